"""Trains: rollouts that share the outage of a node."""
