"""Votes that a forecast assumes: when each gate is asked, and the votes that open it.

The voters are invented: each has one vote, for one team.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from machines.facts.index import Index
from machines.facts.votes import was_opened
from machines.model.events import Event, VoteCast
from machines.model.plan import GateName
from machines.model.rollout import Actor, ActorKind, Rollout, Vote
from machines.rules import gates
from machines.states import Phase, Trigger
from machines.workflow.phase_transitions import transition

GateKey = tuple[str, GateName, str]
"""Rollout, gate and wave."""

_JOINERS = "*"
"""In the place of a wave: the vote of the teams whose nodes have joined; no wave has this name."""


@dataclass(slots=True)
class Approvals:
    """The gates that were asked, and when each gets its votes; `after_s` None: never."""

    after_s: float | None
    asked_at: dict[GateKey, float] = field(default_factory=dict)
    _due: dict[GateKey, float] = field(default_factory=dict)
    _votes: int = 0
    _joiners: dict[str, bool] = field(default_factory=dict)

    def ask(self, index: Index, now: float) -> None:
        """Note the gates that ask for votes since now."""
        for rollout in index.rollouts.values():
            if rollout.closed:
                continue
            for gate, wave in rollout.plan.gates_in_order:
                key = (rollout.id, gate, wave)
                if key not in self.asked_at and not was_opened(rollout, gate, wave):
                    self._note(index, rollout, key, now)
            key = (rollout.id, GateName.PROCEED, "")
            if key not in self._due:  # it is asked again after each failure
                self._note(index, rollout, key, now)
            self._ask_for_joiners(index, rollout, now)

    def _note(self, index: Index, rollout: Rollout, key: GateKey, now: float) -> None:
        if gates.is_voting_open(index, rollout, key[1], key[2]):
            self.asked_at[key] = now
            if self.after_s is not None:
                self._due[key] = now + self.after_s

    def _ask_for_joiners(self, index: Index, rollout: Rollout, now: float) -> None:
        """Ask the teams of nodes that wait for their own team's vote, once for all of them."""
        # Nodes join before a walk, never during it.
        if rollout.id not in self._joiners:
            pending = (each for each in index.targets(rollout.id) if each.phase is Phase.PENDING)
            self._joiners[rollout.id] = any(each.needs_vote_of for each in pending)
        if self._joiners[rollout.id] and was_opened(rollout, rollout.plan.entry_gate):
            self._joiners[rollout.id] = False
            if self.after_s is not None:
                self._due[rollout.id, rollout.plan.entry_gate, _JOINERS] = now + self.after_s

    def next_due(self) -> float:
        """Return when the next gate gets its votes, infinity when no gate does."""
        return min(self._due.values(), default=math.inf)

    def due_events(self, index: Index, now: float) -> Iterator[Event]:
        """Yield the votes of the gates that get theirs now; after a failure also the next try of its node."""
        for key in [key for key, at in self._due.items() if at <= now]:
            del self._due[key]
            rollout = index.rollouts.get(key[0])
            if rollout is None or rollout.closed:
                continue
            if key[2] == _JOINERS:
                teams = {each.needs_vote_of for each in index.targets(key[0]) if each.needs_vote_of}
                gate = GateName.START
                yield from (self._vote(rollout, gate, "", team, now) for team in sorted(teams))
            else:
                yield from self._votes_at(index, rollout, key[1], key[2], now)
            if key[1] is GateName.PROCEED:
                for node in sorted(index.counters(rollout.id).failed):
                    yield transition(index.target(rollout.id, node), Trigger.RETRIED, now)

    def _votes_at(
        self, index: Index, rollout: Rollout, gate: GateName, wave: str, now: float
    ) -> Iterator[Event]:
        view = gates.gate_view(index, rollout, gate, wave, now)
        shown = tuple(failure.id for failure in view.unresolved)
        wanted = [(rollout.plan.owner, view.owners_required, view.owners_voted), *view.teams]
        for team, required, voted in wanted:
            for _ in range(required - voted):
                cast = self._vote(rollout, gate, wave, team, now)
                yield VoteCast(cast.rollout, replace(cast.vote, shown=shown))

    def _vote(self, rollout: Rollout, gate: GateName, wave: str, team: str, now: float) -> VoteCast:
        self._votes += 1
        name = f"forecast-{self._votes}"
        digest, voter = rollout.digest_at(gate), Actor(ActorKind.PERSON, name)
        return VoteCast(rollout.id, Vote(name, gate, digest, voter, True, "", now, (team,), wave))
