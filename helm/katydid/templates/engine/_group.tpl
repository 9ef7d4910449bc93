{{/* What a pod of a group has to know of the others, given their number. */}}
{{- define "katydid.nodeEnv" -}}
- {name: KATYDID_ENGINE_NODES, value: {{ . | quote }}}
- {name: KATYDID_ENGINE_NODE_RANK, valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"}}}
- {name: KATYDID_ENGINE_RENDEZVOUS, value: "$(LWS_LEADER_ADDRESS):29500"}
{{- end }}
