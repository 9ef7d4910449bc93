{{/* Names, labels and images. Every helper takes a dict whose `root` is the top context. */}}

{{- define "katydid.selector" -}}
app.kubernetes.io/name: katydid
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
katydid/pool: {{ . }}
{{- end }}
{{- end }}

{{- define "katydid.labels" -}}
{{ include "katydid.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* A digest wins over a tag; without either the chart's own version is meant. */}}
{{- define "katydid.image" -}}
{{- $image := .image -}}
{{- $registry := .root.Values.image.registry -}}
{{- $name := ternary $image.repository (printf "%s/%s" $registry $image.repository) (empty $registry) -}}
{{- if $image.digest -}}
{{ $name }}@{{ $image.digest }}
{{- else -}}
{{ $name }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* A value as the services read it: Helm's own form of large numbers has an exponent, and lists are words with commas. */}}
{{- define "katydid.text" -}}
{{- if kindIs "slice" . -}}{{ join "," . }}
{{- else if and (kindIs "float64" .) (eq (floor .) .) -}}{{ printf "%.0f" . }}
{{- else -}}{{ . }}{{- end -}}
{{- end }}

{{/* Bytes of a Kubernetes quantity such as 40Gi. */}}
{{- define "katydid.bytes" -}}
{{- $units := dict "" 1 "k" 1000 "Ki" 1024 "M" 1000000 "Mi" 1048576 "G" 1000000000 "Gi" 1073741824 "T" 1000000000000 "Ti" 1099511627776 -}}
{{- $text := include "katydid.text" . -}}
{{- $number := regexFind "^[0-9.]+" $text -}}
{{- $unit := trimPrefix $number $text -}}
{{- if or (empty $number) (not (hasKey $units $unit)) -}}{{- fail (printf "%s is no quantity such as 40Gi" $text) -}}{{- end -}}
{{- printf "%.0f" (mulf (float64 $number) (get $units $unit)) -}}
{{- end }}

{{/* Settings as environment: drain_timeout_s of the gateway is KATYDID_GATEWAY_DRAIN_TIMEOUT_S. */}}
{{- define "katydid.settings" -}}
{{- $prefix := .prefix -}}
{{- range $name, $value := .settings }}
{{- if not (kindIs "invalid" $value) }}
- {name: KATYDID_{{ $prefix }}_{{ upper $name }}, value: {{ include "katydid.text" $value | quote }}}
{{- end }}
{{- end }}
{{- end }}

{{/* What has to be over before a pod is killed: the load balancers' notice, the drain, and the rest. */}}
{{- define "katydid.grace" -}}
{{- add (int (.settleSeconds | default 0)) (int (ceil (float64 (get .settings "drain_timeout_s" | default 30)))) 15 -}}
{{- end }}

{{- define "katydid.serviceAccount" -}}
{{- .Values.serviceAccount.create | ternary .Release.Name (.Values.serviceAccount.name | default "default") -}}
{{- end }}

{{/* The secret with a component's certificate, given `root` and `component`. */}}
{{- define "katydid.tlsSecret" -}}
{{- get .root.Values.tls.existingSecrets .component | default (printf "%s-%s-tls" .root.Release.Name .component) -}}
{{- end }}

{{/* NAME=ADDRESS of every engine that can be there: of an autoscaled pool its most, of a group every node's own. */}}
{{- define "katydid.engines" -}}
{{- $addresses := list -}}
{{- range $pool, $own := .Values.engine.pools -}}
{{- $name := printf "%s-engine-%s" $.Release.Name $pool -}}
{{- $count := include "katydid.mostReplicas" $own -}}
{{- range $i := until (int $count) -}}
{{- range $node := until (int ($own.nodes | default 1)) -}}
{{- /* The first pod of a group has the group's name, the others have numbers of their own behind it. */ -}}
{{- $suffix := eq $node 0 | ternary (toString $i) (printf "%d-%d" $i $node) -}}
{{- $host := printf "%s-%s.%s.%s.svc" $name $suffix $name $.Release.Namespace -}}
{{- $addresses = append $addresses (printf "%s-%s=%s:%d" $pool $suffix $host (int $.Values.engine.ports.grpc)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- join "," $addresses -}}
{{- end }}

{{- define "katydid.scaled" -}}
{{- if ne ((.autoscaling | default dict).kind | default "none") "none" -}}true{{- end -}}
{{- end }}

{{- define "katydid.mostReplicas" -}}
{{- ternary (.autoscaling | default dict).maxReplicas (.replicas | default 1) (eq (include "katydid.scaled" .) "true") | int -}}
{{- end }}

{{/* host:port of every instance of the cache's pool. */}}
{{- define "katydid.cachePool" -}}
{{- $addresses := list -}}
{{- $name := printf "%s-kvcache-pool" .Release.Name -}}
{{- range $i := until (int .Values.kvcache.pool.replicas) -}}
{{- $addresses = append $addresses (printf "%s-%d.%s.%s.svc:%d" $name $i $name $.Release.Namespace (int $.Values.kvcache.ports.grpc)) -}}
{{- end -}}
{{- join "," $addresses -}}
{{- end }}

{{/* Where instances other than a node's own are; empty: there are none. */}}
{{- define "katydid.otherCaches" -}}
{{- if .Values.kvcache.pool.enabled -}}
{{- include "katydid.cachePool" . -}}
{{- else if and .Values.kvcache.node.enabled .Values.kvcache.node.peers -}}
dns:{{ .Release.Name }}-kvcache-node.{{ .Release.Namespace }}.svc:{{ .Values.kvcache.ports.grpc }}
{{- end -}}
{{- end }}
