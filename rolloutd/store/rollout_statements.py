"""Statements for rollouts, gates, holds, freezes and team rules.

The rules of statements.py apply.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, assert_never

from machines.model.events import (
    FreezeLifted,
    FreezeStarted,
    GateOpened,
    HoldReleased,
    HoldTaken,
    PhaseMoved,
    PilotEvidenceAttached,
    RolloutCancelled,
    RolloutDeleted,
    RolloutEnded,
    RolloutOpened,
    RolloutPaused,
    RolloutResumed,
    TeamRulesChanged,
    VerdictCleared,
    VerdictRecorded,
    VoteCast,
    VoteWithdrawn,
)
from machines.model.rollout import DAEMON
from machines.model.windows import Window
from rolloutd.audit_chain import canonical_json
from rolloutd.errors import TokenAlreadyUsed
from rolloutd.store.sql_statement import Statement, encode_actor, encode_list

# -- rollouts ---------------------------------------------------------------------

_INSERT_ROLLOUT = """
INSERT INTO rollout (id, name, content, source, change_digest, scope_digest, policy_digest, digest,
                     selector_digest, submitted_by, submitted_at, approved_count, supersedes, overrides,
                     override_reason)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""

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


def insert_rollout(event: RolloutOpened) -> Statement:
    digest = event.digest
    row = (
        *(event.rollout, event.name, canonical_json(event.content), canonical_json(dict(event.source))),
        *(digest.change, digest.scope, digest.policy, digest.whole, event.selector_digest),
        *(encode_actor(event.submitted_by), event.at, len(event.targets), event.supersedes),
        *(encode_list(event.overrides), event.override_reason),
    )
    return Statement(_INSERT_ROLLOUT, (row,), 1, f"there is a rollout {event.rollout} already")


def update_rollout_state(
    event: RolloutPaused | RolloutResumed | RolloutCancelled | RolloutEnded | RolloutDeleted,
) -> Statement:
    name = event.rollout
    match event:
        case RolloutPaused():
            row: Sequence[Any] = (encode_actor(event.actor), event.reason, event.at, name)
            return Statement(_PAUSE, (row,), 1, f"{name} is paused by a person already, closed or unknown")
        case RolloutResumed():
            return Statement(_RESUME, ((name,),), 1, f"{name} is not paused by a person")
        case RolloutCancelled():
            row = (encode_actor(event.actor), event.reason, event.at, name)
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

_INSERT_VOTE = """
INSERT INTO vote (id, rollout, gate, wave, digest, actor, yes, reason, at, teams, shown, nodes, more,
                  until, withdrawn_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""

_WITHDRAW = """
UPDATE vote SET withdrawn_at = ?, withdrawn_by = ?, withdrawn_reason = ?
WHERE id = ? AND rollout = ? AND withdrawn_at IS NULL"""

_INSERT_OPENED_GATE = (
    "INSERT INTO opened (rollout, gate, wave, at) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
)


_INSERT_USED_TOKEN = "INSERT INTO spent_token (id, spent_at) VALUES (?, ?)"  # noqa: S105


def mark_token_used(event: VoteCast | VoteWithdrawn | GateOpened) -> Iterator[Statement]:
    """Yield the statement that records a vote token as used; a second use is a conflict."""
    if isinstance(event, GateOpened) or not event.token:
        return
    at = event.vote.at if isinstance(event, VoteCast) else event.at
    message = f"token {event.token} was used before; each counts once"
    yield Statement(_INSERT_USED_TOKEN, ((event.token, at),), 1, message, TokenAlreadyUsed)


def update_gate(event: VoteCast | VoteWithdrawn | GateOpened) -> Statement:
    """Return the statements of a vote, a withdrawal or an opened gate: each happens once."""
    match event:
        case VoteCast():
            vote = event.vote
            row: Sequence[Any] = (
                *(vote.id, event.rollout, vote.gate, vote.wave, vote.digest, encode_actor(vote.actor)),
                *(vote.yes, vote.reason, vote.at, encode_list(vote.teams), encode_list(vote.shown)),
                *(encode_list(vote.nodes), vote.more, vote.until, vote.withdrawn_at),
            )
            text = f"vote {vote.id} was cast already, or there is no rollout {event.rollout}"
            return Statement(_INSERT_VOTE, (row,), 1, text)
        case VoteWithdrawn():
            row = (event.at, encode_actor(event.actor), event.reason, event.vote, event.rollout)
            text = f"there is no vote {event.vote} in {event.rollout} that could be withdrawn"
            return Statement(_WITHDRAW, (row,), 1, text)
        case GateOpened():
            row = (event.rollout, event.gate, event.wave, event.at)
            text = f"gate {event.gate} of wave {event.wave!r} in {event.rollout} is open already"
            return Statement(_INSERT_OPENED_GATE, (row,), 1, text)
        case _:
            assert_never(event)


_UPSERT_PILOT_EVIDENCE = """
INSERT INTO pilot_evidence (rollout, content, digest, pilot_since, at) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (rollout) DO UPDATE
SET content = excluded.content, digest = excluded.digest, pilot_since = excluded.pilot_since,
    at = excluded.at"""


def upsert_pilot_evidence(event: PilotEvidenceAttached) -> Statement:
    """Return the statement of a pilot's evidence; that of a later attempt replaces it."""
    evidence = event.evidence
    content = canonical_json(dict(evidence.content))
    row = (event.rollout, content, evidence.digest, evidence.pilot_since, evidence.at)
    return Statement(_UPSERT_PILOT_EVIDENCE, (row,), 1)


# -- verdicts ---------------------------------------------------------------------

_INSERT_VERDICT = """
INSERT INTO verdicts (id, change_digest, content, host_class, rollout, node, step, text, at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"""

_CLEAR_VERDICT = """
UPDATE verdicts SET cleared_at = ?, cleared_by = ?, cleared_reason = ? WHERE id = ? AND cleared_at IS NULL"""

_CLEAR_PASSED_VERDICTS = """
UPDATE verdicts SET cleared_at = ?1, cleared_by = ?2, cleared_reason = 'the same content has passed'
WHERE node = ?4 AND cleared_at IS NULL
  AND content = (SELECT content FROM target WHERE rollout = ?3 AND node = ?4)"""


def update_verdicts(event: VerdictRecorded | VerdictCleared) -> Statement:
    """Return the statement of a verdict that is recorded or cleared: each happens once."""
    if isinstance(event, VerdictCleared):
        row: Sequence[Any] = (event.at, encode_actor(event.actor), event.reason, event.verdict)
        return Statement(_CLEAR_VERDICT, (row,), 1, f"there is no verdict {event.verdict}")
    each = event.verdict
    row = (
        *(each.id, each.change, each.content, canonical_json(dict(each.host_class)), each.rollout, each.node),
        *(each.step, each.text, each.at),
    )
    return Statement(_INSERT_VERDICT, (row,), 1, f"there is a verdict {each.id} already")


def clear_passed_verdicts(event: PhaseMoved) -> Statement:
    """Return the statement that clears the verdicts on a content which has now passed on their node."""
    row = (event.at, encode_actor(DAEMON), event.rollout, event.node)
    return Statement(_CLEAR_PASSED_VERDICTS, (row,))


# -- holds and freezes ------------------------------------------------------------

_UPSERT_HOLD = """
INSERT INTO hold (node, source, id, actor, reason, at, until) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (node, source, id) DO UPDATE
SET actor = excluded.actor, reason = excluded.reason, at = excluded.at, until = excluded.until"""

_INSERT_FREEZE = "INSERT INTO freeze (id, scope, reason, by, at, until) VALUES (?, ?, ?, ?, ?, ?)"


def update_hold_or_freeze(event: HoldTaken | HoldReleased | FreezeStarted | FreezeLifted) -> Statement:
    """Return the statements of a hold or freeze; a hold may be taken again with another reason."""
    match event:
        case HoldTaken():
            hold = event.hold
            row: Sequence[Any] = (
                *(
                    hold.node,
                    hold.source,
                    hold.id,
                    encode_actor(hold.actor),
                    hold.reason,
                    hold.at,
                    hold.until,
                ),
            )
            return Statement(_UPSERT_HOLD, (row,), 1)
        case HoldReleased():
            text = f"there is no hold {event.id} of {event.source} on {event.node}"
            sql = "DELETE FROM hold WHERE node = ? AND source = ? AND id = ?"
            return Statement(sql, ((event.node, event.source, event.id),), 1, text)
        case FreezeStarted():
            freeze = event.freeze
            row = (freeze.id, freeze.scope, freeze.reason, freeze.by, freeze.at, freeze.until)
            return Statement(_INSERT_FREEZE, (row,), 1, f"there is a freeze {freeze.id} already")
        case FreezeLifted():
            text = f"there is no freeze {event.freeze}"
            return Statement("DELETE FROM freeze WHERE id = ?", ((event.freeze,),), 1, text)
        case _:
            assert_never(event)


# -- teams ------------------------------------------------------------------------

_UPSERT_TEAM_RULES = """
INSERT INTO team_rules (team, windows, canaries, set_by, at) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (team) DO UPDATE
SET windows = excluded.windows, canaries = excluded.canaries, set_by = excluded.set_by, at = excluded.at"""


def upsert_team_rules(event: TeamRulesChanged) -> Statement:
    rules = event.rules
    windows = canonical_json([encode_window(window) for window in rules.windows])
    row = (rules.team, windows, encode_list(rules.canaries), encode_actor(event.actor), event.at)
    return Statement(_UPSERT_TEAM_RULES, (row,), 1)


def encode_window(window: Window) -> dict[str, Any]:
    return {
        "days": sorted(window.days),
        "from": window.start_minute,
        "to": window.end_minute,
        "zone": window.zone.key,
    }
