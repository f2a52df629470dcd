"""Threads that read the daemon through its blocking client."""
