"""What must hold of clusters as targets: values, bootstrap, how many are at work or unready at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from machines.model.events import Event, PhaseMoved
from machines.model.plan import Plan
from machines.states import Trigger
from rolloutd.ports import RunRequest

if TYPE_CHECKING:
    from tests.sim.sim_node import SimNode

ANSWER_DELAY_S = 180.0
"""How long an answer may take from the inventory to the daemon."""

WORKING = ("isolating", "maintaining", "verifying")


class ClusterJudge:
    """Hears what the inventory answers, what is committed, and what is applied."""

    def __init__(
        self,
        plans: Mapping[str, Plan],
        report: Callable[[str], None],
        now: Callable[[], float],
        observations: Callable[[], Mapping[str, Mapping[str, Any]]],
    ) -> None:
        self._plans, self._report, self._now = plans, report, now
        self.workers: int | None = None
        """How many clusters of the inventory may be in flight at once."""
        self._observations = observations
        self._answers: dict[str, list[tuple[float, str]]] = {}
        self._phases: dict[tuple[str, str], str] = {}
        self._changed: set[tuple[str, str]] = set()

    def on_answer(self, nodes: Sequence[SimNode]) -> None:
        """Hear what the inventory answers of each node."""
        for node in nodes:
            answers = self._answers.setdefault(node.name, [])
            if not answers or answers[-1][1] != node.endpoint:
                answers.append((self._now(), node.endpoint))

    def on_commit(self, events: Sequence[Event], nodes: Mapping[str, SimNode]) -> None:
        """Hear what was committed."""
        for event in events:
            if not isinstance(event, PhaseMoved):
                continue
            place = event.rollout, event.node
            if event.trigger is Trigger.ADMITTED:
                self._judge_start(event, nodes[event.node])
            self._phases[place] = event.target.value
            if event.target.value in WORKING:
                self._changed.add(place)

    def on_applied(self, request: RunRequest) -> None:
        """Hear that a change takes effect: with the values that people voted for."""
        voted = self._voted(request.rollout, request.node)
        values = request.params.get("values", {})
        if voted and not request.previous and values != voted:
            self._report(f"{request.run_id} applies {values}, and people voted for {voted}")

    def _judge_start(self, event: PhaseMoved, node: SimNode) -> None:
        plan, who = self._plans[event.rollout], f"{event.node} of {event.rollout} begins"
        if not node.initialized:
            self._report(f"{who} before its control plane is initialised")
        voted = self._voted(event.rollout, event.node).get("host")
        if voted is not None and voted not in self._recent_answers(event.node):
            self._report(f"{who} with the value {node.endpoint}, and people voted for {voted}")
        if self.workers is not None:  # else nothing is counted: it would be over all nodes of a large fleet
            at_work = {name for (_, name), phase in self._phases.items() if phase in WORKING} - {event.node}
            if len(at_work) >= self.workers:
                self._report(f"{who} while {', '.join(sorted(at_work))} are at work (workers {self.workers})")
        if plan.max_unready is None:
            return
        unready = [
            name
            for (rollout, name), phase in self._phases.items()
            if rollout == event.rollout and name != event.node and self._is_unready(rollout, name, phase)
        ]
        if len(unready) >= plan.max_unready:
            self._report(f"{who} while {', '.join(unready)} are unready (maxUnready {plan.max_unready})")

    def _is_unready(self, rollout: str, node: str, phase: str) -> bool:
        if phase in (*WORKING, "failed"):
            return True
        if (rollout, node) not in self._changed:
            return False
        seen = self._observations().get(node)
        return seen is not None and not seen["up"]

    def _recent_answers(self, node: str) -> set[str]:
        """Return the values by which the daemon may start the node now."""
        answers, since = self._answers.get(node, []), self._now() - ANSWER_DELAY_S
        later = {value for at, value in answers if at >= since}
        before = [value for at, value in answers if at < since]
        return later | set(before[-1:])

    def _voted(self, rollout: str, node: str) -> Mapping[str, Any]:
        return next(iter(self._plans[rollout].values.get(node, {}).values()), {})
