"""`manta k8s lint`: what is wrong with manifests although their schema is right and the API server takes them."""
