"""What makes the daemon a good service: its socket, watchdog, reload, logs, metrics.

It reads where the daemon stands and decides nothing about rollouts.
"""
