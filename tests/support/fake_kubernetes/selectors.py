"""Label and field selectors, as the API server reads them in queries and objects."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

JSON = Any
Matches = Callable[[Mapping[str, JSON]], bool]

_SET = re.compile(r"^(\S+)\s+(in|notin)\s+\(([^)]*)\)$")


def matcher(query: Mapping[str, str]) -> Matches:
    """Return the test that the selectors of a query make."""
    fields = [_field(part) for part in query.get("fieldSelector", "").split(",") if part]
    labels = [_label(part) for part in _split(query.get("labelSelector", ""))]

    def matches(thing: Mapping[str, JSON]) -> bool:
        own = thing["metadata"].get("labels") or {}
        return all(test(thing) for test in fields) and all(test(own) for test in labels)

    return matches


def selects(selector: Mapping[str, JSON] | None, labels: Mapping[str, str]) -> bool:
    """Say whether a selector object selects these labels."""
    if selector is None:
        return False
    if any(labels.get(k) != v for k, v in (selector.get("matchLabels") or {}).items()):
        return False
    for expression in selector.get("matchExpressions") or ():
        value, values = labels.get(expression["key"]), expression.get("values") or ()
        good = {
            "In": value in values,
            "NotIn": value not in values,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }
        if not good[expression["operator"]]:
            return False
    return True


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    return [part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def _field(part: str) -> Matches:
    path, wanted = re.split(r"!=|==|=", part, maxsplit=1)
    negative = "!=" in part

    def test(thing: Mapping[str, JSON]) -> bool:
        value: JSON = thing
        for key in path.split("."):
            value = (value or {}).get(key)
        return (str(value or "") == wanted) is not negative

    return test


def _label(part: str) -> Callable[[Mapping[str, str]], bool]:
    in_set = _SET.match(part)
    if in_set:
        key, values = in_set[1], {value.strip() for value in in_set[3].split(",")}
        return lambda labels: (labels.get(key) in values) is (in_set[2] == "in")
    if "!=" in part:
        key, value = part.split("!=")
        return lambda labels: labels.get(key.strip()) != value.strip()
    if "=" in part:
        key, value = re.split("==?", part)
        return lambda labels: labels.get(key.strip()) == value.strip()
    if part.startswith("!"):
        return lambda labels: part[1:] not in labels
    return lambda labels: part in labels
