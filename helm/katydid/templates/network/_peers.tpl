{{/* Pods of one component of this release, as a NetworkPolicy peer. */}}
{{- define "katydid.peer" -}}
- podSelector:
    matchLabels: {{- include "katydid.selector" . | nindent 6 }}
{{- end }}

{{/* A rule's ports. */}}
{{- define "katydid.tcp" -}}
ports:
{{- range . }}
  - {protocol: TCP, port: {{ . }}}
{{- end }}
{{- end }}

{{/* What every pod may reach: names, and where spans go. */}}
{{- define "katydid.egress" -}}
- to: {{- toYaml .Values.networkPolicy.dnsTo | nindent 4 }}
  ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- with .Values.networkPolicy.otlpTo }}
- to: {{- toYaml . | nindent 4 }}
  ports: [{protocol: TCP, port: 4317}]
{{- end }}
{{- end }}

{{/* Scrapes of a port, where somebody is named that scrapes. */}}
{{- define "katydid.scrapes" -}}
{{- with .root.Values.networkPolicy.metricsFrom }}
- from: {{- toYaml . | nindent 4 }}
  {{- include "katydid.tcp" (list $.port) | nindent 2 }}
{{- end }}
{{- end }}
