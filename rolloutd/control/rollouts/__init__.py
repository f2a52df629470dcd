"""Rollouts, their gates and pools: what the API says of them, and what may be asked."""
