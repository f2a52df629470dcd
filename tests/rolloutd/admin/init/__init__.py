"""First setup of a daemon."""
