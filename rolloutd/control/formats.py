"""How values become JSON: answers by their models, instants, pages."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from enum import Enum
from functools import cache, lru_cache
from typing import Any, ForwardRef, Generic, TypeVar, cast

from machines.model.node import natural_sort_key
from machines.model.timefmt import format_rfc3339
from rolloutd.control.requests import PageQuery

T = TypeVar("T")
Key = TypeVar("Key")

MAX_INSERTED = 1_000
"""New names that are inserted one by one; more of them are sorted with all others."""


def fill(model: type[T], source: object, **given: Any) -> T:
    """Return an answer by its model: what is given, and for other keys what the source has by that name."""
    return cast(
        "T",
        {
            key: given[key] if key in given else _plain(getattr(source, key), kind)
            for key, kind in _kinds(cast("Any", model)).items()
        },
    )


@cache
def _kinds(model: Any) -> dict[str, str]:
    kinds = model.__annotations__.items()
    return {
        key: kind.__forward_arg__ if isinstance(kind, ForwardRef) else kind.__name__ for key, kind in kinds
    }


def _plain(value: object, kind: str) -> object:
    if type(value) in (int, str):  # most of a status; the patterns below take ten times as long
        return value
    match value:
        case float() if kind.startswith("str"):
            return format_timestamp(value)
        case Enum():
            return value.value
        case tuple():
            return list(value)
        case Mapping():
            return dict(value)
        case _:
            return value


@lru_cache(maxsize=4_096)  # a status has most instants of the one before
def format_timestamp(instant: float) -> str:
    """Return an instant (epoch seconds) as `2026-11-20T09:30:00.123Z`."""
    return format_rfc3339(instant, "milliseconds")


def format_optional_timestamp(instant: float | None) -> str | None:
    """Return an instant, or None if there is none; 0.0 means never."""
    return format_timestamp(instant) if instant else None


class KeptRows(Generic[Key, T]):
    """The rows of a list as they were last shown, and what each was made of."""

    def __init__(self) -> None:
        self._rows: dict[Key, tuple[object, T]] = {}

    def keys(self) -> Iterable[Key]:
        return self._rows.keys()

    def update(self, sources: Mapping[Key, object], make: Callable[[Key], T]) -> list[T]:
        """Return the rows by what each is made of; a row whose source is equal is the one kept."""
        before = self._rows
        # With the new source: the next time it is most likely the same object, which is compared at once.
        self._rows = {
            key: (source, row[1] if (row := before.get(key)) is not None and row[0] == source else make(key))
            for key, source in sources.items()
        }
        return [row for _, row in self._rows.values()]


def in_natural_order(before: Iterable[str], names: Set[str]) -> list[str]:
    """Return the names in their order, given that of the last time: only what differs is placed."""
    ordered = list(filter(names.__contains__, before))
    added = names - set(ordered) if len(ordered) < len(names) else set()
    if len(added) > MAX_INSERTED:
        return sorted(names, key=natural_sort_key)
    for name in added:
        insort(ordered, name, key=natural_sort_key)
    return ordered


def page(rest: Sequence[T], query: PageQuery, name_of: Callable[[T], str]) -> tuple[Sequence[T], str | None]:
    """Return the first items up to the limit, and the name of the last one if more follow."""
    if query.limit is None or len(rest) <= query.limit:
        return rest, None
    return rest[: query.limit], name_of(rest[query.limit - 1])
