"""Where instances live: Kubernetes pods or, on one machine, processes. One interface for both."""
