"""The daemon's HTTP API on its Unix socket, and its client."""
