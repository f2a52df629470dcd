"""Which rows change by what people decide: rollouts, gates, holds and freezes.

A second half of statements.py, under the same rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, assert_never

from machines.events import (
    Frozen,
    GateOpened,
    HoldReleased,
    HoldTaken,
    RolloutCancelled,
    RolloutDeleted,
    RolloutEnded,
    RolloutOpened,
    RolloutPaused,
    RolloutResumed,
    TeamSet,
    Unfrozen,
    VoteCast,
    VoteWithdrawn,
)
from machines.windows import Window
from rolloutd.chain import canonical
from rolloutd.orders.tokens import SPENT
from rolloutd.store.statement import Statement, actor_text, list_text

# -- rollouts ---------------------------------------------------------------------

_NEW_ROLLOUT = """
INSERT INTO rollout (id, name, content, source, change_digest, scope_digest, policy_digest, digest,
                     selector_digest, submitted_by, submitted_at, approved_count, supersedes)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""

_PAUSE = """
UPDATE rollout SET paused_by = ?, paused_reason = ?, paused_at = ?
WHERE id = ? AND paused_at IS NULL AND cancelled_at IS NULL AND ended_at IS NULL AND deleted_at IS NULL"""
_RESUME = """
UPDATE rollout SET paused_by = NULL, paused_reason = NULL, paused_at = NULL
WHERE id = ? AND paused_at IS NOT NULL"""
_CANCEL = """
UPDATE rollout SET cancelled_by = ?, cancelled_reason = ?, cancelled_at = ?
WHERE id = ? AND cancelled_at IS NULL AND ended_at IS NULL AND deleted_at IS NULL"""
_END = "UPDATE rollout SET ended_at = ? WHERE id = ? AND ended_at IS NULL AND deleted_at IS NULL"
_DELETE = """
UPDATE rollout SET deleted_at = ?
WHERE id = ? AND deleted_at IS NULL AND (cancelled_at IS NOT NULL OR ended_at IS NOT NULL)"""


def new_rollout(event: RolloutOpened) -> Statement:
    """Return what a submit writes besides its targets."""
    digest = event.digest
    row = (
        *(event.rollout, event.name, canonical(event.content), canonical(dict(event.source))),
        *(digest.change, digest.scope, digest.policy, digest.whole, event.selector_digest),
        *(actor_text(event.submitted_by), event.at, len(event.targets), event.supersedes),
    )
    return Statement(_NEW_ROLLOUT, (row,), 1, f"there is a rollout {event.rollout} already")


def rollout_marked(
    event: RolloutPaused | RolloutResumed | RolloutCancelled | RolloutEnded | RolloutDeleted,
) -> Statement:
    """Return how a rollout is paused, resumed, cancelled, ended or deleted."""
    name = event.rollout
    match event:
        case RolloutPaused():
            row: Sequence[Any] = (actor_text(event.actor), event.reason, event.at, name)
            return Statement(_PAUSE, (row,), 1, f"{name} is paused by a person already, closed or unknown")
        case RolloutResumed():
            return Statement(_RESUME, ((name,),), 1, f"{name} is not paused by a person")
        case RolloutCancelled():
            row = (actor_text(event.actor), event.reason, event.at, name)
            return Statement(_CANCEL, (row,), 1, f"{name} is closed already or unknown")
        case RolloutEnded():
            return Statement(_END, ((event.at, name),), 1, f"{name} has ended already or is unknown")
        case RolloutDeleted():
            return Statement(
                _DELETE, ((event.at, name),), 1, f"{name} is not closed, deleted already or unknown"
            )
        case _:
            assert_never(event)


# -- gates ------------------------------------------------------------------------

_VOTE = """
INSERT INTO vote (id, rollout, gate, wave, digest, actor, yes, reason, at, teams, shown, nodes, more,
                  until, withdrawn_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""

_WITHDRAW = """
UPDATE vote SET withdrawn_at = ?, withdrawn_by = ?, withdrawn_reason = ?
WHERE id = ? AND rollout = ? AND withdrawn_at IS NULL"""

_OPENED = "INSERT INTO opened (rollout, gate, wave, at) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"


_SPEND = "INSERT INTO spent_token (id, spent_at) VALUES (?, ?)"


def token_spent(event: VoteCast | VoteWithdrawn | GateOpened) -> Iterator[Statement]:
    """Yield what makes the token useless by which a service spoke."""
    if isinstance(event, GateOpened) or not event.token:
        return
    at = event.vote.at if isinstance(event, VoteCast) else event.at
    yield Statement(_SPEND, ((event.token, at),), 1, SPENT)


def gate_moved(event: VoteCast | VoteWithdrawn | GateOpened) -> Statement:
    """Return how a vote is cast or withdrawn and a gate opened: each once."""
    match event:
        case VoteCast():
            vote = event.vote
            row: Sequence[Any] = (
                *(vote.id, event.rollout, vote.gate, vote.wave, vote.digest, actor_text(vote.actor)),
                *(vote.yes, vote.reason, vote.at, list_text(vote.teams), list_text(vote.shown)),
                *(list_text(vote.nodes), vote.more, vote.until, vote.withdrawn_at),
            )
            text = f"vote {vote.id} was cast already, or there is no rollout {event.rollout}"
            return Statement(_VOTE, (row,), 1, text)
        case VoteWithdrawn():
            row = (event.at, actor_text(event.actor), event.reason, event.vote, event.rollout)
            text = f"there is no vote {event.vote} in {event.rollout} that could be withdrawn"
            return Statement(_WITHDRAW, (row,), 1, text)
        case GateOpened():
            row = (event.rollout, event.gate, event.wave, event.at)
            text = f"gate {event.gate} of wave {event.wave!r} in {event.rollout} is open already"
            return Statement(_OPENED, (row,), 1, text)
        case _:
            assert_never(event)


# -- holds and freezes ------------------------------------------------------------

_HOLD = """
INSERT INTO hold (node, source, id, actor, reason, at, until) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (node, source, id) DO UPDATE
SET actor = excluded.actor, reason = excluded.reason, at = excluded.at, until = excluded.until"""

_FREEZE = "INSERT INTO freeze (id, scope, reason, by, at, until) VALUES (?, ?, ?, ?, ?, ?)"


def slot_held(event: HoldTaken | HoldReleased | Frozen | Unfrozen) -> Statement:
    """Return how a hold or a freeze begins and ends; a hold may be taken again, with other words."""
    match event:
        case HoldTaken():
            hold = event.hold
            row: Sequence[Any] = (
                *(hold.node, hold.source, hold.id, actor_text(hold.actor), hold.reason, hold.at, hold.until),
            )
            return Statement(_HOLD, (row,), 1)
        case HoldReleased():
            text = f"there is no hold {event.id} of {event.source} on {event.node}"
            sql = "DELETE FROM hold WHERE node = ? AND source = ? AND id = ?"
            return Statement(sql, ((event.node, event.source, event.id),), 1, text)
        case Frozen():
            freeze = event.freeze
            row = (freeze.id, freeze.scope, freeze.reason, freeze.by, freeze.at, freeze.until)
            return Statement(_FREEZE, (row,), 1, f"there is a freeze {freeze.id} already")
        case Unfrozen():
            text = f"there is no freeze {event.freeze}"
            return Statement("DELETE FROM freeze WHERE id = ?", ((event.freeze,),), 1, text)
        case _:
            assert_never(event)


# -- teams ------------------------------------------------------------------------

_TEAM = """
INSERT INTO team_rules (team, windows, canaries, set_by, at) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (team) DO UPDATE
SET windows = excluded.windows, canaries = excluded.canaries, set_by = excluded.set_by, at = excluded.at"""


def team_set(event: TeamSet) -> Statement:
    """Return how a team's own rules replace those it had."""
    rules = event.rules
    windows = canonical([window_value(window) for window in rules.windows])
    row = (rules.team, windows, list_text(rules.canaries), actor_text(event.actor), event.at)
    return Statement(_TEAM, (row,), 1)


def window_value(window: Window) -> dict[str, Any]:
    """Return a window as JSON."""
    return {
        "days": sorted(window.days),
        "from": window.start_minute,
        "to": window.end_minute,
        "zone": window.zone.key,
    }
