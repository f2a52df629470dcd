"""The daemons of a store: health, settings, callers, leadership."""
