{{/*
What `helm uninstall` does first: a Job deletes the RayService and waits until its pods have ended, for KubeRay's clean-up needs Redis
and the PriorityClass, and pods that drain need the network policies. It may do just that. `head`: the head's pod.
*/}}
{{- define "manta.uninstall" -}}
{{- $hook := dict "helm.sh/hook" "pre-delete" "helm.sh/hook-delete-policy" "before-hook-creation,hook-succeeded" -}}
{{- $before := toYaml (set (deepCopy $hook) "helm.sh/hook-weight" "-1") -}}
---
apiVersion: v1
kind: ServiceAccount
metadata:
  name: manta-uninstall
  namespace: {{ .namespace }}
  annotations: {{- $before | nindent 4 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: manta-uninstall
  namespace: {{ .namespace }}
  annotations: {{- $before | nindent 4 }}
rules:
  - apiGroups: [ray.io]
    resources: [rayservices]
    resourceNames: [{{ .service }}]
    verbs: [get, delete]
  - apiGroups: [""]
    resources: [pods]
    verbs: [list]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: manta-uninstall
  namespace: {{ .namespace }}
  annotations: {{- $before | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: manta-uninstall}
subjects:
  - {kind: ServiceAccount, name: manta-uninstall, namespace: {{ .namespace }}}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: manta-uninstall
  namespace: {{ .namespace }}
  annotations: {{- $before | nindent 4 }}
spec:
  podSelector:
    matchLabels: {manta/job: uninstall}
  policyTypes: [Ingress, Egress]
  egress: # as manta-autoscaler's
    - ports:
        - {protocol: TCP, port: 443}
        - {protocol: TCP, port: 6443}
        - {protocol: TCP, port: 8443}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: manta-uninstall
  namespace: {{ .namespace }}
  annotations: {{- toYaml $hook | nindent 4 }}
spec:
  activeDeadlineSeconds: {{ .deadline }} # two minutes more than pods may take to drain
  backoffLimit: 3
  template:
    metadata:
      labels: {manta/job: uninstall}
    spec:
      restartPolicy: OnFailure
      serviceAccountName: manta-uninstall
      securityContext:
        runAsNonRoot: true
        runAsUser: 1000
        runAsGroup: 1000
        seccompProfile: {type: RuntimeDefault}
      {{- with .head.imagePullSecrets }}
      imagePullSecrets: {{- toYaml . | nindent 8 }}
      {{- end }}
      containers:
        - name: delete
          image: {{ (first .head.containers).image }}
          command: [manta, k8s, delete, {{ .service }}]
          resources:
            requests: {cpu: 100m, memory: 256Mi}
            limits: {memory: 256Mi}
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities: {drop: [ALL]}
{{- end }}
