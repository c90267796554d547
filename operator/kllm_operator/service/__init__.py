"""What one InferenceService is made of on Kubernetes: its other objects, its control loop and its status."""
