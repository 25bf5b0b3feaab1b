{{- define "headway.labels" -}}
app.kubernetes.io/part-of: headway
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Labels that select a component's pods: (list . "gateway"), or (list . "") for those of the release */}}
{{- define "headway.selector" -}}
{{- $top := index . 0 -}}
app.kubernetes.io/part-of: headway
app.kubernetes.io/instance: {{ $top.Release.Name }}
{{- with index . 1 }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{- define "headway.image" -}}
{{- $top := index . 0 -}}
{{ $top.Values.image.registry }}headway-{{ index . 1 }}:{{ $top.Values.image.tag | default $top.Chart.AppVersion }}
{{- end }}

{{/* What every pod has: (list . UID) */}}
{{- define "headway.pod" -}}
{{- $top := index . 0 -}}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ index . 1 }}
  runAsGroup: {{ index . 1 }}
  fsGroup: {{ index . 1 }}
{{- with $top.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "headway.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "headway.container" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* A variable of a token: (list . "ADMIN") */}}
{{- define "headway.token" -}}
{{- $top := index . 0 -}}
- name: HEADWAY_{{ index . 1 }}_TOKEN
  valueFrom: {secretKeyRef: {name: {{ $top.Values.tokens.secret }}, key: {{ index . 1 | lower }}}}
{{- end }}

{{/* Resources with GPUs among the limits: (list resources gpus) */}}
{{- define "headway.resources" -}}
{{- $resources := deepCopy (index . 0) -}}
{{- with index . 1 -}}
{{- $_ := set $resources "limits" (merge (dict "nvidia.com/gpu" .) ($resources.limits | default dict)) -}}
{{- end -}}
{{- toYaml $resources }}
{{- end }}
