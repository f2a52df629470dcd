"""What other rollouts have done to a node whose outage they share: the isolators that they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from machines.model.plan import StepDef
from machines.model.rollout import Target
from machines.model.step_record import StepRecord
from machines.workflow.outage import held_isolators
from rolloutd.engine.drivers.node_session import NodeSession


class OtherAttempts:
    """The other targets that hold the isolation of a node, and their records."""

    def __init__(self, session: NodeSession) -> None:
        self._session = session
        self._loaded_for: tuple[object, ...] = ()
        self._holders: list[tuple[Sequence[StepDef], Sequence[StepRecord]]] = []

    async def load(self, *, again: bool = False) -> None:
        """Read the records of the other holders, if they have changed or `again`."""
        holders = self._other_holders()
        key = tuple((each.rollout, each.attempt, each.phase, each.order) for each in holders)
        if key == self._loaded_for and not again:
            return
        state = self._session.state
        self._holders = [
            (
                state.index.rollout(each.rollout).plan.isolate,
                tuple(await state.store.load_steps(each.rollout, each.node)),
            )
            for each in holders
        ]
        self._loaded_for = key

    def held(self) -> Mapping[str, Any]:
        """Return which isolators of this rollout's plan the others hold, with the state before them."""
        return held_isolators(self._session.plan.isolate, self._holders) if self._holders else {}

    def _other_holders(self) -> list[Target]:
        session = self._session
        others = session.state.index.targets_on(session.node)
        found = [each for each in others if each.isolated and each.rollout != session.rollout]
        return sorted(found, key=lambda each: (each.admitted_at, each.rollout))
