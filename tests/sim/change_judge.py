"""What must hold of changes that are no playbooks: of their contents, their order and their undoing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from machines.model.events import Event, PhaseMoved
from machines.states import Outcome
from rolloutd.ports import RunRequest
from tests.support.note_change import noted_text

if TYPE_CHECKING:
    from tests.sim.sim_node import SimNode


class ChangeJudge:
    """Hears what is read and applied; it knows neither records nor plans."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._contents: dict[str, str] = {}
        self._tokens: dict[str, tuple[tuple[int, ...], str]] = {}
        self._before: dict[tuple[str, str], set[str]] = {}
        self._changed: set[tuple[str, str]] = set()

    def on_commit(self, events: Sequence[Event], nodes: Mapping[str, SimNode]) -> None:
        """Hear what was committed: a change that was rolled back has left what was there before it."""
        for event in events:
            if isinstance(event, PhaseMoved) and event.outcome is Outcome.ROLLED_BACK:
                now = json.dumps({"text": nodes[event.node].version})
                place = event.rollout, event.node
                if place in self._changed and now not in self._before.get(place, ()):
                    self._report(f"{event.rollout} has rolled {event.node} back, which has {now}")

    def on_state_read(self, request: RunRequest, previous: str) -> None:
        """Hear what a daemon was told of the state before a change."""
        place = request.rollout, request.node
        if place not in self._changed:
            self._before.setdefault(place, set()).add(previous)

    def on_applied(self, request: RunRequest) -> None:
        """Hear that a change takes effect."""
        run, place = request.run_id, (request.rollout, request.node)
        self._changed.add(place)
        content = json.dumps([noted_text(request), request.params.get("values")], sort_keys=True)
        if self._contents.setdefault(run, content) != content:
            self._report(f"{run} applies {content}, and has applied {self._contents[run]}")
        token = tuple(int(part) for part in request.fencing_token.split()[0].split("."))
        newest, newest_run = self._tokens.get(request.node, (token, run))
        if run != newest_run and token <= newest:
            self._report(f"{run} is applied after {newest_run}, which had the token {newest}")
        self._tokens[request.node] = token, run
        is_rollback = request.step.startswith("run.rollback")
        if is_rollback and request.previous not in self._before.get(place, ()):
            self._report(f"{run} restores {request.previous or 'nothing'}, not what was there before")
