"""The daemon itself: that it is there, and why it refused."""

from __future__ import annotations

from typing import TypedDict

from rolloutd.control.wire.plans import Mistake


class Health(TypedDict):
    """That the daemon is there, since when, and what troubles it."""

    version: str
    epoch: int
    pid: int
    since: str
    observe_only: bool
    trouble: str | None


class Error(TypedDict):
    """Why a request was not carried out."""

    error: str
    code: str
    errors: list[Mistake]
