{{/* What the schema cannot see, since it lies in several values. */}}
{{- define "kllm.validate" -}}
{{- if and (not .Values.operator.leaderElection.enabled) (gt (int .Values.operator.replicas) 1) -}}
{{- fail "operator.leaderElection.enabled is false with operator.replicas above 1: replicas would act against each other; set operator.replicas to 1 or elect a leader" -}}
{{- end -}}
{{- if and (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) -}}
{{- fail "serviceAccount.create is false and serviceAccount.name is empty; name the service account that the operator shall use" -}}
{{- end -}}
{{- $redis := .Values.redis -}}
{{- if and $redis.enabled (or $redis.external.url $redis.external.existingSecret) -}}
{{- fail "redis.enabled and redis.external name two servers; set redis.enabled to false, or leave redis.external.url and redis.external.existingSecret empty" -}}
{{- end -}}
{{- if and $redis.external.url $redis.external.existingSecret -}}
{{- fail "redis.external.url and redis.external.existingSecret name two servers; leave one of them empty" -}}
{{- end -}}
{{- end -}}
