"""Votes of people and of services."""
