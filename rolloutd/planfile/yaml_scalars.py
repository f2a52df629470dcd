"""Unquoted YAML scalars: text, a number, a boolean or null.

YAML 1.2's core schema decides.  Where YAML 1.1, which Ansible uses, reads something else, the scalar is
refused with the advice to quote or respell it.
"""

from __future__ import annotations

import math
import re
from typing import Any

JSON = Any

_MAX_NUMBER_CHARS = 60
"""Characters of a number: more than any that can be stored, few enough to match quickly."""

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_PREFIXED_INT = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_YAML11_BOOL = re.compile(r"yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF")
_YAML11_NUMBER = re.compile(r"[-+]?0[0-9_]+|[-+]?0b[01_]+|[-+]?[1-9][0-9]*(?:_[0-9]+)+(?:\.[0-9_]*)?")
_INFINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_CONSTANTS: dict[str, JSON] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_MAX_INTEGER = 2**63 - 1


class AmbiguousScalar(ValueError):
    """YAML 1.1 and 1.2 read this scalar differently, or JSON cannot hold it."""

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


def parse_plain_scalar(text: str) -> JSON:
    """Return what an unquoted scalar means in YAML 1.2's core schema; raises AmbiguousScalar."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if len(text) > _MAX_NUMBER_CHARS:
        return text
    if _YAML11_BOOL.fullmatch(text):
        message = f"`{text}` is text to some YAML readers and a boolean to others"
        raise AmbiguousScalar(message, f'true or false, or "{text}" in quotes for the text')
    if _YAML11_NUMBER.fullmatch(text):
        message = f"`{text}` is one number to some YAML readers and another, or text, to others"
        raise AmbiguousScalar(
            message, f'a decimal number without leading zeros, or "{text}" in quotes for the text'
        )
    if _INFINITE.fullmatch(text):
        raise AmbiguousScalar(
            "infinity and not-a-number cannot be stored", "a finite number, or text in quotes"
        )
    if _INT.fullmatch(text) or _PREFIXED_INT.fullmatch(text):
        return _require_storable(int(text, 0))
    if _FLOAT.fullmatch(text):
        return _require_storable(float(text))
    return text


def _require_storable(number: float) -> JSON:
    if (isinstance(number, int) and abs(number) > _MAX_INTEGER) or not math.isfinite(number):
        raise AmbiguousScalar("the number is too large", f"numbers up to {_MAX_INTEGER}, or text in quotes")
    return number
