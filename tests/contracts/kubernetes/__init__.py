"""What the Kubernetes adapter must do on any cluster."""
