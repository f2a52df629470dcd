"""A JSON decoder that lets other threads run between list elements.

One call that decodes ten thousand nodes holds the interpreter for a tenth of a
second, and the console answers no key meanwhile.  This one decodes element by
element, and converts each before it decodes the next, which also saves memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_decode_value = json.JSONDecoder().raw_decode
_match_whitespace = re.compile(r"[ \t\r\n]*").match


def decode_object(text: str, name: str, convert: Callable[[Any], T]) -> dict[str, Any]:
    """Return a JSON object whose list `name` has each element converted.

    Raises ValueError where the text is not such an object.
    """
    found: dict[str, Any] = {}
    position, is_over = _enter(text, 0, "{", "}")
    while not is_over:
        key, position = _decode_value(text, position)
        position = _expect(text, position, ":")
        if key == name:
            found[key], position = _decode_list(text, position, convert)
        else:
            found[key], position = _decode_value(text, position)
        position, is_over = _next_element(text, position, "}")
    return found


def _decode_list(text: str, position: int, convert: Callable[[Any], T]) -> tuple[list[T], int]:
    found: list[T] = []
    position, is_over = _enter(text, position, "[", "]")
    while not is_over:
        element, position = _decode_value(text, position)
        found.append(convert(element))
        position, is_over = _next_element(text, position, "]")
    return found, position


def _enter(text: str, position: int, opening: str, closing: str) -> tuple[int, bool]:
    """Return the position of the first element, or the one after an empty object and True."""
    position = _expect(text, position, opening)
    return (position + 1, True) if text.startswith(closing, position) else (position, False)


def _next_element(text: str, position: int, closing: str) -> tuple[int, bool]:
    """Return the position of the next element, or the one after the closing token and True."""
    position = _skip_whitespace(text, position)
    if text.startswith(closing, position):
        return position + 1, True
    return _expect(text, position, ","), False


def _expect(text: str, position: int, token: str) -> int:
    position = _skip_whitespace(text, position)
    if not text.startswith(token, position):
        raise ValueError(f"no {token!r} at character {position} of the response")
    return _skip_whitespace(text, position + 1)


def _skip_whitespace(text: str, position: int) -> int:
    match = _match_whitespace(text, position)
    return position if match is None else match.end()
