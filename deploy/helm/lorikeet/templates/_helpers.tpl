{{/* Names, labels, and what router and shard pods have in common. */}}

{{- define "lorikeet.name" -}}
{{- if contains "lorikeet" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-lorikeet" (.Release.Name | trunc 40 | trimSuffix "-") }}{{ end }}
{{- end }}

{{- define "lorikeet.selector" -}}
app.kubernetes.io/name: lorikeet
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "lorikeet.labels" -}}
{{ include "lorikeet.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "lorikeet.secretName" -}}
{{ .Values.shardSecret.existingSecret | default (printf "%s-shard-secret" (include "lorikeet.name" .)) }}
{{- end }}

{{/* Flags that routers and shards must agree on. */}}
{{- define "lorikeet.args" -}}
- --json-output
{{- if .Values.model.id }}
- {{ printf "--model-id=%s" .Values.model.id | quote }}
{{- end }}
{{- if .Values.model.revision }}
- {{ printf "--revision=%s" .Values.model.revision | quote }}
{{- end }}
- --huggingface-hub-cache=/data
- --adapter-store=/adapters
- --shard-secret-file=/etc/lorikeet/secret
- --drain-timeout-s={{ int .Values.drainTimeoutSeconds }}
{{- range .Values.args }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "lorikeet.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: ["ALL"]
{{- end }}

{{- define "lorikeet.hubToken" -}}
{{- if .Values.hubTokenSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.hubTokenSecret }}
      key: HF_TOKEN
{{- end }}
{{- end }}

{{- define "lorikeet.mounts" -}}
- name: models
  mountPath: /data
- name: adapters
  mountPath: /adapters
- name: shard-secret
  mountPath: /etc/lorikeet
  readOnly: true
- name: tmp
  mountPath: /tmp
{{- end }}

{{- define "lorikeet.volumes" -}}
- name: models
  persistentVolumeClaim:
    claimName: {{ .Values.storage.models.existingClaim | default (printf "%s-models" (include "lorikeet.name" .)) }}
- name: adapters
  persistentVolumeClaim:
    claimName: {{ .Values.storage.adapters.existingClaim | default (printf "%s-adapters" (include "lorikeet.name" .)) }}
- name: shard-secret
  secret:
    secretName: {{ include "lorikeet.secretName" . }}
    defaultMode: 0440
# Sockets, and kernels compiled for the device.
- name: tmp
  emptyDir: {}
{{- end }}

{{- define "lorikeet.pod" -}}
automountServiceAccountToken: false
{{- /* A Service `lorikeet` would set LORIKEET_PORT, the variable of --port. */}}
enableServiceLinks: false
securityContext:
  {{- toYaml .Values.securityContext | nindent 2 }}
{{- if .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml .Values.image.pullSecrets | nindent 2 }}
{{- end }}
{{- end }}

{{/* Where pods may run; of .Values.router or .Values.shards. */}}
{{- define "lorikeet.placement" -}}
{{- if .nodeSelector }}
nodeSelector:
  {{- toYaml .nodeSelector | nindent 2 }}
{{- end }}
{{- if .tolerations }}
tolerations:
  {{- toYaml .tolerations | nindent 2 }}
{{- end }}
{{- if .affinity }}
affinity:
  {{- toYaml .affinity | nindent 2 }}
{{- end }}
{{- end }}
