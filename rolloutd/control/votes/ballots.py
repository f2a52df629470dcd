"""Votes as they are sent, over any front end, and what a voter could not read."""

from __future__ import annotations

from machines.model.plan import GateName
from rolloutd.commands.resolve import ResolvedRollout
from rolloutd.commands.voting import Ballot
from rolloutd.control.plans.review import unseen_by_voters
from rolloutd.control.requests import CastVote
from rolloutd.engine.state import State
from rolloutd.ports import SourceStore


async def make_ballot(
    state: State, sources: SourceStore, resolved: ResolvedRollout, body: CastVote
) -> Ballot:
    """Return the vote that was sent for a rollout, with what its review cannot show."""
    gate = GateName(body.gate)
    has_seen_all = body.unseen or not body.yes or gate is GateName.PROCEED
    unseen = () if has_seen_all else await unseen_by_voters(state, sources, resolved)
    return Ballot(
        gate=gate,
        yes=body.yes,
        reason=body.reason,
        team=body.team,
        digest=body.digest,
        wave=body.wave,
        shown=None if body.shown is None else tuple(body.shown),
        nodes=tuple(body.nodes),
        more=body.more,
        until=None if body.until is None else body.until.timestamp(),
        unseen=unseen,
    )
