"""`manta k8s lint`: what is wrong with manifests that follow their schemas, and that the API server would take."""
