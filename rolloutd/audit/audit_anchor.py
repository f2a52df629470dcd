"""Lines of an anchor: the audit's latest hash, kept where a user who can write the database cannot.

A line is `TIME NUMBER HASH`.  This module knows neither the daemon nor the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from machines.model.timefmt import format_rfc3339

_HASH_LENGTH = 64

_MAX_DIGITS = 18
"""Those of a number that each database can have; who writes an anchor may write any."""


@dataclass(frozen=True, slots=True)
class AnchoredHash:
    """The hash that an audit entry had at an instant (RFC 3339)."""

    at: str
    seq: int
    hash: str


def format_line(at: float, seq: int, entry_hash: str) -> str:
    return f"{format_rfc3339(at)} {seq} {entry_hash}\n"


def parse_lines(lines: Iterable[str]) -> list[AnchoredHash]:
    """Return the anchored hashes; other lines, such as the subject of a mail, are skipped."""
    return [
        AnchoredHash(words[0], int(words[1]), words[2])
        for words in (line.split() for line in lines)
        if len(words) == 3
        and words[1].isdecimal()
        and len(words[1]) <= _MAX_DIGITS
        and len(words[2]) == _HASH_LENGTH
    ]


def describe_difference(anchored: Iterable[AnchoredHash], hashes: Mapping[int, str]) -> str:
    """Return how the audit differs from its anchor, the empty string if it does not."""
    for each in anchored:
        found = hashes.get(each.seq)
        if found != each.hash:
            what = "is missing" if found is None else "has another hash"
            return (
                f"entry {each.seq}, anchored at {each.at}, {what}: the audit was rewritten or cut;"
                " keep a copy and restore a backup"
            )
    return ""
