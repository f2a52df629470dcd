"""Adapters over ssh outside Ansible: shell, checks, isolator and observer."""
