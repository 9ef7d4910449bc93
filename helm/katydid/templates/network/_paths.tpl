{{/* What of the gateway is for the world: not /metrics, nor the probes. */}}
{{- define "katydid.publicPaths" -}}
[/v1, /tokenize, /detokenize]
{{- end }}
