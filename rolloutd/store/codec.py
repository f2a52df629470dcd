"""The codec: values of the core as columns and JSON, and back by their types.

A column has the name of its field, unless the table says otherwise.  Strings, numbers and flags are columns
as they are; every other value is canonical JSON.  The statements follow from the columns and the key.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache, lru_cache, partial
from itertools import chain, repeat
from operator import attrgetter
from types import MappingProxyType, NoneType
from typing import Any, Final, Generic, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from machines.model.node import Conflict as NodeConflict
from machines.model.rollout import Actor
from rolloutd.audit.audit_chain import canonical_json

R = TypeVar("R")

_PLAIN: Final = frozenset({str, int, float, bool, NoneType})

_SHARED: Final = (Actor, tuple[str, ...], tuple[NodeConflict, ...], Mapping[str, str])
"""Types of which many rows have one of few values, so each is decoded once."""

_KEY_EXPRESSIONS: Final = {"attempt": "ifnull(attempt, -1)"}
"""Columns of keys as their index has them."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How a field is stored that is not one column of its own name; `selected`: what a query reads for it."""

    columns: tuple[str, ...]
    encode: Callable[[Any], tuple[Any, ...]] | None = None
    decode: Callable[..., Any] | None = None
    selected: tuple[str, ...] = ()


class Table(Generic[R]):
    """One kind of row: its columns, the statements on them, and what converts both ways.

    `given` has the fields that are not a column of their own name; of a row that is `partial`, all of them.
    `owner`: the column of Write.owner.  `present`: the condition for rows that have not ended.
    """

    def __init__(
        self,
        kind: type[R],
        name: str,
        key: str,
        given: Mapping[str, str | Codec] = MappingProxyType({}),
        *,
        owner: str = "",
        source: str = "",
        present: str = "",
        partial: bool = False,
    ) -> None:
        names = tuple(given) if partial else tuple(each.name for each in fields(cast(Any, kind)))
        hints = {} if partial else get_type_hints(kind)
        codecs = [_codec(given.get(each, each), hints.get(each, str)) for each in names]
        selected = [each.selected or tuple(f"{name}.{column}" for column in each.columns) for each in codecs]
        self.kind, self.name, self._has_owner = kind, name, bool(owner)
        self._get = attrgetter(*names)
        encoders = [(at, each.encode) for at, each in enumerate(codecs) if each.encode is not None]
        self._encoders = encoders[::-1]  # from the end, because each may make several columns of one
        decoders = ((at, len(selected[at]), each.decode) for at, each in enumerate(codecs))
        self._decoders = [(at, width, decode) for at, width, decode in decoders if decode is not None]
        columns = [*filter(None, [owner]), *(column for each in codecs for column in each.columns)]
        self._key = [columns.index(column) for column in key.split()]
        self._write_statements(name, columns, key.split())
        self.select = f"SELECT {', '.join(chain(*selected))} FROM {source or name}"  # noqa: S608
        self.select_one = " AND ".join([f"{self.select} WHERE {self._where}", *filter(None, [present])])

    def _write_statements(self, name: str, columns: Sequence[str], key: Sequence[str]) -> None:
        places = {column: f"?{number}" for number, column in enumerate(columns, 1)}
        changed = [column for column in columns if column not in key]
        conditions = {each: _KEY_EXPRESSIONS.get(each, f"{name}.{each}") for each in key}
        self._where = " AND ".join(f"{condition} = ?" for condition in conditions.values())
        self.delete = f"DELETE FROM {name} WHERE {self._where}"  # noqa: S608
        self.insert = f"INSERT INTO {name} ({', '.join(columns)}) VALUES ({', '.join(places.values())})"  # noqa: S608
        assignments = ", ".join(f"{column} = excluded.{column}" for column in changed)
        self.upsert = f"{self.insert} ON CONFLICT ({', '.join(key)}) DO UPDATE SET {assignments}"
        assignments = ", ".join(f"{column} = {places[column]}" for column in changed)
        where = " AND ".join(f"{condition} = {places[each]}" for each, condition in conditions.items())
        self.update = f"UPDATE {name} SET {assignments} WHERE {where}"  # noqa: S608

    def encode(self, row: R, owner: str = "") -> list[Any]:
        """Return the row's columns; raises TypeError or ValueError for a value that has no JSON form."""
        values = list(self._get(row))
        for at, encode in self._encoders:
            values[at : at + 1] = encode(values[at])
        if self._has_owner:
            values.insert(0, owner)
        return [value if value.__class__ in _PLAIN else _encode(value) for value in values]

    def key_of(self, row: R, owner: str = "") -> list[Any]:
        values = self.encode(row, owner)
        return [values[at] for at in self._key]

    def decode(self, rows: Sequence[Sequence[Any]]) -> Iterator[R]:
        """Yield the values of rows, column by column: a start reads two hundred thousand rows."""
        columns: list[Iterable[Any]] = list(zip(*rows, strict=True))
        for at, width, decode in self._decoders if rows else ():
            read = columns[at : at + width]
            # A field of no column has the same value in all rows.
            columns[at : at + width] = (map(decode, *read) if read else repeat(decode(), len(rows)),)
        return map(self.kind, *columns) if rows else iter(())


# -- columns --------------------------------------------------------------------


def _codec(given: str | Codec, hint: Any) -> Codec:
    return given if isinstance(given, Codec) else Codec((given,), decode=_decoder(hint))


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
