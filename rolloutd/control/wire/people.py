"""Who is asking, and who may do what: teams and the settings."""

from __future__ import annotations

from typing import TypedDict

from rolloutd.control.wire.locks import Freeze


class WhoAmI(TypedDict):
    """Who is asking, as the socket says, and what they are here."""

    user: str
    uid: int
    groups: list[str]
    teams: list[str]
    owner_of: list[str]
    admin: bool


class TeamShown(TypedDict):
    """A team of the settings; `members` are user names and @groups, checks and windows are counted."""

    team: str
    members: list[str]
    checks: int
    windows: int
    canaries: list[str]


class Team(TypedDict):
    """A team: what the settings say of it, and what it has set for itself on top (`own_...`)."""

    team: str
    members: list[str]
    windows: list[str]
    own_windows: list[str]
    canaries: list[str]
    own_canaries: list[str]
    freezes: list[Freeze]


class PoolKeyShown(TypedDict):
    """A label key that makes pools, and the budget of those that have none of their own."""

    key: str
    max_unavailable: str


class SettingsShown(TypedDict):
    """The part of the settings that says who may do what, and how much at once."""

    observe_only: bool
    max_parallel: int
    admins: list[str]
    teams: list[TeamShown]
    pools: list[PoolKeyShown]
