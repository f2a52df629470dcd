"""Formatting of counts, shared by daemon, command line and console."""

from __future__ import annotations


def pluralize(number: int, singular: str, plural: str = "") -> str:
    """Return `1 node`, `2 nodes`; `plural` is for words that take no s."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"
