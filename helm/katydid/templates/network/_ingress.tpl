{{/* What of the gateway is for the world: not /metrics, nor the probes. */}}
{{- define "katydid.publicPaths" -}}
{{- $console := .Values.gateway.settings.console -}}
[/v1, /tokenize, /detokenize{{ if or (kindIs "invalid" $console) $console }}, /console{{ end }}]
{{- end }}

{{/* Annotations of ingress-nginx, given `words` without its prefix; one's `own` win. */}}
{{- define "katydid.nginx" -}}
{{- $all := dict -}}
{{- range $word, $value := .words -}}
{{- $_ := set $all (printf "nginx.ingress.kubernetes.io/%s" $word) $value -}}
{{- end -}}
{{- toYaml (merge (dict) .own $all) -}}
{{- end }}
