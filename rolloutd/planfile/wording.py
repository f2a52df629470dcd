"""How a mistake shows what was found and where: on one line, short, as people write it.

What was found may be a secret in the wrong place, so little of it is shown.
"""

from __future__ import annotations

from typing import Any

JSON = Any
Path = tuple[str | int, ...]

MAX_FOUND = 60
"""Characters shown of what was found: enough to find it again, too few to print a key or a certificate."""

ROOT = "(file)"
"""The path of a mistake that is the whole file's."""


def shown(value: JSON) -> str:
    """Return a value as a person may see it in a mistake: one line, cut."""
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
    return cut(text)


def cut(text: str) -> str:
    """Return text on one line, without control characters, of at most MAX_FOUND characters."""
    line = "".join(
        character if character.isprintable() else " " for character in text[: MAX_FOUND * 2]
    ).strip()
    return line if len(line) <= MAX_FOUND and len(text) <= MAX_FOUND * 2 else line[: MAX_FOUND - 1] + "…"


def dotted(path: Path) -> str:
    """Return a path as people write it: `spec.verify[0].ssh`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.lstrip(".")[: MAX_FOUND * 4] or ROOT
