"""One module per command; each has `run`, which returns the exit status."""
