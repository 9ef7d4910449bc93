{{/* What of the gateway is for the world: not /metrics, nor the probes. */}}
{{- define "katydid.publicPaths" -}}
{{- $console := .Values.gateway.settings.console -}}
[/v1, /tokenize, /detokenize{{ if or (kindIs "invalid" $console) $console }}, /console{{ end }}]
{{- end }}
