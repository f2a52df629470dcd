"""Formatting of counts, sizes and suggestions, shared by daemon, command line and console."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

MAX_COMPARED_NAMES = 2_000
"""Names that a suggestion compares: some ten milliseconds of the daemon's time."""

SUGGESTION_CUTOFF = 0.7
"""Minimum similarity of a suggestion, as difflib counts: `lgos` is near `logs`."""

SHORT_HASH_CHARS = 12
"""Enough characters of a commit, digest or content hash to be unique, few enough to compare by eye."""


def pluralize(number: int, singular: str, plural: str = "") -> str:
    """Return `1 node`, `2 nodes`; `plural` is for words that take no s."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def format_percent(percent: float | None) -> str:
    """Return a percentage, rounded down: 100 means that every node is done; empty for None."""
    return "" if percent is None else f"{int(percent)} %"


def join_limited(names: Sequence[str], limit: int, separator: str = ", ") -> str:
    """Return the first names and the number of the others: `a, b and 3 more`."""
    more = len(names) - limit
    return separator.join(names[:limit]) + (f" and {more:,} more" if more > 0 else "")


MAX_VALUE_CHARS = 2_000
"""Characters of one value in a list of differences: a person compares no more at a glance."""


def cut_value(text: str) -> str:
    """Return a value as differences show it; of a long one the beginning, and how much is left out.

    Its hash shows that two values differ that begin alike.
    """
    left_out = len(text) - MAX_VALUE_CHARS
    if left_out <= 0:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{text[:MAX_VALUE_CHARS]}\u2026 ({left_out:,} more characters, sha256 {short_hash(digest)})"


def short_hash(text: str) -> str:
    return text[:SHORT_HASH_CHARS]


def shorten_name(name: str, width: int) -> str:
    """Return a name in at most `width` characters: a long one loses its domain, then its middle.

    The ends stay, because names of one rack or cluster begin alike.
    """
    host, _, domain = name.partition(".")
    if len(name) > width and domain and "/" not in name:
        name = f"{host}…" if len(host) < width else host
    if len(name) <= width:
        return name
    end = (width - 1) // 2
    return f"{name[: width - 1 - end]}…{name[len(name) - end :]}"[:width]


def format_exceptions(skipped: int, rolled_back: int) -> str:
    """Return `2 skipped, 1 rolled back` for nodes without the change; "" for none.

    As in the API, `skipped` counts the rolled-back nodes too.
    """
    parts = ((skipped - rolled_back, "skipped"), (rolled_back, "rolled back"))
    return ", ".join(f"{number:,} {name}" for number, name in parts if number)


def format_size(number: int) -> str:
    """Return bytes as `31 MiB`, or as `245 KiB` below one MiB."""
    return f"{number // 2**20} MiB" if number >= 2**20 else f"{number // 2**10} KiB"


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like a mistyped one, None if none is near."""
    import difflib  # the command line loads it after a mistake only

    compared = islice(known, MAX_COMPARED_NAMES)
    return next(iter(difflib.get_close_matches(name[:100], compared, n=1, cutoff=SUGGESTION_CUTOFF)), None)


def suggest_name(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return what to do about an unknown name: the nearest known one, else `otherwise`."""
    near = nearest_name(name, known)
    return otherwise if near is None else f"did you mean {near}?"


def describe_source(pinned: Mapping[str, str]) -> str:
    """Return a pinned source in one line: `commit 3f2a9c1d4b5e, tag v1.4.2 of https://git.example/x.git`."""
    pin = short_hash(pinned["pin"])
    if "requirements" in pinned:
        pin += f" with requirements {short_hash(pinned['requirements'])}"
    if pinned["kind"] != "git":
        return f"upload {pin}"
    named = "" if pinned.get("ref_kind", "commit") == "commit" else f", {pinned['ref_kind']} {pinned['ref']}"
    return f"commit {pin}{named}" + (f" of {pinned['url']}" if "url" in pinned else "")
