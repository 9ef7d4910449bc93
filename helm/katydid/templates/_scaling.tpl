{{/* Up at once, down slowly: an engine takes minutes to load, and the signal is held against flapping already. */}}
{{- define "katydid.scalingBehavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  policies: [{type: Percent, value: 100, periodSeconds: 60}, {type: Pods, value: 2, periodSeconds: 60}]
scaleDown:
  stabilizationWindowSeconds: 300
  policies: [{type: Pods, value: 1, periodSeconds: 300}]
{{- end }}

{{/* Labels of this release's gateways in Prometheus. The job's name is known where the chart's own monitor gives it. */}}
{{- define "katydid.series" -}}
namespace="{{ .Release.Namespace }}"
{{- if .Values.monitoring.enabled }},job="{{ .Release.Name }}-gateway"{{ end }}
{{- end }}
