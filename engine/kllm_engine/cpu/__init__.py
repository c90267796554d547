"""What SGLang lacks on a machine without a GPU."""
