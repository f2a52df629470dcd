"""What an unquoted word of YAML means: text, a number, a boolean or nothing.

YAML 1.2's core schema decides.  Where YAML 1.1, which Ansible and most people
have in their fingers, reads something else, the word is refused with the advice
to say which is meant.
"""

from __future__ import annotations

import math
import re
from typing import Any

JSON = Any

_MAX_NUMBER = 60
"""Characters a number may have: more than any that can be stored, few enough to match quickly."""

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_PREFIXED_INT = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_OLD_BOOL = re.compile(r"yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF")
_OLD_NUMBER = re.compile(r"[-+]?0[0-9_]+|[-+]?0b[01_]+|[-+]?[1-9][0-9]*(?:_[0-9]+)+(?:\.[0-9_]*)?")
_INFINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_WORDS: dict[str, JSON] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_MAX_INTEGER = 2**63 - 1


class Ambiguous(ValueError):
    """YAML 1.1 and 1.2 read this scalar differently, or JSON cannot hold it."""

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


def plain_scalar(text: str) -> JSON:
    """Return what an unquoted scalar means in YAML 1.2's core schema; raises Ambiguous."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > _MAX_NUMBER:
        return text
    if _OLD_BOOL.fullmatch(text):
        message = f"`{text}` is text to some YAML readers and a boolean to others"
        raise Ambiguous(message, f'true or false, or "{text}" in quotes for the text')
    if _OLD_NUMBER.fullmatch(text):
        message = f"`{text}` is one number to some YAML readers and another, or text, to others"
        raise Ambiguous(
            message, f'a decimal number without leading zeros, or "{text}" in quotes for the text'
        )
    if _INFINITE.fullmatch(text):
        raise Ambiguous("infinity and not-a-number cannot be stored", "a finite number, or text in quotes")
    if _INT.fullmatch(text) or _PREFIXED_INT.fullmatch(text):
        return _bounded(int(text, 0))
    if _FLOAT.fullmatch(text):
        return _bounded(float(text))
    return text


def _bounded(number: float) -> JSON:
    if (isinstance(number, int) and abs(number) > _MAX_INTEGER) or not math.isfinite(number):
        raise Ambiguous("the number is too large", f"numbers up to {_MAX_INTEGER}, or text in quotes")
    return number
