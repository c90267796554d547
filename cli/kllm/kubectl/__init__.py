"""`kubectl kllm`: services on a cluster, through the user's own kubectl."""
