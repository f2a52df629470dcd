"""The demo's user: a vote that the daemon refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from rolloutd.control.client import Client
from rolloutd.demo.environment import DemoEnvironment
from rolloutd.demo.scenario import _Operator
from tests.rolloutd.canned_daemon import serve_canned
from tests.rolloutd.cli.samples import GATE, ROLLOUT


class SilentUi:
    """A user who agrees to everything, and what they are told."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def show_update(self, update: object) -> None: ...
    def close(self) -> None: ...

    def print_message(self, text: str) -> None:
        self.messages.append(text)

    def confirm(self, question: str) -> bool:
        return True


class CannedDemo:
    def __init__(self, socket: Path) -> None:
        self.client = Client(socket)


def test_refused_vote_is_shown_and_not_repeated(tmp_path: Path) -> None:
    rollout: Any = {**ROLLOUT, "state": "running", "gates": [{**GATE, "gate": "start", "wave": None}]}
    ui = SilentUi()
    with serve_canned(tmp_path / "s") as daemon:
        daemon.refuse("POST", "rollouts/r/votes", 409, "r: the review lacks x.bin; vote with --unseen")
        demo = cast("DemoEnvironment", CannedDemo(daemon.socket))
        operator = _Operator(demo, ui, "r", set())
        operator.act(rollout)
        operator.act(rollout)
        assert len(daemon.requests) == 1
    assert ui.messages == ["r: the review lacks x.bin; vote with --unseen"]
