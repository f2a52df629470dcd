"""The in-memory twins of the ports."""
