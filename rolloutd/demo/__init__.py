"""The demo: an embedded fleet, and a story told on it."""
