"""The judge of cleaning: what the content in effect needs stays on a node, and what is old goes.

It knows the committed events, the plans, and what is on the nodes, but none of the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from machines.model.events import Event, NodeCleaned, PhaseMoved, RolloutDeleted
from machines.model.plan import Plan
from machines.states import Outcome, Phase, Trigger

if TYPE_CHECKING:
    from tests.sim.sim_node import SimNode


class CleanJudge:
    """What must hold of files that are removed from nodes, and of those that are left."""

    def __init__(self, plans: Mapping[str, Plan], report_violation: Callable[[str], None]) -> None:
        self.nodes: Mapping[str, SimNode] = {}
        self._plans = plans
        self._report = report_violation
        self._in_effect: dict[tuple[str, str], str] = {}
        """The rollout whose change a node has, by plan and node."""
        self._unknown: set[tuple[str, str]] = set()
        """The plans and nodes of which a rollback or a deletion left nothing to judge by."""

    def on_removed(self, node: str, digests: Collection[str]) -> None:
        """Hear that staged files are removed from a node."""
        for (plan, where), rollout in self._in_effect.items():
            lost = self._artifacts(rollout) & set(digests) if where == node else set()
            if lost and (plan, node) not in self._unknown:
                self._report(f"{node} loses {', '.join(sorted(lost))}, which {rollout} has in effect there")

    def on_commit(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                # A rollback whose isolation was aborted changed nothing: a later rollout may be in effect.
                case PhaseMoved() if (
                    event.target is Phase.DONE and event.trigger is not Trigger.ISOLATION_ABORTED
                ):
                    self._on_done(event)
                case RolloutDeleted():
                    # Nodes that later rollouts found to be current rely on it too.
                    plan = self._plans[event.rollout].name
                    self._unknown |= {key for key in self._in_effect if key[0] == plan}
                case NodeCleaned():
                    self._require_clean(event.node)

    def _on_done(self, event: PhaseMoved) -> None:
        key = (self._plans[event.rollout].name, event.node)
        # A node that was found to be current has what an earlier rollout staged, unless this one did.
        is_staged = self._artifacts(event.rollout) <= self.nodes[event.node].staged
        if event.outcome is Outcome.CHANGED or (event.outcome is Outcome.ALREADY_CURRENT and is_staged):
            self._in_effect[key] = event.rollout
            if event.outcome is Outcome.CHANGED:
                self._unknown.discard(key)
        elif event.outcome is Outcome.ROLLED_BACK:
            self._unknown.add(key)

    def _require_clean(self, node: str) -> None:
        """A node that was cleaned remembers no stage of content that it does not have."""
        for checkpoint in self.nodes[node].checkpoints.values():
            key = (checkpoint.plan, node)
            rollout = self._in_effect.get(key)
            wanted = set() if rollout is None else self._artifacts(rollout)
            # Those with a selector depend on labels, which may have changed since.
            old = {each.sha256 for name, each in checkpoint.artifacts.items() if name == "app"} - wanted
            if old and key not in self._unknown:
                self._report(f"{node} is clean and keeps {', '.join(sorted(old))} of {checkpoint.rollout}")

    def _artifacts(self, rollout: str) -> set[str]:
        stages = self._plans[rollout].prepare
        return {each.sha256 for stage in stages for each in stage.manifest if each.select is None}
