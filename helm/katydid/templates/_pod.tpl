{{/* What all pods and containers of the chart have in common. */}}

{{/* Pod fields, given `root`, `component`, `own` (the workload's values) and maybe `pool`. */}}
{{- define "katydid.pod" -}}
{{- $own := .own -}}
serviceAccountName: {{ include "katydid.serviceAccount" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - {name: {{ . }}}
  {{- end }}
{{- end }}
{{- with $own.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $own.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $own.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Pods of one workload over zones and hosts, unless the values say otherwise. */}}
{{- define "katydid.spread" -}}
topologySpreadConstraints:
{{- if kindIs "invalid" .own.topologySpreadConstraints }}
{{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "katydid.selector" $ | nindent 8 }}
{{- end }}
{{- else }}
{{- toYaml .own.topologySpreadConstraints | nindent 2 }}
{{- end }}
{{- end }}

{{/* Labels and annotations of a pod template. */}}
{{- define "katydid.podMetadata" -}}
labels:
  {{- include "katydid.labels" . | nindent 2 }}
  {{- with .own.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (.annotations | default dict) (.own.podAnnotations | default dict) }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "katydid.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* A probe of readiness: gRPC's own where the port speaks plain text, else the plain HTTP port. Given `root`, `grpc`. */}}
{{- define "katydid.readinessCheck" -}}
{{- if .root.Values.tls.enabled -}}
httpGet: {path: /readyz, port: metrics}
{{- else -}}
grpc: {port: {{ .grpc }}}
{{- end -}}
{{- end }}

{{/* Environment of TLS, given `root`, `prefix`, `component`, and `demand`: whether clients must show a certificate. */}}
{{- define "katydid.tlsEnv" -}}
{{- if .root.Values.tls.enabled }}
- {name: KATYDID_{{ .prefix }}_TLS_CERT_FILE, value: /etc/katydid/tls/tls.crt}
- {name: KATYDID_{{ .prefix }}_TLS_KEY_FILE, value: /etc/katydid/tls/tls.key}
- {name: KATYDID_{{ .prefix }}_TLS_CA_FILE, value: /etc/katydid/tls/ca.crt}
{{- if .demand }}
- {name: KATYDID_{{ .prefix }}_TLS_CLIENT_CA_FILE, value: /etc/katydid/tls/ca.crt}
{{- end }}
{{- end }}
{{- end }}

{{- define "katydid.tlsMount" -}}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: /etc/katydid/tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "katydid.tlsVolume" -}}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ include "katydid.tlsSecret" . }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{/* The model's volume and its mount, where the folder is not inside the image. */}}
{{- define "katydid.modelVolume" -}}
{{- $model := .Values.model }}
{{- if $model.existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ $model.existingClaim }}, readOnly: true}
{{- else if $model.hostPath }}
- name: models
  hostPath: {path: {{ $model.hostPath }}, type: Directory}
{{- else if $model.image }}
- name: models
  image: {reference: {{ $model.image }}, pullPolicy: {{ .Values.image.pullPolicy }}}
{{- end }}
{{- end }}

{{- define "katydid.modelMount" -}}
{{- if or .Values.model.existingClaim .Values.model.hostPath .Values.model.image }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{- define "katydid.cacheToken" -}}
{{- if .root.Values.kvcache.tokensSecret }}
- {name: KATYDID_{{ .prefix }}_KVCACHE_TOKEN_FILE, value: /etc/katydid/cache/token}
{{- end }}
{{- end }}

{{- define "katydid.cacheTokenMount" -}}
{{- if .Values.kvcache.tokensSecret }}
- {name: cache-tokens, mountPath: /etc/katydid/cache, readOnly: true}
{{- end }}
{{- end }}

{{/* Clients get the token alone. */}}
{{- define "katydid.cacheTokenVolume" -}}
{{- with .Values.kvcache.tokensSecret }}
- name: cache-tokens
  secret: {secretName: {{ . }}, defaultMode: 0440, items: [{key: token, path: token}]}
{{- end }}
{{- end }}
