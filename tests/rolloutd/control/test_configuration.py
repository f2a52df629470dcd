"""Configurations by query: records of a node, differences, and what a plan would change for whom."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from machines.model.events import StepRecorded
from machines.model.step_record import StepAction
from machines.states import Outcome, Trigger
from rolloutd.cli.main import main
from rolloutd.control.client import ApiError
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment

SECRET = "hunter2-hunter2"
VAULTED = "$ANSIBLE_VAULT;1.1;AES256\n6162"


def plan_with(name: str, **variables: object) -> str:
    """Return the plan under another name, with variables."""
    maintain = json.dumps({"playbook": "site.yml", "vars": variables})
    text = PLAN.replace("{playbook: site.yml}", maintain).replace("name: sysctl", f"name: {name}")
    text = text.replace("maintain:", "show_vars: [somaxconn]\n  maintain:")
    return text.replace("rollback: {playbook: undo.yml}", 'rollback: {playbook: undo.yml, vars: {a: "b"}}')


async def records(inside: ControlEnvironment, node: str = "p1") -> dict[str, Any]:
    """Return the records of a node."""
    found: dict[str, Any] = await inside.request("nora", "get", f"/v1/nodes/{node}/configuration")
    return found


def somaxconn(found: dict[str, Any]) -> tuple[int | None, ...]:
    """Return the value in each record."""
    return tuple(
        each and each["values"]["variables"]["somaxconn"]
        for each in (found["current"], found["previous"], found["invalid"])
    )


async def roll_back(inside: ControlEnvironment, rollout: str, node: str) -> None:
    """Bring a failed node to done without the change."""
    for trigger in (Trigger.ROLLBACK_ORDERED, Trigger.ISOLATED, Trigger.MAINTAINED):
        await inside.transition(rollout, node, trigger, rolling_back=True)
    checked = inside.step(rollout, node, "rollback.verify.0.reachable", StepAction.CHECK)
    undone = inside.step(rollout, node, "isolate.0.command", StepAction.REVERT)
    await inside.commit(StepRecorded(checked), StepRecorded(undone, isolated=False))
    await inside.transition(rollout, node, Trigger.VERIFIED, outcome=Outcome.ROLLED_BACK)


async def run_cli(inside: ControlEnvironment, *words: str) -> int:
    """Run rolloutctl against the daemon of the test."""
    return await asyncio.to_thread(main, [*words, "--socket", str(inside.client.path)])


async def test_records_at_every_moment_of_a_rollout(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        assert await records(inside) == {"current": None, "previous": None, "invalid": None}
        first = await inside.start(text=plan_with("one", somaxconn=128))
        await inside.finish(first, "p1")
        assert somaxconn(await records(inside)) == (128, None, None)
        second = await inside.start(text=plan_with("two", somaxconn=4096))
        await inside.isolate(second, "p1")
        await inside.run_playbook(second, "p1")
        assert somaxconn(await records(inside)) == (128, None, None)
        await inside.fail(second, "p1")
        found = await records(inside)
        assert somaxconn(found) == (128, None, 4096)
        assert found["invalid"]["evidence"] == {"step": "run.configure", "text": "broken"}
        assert found["invalid"]["rollout"] == second
        assert found["invalid"]["change"] == inside.state.index.rollout(second).digest.change
        await roll_back(inside, second, "p1")
        assert somaxconn(await records(inside)) == (128, None, 4096)
        third = await inside.start(text=plan_with("three", somaxconn=65535))
        await inside.finish(third, "p1")
        assert somaxconn(await records(inside)) == (65535, 128, 4096)
        with pytest.raises(ApiError) as unknown:
            await records(inside, "p9")
        assert unknown.value.status == 404


async def test_no_answer_shows_a_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with control_environment(tmp_path) as inside:
        inside.state.connections["p1"] = {
            "db_password": SECRET,
            "banner": SECRET,
            "motd": {"__ansible_vault": VAULTED},
            "rolloutd_no_log": ["banner"],
        }
        rollout = await inside.start(text=plan_with("one", somaxconn=1))
        await inside.finish(rollout, "p1")
        changed = {"db_password": f"{SECRET}2", "motd": {"__ansible_vault": f"{VAULTED}63"}}
        inside.state.connections["p1"] = {**inside.state.connections["p1"], **changed}
        text = plan_with("two", somaxconn=2)
        rollout = await inside.start(text=text)
        await inside.finish(rollout, "p1")
        answer = await inside.request("nora", "get", "/v1/nodes/p1/configuration/diff")
        assert [each["name"] for each in answer["differences"]] == ["db_password", "motd", "somaxconn"]
        inside.state.connections["p1"] = {"db_password": f"{SECRET}3"}
        plan = await inside.request("paul", "post", "/v1/plans/diff", {"file": "p", "text": text})
        assert [each["name"] for each in plan["groups"][-1]["differences"]] == [
            "banner",
            "db_password",
            "motd",
        ]
        inside.state.connections["p1"] = {"db_password": f"{SECRET}4"}
        await inside.fail(await inside.start(text=plan_with("four", somaxconn=4)), "p1")
        named = (["--record", record] for record in ("current", "previous", "invalid"))
        for command in (["config"], *(["config", *each] for each in named), ["diff"]):
            for form in ((), ("--json",)):
                assert await run_cli(inside, command[0], "p1", *command[1:], *form) == 0
        shown = capsys.readouterr().out + str(answer) + str(plan) + str(await records(inside))
        entries = await inside.state.store.read_audit()
        everything = shown + "".join(entry.text for entry in entries)
        assert SECRET not in everything
        assert "ANSIBLE_VAULT" not in everything


async def test_long_and_many_differences_are_limited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_file = tmp_path / "plan.yaml"
    plan_file.write_text(plan_with("two", somaxconn="9" * 5000, motd="x"))
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=plan_with("one", somaxconn="9" * 5001, motd="y"))
        await inside.finish(rollout, "p1")
        assert await run_cli(inside, "plan", "preview", str(plan_file), "--diff") == 0
        out = capsys.readouterr().out
        assert f"{'9' * 2000}\u2026 (3,001 more characters, sha256 " in out
        assert "9" * 2001 not in out
        monkeypatch.setattr("rolloutd.control.plans.configuration.MAX_REVIEW_CHARS", 100)
        assert await run_cli(inside, "plan", "preview", str(plan_file), "--diff") == 0
        out = capsys.readouterr().out
        assert "1 node: motd secret:" in out
        assert "somaxconn" not in out
        assert " 1 further difference, not shown\n" in out


async def test_plan_differences_are_grouped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_file = tmp_path / "plan.yaml"
    plan_file.write_text(plan_with("two", somaxconn=65535))
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=plan_with("one", somaxconn=4096))
        for node in ("p1", "s1"):
            await inside.finish(rollout, node)
        assert await run_cli(inside, "plan", "preview", str(plan_file), "--diff") == 0
        out = capsys.readouterr().out
        assert "2 nodes: somaxconn 4096 \u2192 65535\n" in out
        assert "2 nodes: no record" in out
        assert await run_cli(inside, "plan", "preview", str(plan_file), "--diff", "--json") == 0
        groups = json.loads(capsys.readouterr().out)["diff"]
        assert [(len(each["nodes"]), each["state"]) for each in groups] == [(2, "changed"), (2, "new")]
