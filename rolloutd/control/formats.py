"""Instants and pages as the API has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

from machines.model.timefmt import format_rfc3339
from rolloutd.control.requests import PageQuery

T = TypeVar("T")


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
