{{/* The pods of an engine. A pool's values are those of `engine` with its own laid over them. */}}

{{- define "katydid.enginePool" -}}
{{- $shared := omit .root.Values.engine "pools" "image" "ports" "startupSeconds" "gpuResource" -}}
{{- toYaml (mustMergeOverwrite (deepCopy $shared) (deepCopy .own)) -}}
{{- end }}

{{/* Spec of a pod, given `root`, `pool`, `own` (merged), `component`. */}}
{{- define "katydid.enginePod" -}}
{{- $root := .root -}}
{{- $own := .own -}}
{{- $ports := $root.Values.engine.ports -}}
{{- $cache := $root.Values.kvcache -}}
{{- $node := $cache.node.enabled -}}
{{- $others := include "katydid.otherCaches" $root -}}
{{- $settings := $own.settings | default dict -}}
{{- $tls := dict "root" $root "prefix" "ENGINE" "component" "engine" "demand" true -}}
{{ include "katydid.pod" . }}
{{ include "katydid.spread" . }}
terminationGracePeriodSeconds: {{ include "katydid.grace" (dict "settings" $settings) }}
containers:
  - name: engine
    image: {{ include "katydid.image" (dict "root" $root "image" $root.Values.engine.image) }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    env:
      - {name: KATYDID_ENGINE_LISTEN, value: "0.0.0.0:{{ $ports.grpc }}"}
      - {name: KATYDID_ENGINE_HTTP_LISTEN, value: "0.0.0.0:{{ $ports.metrics }}"}
      - {name: KATYDID_ENGINE_MODEL, value: {{ $root.Values.model.path | quote }}}
      - {name: KATYDID_ENGINE_ROLE, value: {{ $own.role | default "both" }}}
      {{- if gt (int $own.gpus) 0 }}
      - {name: KATYDID_ENGINE_DEVICE, value: cuda}
      {{- if not (hasKey $settings "plan") }}
      {{- $nodes := int ($own.nodes | default 1) }}
      {{- $all := mul (int $own.gpus) $nodes }}
      - {name: KATYDID_ENGINE_PLAN, value: {{ eq $nodes 1 | ternary (printf "tp%d" $all) (printf "dp%d,ep%d" $all $all) | quote }}}
      {{- end }}
      {{- end }}
      {{- if $node }}
      - {name: KATYDID_ENGINE_KVCACHE_ADDRESS, value: "unix:/run/katydid/kvcache.sock"}
      {{- with $others }}
      - {name: KATYDID_ENGINE_KVCACHE_INSTANCES, value: {{ . | quote }}}
      {{- end }}
      {{- else }}
      {{- with $others }}
      - {name: KATYDID_ENGINE_KVCACHE_ADDRESS, value: {{ . | quote }}}
      {{- end }}
      {{- end }}
      # Compiled kernels; the root filesystem is read-only.
      - {name: TRITON_CACHE_DIR, value: /tmp/triton}
      {{- include "katydid.cacheToken" $tls | nindent 6 }}
      {{- include "katydid.tlsEnv" $tls | nindent 6 }}
      {{- include "katydid.settings" (dict "prefix" "ENGINE" "settings" $settings) | nindent 6 }}
      {{- with .nodeEnv }}
      {{- . | nindent 6 }}
      {{- end }}
    ports:
      - {name: grpc, containerPort: {{ $ports.grpc }}}
      - {name: metrics, containerPort: {{ $ports.metrics }}}
    {{- if .probed }}
    # It serves once the model is loaded, is ready while it takes requests, and lives while its step loop turns.
    startupProbe:
      {{- include "katydid.readinessCheck" (dict "root" $root "grpc" $ports.grpc) | nindent 6 }}
      periodSeconds: 10
      timeoutSeconds: 3
      failureThreshold: {{ div (add (int $root.Values.engine.startupSeconds) 9) 10 }}
    readinessProbe:
      {{- include "katydid.readinessCheck" (dict "root" $root "grpc" $ports.grpc) | nindent 6 }}
      periodSeconds: 5
      timeoutSeconds: 3
      failureThreshold: 2
    livenessProbe:
      httpGet: {path: /healthz, port: metrics}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 12
    {{- end }}
    resources:
      {{- $resources := deepCopy $own.resources }}
      {{- if gt (int $own.gpus) 0 }}
      {{- $resources = mustMergeOverwrite $resources (dict "limits" (dict $root.Values.engine.gpuResource (int $own.gpus))) }}
      {{- end }}
      {{- toYaml $resources | nindent 6 }}
    securityContext: {{- include "katydid.containerSecurity" $root | nindent 6 }}
    volumeMounts:
      - {name: tmp, mountPath: /tmp}
      - {name: shm, mountPath: /dev/shm}
      {{- if $node }}
      - {name: socket, mountPath: /run/katydid}
      {{- end }}
      {{- include "katydid.modelMount" $root | nindent 6 }}
      {{- include "katydid.tlsMount" $tls | nindent 6 }}
      {{- include "katydid.cacheTokenMount" $root | nindent 6 }}
volumes:
  - {name: tmp, emptyDir: {}}
  - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $own.shmSize }}}}
  {{- if $node }}
  - {name: socket, hostPath: {path: {{ $cache.node.socketHostPath }}, type: DirectoryOrCreate}}
  {{- end }}
  {{- include "katydid.modelVolume" $root | nindent 2 }}
  {{- include "katydid.tlsVolume" $tls | nindent 2 }}
  {{- include "katydid.cacheTokenVolume" $root | nindent 2 }}
{{- end }}
