"""Adapters for Kubernetes: inventory, watch, observer, isolator, check and traffic probe.

A cluster's first request imports the heavy client library, so a fleet without Kubernetes never pays for it.
"""
