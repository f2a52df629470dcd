"""Nodes of rollouts: state, reasons, steps, logs, preparation."""
