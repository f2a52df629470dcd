"""Commands of teams and services against a real API: what they send, print and refuse."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest

from machines.model.decision import Admit
from machines.scheduler.decide import decide
from rolloutd.cli.main import main
from rolloutd.store import open_store
from tests.rolloutd.commands.test_tokens import SECRET, services
from tests.rolloutd.control_environment import ACCOUNTS, PLAN, ControlEnvironment, control_environment


async def run(inside: ControlEnvironment, who: str, *words: str) -> int:
    """Run rolloutctl as somebody."""
    inside.name_service.current = ACCOUNTS[who]
    try:
        return await asyncio.to_thread(main, ["--socket", str(inside.server._path), *words])
    except SystemExit as ended:
        return int(ended.code or 0)


async def test_a_team_sets_its_windows_and_its_nodes_keep_to_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """2027-01-15 08:00 UTC is a Friday: a window on Mondays is shut, for this team alone."""
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        words = ("team", "windows", "payments", "mon 09:00-16:00 Europe/Amsterdam")
        assert await run(inside, "paul", *words, "--reason", "no Fridays") == 0
        assert "windows of its own: mon 09:00-16:00 Europe/Amsterdam" in capsys.readouterr().out
        decision = decide(inside.state.index, inside.clock.now())
        assert [start.node for start in decision.of(Admit)] == ["s1"], "the others go on"
        told = await inside.request("nora", "get", f"/v1/rollouts/{rollout}/nodes/p1/why")
        assert told["reason"]["code"] == "outside-window"
        assert "team payments's own windows are closed" in told["reason"]["text"]
        assert await run(inside, "paul", "team", "windows", "payments", "--none", "--reason", "back") == 0
        assert decide(inside.state.index, inside.clock.now()).of(Admit)
        kinds = (await inside.request("nora", "get", "/v1/audit?kind=TeamRulesChanged"))["entries"]
        assert [entry["entry"]["fields"]["reason"] for entry in kinds] == ["no Fridays", "back"]


async def test_a_teams_own_canaries_go_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with control_environment(tmp_path) as inside:
        assert await run(inside, "paul", "team", "canaries", "payments", "p2", "--reason", "idle") == 0
        assert await run(inside, "paul", "team", "canaries", "payments", "s1", "--reason", "mine") == 1
        assert "s1: belongs to search" in capsys.readouterr().err
        rollout = await inside.submit()
        waves = {target.node: target.wave for target in inside.state.index.targets(rollout)}
        assert waves["p2"] == "canary"
        assert waves["p1"] == "fleet"


async def test_nobody_sets_another_teams_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with control_environment(tmp_path) as inside:
        words = ("team", "windows", "payments", "mon-fri 09:00-16:00", "--reason", "x")
        for who, code in (("sara", 4), ("nora", 4), ("olga", 4), ("adam", 0)):
            assert await run(inside, who, *words) == code
        assert await run(inside, "paul", "team", "windows", "payments", "--reason", "x") == 2
        assert await run(inside, "paul", "team", "windows", "payments", "sometimes", "--reason", "x") == 2
        assert await run(inside, "paul", "team", "show", "nobody") == 1
        capsys.readouterr()
        assert await run(inside, "nora", "team", "show", "payments", "--json") == 0
        assert json.loads(capsys.readouterr().out)["own_windows"] == ["mon-fri 09:00-16:00 UTC"]


async def test_rules_of_teams_survive_a_restart(tmp_path: Path) -> None:
    async def sqlite(compiled: Any) -> Any:
        return await open_store(tmp_path / "state", compile_plan=compiled)

    async with control_environment(tmp_path, store=sqlite) as inside:
        await run(inside, "paul", "team", "windows", "payments", "mon 09:00-16:00", "--reason", "x")
        await run(inside, "paul", "team", "canaries", "payments", "p2", "--reason", "x")
        before = dict(inside.state.index.team_rules)
    async with control_environment(tmp_path, store=sqlite) as inside:
        assert dict(inside.state.index.team_rules) == before
        assert before["payments"].canaries == ("p2",)


async def test_a_freeze_of_one_node_blocks_it_and_leaves_its_slot(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        assert await run(inside, "sara", "freeze", "--scope", "node/p1", "--reason", "x") == 4
        until = ("--until", "2027-01-15T10:00:00Z", "--reason", "vendor on site")
        assert await run(inside, "paul", "freeze", "--scope", "node/p1", *until) == 0
        told = await inside.request("nora", "get", f"/v1/rollouts/{rollout}/nodes/p1/why")
        assert told["reason"]["code"] == "freeze"
        inside.clock.advance(7201)
        inside.observe_all_up()
        assert [start.node for start in decide(inside.state.index, inside.clock.now()).of(Admit)] == ["p1"]


async def test_a_node_that_is_advanced_goes_next(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        text = PLAN.replace("  soak: 10m", "  soak: 0s\n  canary: {select: 'rack=r9'}")
        rollout = await inside.start(text=text)
        await inside.request(
            "paul", "post", f"/v1/rollouts/{rollout}/nodes/p2/advance", {"reason": "idle now"}
        )
        order = [place[2] for place in inside.state.index.pending(rollout, "fleet")]
        assert order[0] == "p2"
        assert await run(inside, "sara", "advance", rollout, "p1", "--reason", "x") == 4
        assert await run(inside, "olga", "advance", rollout, "s2", "--reason", "x") == 0
        order = [place[2] for place in inside.state.index.pending(rollout, "fleet")]
        assert order == ["s2", "p2", "p1", "s1"]


async def test_a_token_is_signed_and_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with control_environment(tmp_path, service_accounts=services(tmp_path)) as inside:
        rollout = await inside.submit()
        key = ("--service", "jira", "--key-file", str(tmp_path / "jira.key"), "--for", "zoe@example.com")
        until = ("--expires", "2027-01-15T09:00:00Z", "--reason", "CHG-1")
        assert await run(inside, "nora", "token", "sign", rollout, "start", *key, *until) == 0
        token = capsys.readouterr().out
        assert SECRET.decode() not in token
        (tmp_path / "token.txt").write_text(token)
        assert await run(inside, "nora", "token", "use", rollout, str(tmp_path / "token.txt")) == 0
        assert "start is open" in capsys.readouterr().out
        monkeypatch.setattr("sys.stdin", io.StringIO(token))
        assert await run(inside, "nora", "token", "use", rollout) == 4
        assert "used before" in capsys.readouterr().err


async def test_pause_now_orders_every_node_at_work_to_stop(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        assert await run(inside, "olga", "pause", rollout, "--reason", "later") == 0
        assert inside.state.index.target(rollout, "p1").order is None
        assert await run(inside, "olga", "pause", rollout, "--now", "--reason", "now") == 0
        assert inside.state.index.target(rollout, "p1").order == "stop"
        assert inside.state.index.target(rollout, "s1").order is None
        assert await run(inside, "olga", "cancel", rollout, "--now", "--yes", "--reason", "never") == 0
