"""Adapters of HAProxy: an isolator and a traffic probe over its Runtime API."""
