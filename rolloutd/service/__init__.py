"""Service integration: socket, systemd, reload, logs, metrics, preflight.

It reads the daemon's state and decides nothing about rollouts.
"""
