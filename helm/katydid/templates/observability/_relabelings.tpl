{{/* The job of all pods of a service is RELEASE-SERVICE, whatever monitor found them: rules and dashboards ask for it. */}}
{{- define "katydid.relabelings" -}}
relabelings:
  - {targetLabel: job, replacement: {{ .root.Release.Name }}-{{ .job }}}
{{- end }}
