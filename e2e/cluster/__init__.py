"""A real single-node Kubernetes cluster without Docker: see `__main__.py` for the command line."""
