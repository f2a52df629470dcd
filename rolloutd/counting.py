"""How a number of things is told: one node is not "1 nodes".

It knows words and nothing that they stand for, so that whoever tells something may use it.
"""

from __future__ import annotations


def count(number: int, one: str, many: str = "") -> str:
    """Return `1 node`, `2 nodes`; `many` is the plural where no s makes it."""
    return f"{number} {one if number == 1 else many or one + 's'}"
