{{- define "katydid.labels" -}}
app.kubernetes.io/name: katydid
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end }}

{{- define "katydid.selector" -}}
app.kubernetes.io/name: katydid
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "katydid.image" -}}
{{- if .root.Values.image.registry }}{{ .root.Values.image.registry }}/{{ end }}{{ .image }}
{{- end }}

{{/* Environment from a settings map: drain_timeout_s of the gateway is KATYDID_GATEWAY_DRAIN_TIMEOUT_S. */}}
{{- define "katydid.env" -}}
{{- $prefix := .prefix }}
{{- range $key, $value := .settings }}
- name: KATYDID_{{ $prefix }}_{{ upper $key }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{- define "katydid.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "katydid.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Stable addresses of the engine pods, separated by commas. */}}
{{- define "katydid.engines" -}}
{{- $root := . }}
{{- $addresses := list }}
{{- range $i := until (int .Values.engine.replicas) }}
{{- $host := printf "%s-engine-%d.%s-engine.%s.svc" $root.Release.Name $i $root.Release.Name $root.Release.Namespace }}
{{- $addresses = append $addresses (printf "%s:%d" $host (int $root.Values.engine.grpcPort)) }}
{{- end }}
{{- join "," $addresses }}
{{- end }}

{{- define "katydid.models" -}}
- name: models
  {{- if .Values.model.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .Values.model.existingClaim }}, readOnly: true}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}
