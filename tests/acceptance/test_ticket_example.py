"""The example of a ticket system: a real daemon's webhook opens a ticket, and its approval is a vote."""

from __future__ import annotations

import base64
import json
import os
import pwd
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.daemon_environment import CHANGE_PLAYBOOK, DaemonEnvironment, daemon_environment, plan
from tests.support.ports import free_port

RECEIVER = Path(__file__).parents[2] / "examples/tickets/receiver.py"

PERSON = "a.larsen@example.com"


@contextmanager
def receiver(directory: Path, port: int) -> Iterator[None]:
    """Run the example with keys in the directory, and a rolloutctl that speaks with its daemon."""
    keys = [word for name in ("webhook", "vote", "approve") for word in (f"--{name}-key", f"{name}.key")]
    script = directory / "rolloutctl"
    script.write_text(
        f'#!/bin/sh\nexec {sys.executable} -m rolloutd.cli "$@" --socket {directory / "world/s"}\n'
    )
    script.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, RECEIVER, "--listen", f"127.0.0.1:{port}", *keys, "--tickets", "tickets"],
        cwd=directory,
        env={**os.environ, "ROLLOUTCTL": str(script)},
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        assert b"listening" in process.stderr.readline()
        yield
    finally:
        process.kill()
        process.communicate()


def post(port: int, path: str, body: bytes, **headers: str) -> int:
    """Send a request; return the status."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        body,
        {name.replace("_", "-"): text for name, text in headers.items()},
    )
    try:
        with urllib.request.urlopen(request) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


@pytest.mark.servers
def test_approved_ticket_is_a_vote_of_its_person(tmp_path: Path) -> None:
    port, myself = free_port(), pwd.getpwuid(os.geteuid()).pw_name
    for name in ("webhook", "vote", "approve"):
        file = tmp_path / f"{name}.key"
        file.write_bytes(base64.b64encode(os.urandom(48)))
        file.chmod(0o600)
    settings = {
        "notify": {
            "webhooks": [
                {"url": f"http://127.0.0.1:{port}/rolloutd", "key_file": str(tmp_path / "webhook.key")}
            ]
        },
        "service_accounts": {
            "tickets": {
                "key_file": str(tmp_path / "vote.key"),
                "teams": ["infra"],
                "people": {PERSON: myself},
            }
        },
    }
    world = tmp_path / "world"
    world.mkdir()
    with (
        receiver(tmp_path, port),
        daemon_environment(world, {"n1": {"team": "t1", "role": "worker"}}, **settings) as daemon,
    ):
        change = {"playbook": "change.yml", "vars": {"log_file": str(daemon.log_file)}}
        rollout = daemon.submit(plan("asked", maintain=change), {"change.yml": CHANGE_PLAYBOOK})
        ticket = tmp_path / "tickets" / f"{rollout}-start.json"
        daemon.wait_until(ticket.exists, "the webhook has opened a ticket")
        assert json.loads(ticket.read_text())["state"] == "open"

        approve, body = f"/tickets/{ticket.stem}/approve", json.dumps({"person": PERSON}).encode()
        key = (tmp_path / "approve.key").read_text()
        assert post(port, approve, body, Authorization="Bearer forged") == 401
        stranger = json.dumps({"person": "x@example.com"}).encode()
        assert post(port, approve, stranger, Authorization=f"Bearer {key}") == 409
        assert start_state(daemon, rollout) == "waiting"
        assert post(port, approve, body, Authorization=f"Bearer {key}") == 200
        assert start_state(daemon, rollout) == "open"
        votes = daemon.client.get("/v1/audit?kind=VoteCast")["entries"]
        assert [(vote["entry"]["actor"]["name"], vote["entry"]["actor"]["kind"]) for vote in votes] == [
            (f"tickets:{myself}", "service")
        ]
        assert json.loads(ticket.read_text())["state"] == "approved"

        forged = {
            "webhook_id": "m",
            "webhook_timestamp": str(int(time.time())),
            "webhook_signature": "v1,AAAA",
        }
        assert post(port, "/rolloutd", b'{"notifications": []}', **forged) == 401


def start_state(daemon: DaemonEnvironment, rollout: str) -> str:
    """Return the state of the gate `start`."""
    return next(str(gate["state"]) for gate in daemon.status(rollout)["gates"] if gate["gate"] == "start")
