"""Values of the core as JSON, and back by their types."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache, partial
from typing import Any, Union, get_args, get_origin, get_type_hints


def to_json(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if is_dataclass(value):
        kind: Any = type(value)
        return {name: to_json(getattr(value, name)) for name in field_names(kind)}
    if isinstance(value, Mapping):
        return {key: to_json(inner) for key, inner in value.items()}
    return [to_json(inner) for inner in value]


@cache
def field_names(kind: Any) -> tuple[str, ...]:
    """Return the field names of a type; those of an event without node and rollout, which its entry has."""
    hidden = {"rollout", "node"} if kind.__module__ == "machines.model.events" else set[str]()
    return tuple(each.name for each in fields(kind) if each.name not in hidden)


def from_json(hint: Any, content: Any) -> Any:
    """Return the value of this type from its JSON; raises KeyError, TypeError or ValueError."""
    decode = decoder(hint)
    return content if decode is None else decode(content)


@cache
def decoder(hint: Any) -> Callable[[Any], Any] | None:
    """Return what makes a value of this type from JSON; None when the JSON is the value."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return decoder(next(each for each in args if each is not type(None)))
    if origin is tuple:
        inner = decoder(args[0])
        return tuple if inner is None else lambda values: tuple(map(inner, values))
    if not isinstance(hint, type):
        return None
    if is_dataclass(hint):
        found = ((name, decoder(each)) for name, each in get_type_hints(hint).items())
        return partial(_decode_fields, hint, {name: each for name, each in found if each is not None})
    return hint if issubclass(hint, StrEnum) else None


def _decode_fields(
    kind: type[Any], decoders: Mapping[str, Callable[[Any], Any]], content: Mapping[str, Any]
) -> Any:
    values = dict(content)
    for name, decode in decoders.items():
        if values.get(name) is not None:
            values[name] = decode(values[name])
    return kind(**values)
