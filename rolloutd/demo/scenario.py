"""The demo's sequence: submit a plan, vote, repair and retry broken nodes.

It uses the daemon's socket like any client.  The DemoUi decides how updates are
shown, and whether a person or the demo answers at a gate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from rolloutd import planfile
from rolloutd.cli import exits
from rolloutd.cli.follow import WatchUpdate, watch_updates
from rolloutd.cli.status import format_gate
from rolloutd.control.client import ApiError, Client, api_path
from rolloutd.control.nodes.wire_nodes import Node
from rolloutd.control.rollouts.wire import Gate, Rollout
from rolloutd.demo.environment import DemoEnvironment, log_tail
from rolloutd.demo.fleet import clear_fault, set_fault
from rolloutd.demo.node import Fault
from rolloutd.files.source_archive import pack_tree

FAULTS: Mapping[str, Fault] = {
    "isolating": Fault.DRAIN_FAILS,
    "maintaining": Fault.TASK_FAILS,
    "verifying": Fault.CHECK_WRONG,
}

STALL_TIMEOUT_S = 180.0
"""Time without any change after which the demo stops: a node takes seconds."""

HTTP_CONFLICT = 409
"""Status of a vote that is too late or too early."""


class DemoUi(Protocol):
    def show_update(self, update: WatchUpdate) -> None: ...
    def print_message(self, text: str) -> None: ...
    def confirm(self, question: str) -> bool: ...
    def close(self) -> None: ...


def run(demo: DemoEnvironment, ui: DemoUi, faults: Mapping[str, str]) -> Rollout:
    """Run from submit to the rollout's end, and return the rollout; `faults` are phases by node."""
    rollout = start_rollout(demo, ui.print_message, faults)
    operator = _Operator(demo, ui, rollout, set(faults))
    try:
        for update in _exit_when_stalled(watch_updates(demo.client, [rollout]), demo):
            ui.show_update(update)
            if update.is_finished:
                return update.rollouts[0]
            operator.act(update.rollouts[0])
    finally:
        ui.close()
    raise AssertionError("the stream of updates ended")


def start_rollout(
    demo: DemoEnvironment, print_message: Callable[[str], None], faults: Mapping[str, str]
) -> str:
    """Set the faults (phases by node), submit the plan, and return the rollout's id."""
    for node, phase in faults.items():
        set_fault(demo.fleet_directory, node, FAULTS[phase])
        print_message(f"{node}: has a fault and will fail while {phase}")
    rollout = _submit_plan(demo)
    print_message(f"submitted {demo.plan_file.name} as {rollout}")
    return rollout


class _Operator:
    """The user of the demo: votes at gates, repairs nodes and retries them."""

    def __init__(self, demo: DemoEnvironment, ui: DemoUi, rollout: str, faulty_nodes: set[str]) -> None:
        self._demo = demo
        self._client: Client = demo.client
        self._ui = ui
        self._rollout = rollout
        self._faulty_nodes = faulty_nodes
        self._voted_gates: set[tuple[str, ...]] = set()

    def act(self, rollout: Rollout) -> None:
        """Settle failures and vote at open gates."""
        if rollout["state"] == "paused":
            self._settle_failures(rollout)
        for gate in rollout["gates"]:
            if gate["state"] == "waiting" and gate["gate"] != "proceed":
                self._vote(gate, ())

    def _settle_failures(self, rollout: Rollout) -> None:
        """Repair and retry failed nodes, and vote at `proceed`."""
        failed = [node for node in self._nodes() if node["phase"] == "failed"]
        fresh = [node for node in failed if node["node"] in self._faulty_nodes]
        for node in fresh:
            why = node["reason"]["text"] if node["reason"] else "it failed"
            self._ui.print_message(f"paused: {node['node']}: {why}")
        unknown = [node["node"] for node in failed if node["node"] not in self._faulty_nodes]
        if unknown and not fresh:
            self._exit_on_unexpected_failure(rollout, unknown)
        for node in fresh:
            name = node["node"]
            if not self._ui.confirm(f"repair {name} and retry it?"):
                self._cancel(f"{name} was not repaired")
                return
            clear_fault(self._demo.fleet_directory, name)
            self._faulty_nodes.discard(name)
            self._client.post(
                api_path("rollouts", self._rollout, "nodes", name, "retry"),
                {"reason": "the fault was repaired"},
            )
            self._ui.print_message(f"{name}: repaired; retry follows")
        for gate in rollout["gates"]:
            if gate["gate"] == "proceed" and gate["state"] == "waiting":
                unresolved = self._client.get(api_path("rollouts", self._rollout, "failures"))["failures"]
                self._vote(gate, tuple(each["id"] for each in unresolved))

    def _exit_on_unexpected_failure(self, rollout: Rollout, nodes: list[str]) -> None:
        """Stop the demo after a failure that it did not cause."""
        reason = rollout["reason"]
        why = reason["text"] if reason else "paused"
        raise exits.Exit(
            exits.REFUSED, f"{', '.join(nodes)}: unexpected failure: {why}\n{log_tail(self._demo, 'daemon')}"
        )

    def _vote(self, gate: Gate, failure_ids: tuple[str, ...]) -> None:
        key = (gate["gate"], gate["wave"] or "", gate["team"] or "", *failure_ids)
        if key in self._voted_gates:
            return
        self._voted_gates.add(key)
        yes = self._ui.confirm(f"gate {format_gate(gate)}. Vote yes?")
        body: dict[str, object] = {"gate": gate["gate"], "yes": yes, "reason": "seen in the demo"}
        if gate["gate"] == "proceed":
            body["shown"] = list(failure_ids)
        if gate["wave"]:
            body["wave"] = gate["wave"]
        try:
            self._client.post(api_path("rollouts", self._rollout, "votes"), body)
        except ApiError as refused:
            # The gate may have changed since the last update; the next update shows its state.
            if refused.status != HTTP_CONFLICT:
                raise
            self._ui.print_message(str(refused))
            return
        if not yes and gate["gate"] != "start":
            self._cancel("a no at a gate")

    def _cancel(self, reason: str) -> None:
        self._client.post(api_path("rollouts", self._rollout, "cancel"), {"reason": reason})

    def _nodes(self) -> list[Node]:
        nodes: list[Node] = self._client.get(api_path("rollouts", self._rollout, "nodes"))["nodes"]
        return nodes


def _submit_plan(demo: DemoEnvironment) -> str:
    text = demo.plan_file.read_bytes()
    plan = planfile.read(text, demo.plan_file.name)
    upload = demo.client.upload(api_path("uploads"), pack_tree(Path(demo.directory / plan.source["path"])))
    body = {"file": demo.plan_file.name, "text": text.decode(), "upload": upload["upload"]}
    return str(demo.client.post(api_path("plans", "submit"), body)["rollout"])


def _exit_when_stalled(updates: Iterator[WatchUpdate], demo: DemoEnvironment) -> Iterator[WatchUpdate]:
    """Yield the updates; raises exits.Exit if they show no change for too long."""
    last: list[Rollout] = []
    changed = time.monotonic()
    for update in updates:
        if update.entries or update.rollouts != last:
            last, changed = update.rollouts, time.monotonic()
        elif time.monotonic() - changed > STALL_TIMEOUT_S:
            tail = log_tail(demo, "daemon")
            raise exits.Exit(
                exits.REFUSED,
                f"the rollout: no change for {STALL_TIMEOUT_S:.0f} s; read the daemon's log:\n{tail}",
            )
        yield update
