{{/* What a pod of a group has to know of the others, given their number: the names that torchrun gives these things. */}}
{{- define "katydid.nodeEnv" -}}
- {name: NNODES, value: {{ . | quote }}}
- {name: NODE_RANK, valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"}}}
- {name: MASTER_ADDR, value: $(LWS_LEADER_ADDRESS)}
- {name: MASTER_PORT, value: "29500"}
{{- end }}
