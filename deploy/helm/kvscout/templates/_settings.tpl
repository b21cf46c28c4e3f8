{{- define "kvscout.agent" -}}
{{ .Values.image.agent }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "kvscout.nats-url" -}}
{{- if .Values.nats.install }}nats://kvscout-nats.{{ .Release.Namespace }}:4222{{ else }}{{ .Values.nats.url }}{{ end }}
{{- end }}

{{- /* Flags of kvscout-agent inject, one a line. */ -}}
{{- define "kvscout.settings" -}}
image: {{ include "kvscout.agent" . }}
nats-url: {{ include "kvscout.nats-url" . }}
{{- range $name, $value := .Values.injection.settings }}
{{ $name }}: {{ $value | toString | quote }}
{{- end }}
{{- end }}
