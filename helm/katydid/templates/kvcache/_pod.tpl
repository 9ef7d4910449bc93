{{/* The pods of the cache service: of nodes, and of the pool. */}}

{{- define "katydid.cacheSettings" -}}
{{- toYaml (mustMergeOverwrite (deepCopy .root.Values.kvcache.settings) (deepCopy .own.settings)) -}}
{{- end }}

{{/* Refuses memory that the pod's limit does not hold, given `own`, `settings`, `what`. */}}
{{- define "katydid.cacheFits" -}}
{{- $blocks := include "katydid.bytes" (.settings.memory_bytes | default 1073741824) | int64 -}}
{{- with ((.own.resources | default dict).limits | default dict).memory -}}
{{- $limit := include "katydid.bytes" . | int64 -}}
{{- if lt $limit (add $blocks 1073741824) -}}
{{- fail (printf "%s: resources.limits.memory is %s; it must hold memory_bytes=%d and 1Gi for the service itself" $.what . $blocks) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Container, given `root`, `own`, `settings`, `env` and `probe` (YAML), `pullFrom`, and whether it has a `disk`, serves on
     `tcp`, and on a `socket` of the node. */}}
{{- define "katydid.cacheContainer" -}}
{{- $root := .root -}}
{{- $cache := $root.Values.kvcache -}}
{{- $ports := $cache.ports -}}
{{- $tls := dict "root" $root "prefix" "KVCACHE" "component" "kvcache" "demand" true -}}
name: kvcache
image: {{ include "katydid.image" (dict "root" $root "image" $cache.image) }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
env:
  {{- .env | nindent 2 }}
  - {name: KATYDID_KVCACHE_HTTP_LISTEN, value: "0.0.0.0:{{ $ports.metrics }}"}
  # Reached through the pod alone: kubectl port-forward, kubectl exec.
  - {name: KATYDID_KVCACHE_ADMIN_LISTEN, value: "127.0.0.1:{{ $ports.admin }}"}
  {{- if .disk }}
  - {name: KATYDID_KVCACHE_DISK_PATH, value: /var/lib/katydid/blocks}
  {{- end }}
  {{- if .tcp }}
  {{- if not $root.Values.tls.enabled }}
  - {name: KATYDID_KVCACHE_LANE_LISTEN, value: "0.0.0.0:{{ $ports.lanes }}"}
  {{- end }}
  {{- end }}
  {{- with .pullFrom }}
  - {name: KATYDID_KVCACHE_PULL_FROM, value: {{ . | quote }}}
  {{- end }}
  {{- if $cache.tokensSecret }}
  - {name: KATYDID_KVCACHE_TOKENS_FILE, value: /etc/katydid/cache/tokens}
  {{- end }}
  {{- if $cache.policy }}
  - {name: KATYDID_KVCACHE_POLICY_FILE, value: /etc/katydid/policy/policy.yaml}
  {{- end }}
  {{- include "katydid.cacheToken" $tls | nindent 2 }}
  {{- include "katydid.tlsEnv" $tls | nindent 2 }}
  {{- include "katydid.settings" (dict "prefix" "KVCACHE" "settings" .settings) | nindent 2 }}
{{- with $cache.sharedStoreSecret }}
envFrom:
  - {secretRef: {name: {{ . }}}}
{{- end }}
ports:
  - {name: metrics, containerPort: {{ $ports.metrics }}}
  {{- if .tcp }}
  - {name: grpc, containerPort: {{ $ports.grpc }}}
  {{- if not $root.Values.tls.enabled }}
  - {name: lanes, containerPort: {{ $ports.lanes }}}
  {{- end }}
  {{- end }}
# It listens once the disk's index is read, or made anew; serves until it drains; and lives while its loop turns.
startupProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 240
readinessProbe:
  {{- .probe | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
resources: {{- toYaml .own.resources | nindent 2 }}
securityContext: {{- include "katydid.containerSecurity" $root | nindent 2 }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  {{- if .disk }}
  - {name: disk, mountPath: /var/lib/katydid}
  {{- end }}
  {{- if .socket }}
  - {name: socket, mountPath: /run/katydid}
  {{- end }}
  {{- if $cache.policy }}
  - {name: policy, mountPath: /etc/katydid/policy, readOnly: true}
  {{- end }}
  {{- include "katydid.tlsMount" $tls | nindent 2 }}
  {{- include "katydid.cacheTokenMount" $root | nindent 2 }}
{{- end }}

{{/* Volumes that node and pool have in common. */}}
{{- define "katydid.cacheVolumes" -}}
- {name: tmp, emptyDir: {}}
{{- if .Values.kvcache.policy }}
- {name: policy, configMap: {name: {{ .Release.Name }}-kvcache-policy}}
{{- end }}
{{- with .Values.kvcache.tokensSecret }}
- name: cache-tokens
  secret: {secretName: {{ . }}, defaultMode: 0440, items: [{key: tokens, path: tokens}, {key: token, path: token}]}
{{- end }}
{{- include "katydid.tlsVolume" (dict "root" . "component" "kvcache") }}
{{- end }}

{{/* What a change of the policy has to restart. */}}
{{- define "katydid.cacheAnnotations" -}}
{{- with .Values.kvcache.policy }}
katydid/policy: {{ toYaml . | sha256sum }}
{{- end }}
{{- end }}
