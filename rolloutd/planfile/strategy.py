"""Models of a plan's strategy: how many of its targets may be not ready at once."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rolloutd.plugin import ABSENT, Params

MAX_PARALLEL = 10_000
"""Nodes at once: the largest fleet the daemon is measured with."""


class Incremental(Params):
    """Change a target whenever fewer than so many are in flight, failed, or not ready after their change."""

    max_unready: int = Field(
        alias="maxUnready", ge=1, le=MAX_PARALLEL, description="Targets not ready at once."
    )


class Strategy(Params):
    """How many targets of the plan may be not ready at once."""

    exclusive: ClassVar[tuple[str, ...]] = ("incremental", "replace_all")

    incremental: Incremental = Field(
        default=ABSENT, description="A few at once; failed ones, and done ones that are not ready, count."
    )
    replace_all: Literal[True] = Field(
        default=ABSENT, description="All at once, as far as pools and max_parallel allow."
    )
