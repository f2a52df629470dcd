"""The story of the demo: a plan is submitted, people say yes, nodes change, a fault is settled.

It speaks to the daemon as anybody does, over its socket, and decides by what it
answers.  Whether a person or the demo itself answers at a gate, and how things
are shown, the audience knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from rolloutd import planfile
from rolloutd.cli import exits
from rolloutd.cli.views import View, views
from rolloutd.cli.voting import gate_sentence
from rolloutd.control.client import Answer, Client, path_of
from rolloutd.control.wire import Gate, Node, Rollout
from rolloutd.demo.fleet import heal, set_fault
from rolloutd.demo.node import Fault
from rolloutd.demo.stage import Stage, log_tail
from rolloutd.packing import pack

FAULTS: Mapping[str, Fault] = {
    "isolating": Fault.DRAIN_FAILS,
    "maintaining": Fault.TASK_FAILS,
    "verifying": Fault.CHECK_WRONG,
}
"""What is wrong with a node so that it fails in that phase."""

STUCK_S = 180.0
"""Without any change for so long something is wrong: a node of the demo takes seconds."""


CONFLICT = 409
"""The API's no to a request that is well formed: it comes too late or too early."""


class Audience(Protocol):
    """Who watches, and answers."""

    def see(self, view: View) -> None:
        """Show how things stand."""
        ...

    def tell(self, text: str) -> None:
        """Say a sentence."""
        ...

    def agree(self, question: str) -> bool:
        """Ask for a yes."""
        ...

    def close(self) -> None:
        """Show no more."""
        ...


def play(stage: Stage, audience: Audience, faults: Mapping[str, str]) -> Rollout:
    """Play from submit to the rollout's end and return how it ended; `faults` are phases by node."""
    rollout = begin(stage, audience.tell, faults)
    actor = _Actor(stage, audience, rollout, set(faults))
    try:
        for view in _moving(views(stage.client, [rollout]), stage):
            audience.see(view)
            if view.over:
                return view.rollouts[0]
            actor.act(view.rollouts[0])
    finally:
        audience.close()
    raise AssertionError("views do not end")


def begin(stage: Stage, tell: Callable[[str], None], faults: Mapping[str, str]) -> str:
    """Break what is to be broken, submit the plan, and return the rollout; `faults` are phases by node."""
    for node, phase in faults.items():
        set_fault(stage.fleet, node, FAULTS[phase])
        tell(f"{node} has a fault that will show while it is {phase}")
    rollout = _submit(stage)
    tell(f"submitted {stage.plan.name} as {rollout}")
    return rollout


class _Actor:
    """The people of the demo: they say yes at gates, repair nodes and have them tried again."""

    def __init__(self, stage: Stage, audience: Audience, rollout: str, broken: set[str]) -> None:
        self._stage = stage
        self._client: Client = stage.client
        self._audience = audience
        self._rollout = rollout
        self._broken = broken
        self._answered: set[tuple[str, ...]] = set()

    def act(self, rollout: Rollout) -> None:
        """Do what people would do now."""
        if rollout["state"] == "paused":
            self._settle(rollout)
        for gate in rollout["gates"]:
            if gate["state"] == "waiting" and gate["gate"] != "proceed":
                self._answer(gate, ())

    def _settle(self, rollout: Rollout) -> None:
        """Repair what has failed, have it tried again and say that it may go on."""
        failed = [node for node in self._nodes() if node["phase"] == "failed"]
        fresh = [node for node in failed if node["node"] in self._broken]
        for node in fresh:
            why = node["reason"]["text"] if node["reason"] else "it failed"
            self._audience.tell(f"paused: {node['node']}: {why}")
        unknown = [node["node"] for node in failed if node["node"] not in self._broken]
        if unknown and not fresh:
            self._give_up(rollout, unknown)
        for node in fresh:
            name = node["node"]
            if not self._audience.agree(f"repair {name} and try it again?"):
                self._cancel(f"{name} was not repaired")
                return
            heal(self._stage.fleet, name)
            self._broken.discard(name)
            self._client.post(
                path_of("rollouts", self._rollout, "nodes", name, "retry"),
                {"reason": "the fault was repaired"},
            )
            self._audience.tell(f"retry: {name} was repaired and will be tried again")
        for gate in rollout["gates"]:
            if gate["gate"] == "proceed" and gate["state"] == "waiting":
                self._answer(gate, tuple(sorted(f"{n['node']}#{n['attempt']}" for n in failed)))

    def _give_up(self, rollout: Rollout, nodes: list[str]) -> None:
        """End a story in which something failed that was not asked for."""
        reason = rollout["reason"]
        why = reason["text"] if reason else "paused"
        raise exits.Stop(
            exits.NO, f"{', '.join(nodes)} failed unasked: {why}\n{log_tail(self._stage, 'daemon')}"
        )

    def _answer(self, gate: Gate, about: tuple[str, ...]) -> None:
        key = (gate["gate"], gate["wave"] or "", gate["team"] or "", *about)
        if key in self._answered:
            return
        self._answered.add(key)
        yes = self._audience.agree(f"gate {gate_sentence(gate)}. Say yes?")
        body = {"gate": gate["gate"], "yes": yes, "reason": "seen in the demo"}
        if gate["wave"]:
            body["wave"] = gate["wave"]
        try:
            self._client.post(path_of("rollouts", self._rollout, "votes"), body)
        except Answer as refused:
            # The gate moved on between our look and our word: the next view shows how it stands.
            if refused.status != CONFLICT:
                raise
            return
        if not yes and gate["gate"] != "start":
            self._cancel("somebody said no")

    def _cancel(self, reason: str) -> None:
        self._client.post(path_of("rollouts", self._rollout, "cancel"), {"reason": reason})

    def _nodes(self) -> list[Node]:
        nodes: list[Node] = self._client.get(path_of("rollouts", self._rollout, "nodes"))["nodes"]
        return nodes


def _submit(stage: Stage) -> str:
    text = stage.plan.read_bytes()
    plan = planfile.read(text, stage.plan.name)
    upload = stage.client.upload(path_of("uploads"), pack(Path(stage.directory / plan.source["path"])))
    body = {"file": stage.plan.name, "text": text.decode(), "upload": upload["upload"]}
    submission = stage.client.post(path_of("plans", "submit"), body)
    rollout: str = submission["rollout"]
    return rollout


def _moving(seen: Iterator[View], stage: Stage) -> Iterator[View]:
    """Pass views on; raise exits.Stop when nothing has changed for too long."""
    last: list[Rollout] = []
    changed = time.monotonic()
    for view in seen:
        if view.entries or view.rollouts != last:
            last, changed = view.rollouts, time.monotonic()
        elif time.monotonic() - changed > STUCK_S:
            tail = log_tail(stage, "daemon")
            raise exits.Stop(
                exits.NO, f"nothing has moved for {STUCK_S:.0f} s; the daemon's log ends with\n{tail}"
            )
        yield view
