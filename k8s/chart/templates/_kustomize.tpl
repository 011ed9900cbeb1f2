{{/*
What the chart understands of a kustomization: resources, components, ConfigMap generators with hashed names, JSON patches
and one image. tests/k8s/test_chart.py compares the outcome with kustomize's.
*/}}

{{/* The folders of a kustomization in the order in which they apply. */}}
{{- define "manta.folders" -}}
{{- $own := $.Files.Get (printf "files/overlays/%s/kustomization.yaml" .Values.overlay) | fromYaml -}}
{{- $components := .Values.components -}}
{{- range ternary (list) $own.components (gt (len $components) 0) }}{{ $components = append $components (base .) }}{{ end -}}
{{- $folders := list "files/base" -}}
{{- range $components }}{{ $folders = append $folders (printf "files/components/%s" .) }}{{ end -}}
{{- append $folders (printf "files/overlays/%s" .Values.overlay) | toJson -}}
{{- end }}

{{/* The image of all pods: that of the overlay, but for what the values say. Of several tags, that of the first. */}}
{{- define "manta.image" -}}
{{- $own := $.Files.Get (printf "files/overlays/%s/kustomization.yaml" .Values.overlay) | fromYaml -}}
{{- $image := first $own.images -}}
{{- $name := .Values.image.repository | default $image.newName -}}
{{- with .Values.image.digest }}{{ $name }}@{{ . }}{{ else }}{{ $name }}:{{ first .Values.rollout.tags | default .Values.image.tag | default $image.newTag }}{{ end -}}
{{- end }}

{{/* Apply `operations` (JSON patch: add, replace, remove) to `object`, in place. */}}
{{- define "manta.patch" -}}
{{- $object := .object -}}
{{- range .operations -}}
  {{- $steps := list }}{{ range splitList "/" (trimPrefix "/" .path) }}{{ $steps = append $steps (. | replace "~1" "/" | replace "~0" "~") }}{{ end -}}
  {{- $item := "" }}{{ if regexMatch "^(-|[0-9]+)$" (last $steps) }}{{ $item = last $steps }}{{ $steps = initial $steps }}{{ end -}}
  {{- $place := $object -}}
  {{- $path := .path -}}
  {{- range initial $steps -}}
    {{- if kindIs "slice" $place }}{{ $place = index $place (atoi .) }}{{ else }}{{ $place = get $place . }}{{ end -}}
    {{- if not (or (kindIs "map" $place) (kindIs "slice" $place)) }}{{ fail (printf "a patch has the path %s, which leads nowhere" $path) }}{{ end -}}
  {{- end -}}
  {{- $key := last $steps -}}
  {{- if $item -}}
    {{- $items := get $place $key | default list -}}
    {{- $at := ternary (len $items) (atoi $item) (eq $item "-") -}}
    {{- $value := ternary list (list .value) (eq .op "remove") -}}
    {{- $after := ternary $at (int (add1 $at)) (eq .op "add") -}}
    {{- $_ := set $place $key (concat (slice $items 0 $at | default list) $value (slice $items $after | default list)) -}}
  {{- else if eq .op "remove" }}{{ $_ := unset $place $key -}}
  {{- else }}{{ $_ := set $place $key .value }}{{ end -}}
{{- end -}}
{{- end }}

{{/* The data of a ConfigMap generator: lines NAME=VALUE of files and literals, and whole files. */}}
{{- define "manta.data" -}}
{{- $data := dict }}{{ $lines := .generator.literals | default list -}}
{{- range .generator.envs }}{{ $lines = concat $lines (splitList "\n" ($.files.Get (printf "%s/%s" $.folder .))) }}{{ end -}}
{{- range $lines -}}
  {{- if and . (not (hasPrefix "#" .)) }}{{ $_ := set $data (splitn "=" 2 .)._0 (splitn "=" 2 .)._1 }}{{ end -}}
{{- end -}}
{{- range .generator.files }}{{ $_ := set $data . ($.files.Get (printf "%s/%s" $.folder .)) }}{{ end -}}
{{- toJson $data -}}
{{- end }}

{{/* The suffix that kustomize gives a ConfigMap: ten digits of a hash of its data, none a vowel. */}}
{{- define "manta.suffix" -}}
{{- dict "kind" "ConfigMap" "name" "" "data" .data | toJson | sha256sum | trunc 10 | replace "0" "g" | replace "1" "h" | replace "3" "k" | replace "a" "m" | replace "e" "t" -}}
{{- end }}

{{/* Merge what the values say of a worker group into it. */}}
{{- define "manta.group" -}}
{{- $pod := .group.template.spec -}}
{{- $_ := mergeOverwrite .group (omit .values "pod" "resources") -}}
{{- with .values.pod }}{{ $_ := mergeOverwrite $pod . }}{{ end -}}
{{- with .values.resources }}{{ $_ := mergeOverwrite (index $pod.containers 0).resources . }}{{ end -}}
{{- end }}
