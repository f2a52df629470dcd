"""Gates and their votes as the API's JSON shapes.

A gate whose votes or opening the audit does not account for is in doubt: the votes in question count nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from machines.facts import votes
from machines.facts.index import Index
from machines.model.plan import PILOT_WAVE, GateName
from machines.model.rollout import Rollout, Vote
from machines.model.rows import AuditMismatch
from machines.rules import gates
from rolloutd.control.formats import KeptRows, fill, format_timestamp
from rolloutd.control.rollouts import wire
from rolloutd.texts.reason_text import describe_mismatch
from rolloutd.texts.vote_text import describe_missing_votes

KeptGates = KeptRows[tuple[GateName, str], tuple[wire.Gate, int]]


def gates_of(kept: KeptGates, index: Index, each: Rollout, now: float) -> list[tuple[wire.Gate, int]]:
    """Return all gates, and how many votes each still needs; `kept` has those of the last time."""
    index = index.at(now)
    # All that a gate is made of: who must vote, which votes count, and whether it asks.
    source = (
        each,
        index.limits,
        index.mismatches,
        frozenset(index.counters(each.id).teams),
        [index.is_wave_over(each.id, wave.name) for wave in each.plan.waves],
        index.wave_end(each.id, PILOT_WAVE),
        len(votes.unexpired(each, each.votes, now)),
        # How many nodes are prepared changes with most events.
        None if index.preparations(each.id) is None else object(),
    )
    places = gate_places(each)

    def make(place: tuple[GateName, str]) -> tuple[wire.Gate, int]:
        view = gate_view(index, each, *place, now)
        return gate(index, each, view, now), count_missing_votes(view)

    return kept.update(dict.fromkeys(places, source), make)


def gate_places(each: Rollout) -> Sequence[tuple[GateName, str]]:
    return (*each.plan.gates_in_order, (GateName.PROCEED, ""))


def gate_view(index: Index, each: Rollout, gate: GateName, wave: str, now: float) -> gates.GateView:
    """Return a gate as it is without the votes and openings that the audit does not account for."""
    doubtful = _doubtful_votes(index, each)
    counted = tuple(vote for vote in each.votes if vote.id not in doubtful)
    return gates.gate_view(index, replace(each, votes=counted) if doubtful else each, gate, wave, now)


def count_missing_votes(view: gates.GateView) -> int:
    """Return the votes that a gate still needs; `proceed` needs some only after a failure."""
    if view.state == "open" or (view.state == "not-asked" and view.gate is GateName.PROCEED):
        return 0
    by_teams = sum(max(0, want - have) for _, want, have in view.teams)
    return max(0, view.owners_required - view.owners_voted) + by_teams


def gate(index: Index, each: Rollout, view: gates.GateView, now: float) -> wire.Gate:
    cast_here = [
        vote
        for vote in each.votes
        if vote.gate is view.gate and (view.gate is not GateName.CONTINUE or vote.wave == view.wave)
    ]
    is_start, evidence = view.gate is GateName.START, each.pilot_evidence
    doubts, doubtful = _doubts(index, each, view), _doubtful_votes(index, each)
    return {
        "gate": view.gate.value,
        "wave": view.wave or None,
        "team": None,
        "state": "in-doubt" if doubts else cast(wire.GateState, view.state),
        "needs": {
            "owner": {"want": view.owners_required, "have": view.owners_voted},
            "teams": [{"team": team, "want": want, "have": have} for team, want, have in view.teams],
            "four_eyes": votes.requirement(each, view.gate).four_eyes,
        },
        "votes": [_vote(each, vote, now, is_doubtful=vote.id in doubtful) for vote in cast_here],
        "missing": _describe_doubts(doubts) if doubts else describe_missing_votes(view.missing) or None,
        "digest": each.digest_at(view.gate),
        "evidence": cast(wire.PilotEvidence, evidence.content) if evidence and is_start else None,
        "waived": each.plan.pilot.waived or None if each.plan.pilot and is_start else None,
        "prepared": _prepared_after(index, each, view),
    }


def _prepared_after(index: Index, each: Rollout, view: gates.GateView) -> wire.Prepared | None:
    """Return how many of the nodes that a gate to continue opens for are prepared."""
    known = index.preparations(each.id)
    if known is None or view.gate is not GateName.CONTINUE or view.state == "open":
        return None
    names = [wave.name for wave in each.plan.waves]
    later = names[names.index(view.wave) + 1 :]
    total = sum(len(index.pending(each.id, wave)) for wave in later)
    return {"done": total - known.unprepared_after(view.wave), "total": total}


def _vote(each: Rollout, vote: Vote, now: float, *, is_doubtful: bool) -> wire.Vote:
    return fill(
        wire.Vote,
        vote,
        by=vote.actor.name,
        uid=vote.actor.uid,
        withdrawn=None if vote.withdrawn_at is None else format_timestamp(vote.withdrawn_at),
        counts=not is_doubtful and votes.is_counted(each, vote, now),
    )


def _mismatches(index: Index, each: Rollout) -> Sequence[AuditMismatch]:
    return [found for found in index.mismatches if found.scope == f"rollout/{each.id}"]


def _doubtful_votes(index: Index, each: Rollout) -> frozenset[str]:
    rows = (found.subject.partition("/") for found in _mismatches(index, each))
    return frozenset(key for table, _, key in rows if table == "vote")


def _doubts(index: Index, each: Rollout, view: gates.GateView) -> list[AuditMismatch]:
    # A vote that the database lost is of an unknown gate, so it counts for each.
    elsewhere = {vote.id for vote in each.votes if (vote.gate, vote.wave) != (view.gate, view.wave)}
    opening = f"opened/{each.id}/{view.gate.value}"
    return [
        found
        for found in _mismatches(index, each)
        if found.subject == f"rollout/{each.id}"
        or (found.subject.startswith("vote/") and found.subject.removeprefix("vote/") not in elsewhere)
        or found.subject in (opening, f"{opening}/{view.wave}")
    ]


def _describe_doubts(doubts: Sequence[AuditMismatch]) -> str:
    rows = "; ".join(describe_mismatch(each.subject, each.kind, each.columns) for each in doubts)
    return f"{rows}; compare with rolloutctl audit verify and settle it"
