"""What makes the daemon a good service: sockets handed over, watchdog, reload, log lines, metrics.

It reads where the daemon stands and decides nothing about rollouts.
"""
