"""One-line text of the values and paths in mistakes.

A value may be a secret in the wrong place, so little of it is shown.
"""

from __future__ import annotations

from typing import Any

JSON = Any
Path = tuple[str | int, ...]

MAX_FOUND_CHARS = 60
"""Characters shown of a value: enough to find it, too few to print a key or a certificate."""

ROOT_PATH = "(file)"
"""The path of a mistake that concerns the whole file."""


def describe_value(value: JSON) -> str:
    """Return a value as a mistake shows it: one line, cut."""
    match value:
        case None:
            text = "nothing"
        case bool():
            text = "true" if value else "false"
        case dict():
            text = "a mapping with " + (", ".join(map(str, list(value)[:8])) or "no keys")
        case list():
            text = f"a list of {len(value)}"
        case _:
            text = str(value) or "empty text"
    return truncate(text)


def truncate(text: str) -> str:
    """Return text on one line, without control characters, of at most MAX_FOUND_CHARS characters."""
    line = "".join(
        character if character.isprintable() else " " for character in text[: MAX_FOUND_CHARS * 2]
    ).strip()
    return (
        line
        if len(line) <= MAX_FOUND_CHARS and len(text) <= MAX_FOUND_CHARS * 2
        else line[: MAX_FOUND_CHARS - 1] + "…"
    )


def format_path(path: Path) -> str:
    """Return a path as people write it: `spec.verify[0].ssh`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.lstrip(".")[: MAX_FOUND_CHARS * 4] or ROOT_PATH
