"""Values that differ for each target: texts, labels, fields of its object, and references to secrets."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from rolloutd.plugin.field_types import InvalidValue, raise_invalid

MAX_VALUES = 64
"""Values of one change: a reviewer reads each of them for each target."""

MAX_VALUE_CHARS = 4096
"""Characters of a literal value; longer texts belong in the module."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEYS = (frozenset({"label"}), frozenset({"field"}), frozenset({"secret", "key"}))
_ALLOWED = "a text, {label: KEY}, {field: /spec/...} or {secret: NAME, key: KEY}"


def _require_expressions(values: dict[str, Any]) -> dict[str, Any]:
    raise_invalid(
        InvalidValue(message, _ALLOWED, at=(name,))
        for name, expression in values.items()
        if (message := _mistake(name, expression))
    )
    return values


def _mistake(name: str, expression: Any) -> str:
    if not _NAME.fullmatch(name):
        return "the name of a value is letters, digits and `_`, and begins with no digit"
    if isinstance(expression, str):
        return "" if len(expression) <= MAX_VALUE_CHARS else f"the value is over {MAX_VALUE_CHARS} characters"
    if not isinstance(expression, dict):
        return "a value is a text; put it in quotes"
    if frozenset(expression) not in _KEYS or not all(
        isinstance(each, str) and each for each in expression.values()
    ):
        return "this is no expression of a value"
    if not expression.get("field", "/").startswith("/"):
        return "a field is a path that begins with `/`"
    return ""


Values = Annotated[dict[str, Any], Field(max_length=MAX_VALUES), AfterValidator(_require_expressions)]
"""The type of a change's key `values`; each name has a text, which may be a template, or an expression."""
