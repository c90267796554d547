{{- define "kllm.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* 45 characters leave room for the suffixes of the chart's objects. */}}
{{- define "kllm.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 45 | trimSuffix "-" -}}
{{- else if contains (include "kllm.name" .) .Release.Name -}}
{{- .Release.Name | trunc 45 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "kllm.name" .) | trunc 45 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kllm.serviceAccountName" -}}
{{- default (include "kllm.fullname" .) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "kllm.redisName" -}}
{{- printf "%s-redis" (include "kllm.fullname" .) -}}
{{- end -}}

{{/* Called with (list root component). */}}
{{- define "kllm.selector" -}}
app.kubernetes.io/name: {{ include "kllm.name" (index . 0) }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "kllm.labels" -}}
{{- $root := index . 0 -}}
{{ include "kllm.selector" . }}
app.kubernetes.io/part-of: kllm
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | quote }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* An image as the runtime wants it. Called with (list root image). */}}
{{- define "kllm.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- $name := $image.repository -}}
{{- if $image.registry }}{{- $name = printf "%s/%s" $image.registry $image.repository }}{{- end -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $name $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default $root.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Names of the pull secrets, as JSON. */}}
{{- define "kllm.pullSecrets" -}}
{{- $names := list -}}
{{- range .Values.imagePullSecrets }}{{- $names = append $names .name }}{{- end -}}
{{- toJson $names -}}
{{- end -}}

{{/* operator.yaml, as kllm_operator.config reads it. */}}
{{- define "kllm.config" -}}
images:
  engine:
    image: {{ include "kllm.image" (list . .Values.engine.image) | quote }}
    pullPolicy: {{ .Values.engine.image.pullPolicy }}
  router:
    image: {{ include "kllm.image" (list . .Values.router.image) | quote }}
    pullPolicy: {{ .Values.router.image.pullPolicy }}
imagePullSecrets: {{ include "kllm.pullSecrets" . }}
engine:
  command: {{ .Values.engine.command | toJson }}
  template: {{ .Values.engine.template | toJson }}
  drainSeconds: {{ .Values.engine.drainSeconds }}
  pace: {{ .Values.engine.pace | default nil | toJson }}
router:
  command: {{ .Values.router.command | toJson }}
  template: {{ .Values.router.template | toJson }}
  lameDuckSeconds: {{ .Values.router.lameDuckSeconds }}
  drainSeconds: {{ .Values.router.drainSeconds }}
  workers: {{ .Values.router.workers }}
  accessLog: {{ .Values.router.accessLog }}
{{- if .Values.redis.enabled }}
redis:
  secretName: {{ include "kllm.redisName" . | quote }}
  secretKey: url
{{- else if .Values.redis.external.url }}
redis:
  url: {{ .Values.redis.external.url | quote }}
{{- else if .Values.redis.external.existingSecret }}
redis:
  secretName: {{ .Values.redis.external.existingSecret | quote }}
  secretKey: {{ .Values.redis.external.existingSecretKey | quote }}
{{- end }}
{{- if .Values.networkPolicy.enabled }}
networkPolicy:
  operatorLabels:
    {{- include "kllm.selector" (list . "operator") | nindent 4 }}
  clients: {{ .Values.networkPolicy.clients | toJson }}
  metrics: {{ .Values.networkPolicy.metrics | toJson }}
{{- end }}
watchNamespaces: {{ .Values.watchNamespaces | toJson }}
leaderElection:
  enabled: {{ .Values.operator.leaderElection.enabled }}
  leaseName: {{ default (include "kllm.fullname" .) .Values.operator.leaderElection.leaseName | quote }}
  namespace: {{ .Release.Namespace | quote }}
{{- if .Values.history.enabled }}
history:
  folder: /var/lib/kllm/history
  mostMebibytes: {{ .Values.history.mostMebibytes }}
  fileMebibytes: {{ .Values.history.fileMebibytes }}
{{- end }}
loop: {{ .Values.loop | toJson }}
{{- end -}}

{{/* What the operator may do in each namespace whose services it keeps; kllm_operator.render.permissions is its source. */}}
{{- define "kllm.operatorRules" -}}
- apiGroups: [kllm.io]
  resources: [inferenceservices]
  verbs: [get, list, watch]
- apiGroups: [kllm.io]
  resources: [prefillpools, decodepools]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [kllm.io]
  resources: [inferenceservices/status, prefillpools/status, decodepools/status]
  verbs: [patch]
- apiGroups: [kllm.io]
  resources: [inferenceservices/finalizers, prefillpools/finalizers, decodepools/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods, services, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [list, create]
{{- end -}}

{{/* Where the chart's other pods run: where the operator does. */}}
{{- define "kllm.placement" -}}
{{- with .Values.operator.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.operator.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.operator.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.operator.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* The part that the pods of the chart's jobs share. */}}
{{- define "kllm.jobPod" -}}
restartPolicy: Never
automountServiceAccountToken: true
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext: {{ toYaml .Values.operator.podSecurityContext | nindent 2 }}
{{ include "kllm.placement" . }}
{{- end -}}

{{/* Volumes of the chart's jobs: the kinds, and room to write. Called with (list root name-of-the-ConfigMap). */}}
{{- define "kllm.jobVolumes" -}}
- name: crds
  configMap:
    name: {{ index . 1 }}
- name: tmp
  emptyDir: {}
{{- with (index . 0).Values.operator.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The container of the chart's jobs, without its arguments. */}}
{{- define "kllm.jobContainer" -}}
image: {{ include "kllm.image" (list . .Values.operator.image) | quote }}
imagePullPolicy: {{ .Values.operator.image.pullPolicy }}
command: {{ toYaml .Values.crds.command | nindent 2 }}
env:
  - name: HOME
    value: /tmp
  {{- with .Values.operator.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
# Without it the reason of a failure is in a log only, which goes with the pod.
terminationMessagePolicy: FallbackToLogsOnError
securityContext: {{ toYaml .Values.operator.securityContext | nindent 2 }}
resources: {{ toYaml .Values.jobs.resources | nindent 2 }}
volumeMounts:
  - name: crds
    mountPath: /etc/kllm/crds
    readOnly: true
  - name: tmp
    mountPath: /tmp
  {{- with .Values.operator.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}
