"""Adapter of NetBox: an inventory source, and a receiver of its webhooks."""
