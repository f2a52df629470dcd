"""Request models of votes: at a gate, withdrawn, and by a service's token."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from machines.model.plan import GateName
from machines.model.rollout import Rollout
from rolloutd.commands.tokens import MAX_TOKEN_CHARS
from rolloutd.commands.voting import Ballot, resolve_wave
from rolloutd.control.requests import (
    MAX_NODES_NAMED,
    Gate,
    Instant,
    Name,
    Names,
    ReasonBody,
    RequestBody,
    require_one_line,
)


class _AtGate(ReasonBody):
    gate: Gate
    team: Name | None = None
    wave: Name | None = None


class WithdrawVote(_AtGate):
    """The gate at which the caller's votes are withdrawn."""


class CastVote(_AtGate):
    """A yes or no at a gate; `shown` are the failures that a proceed vote covers.

    `unseen` approves also what the review does not show.
    """

    yes: bool
    unseen: bool = False
    digest: Name | None = None
    shown: Names | None = None
    nodes: Names = Field(default_factory=list)
    more: Annotated[int, Field(ge=0, le=MAX_NODES_NAMED)] = 0
    until: Instant | None = None

    def ballot(self, rollout: Rollout) -> Ballot:
        """Return the vote for a rollout; without a wave it is for the first one whose gate is not open."""
        gate = GateName(self.gate)
        return Ballot(
            gate=gate,
            yes=self.yes,
            reason=self.reason,
            team=self.team,
            digest=self.digest,
            wave=resolve_wave(rollout, gate, self.wave) or None,
            shown=None if self.shown is None else tuple(self.shown),
            nodes=tuple(self.nodes),
            more=self.more,
            until=None if self.until is None else self.until.timestamp(),
            unseen=self.unseen,
        )


class TokenVote(RequestBody):
    """A service's signed token, which contains the vote."""

    token: Annotated[
        str, StringConstraints(min_length=1, max_length=MAX_TOKEN_CHARS), AfterValidator(require_one_line)
    ]
