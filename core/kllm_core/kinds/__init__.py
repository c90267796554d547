"""The kinds of group kllm.io, version v1alpha1: one source for manifests, CRDs and `kubectl explain`."""
