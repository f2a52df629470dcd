"""The judge of superseded rollouts: a node that has the change already must not get it a second time.

It knows the committed rows and the plans, but none of the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from machines.model.events import (
    DriftRecorded,
    Event,
    PhaseMoved,
    RolloutCancelled,
    RolloutDeleted,
    RolloutEnded,
    RolloutOpened,
    TargetsJoined,
)
from machines.model.plan import Plan
from machines.states import Outcome, Phase, Trigger


class SupersedeJudge:
    """What must hold after each commit of a rollout and the one that supersedes it."""

    def __init__(self, plans: Mapping[str, Plan], report_violation: Callable[[str], None]) -> None:
        self._plans = plans
        self._report = report_violation
        self._opened: dict[str, RolloutOpened] = {}
        """The rollouts that are open, by id."""
        self._closed: dict[str, RolloutOpened] = {}
        self._pending: set[tuple[str, str]] = set()
        self._changed: set[tuple[str, str]] = set()
        """The rollouts and nodes whose change is in effect, as far as the commits say."""

    def on_commit(self, events: Sequence[Event]) -> None:
        for event in events:
            self._on_event(event)
        for event in events:
            match event:
                case RolloutOpened(supersedes=str(old)) if self._is_same_change(old, event):
                    nodes = (node for rollout, node in sorted(self._changed) if rollout == old)
                    self._require_not_pending(event, nodes)
                case PhaseMoved(trigger=Trigger.VERIFIED, outcome=Outcome.CHANGED):
                    for opened in self._successors(event.rollout):
                        self._require_not_pending(opened, (event.node,))

    def _on_event(self, event: Event) -> None:
        match event:
            case RolloutOpened():
                self._opened[event.rollout] = event
                self._pending.update((event.rollout, target.node) for target in event.targets)
            case TargetsJoined():
                self._pending.update((event.rollout, target.node) for target in event.targets)
            case RolloutCancelled() | RolloutEnded() | RolloutDeleted():
                if (opened := self._opened.pop(event.rollout, None)) is not None:
                    self._closed[event.rollout] = opened
            case PhaseMoved():
                place = (event.rollout, event.node)
                is_changed = event.outcome in (Outcome.CHANGED, Outcome.ALREADY_CURRENT)
                (self._changed.add if is_changed else self._changed.discard)(place)
                (self._pending.add if event.target is Phase.PENDING else self._pending.discard)(place)
            case DriftRecorded():
                (self._changed.discard if event.tasks else self._changed.add)((event.rollout, event.node))

    def _is_same_change(self, old: str, opened: RolloutOpened) -> bool:
        before = self._closed.get(old) or self._opened.get(old)
        return before is not None and before.digest.change == opened.digest.change

    def _successors(self, rollout: str) -> Iterator[RolloutOpened]:
        """Yield the open rollouts with the same change that supersede this one, directly or not."""
        for opened in self._opened.values():
            old: RolloutOpened | None = opened
            while old is not None and old.supersedes is not None:
                if old.supersedes == rollout and self._is_same_change(rollout, opened):
                    yield opened
                old = self._closed.get(old.supersedes)

    def _require_not_pending(self, opened: RolloutOpened, nodes: Iterator[str] | Sequence[str]) -> None:
        for node in nodes:
            # A pilot shows the new plan, so it gets the change again.
            is_pilot = self._plans[opened.rollout].pilot_node == node
            if (opened.rollout, node) in self._pending and not is_pilot:
                self._report(f"{node} has the change and waits for it again in {opened.rollout}")
