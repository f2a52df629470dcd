"""Threads for calls that block, a semaphore whose limit may change, and when garbage is collected."""
