"""What the settings say of the world of people around the daemon: services that vote, channels that tell.

Only names and files stand in the settings: keys and addresses hold secrets and
are in files of their own, which the daemon alone reads.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rolloutd.planfile.model import MAX_ITEMS
from rolloutd.planfile.scalars import Limit, TeamName
from rolloutd.planfile.steps import Part, span
from rolloutd.settings.sources import FilePath

PATHS: tuple[tuple[str, ...], ...] = (("service_accounts", "*", "key_file"), ("notify", "urls_file"))
"""Where paths stand; `*` is any key of a mapping."""

ServiceName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-z0-9][a-z0-9-]*$")]
Outsider = Annotated[str, Field(min_length=1, max_length=253)]
Occasion = Literal["gate-waits", "node-failed", "rollout-ended", "nothing-moved"]


class ServiceAccount(Part):
    """A ticket system or a chat whose signed tokens carry people's votes."""

    key_file: FilePath = Field(
        description="HMAC secret of at least 32 bytes, or Ed25519 public key (PEM); read by the daemon alone."
    )
    teams: list[TeamName] = Field(
        min_length=1, max_length=1000, description="Teams that the service may carry votes for."
    )
    people: dict[Outsider, Outsider] = Field(
        default={},
        max_length=10_000,
        description="User names of this machine by those of the service; with any, nobody else may vote.",
    )


class Notify(Part):
    """Whom to tell of what happens."""

    urls_file: FilePath = Field(description="File with one apprise URL per line; only the daemon reads it.")
    events: list[Occasion] = Field(
        default=["gate-waits", "node-failed", "rollout-ended", "nothing-moved"],
        max_length=MAX_ITEMS,
        description="What is told.",
    )
    nothing_moved: Limit = span("1h", "Standstill of a rollout after which it is told.")
