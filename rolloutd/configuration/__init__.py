"""What runs give to a node: its documents, and which variables are secret, sealed or shown."""
