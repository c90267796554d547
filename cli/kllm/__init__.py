"""The command line: `kllm up`, `status`, `chat`, `down`."""
