"""How values become JSON: answers by their models, instants, pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache, lru_cache
from typing import Any, ForwardRef, TypeVar, cast

from machines.model.timefmt import format_rfc3339
from rolloutd.control.requests import PageQuery

T = TypeVar("T")


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


def page(rest: Sequence[T], query: PageQuery, name_of: Callable[[T], str]) -> tuple[Sequence[T], str | None]:
    """Return the first items up to the limit, and the name of the last one if more follow."""
    if query.limit is None or len(rest) <= query.limit:
        return rest, None
    return rest[: query.limit], name_of(rest[query.limit - 1])
