"""`manta k8s lint`: finds mistakes in manifests that follow their schemas and that the API server would accept."""
