"""What the adapters of whole clusters must do on any management cluster."""
