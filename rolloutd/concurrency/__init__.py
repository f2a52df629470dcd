"""Threads for calls that block, and a semaphore whose limit may change."""
