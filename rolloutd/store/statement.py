"""What the store's parts hand to the writer: one SQL statement and what is expected of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from machines.rollout import Actor
from rolloutd.chain import canonical


@dataclass(frozen=True, slots=True)
class Statement:
    """SQL with the rows for it; `changes` is how many rows it must change, None for any number."""

    sql: str
    rows: Sequence[Sequence[Any]]
    changes: int | None = None
    otherwise: str = ""


def actor_text(actor: Actor | None) -> str | None:
    """Return an actor as its column holds it."""
    return None if actor is None else canonical({"kind": actor.kind, "name": actor.name, "uid": actor.uid})


def list_text(values: Iterable[str]) -> str:
    """Return names as their column holds them."""
    return canonical(list(values))
