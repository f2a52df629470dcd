"""The four ways out of a bad change, in the middle of a rollout: a running daemon, asked over its socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from machines.model.rollout import Target
from machines.states import Outcome, Phase
from rolloutd.ports import Failed
from tests.contracts.fakes.check import FakeCheck
from tests.contracts.fakes.runner import Script
from tests.rolloutd.commands.test_commands import REASON, steer
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment
from tests.rolloutd.slow_store import adapters_of, daemon_of, loop_iterations

CANARIES = PLAN.replace("reachable: {}", "reachable: {within: 5s}") + (
    '  canary: {select: "team in (payments,search)", max_parallel: 9}\n'
)
CORRECTED = CANARIES.replace("playbook: site.yml", "playbook: site.yml, vars: {corrected: true}")


class Midway:
    """A rollout with p1 changed, s1 failed, s2 pending, and p2 behind p1."""

    def __init__(self, inside: ControlEnvironment, rollout: str, check: FakeCheck) -> None:
        self.inside, self.rollout, self.check = inside, rollout, check

    def target(self, node: str, rollout: str = "") -> Target:
        return self.inside.state.index.target(rollout or self.rollout, node)

    async def until(self, is_so: Callable[[], object]) -> None:
        """Let time pass until it is so."""
        for _ in range(300):
            await loop_iterations(40)
            if is_so():
                return
            self.inside.clock.advance(1)
            self.inside.observe_all_up()
        raise AssertionError([(t.rollout, t.node, t.phase, t.last_text) for t in self.targets()])

    def targets(self) -> list[Target]:
        return [t for r in self.inside.state.index.rollouts for t in self.inside.state.index.targets(r)]

    def playbooks_on(self, node: str) -> list[str]:
        runs = self.inside.run_host.runs.values()
        return [run.request.playbook for run in runs if run.request.node == node]


@asynccontextmanager
async def midway(tmp_path: Path) -> AsyncIterator[Midway]:
    async with control_environment(tmp_path) as inside:
        inside.run_host.scripts = {"site.yml": Script.OK, "undo.yml": Script.OK}
        check = FakeCheck()
        check.results["s1"] = [Failed("the service is down")]
        made = Midway(inside, await inside.start(text=CANARIES), check)
        daemon = asyncio.create_task(daemon_of(inside, adapters_of(inside, tmp_path, check=check)).run())
        try:
            await made.until(
                lambda: made.target("s1").phase is Phase.FAILED and made.target("p1").phase is Phase.DONE
            )
            assert made.target("s2").phase is Phase.PENDING
            yield made
        finally:
            daemon.cancel()
            await asyncio.wait({daemon})


async def test_changed_and_failed_node_rolled_back_midway(tmp_path: Path) -> None:
    async with midway(tmp_path) as made:
        made.check.results.clear()
        body = REASON | {"nodes": ["p1", "s1"]}
        await made.inside.request("olga", "post", f"/v1/rollouts/{made.rollout}/rollback", body)
        nodes = ("p1", "s1")
        await made.until(lambda: {made.target(n).outcome for n in nodes} == {Outcome.ROLLED_BACK})
        assert [made.playbooks_on(node) for node in nodes] == [["site.yml", "undo.yml"]] * 2
        assert not any(made.target(node).isolated for node in nodes)
        # History: what was done to a node, and who did it.
        asked = {"rollout": made.rollout, "node": "p1"}
        found: dict[str, Any] = await made.inside.request("olga", "get", "/v1/audit", asked)
        entries = [each["entry"] for each in found["entries"]]
        ends = [e["fields"]["outcome"] for e in entries if e["fields"].get("trigger") == "verified"]
        assert ends == ["changed", "rolled-back"]
        assert [e["actor"]["name"] for e in entries if e["event"] == "NodeOrdered"] == ["olga"]
        shown = await made.inside.request("olga", "get", f"/v1/rollouts/{made.rollout}/nodes/p1")
        runs = [step["attempt"] for step in shown["steps"] if step["action"] == "run"]
        assert runs == [1, 2], "each run of the node, in order"


async def test_bad_node_left_isolated_while_others_continue(tmp_path: Path) -> None:
    async with midway(tmp_path) as made:
        await steer(made.inside, "olga", made.rollout, "skip", "s1", put_back="leave")
        await made.inside.vote("olga", made.rollout, "proceed")
        await made.until(lambda: made.target("p2").phase is Phase.DONE)
        bad = made.target("s1")
        assert (bad.outcome, bad.isolated) == (Outcome.SKIPPED, True)
        assert made.target("s2").phase is Phase.PENDING, "the bad node keeps its team's slot"
        made.check.results.clear()
        await made.inside.request("olga", "post", "/v1/nodes/s1/return", REASON)
        await made.until(lambda: made.target("s2").phase is Phase.DONE)


async def test_corrected_change_supersedes_midway(tmp_path: Path) -> None:
    async with midway(tmp_path) as made:
        made.check.results.clear()
        later = await made.inside.start(text=CORRECTED, supersede=True)
        await made.until(lambda: made.target("p2", later).outcome is Outcome.CHANGED)
        why = await made.inside.request("olga", "get", f"/v1/rollouts/{later}/nodes/s1")
        assert (
            why["reason"]["remedy"]["command"] == f"rolloutctl skip {made.rollout} s1 --return --reason ..."
        )
        await steer(made.inside, "olga", made.rollout, "skip", "s1", put_back="return")
        nodes = ("p1", "p2", "s1", "s2")
        await made.until(lambda: {made.target(n, later).outcome for n in nodes} == {Outcome.CHANGED})
        assert made.inside.state.index.rollout(made.rollout).closed
        assert [made.target(node, later).attempt for node in nodes] == [1] * 4
        assert made.playbooks_on("s1") == ["site.yml", "site.yml"]
