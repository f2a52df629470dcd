"""Verdicts of failures, in the commit of the failure."""

from __future__ import annotations

from machines.model.events import Event, PhaseMoved, VerdictRecorded
from machines.model.rollout import Target
from machines.workflow.verdicts import new_verdict
from rolloutd.engine.state import State


def verdict_events(state: State, target: Target, moved: PhaseMoved) -> list[Event]:
    """Return the verdict of a transition of this target; empty when it says nothing of the content."""
    node, change = state.index.nodes.get(target.node), state.index.rollout(target.rollout).digest.change
    if node is None:
        return []
    verdict = new_verdict(target, moved, change, node.labels, state.settings.host_class)
    return [] if verdict is None else [VerdictRecorded(target.rollout, target.node, verdict)]
