"""The daemon's HTTP API on its Unix socket, and the client that speaks it."""
