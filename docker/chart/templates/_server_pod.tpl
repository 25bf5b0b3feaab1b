{{/* A server's pod, or that of a later node of its engine: (list . "server") or (list . "engine") */}}
{{- define "headway.serverPod" -}}
{{- $ := index . 0 -}}
{{- $role := index . 1 -}}
{{- $isServer := eq $role "server" -}}
{{- with $.Values.server -}}
{{- $isGroup := gt (int .nodes) 1 -}}
metadata:
  labels: {{- include "headway.selector" (list $ $role) | nindent 4 }}
  annotations: {{- include "headway.configHash" (list $ "server") | nindent 4 }}
spec:
  automountServiceAccountToken: false
  {{- include "headway.pod" (list $ 10001) | nindent 2 }}
  {{- include "headway.placement" . | nindent 2 }}
  terminationGracePeriodSeconds: 60 # above service.drain_timeout_s + 20
  containers:
    - name: {{ $role }}
      image: {{ include "headway.image" (list $ .image) }}
      imagePullPolicy: {{ $.Values.image.pullPolicy }}
      {{- if $isGroup }}
      args:
        - --config
        - /etc/headway/server.yaml
        - --advertise-url=http://$(POD_IP):8001
        - --weights.cache-dir=/versions/$(LWS_LEADER_ADDRESS)
        - '--backend.args={"--nnodes": $(LWS_GROUP_SIZE), "--node-rank": $(LWS_WORKER_INDEX), "--dist-init-addr": "$(LWS_LEADER_ADDRESS):20000"}'
      {{- else }}
      args: ["--config", "/etc/headway/server.yaml", "--advertise-url", "http://$(POD_IP):8001"]
      {{- end }}
      env:
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- if $isServer }}
        {{- include "headway.token" (list $ "ADMIN") | nindent 8 }}
        {{- include "headway.token" (list $ "SERVER") | nindent 8 }}
        {{- end }}
        {{- with .env }}{{ toYaml . | nindent 8 }}{{ end }}
      {{- if $isServer }}
      ports:
        - {name: http, containerPort: 8001}
      startupProbe: # it loads the model first
        httpGet: {path: /health, port: http}
        periodSeconds: 5
        failureThreshold: 240
      readinessProbe:
        httpGet: {path: /ready, port: http}
        periodSeconds: 2
      livenessProbe: # also while weights load, and in a pause
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      {{- end }}
      resources: {{- include "headway.resources" (list .resources .gpus) | nindent 8 }}
      securityContext: {{- include "headway.container" $ | nindent 8 }}
      volumeMounts:
        - {name: config, mountPath: /etc/headway, readOnly: true}
        - {name: model, mountPath: /model, readOnly: true}
        - {name: runs, mountPath: /runs}
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        {{- if $isGroup }}
        - {name: versions, mountPath: /versions, readOnly: {{ not $isServer }}}
        {{- end }}
  volumes:
    - name: config
      configMap: {name: {{ $.Release.Name }}-server}
    - name: model
      persistentVolumeClaim: {claimName: {{ $.Values.model.claim }}, readOnly: true}
    - name: runs
      emptyDir: {}
    - name: tmp
      emptyDir: {}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ .sharedMemory }}}
    {{- if $isGroup }}
    - name: versions
      persistentVolumeClaim: {claimName: {{ .versions.claim }}}
    {{- end }}
{{- end }}
{{- end }}
