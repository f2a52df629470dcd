"""The codec: values of the core as columns and JSON, and back by their types.

A column has the name of its field, unless the table says otherwise.  Strings, numbers and flags are columns
as they are; every other value is canonical JSON.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache, lru_cache, partial
from types import NoneType
from typing import Any, Final, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from machines.model.node import Conflict as NodeConflict
from machines.model.rollout import Actor
from rolloutd.audit.audit_chain import canonical_json

R = TypeVar("R")

_PLAIN: Final = frozenset({str, int, float, bool, NoneType})

_SHARED: Final = (Actor, tuple[str, ...], tuple[NodeConflict, ...], Mapping[str, str])
"""Types of which many rows have one of few values, so each is decoded once."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How a field is stored that is not one column of its own name; `selected`: what a query reads for it."""

    columns: tuple[str, ...]
    encode: Callable[[Any], tuple[Any, ...]] | None = None
    decode: Callable[..., Any] | None = None
    selected: tuple[str, ...] = ()


# -- columns --------------------------------------------------------------------


def column_codec(given: str | Codec, hint: Any) -> Codec:
    return given if isinstance(given, Codec) else Codec((given,), decode=_decoder(hint))


def encode_columns(values: Sequence[Any]) -> list[Any]:
    """Return the columns of values; raises TypeError or ValueError for one that has no JSON form."""
    return [value if value.__class__ in _PLAIN else _encode(value) for value in values]


def _encode(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if value.__class__ is tuple and all(each.__class__ is str for each in value):
        return _encode_strings(value)
    return canonical_json(to_json(value))


@lru_cache(maxsize=1_024)  # the pools of nodes that are in work; those of a whole fleet are megabytes
def _encode_strings(values: tuple[str, ...]) -> str:
    return canonical_json(values)


@cache
def _decoder(hint: Any) -> Callable[[Any], Any] | None:
    """Return what makes a field of this type from its column; None when the column is the value."""
    inner = next((each for each in get_args(hint) if type(None) in get_args(hint)), hint)
    if inner in (str, int, float):
        return None
    if inner is bool:
        return bool
    if isinstance(inner, type) and issubclass(inner, StrEnum):
        members: dict[str | None, Any] = {None: None, **{each.value: each for each in inner}}
        return members.__getitem__

    def decode(text: str | None) -> Any:
        return None if text is None else from_json(inner, json.loads(text))

    # Only labels and actors repeat over thousands of rows, so only they are cached; the bound limits memory.
    return lru_cache(maxsize=16_384)(decode) if inner in _SHARED else decode


decode_actor = cast(Callable[[str], Actor], _decoder(Actor))


# -- JSON -----------------------------------------------------------------------


def to_json(value: Any) -> Any:
    if value.__class__ in _PLAIN or isinstance(value, str | int | float):
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
    # A field that an older version did not write keeps its default.
    values = dict(content)
    for name, decode in decoders.items():
        if values.get(name) is not None:
            values[name] = decode(values[name])
    return kind(**values)
