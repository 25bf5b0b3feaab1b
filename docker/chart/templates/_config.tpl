{{/* The three files. Names of Services are the only thing that a release decides; the rest is to be changed by `config`. */}}
{{- define "headway.gatewayUrl" -}}
http://{{ .Release.Name }}-gateway:8000
{{- end }}

{{- define "headway.trainerHost" -}}
{{ .Release.Name }}-trainer-0.{{ .Release.Name }}-trainer
{{- end }}

{{- define "headway.gateway.yaml" -}}
service:
  host: 0.0.0.0
  port: 8000
  tokens:
    - {name: operator, env: HEADWAY_ADMIN_TOKEN, roles: [admin]}
    - {name: servers, env: HEADWAY_SERVER_TOKEN, roles: [server]}
    - {name: trainer, env: HEADWAY_CONSUME_TOKEN, roles: [consume]}
    - {name: team, env: HEADWAY_SUBMIT_TOKEN, roles: [submit]}
fleet:
  token_env: HEADWAY_ADMIN_TOKEN # the servers know the same one
tokenizer: /model
{{- if .Values.redis.enabled }}
ledger: redis://{{ .Release.Name }}-redis:6379/0?prefix={{ .Release.Name }}
{{- else }}
ledger: {{ required "redis.enabled is false: redis.url is to name another one" .Values.redis.url }}
{{- end }}
{{- end }}

{{- define "headway.server.yaml" -}}
service:
  host: 0.0.0.0
  port: 8001
  token_env: HEADWAY_ADMIN_TOKEN
  drain_timeout_s: 5.0
gateway: {{ include "headway.gatewayUrl" . }}
gateway_token_env: HEADWAY_SERVER_TOKEN
weights:
{{- if .Values.trainer.enabled }}
  allow: ["http://{{ include "headway.trainerHost" . }}:29600"]
{{- end }}
  token_env: HEADWAY_ADMIN_TOKEN # of the trainer's file server, and of other servers
model:
  path: /model
{{- if not (dig "backend" "type" "" .Values.server.config) }}
backend:
  type: embedded_torch
  max_sequences: 64
  max_context: 2048
{{- if .Values.server.gpus }}
  device: cuda
{{- end }}
{{- else if gt (int .Values.server.nodes) 1 }}
backend:
  args: {"--tp-size": {{ mul .Values.server.nodes (.Values.server.gpus | default 1) }}}
{{- end }}
{{- end }}

{{/* Rows need `question` and `answer`, as GSM8K has them. Servers fetch versions from the trainer's pod. */}}
{{- define "headway.trainer.yaml" -}}
type: grpo
run_dir: /runs/train
model:
  path: /model
data:
  path: /data/train.jsonl
  chat: true
  prompt_template: |-
    {question}

    Think step by step. End your answer with the result as a plain number on a line of its own: #### number
  batch_size: 32
sampling:
  max_new_tokens: 512
rollout:
  url: {{ include "headway.gatewayUrl" . }}
  token_env: HEADWAY_CONSUME_TOKEN
  reward:
    name: gsm8k
  group_size: 8
  max_staleness: 2
optimizer:
  lr: 1.0e-6
trainer:
  total_steps: 200
{{- if .Values.trainer.gpusPerNode }}
  device: cuda
{{- end }}
weight_sync:
  type: http
  root: /weights
  host: 0.0.0.0
  port: 29600
  advertise_url: http://{{ include "headway.trainerHost" . }}:29600
  token_env: HEADWAY_ADMIN_TOKEN
recovery:
  every_steps: 10
  mode: auto # a pod that is started again goes on from its checkpoint
{{- end }}

{{/* A file with the user's fields over ours: (list . "gateway") */}}
{{- define "headway.config" -}}
{{- $top := index . 0 -}}
{{- $role := index . 1 -}}
{{- $ours := include (printf "headway.%s.yaml" $role) $top | fromYaml -}}
{{- mergeOverwrite $ours (index $top.Values $role).config | toYaml -}}
{{- end }}

{{/* A new file is a new pod. */}}
{{- define "headway.configHash" -}}
headway/config: {{ include "headway.config" . | sha256sum | trunc 16 | quote }}
{{- end }}

{{- define "headway.configMap" -}}
{{- $top := index . 0 -}}
{{- $role := index . 1 -}}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ $top.Release.Name }}-{{ $role }}
  labels: {{- include "headway.labels" $top | nindent 4 }}
data:
  {{ index . 2 }}: |
    {{- include "headway.config" (list $top $role) | nindent 4 }}
{{- end }}
