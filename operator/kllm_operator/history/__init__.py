"""What control loops decided from, written down for `kllm replay`."""
