"""Gates, what they need, and the votes cast at them."""

from __future__ import annotations

from typing import Literal, TypedDict

GateState = Literal["not-asked", "waiting", "open", "rejected"]


class Need(TypedDict):
    """How many votes are wanted and there."""

    want: int
    have: int


class TeamNeed(TypedDict):
    """How many votes of one team are wanted and there."""

    team: str
    want: int
    have: int


class Needs(TypedDict):
    """What a gate still needs."""

    owner: Need
    teams: list[TeamNeed]


class Vote(TypedDict):
    """One person's yes or no."""

    id: str
    by: str
    uid: int | None
    yes: bool
    teams: list[str]
    reason: str
    at: str
    digest: str
    withdrawn: str | None
    counts: bool


class Gate(TypedDict):
    """A gate as it stands; `wave` is the one that `continue` comes after."""

    gate: str
    wave: str | None
    team: str | None
    state: GateState
    needs: Needs
    votes: list[Vote]
    missing: str | None
