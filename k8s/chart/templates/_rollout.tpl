{{/*
A roll inside one RayCluster. KubeRay changes a RayCluster in place only if worker groups are appended and nothing else of it differs
but numbers of pods. So what a tag has stays as it is, and the next one gets a copy of each group. Ray's autoscaler ends idle pods.
*/}}

{{/* The tag that serves. */}}
{{- define "manta.serving" -}}
{{- $tags := .Values.rollout.tags -}}
{{- if and .Values.image.tag (not (has .Values.image.tag $tags)) }}{{ fail (printf "image.tag: %s is not one of rollout.tags: %s" .Values.image.tag (join ", " $tags)) }}{{ end -}}
{{- if .Values.image.digest }}{{ fail "image.digest: rollout.tags names images by their tags" }}{{ end -}}
{{- .Values.image.tag | default (last $tags) -}}
{{- end }}

{{/* Give the RayCluster `cluster`, whose pods have the first tag, groups for each of `tags`. `serving`: the tag that serves. */}}
{{- define "manta.rollout" -}}
{{- $cluster := .cluster -}}{{- $serving := .serving -}}{{- $first := first .tags -}}{{- $several := gt (len .tags) 1 -}}
{{- if not $cluster.enableInTreeAutoscaling }}{{ fail "rollout.tags: pods of the tag before go only with enableInTreeAutoscaling" }}{{ end -}}
{{- $name := regexReplaceAll ":[^:/]*$" (first $cluster.headGroupSpec.template.spec.containers).image "" -}}
{{- $_ := set $cluster.headGroupSpec "labels" (merge (dict "manta/version" $first) ($cluster.headGroupSpec.labels | default dict)) -}}
{{- $groups := list -}}
{{- range $tag := .tags -}}
  {{- range $cluster.workerGroupSpecs -}}
    {{- $group := deepCopy . -}}
    {{- $_ := set $group "labels" (merge (dict "manta/version" $tag) ($group.labels | default dict)) -}}
    {{- if ne $tag $first -}}
      {{- $_ := set $group "groupName" (printf "%s-%s" .groupName (lower $tag | replace "." "-" | replace "_" "-")) -}}
      {{- range concat $group.template.spec.containers ($group.template.spec.initContainers | default list) -}}
        {{- if eq .image (printf "%s:%s" $name $first) }}{{ $_ := set . "image" (printf "%s:%s" $name $tag) }}{{ end -}}
      {{- end -}}
    {{- end -}}
    {{- $_ := set $group "maxReplicas" (add1 $group.maxReplicas) -}}
    {{- if ne $tag $serving -}}
      {{- $_ := mergeOverwrite $group (dict "replicas" 0 "minReplicas" 0) -}}
    {{- else if and $several (ne (get .rayStartParams "num-gpus" | default "0") "0") -}}
      {{- $_ := mergeOverwrite $group (dict "replicas" (min 1 .replicas) "minReplicas" 0) -}}
    {{- end -}}
    {{- $groups = append $groups $group -}}
  {{- end -}}
{{- end -}}
{{- $names := list }}{{ range $groups }}{{ $names = append $names .groupName }}{{ end -}}
{{- if ne (len $names) (len (uniq $names)) }}{{ fail (printf "rollout.tags: worker groups of two tags have the same name: %s" (join ", " $names)) }}{{ end -}}
{{- $_ := set $cluster "workerGroupSpecs" $groups -}}
{{- end }}

{{/* How a RayService replaces its RayCluster. `options`: of the upgrade in steps. */}}
{{- define "manta.incremental" -}}
{{- if gt (int .options.stepSizePercent) (int .options.maxSurgePercent) }}{{ fail "incrementalUpgrade.stepSizePercent: above maxSurgePercent" }}{{ end -}}
{{- if not .service.rayClusterConfig.enableInTreeAutoscaling }}{{ fail "incrementalUpgrade: KubeRay needs enableInTreeAutoscaling for it" }}{{ end -}}
{{- $_ := set .service "upgradeStrategy" (dict "type" "NewClusterWithIncrementalUpgrade" "clusterUpgradeOptions" .options) -}}
{{- end }}

{{/* The Serve configuration `text` for pods of the tag `serving`: of each deployment, one replica is started before one ends. */}}
{{- define "manta.rollout.serve" -}}
{{- $version := dict "manta/version" .serving -}}
{{- $config := fromYaml .text -}}
{{- range $app := $config.applications -}}
  {{- $args := $app.args | default dict -}}
  {{- if $args.models -}}
    {{- $deployments := dict -}}
    {{- range $app.deployments }}{{ $_ := set $deployments .name . }}{{ end -}}
    {{- range $model := $args.models -}}
      {{- $switches := ($model.handoff | default dict).switch_roles -}}
      {{- range $pool := list "decode" "prefill" "encode" -}}
        {{- if or (eq $pool "decode") (get $model $pool) -}}
          {{- $section := get $model $pool | default dict -}}
          {{- $_ := set $section "label_selector" (merge (deepCopy $version) ($section.label_selector | default dict)) -}}
          {{- $_ := set $model $pool $section -}}
          {{- if not (and $switches (eq $pool "prefill")) -}}
            {{- $name := printf "%s-%s" (ternary "pd" $pool (and $switches (eq $pool "decode") | default false)) $model.name -}}
            {{- $_ := set $deployments $name (merge (get $deployments $name | default dict) (dict "name" $name "max_surge_percent" 1)) -}}
          {{- end -}}
        {{- end -}}
      {{- end -}}
    {{- end -}}
    {{- $ingress := get $deployments "ingress" | default (dict "name" "ingress") -}}
    {{- $options := merge ($ingress.ray_actor_options | default dict) (dict "num_cpus" (($args.ingress | default dict).num_cpus | default 0.1)) -}}
    {{- $_ := set $options "label_selector" (merge (deepCopy $version) ($options.label_selector | default dict)) -}}
    {{- $_ := set $deployments "ingress" (set $ingress "ray_actor_options" $options) -}}
    {{- $_ := set $app "deployments" list -}}
    {{- range keys $deployments | sortAlpha }}{{ $_ := set $app "deployments" (append $app.deployments (get $deployments .)) }}{{ end -}}
  {{- else if hasPrefix "manta" $app.import_path -}}
    {{- fail (printf "rollout.tags: application %s of serveConfig has no args.models" ($app.name | default "")) -}}
  {{- end -}}
{{- end -}}
{{- toYaml $config -}}
{{- end }}
