"""Decodes a long JSON answer in slices, so that the picture goes on moving meanwhile.

A thread that decodes ten thousand nodes in one call holds the interpreter for a
tenth of a second, and no key is answered.  Decoded one by one, others get their
turn between any two, and what each is made into takes the place of its JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_value = json.JSONDecoder().raw_decode
_blank = re.compile(r"[ \t\r\n]*").match


def decoded(text: str, name: str, make: Callable[[Any], T]) -> dict[str, Any]:
    """Return a JSON object; each element of its list `name` is what `make` makes of it.

    Raises ValueError where the text is not such an object.
    """
    found: dict[str, Any] = {}
    place, is_over = _opened(text, 0, "{", "}")
    while not is_over:
        key, place = _value(text, place)
        place = _past(text, place, ":")
        found[key], place = _made(text, place, make) if key == name else _value(text, place)
        place, is_over = _next(text, place, "}")
    return found


def _made(text: str, place: int, make: Callable[[Any], T]) -> tuple[list[T], int]:
    found: list[T] = []
    place, is_over = _opened(text, place, "[", "]")
    while not is_over:
        element, place = _value(text, place)
        found.append(make(element))
        place, is_over = _next(text, place, "]")
    return found, place


def _opened(text: str, place: int, opening: str, closing: str) -> tuple[int, bool]:
    """Return the place of the first element, or the place behind an empty whole and True."""
    place = _past(text, place, opening)
    return (place + 1, True) if text.startswith(closing, place) else (place, False)


def _next(text: str, place: int, closing: str) -> tuple[int, bool]:
    """Return the place of the next element, or the place behind the whole and True."""
    place = _skipped(text, place)
    return (place + 1, True) if text.startswith(closing, place) else (_past(text, place, ","), False)


def _past(text: str, place: int, mark: str) -> int:
    """Return the place of what follows a mark that must be here."""
    place = _skipped(text, place)
    if not text.startswith(mark, place):
        raise ValueError(f"no {mark!r} at character {place} of the answer")
    return _skipped(text, place + 1)


def _skipped(text: str, place: int) -> int:
    blank = _blank(text, place)
    return place if blank is None else blank.end()
