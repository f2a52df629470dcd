"""Machines that reboot themselves, a rollout and a hold share pools, while the daemon is killed.

The machines are clients written after the public description of the protocol, and ask all at once.  Their own
notes and the log of the playbooks say who was down when.  `make reboots` runs the whole number of machines
(ROLLOUTD_TEST_REBOOT_MACHINES), kills (..._KILLS) and malformed requests (..._MALFORMED).
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rolloutd.store import SqliteBackend
from tests.support.daemon_environment import (
    CHANGE_PLAYBOOK,
    DaemonEnvironment,
    daemon_environment,
    fleet_labels,
    plan,
)
from tests.support.ports import free_port

pytestmark = [pytest.mark.servers, pytest.mark.long]

KILLS = int(os.environ.get("ROLLOUTD_TEST_REBOOT_KILLS", "3"))
MACHINES = int(os.environ.get("ROLLOUTD_TEST_REBOOT_MACHINES", "11"))
MALFORMED = int(os.environ.get("ROLLOUTD_TEST_REBOOT_MALFORMED", "200"))
BUDGET = 2
NODES_PER_TEAM = 50
"""Nodes of a team, at most: each slot needs all of a team to be seen."""
ROLLED = 6
"""Nodes of the rollout.  The machines and one held node are the others."""
REBOOT_S = 0.3
RETRY_S = 0.2
LONGEST_LIFE_S = 2.0
LIMIT_S = 600.0

Span = tuple[str, float, float]


@dataclass
class Machine:
    """A machine that wants to reboot once, and notes from when to when it might be down."""

    port: int
    node: str
    span: Span | None = None
    kinds: set[str] = field(default_factory=set)

    def run(self) -> None:
        self.ask("pre-reboot")
        granted_at = time.time()
        time.sleep(REBOOT_S)
        span = (self.node, granted_at, time.time())
        self.ask("steady-state")
        self.span = span

    def ask(self, call: str) -> None:
        """Ask until the answer is 200; a daemon that is not there is asked again."""
        body = json.dumps({"client_params": {"id": f"id-{self.node}", "group": "default"}})
        while True:
            with suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
                connection.request("POST", f"/v1/{call}", body, {"fleet-lock-protocol": "true"})
                response = connection.getresponse()
                answer = json.loads(response.read())
                if response.status == 200:
                    return
                self.kinds.add(answer["kind"])
            time.sleep(RETRY_S)


def test_machines_rollout_and_hold_stay_within_budget(tmp_path: Path) -> None:
    count = ROLLED + MACHINES + 1
    labels = fleet_labels(count, max(2, count // NODES_PER_TEAM), 1)
    for number, node in enumerate(labels.values()):
        node["role"] = "worker" if number < ROLLED else "self"
    port = free_port()
    served = {"listen": f"127.0.0.1:{port}", "groups": {"default": {"ids": {f"id-{n}": n for n in labels}}}}
    settings = {"pools": {"team": {"max_unavailable": BUDGET}}, "fleetlock": served}
    with daemon_environment(tmp_path, labels, nodes_per_sshd=12, **settings) as made:
        variables = {"log_file": str(made.log_file), "work_s": REBOOT_S}
        spec = {"isolate": [{"command": {"do": "true", "undo": "true"}}]}
        maintain = {"playbook": "change.yml", "vars": variables}
        rollout = made.submit(plan("change", maintain=maintain, **spec), {"change.yml": CHANGE_PLAYBOOK})
        made.vote(rollout, "start")
        machines = [Machine(port, node) for node in list(labels)[ROLLED:-1]]
        threads = [threading.Thread(target=machine.run) for machine in machines]
        for thread in threads:
            thread.start()
        held = hold(made, list(labels)[-1])
        draw, garbage = random.Random(36), malformed()
        for _ in range(KILLS):
            send_some(port, garbage, MALFORMED // KILLS)
            time.sleep(draw.uniform(0.0, LONGEST_LIFE_S))
            made.kill_daemon()
            made.start_daemon()
        status = made.finish(rollout)
        for thread in threads:
            thread.join(LIMIT_S)
        assert (status["done"], status["failed"]) == (ROLLED, 0)
        assert {machine.kinds - {"unavailable"} <= {"lock_held"} for machine in machines} == {True}
        ran = [span for span in made.spans() if span.end is not None]
        assert sorted(span.node for span in ran) == sorted(list(labels)[:ROLLED])
        down = [machine.span for machine in machines] + [
            (span.node, span.begin, span.end or 0) for span in ran
        ]
        judge([*down, held], labels)
        assert made.client.get("/v1/locks")["holds"] == []
        assert SqliteBackend(tmp_path / "state" / "rolloutd.sqlite").verify_chain().ok
        print(f"{KILLS} kills, {len(machines)} machines, {len(ran)} nodes of a rollout: never over {BUDGET}")


def hold(made: DaemonEnvironment, node: str) -> Span:
    """Hold a node for a while; the span is what the holder knows."""
    body = {"node": node, "reason": "disk"}
    made.wait_until(lambda: made.client.put("/v1/holds", body), f"{node} is held")
    begin = time.time()
    time.sleep(REBOOT_S)
    end = time.time()
    made.client.delete("/v1/holds", {"node": node})
    return node, begin, end


def judge(down: list[Span | None], labels: dict[str, dict[str, str]]) -> None:
    """Count from outside how many nodes of a team were down together."""
    for team in {each["team"] for each in labels.values()}:
        spans = [span for span in down if span is not None and labels[span[0]]["team"] == team]
        edges = sorted(edge for _, begin, end in spans for edge in ((begin, 1), (end, -1)))
        most = max(itertools.accumulate(step for _, step in edges))
        assert most <= BUDGET, f"{most} nodes of {team} were down together"
    assert None not in down, "a machine never got its slot"


def malformed() -> Iterator[bytes]:
    draw = random.Random(1000)
    good = (
        b"POST /v1/pre-reboot HTTP/1.1\r\nHost: x\r\nfleet-lock-protocol: true\r\nContent-Length: 2\r\n\r\n{}"
    )
    while True:
        cut = bytearray(good[: draw.randrange(len(good))] + draw.randbytes(draw.randrange(40)))
        for _ in range(draw.randrange(4)):
            cut[draw.randrange(len(cut))] = draw.randrange(256)
        yield bytes(cut or b"\0")


def send_some(port: int, requests: Iterator[bytes], count: int) -> None:
    for raw in itertools.islice(requests, count):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            assert not connection.recv(64).startswith(b"HTTP/1.1 200"), raw
