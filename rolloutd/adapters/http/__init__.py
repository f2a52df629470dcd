"""Adapter of HTTP: a check of a URL."""
