"""A daemon with data of every kind, and every command line with the names that it lists there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from machines.model.events import ArtifactsBuilt
from machines.model.preparation import ArtifactKind, ManifestEntry
from machines.states import Trigger
from machines.workflow.phase_transitions import transition
from rolloutd.cli.main import main
from rolloutd.engine.background.node_cleaning import NodeCleaner
from rolloutd.engine.outcomes import verdict_events
from rolloutd.engine.state import State
from rolloutd.ports import Checkpoint, NodeFile, StagedArtifact
from tests.contracts.fakes.checkpoints import FakeCheckpoints
from tests.contracts.fakes.node_files import FakeNodeFiles
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment

BAD_PLAN = (
    PLAN.replace("name: sysctl", "name: kernel")
    .replace('targets: ""', 'targets: "team=search,rack=r2"')
    .replace("{playbook: site.yml}", "{playbook: site.yml, vars: {somaxconn: 4096}}")
)
PREPARED_PLAN = PLAN.replace(
    "  maintain:", "  prepare: [{build: {playbook: site.yml}}, {stage: {}}]\n  maintain:"
).replace("name: sysctl", "name: app")
WAITING_PLAN = PLAN.replace("name: sysctl", "name: later").replace("start: {owner: 1}", "start: {owner: 2}")

UNTIL = "--until 2030-01-01T00:00:00Z"


@dataclass(frozen=True)
class PopulatedDaemon:
    """The daemon, the rollouts that it has, and a directory with files for commands."""

    inside: ControlEnvironment
    live: str
    prepared: str
    cancelled: str
    waiting: str
    directory: Path

    @property
    def verdict(self) -> str:
        return f"{self.cancelled}.s2.1"

    def fill(self, text: str) -> list[str]:
        """Return the words of a line of READING or CHANGING, with the names of this daemon."""
        rollouts = {"live": self.live, "prepared": self.prepared, "cancelled": self.cancelled}
        names = {**rollouts, "waiting": self.waiting, "verdict": self.verdict}
        return text.format(**names, dir=self.directory).split()

    async def run(self, *words: str) -> int:
        """Run rolloutctl; its errors of usage have exit codes too."""

        def run() -> int:
            try:
                return main([*words, "--socket", str(self.inside.client.path)])
            except SystemExit as ended:
                return int(ended.code or 0)

        return await asyncio.to_thread(run)


@asynccontextmanager
async def populated_daemon(tmp_path: Path) -> AsyncIterator[PopulatedDaemon]:
    """Serve rollouts that wait, run, prepare and are cancelled, a failure, a hold and a freeze."""
    checkpoints, files = FakeCheckpoints(), FakeNodeFiles()
    files.files = {"p1": [NodeFile("fence", "/root/.rolloutd-fence")]}

    def cleaner(state: State) -> NodeCleaner:
        return NodeCleaner(state, files, checkpoints, ())

    pools = {"team": {"max_unavailable": 2}, "rack": {"max_unavailable": 2}}
    group = {"owner": "infra", "gate": {"owner": 1}}
    fleetlock = {"listen": "127.0.0.1:9478", "groups": {"workers": group}}
    async with control_environment(
        tmp_path,
        checkpoints=checkpoints,
        cleaner=cleaner,
        admins=["olga"],
        pools=pools,
        fleetlock=fleetlock,
    ) as inside:
        cancelled = await inside.start(text=BAD_PLAN)
        await _fail_with_verdict(inside, cancelled, "s2")
        await inside.request("olga", "post", f"/v1/rollouts/{cancelled}/cancel", {"reason": "broken"})
        prepared = await inside.start(text=PREPARED_PLAN)
        entry = ManifestEntry("tool", "1.2.3", ArtifactKind.FILE, 5, "a" * 64, path="tool")
        await inside.commit(ArtifactsBuilt(prepared, "build", (entry,), inside.clock.now()))
        artifact = StagedArtifact("1.2.3", "a" * 64, "/var/cache/rolloutd/tool")
        checkpoints.facts["p1"] = {
            ("app", "stage"): Checkpoint(
                *("app", "stage", "c" * 64, "d" * 64, prepared, inside.clock.now()), {"tool": artifact}
            )
        }
        live = await inside.start(text=PLAN)
        await inside.finish(live, "p1")
        await inside.fail(live, "s1")
        waiting = await inside.submit(text=WAITING_PLAN)
        hold = {"node": "p2", "id": "job", "reason": "firmware"}
        await inside.request("olga", "put", "/v1/holds", hold)
        await inside.request("olga", "post", "/v1/freezes", {"scope": "rack/r2", "reason": "audit"})
        (tmp_path / "plan.yml").write_text(PLAN.replace("name: sysctl", "name: other"))
        (tmp_path / "files").mkdir()
        (tmp_path / "files" / "tool-1.2.3.tar").write_bytes(b"tool")
        yield PopulatedDaemon(inside, live, prepared, cancelled, waiting, tmp_path)


async def _fail_with_verdict(inside: ControlEnvironment, rollout: str, node: str) -> None:
    await inside.isolate(rollout, node)
    await inside.run_playbook(rollout, node)
    target = inside.state.index.target(rollout, node)
    moved = transition(target, Trigger.FAILED, inside.clock.now(), step="verify.0", text="no answer")
    await inside.commit(moved, *verdict_events(inside.state, target, moved))


NODES = "p1 p2 s1 s2"
ANY = "*"
"""Stands for names that differ from run to run."""

READING = {
    "status": "{prepared} {live} {waiting}",
    "status {live}": "{live}",
    "status --all": "{cancelled} {prepared} {live} {waiting}",
    "rollouts": "{live} {prepared} {cancelled} {waiting}",
    "nodes {live}": NODES,
    "nodes {live} -l team=payments --sort-by node": "p1 p2",
    "nodes {live} --phase failed --phase done --no-headers": "p1 s1",
    "nodes {live} --pool rack/r1": ANY,
    "wait {cancelled} --for cancelled": "",
    "wait {live} --for node/p1=done": "",
    "wait {live} --for gate=continue --timeout 0s": "",
    "forecast": "{prepared} {live} {waiting}",
    "forecast {live} --draws 3": "p2 s1 s2",
    "forecast {live} --draws 3 --set plan.soak=1h --nodes": "p2 s1 s2",
    "forecast {dir}/plan.yml --draws 3 --approve-after never": NODES,
    "forecast --score": "",
    "explain plan.spec.gates": "",
    "explain settings.pools": "",
    "context list": "local",
    "why {live}": "{live}",
    "why {live} s1": "s1",
    "handover --since 2020-01-01T00:00:00Z": "{live} {prepared} {cancelled} {waiting}",
    "compare {live}": "p1",
    "changes": "sysctl app kernel later",
    "changes sysctl": "sysctl",
    "config p1": "current",
    "config p1 --record current": "current",
    "config p1 --record invalid": "",
    "config p2": "",
    "config s2": "invalid",
    "diff p1 current current": "",
    "drift {live}": "p1",
    "gates": ANY,
    "gates fleetlock/workers": "fleetlock/workers",
    "why fleetlock/workers p1": "p1",
    "gates {live}": "{live}/start {live}/continue/canary {live}/proceed",
    "review {live}": "{live}",
    "locks": "rack/r1 rack/r2 team/payments team/search",
    "inventory": NODES,
    "inventory --refresh": NODES,
    "inventory conflicts": "",
    "inventory p1": "p1",
    "shell p1 --show": "p1",
    "team show payments": "payments",
    "prepare {prepared}": f"localhost {NODES}",
    "prepare {prepared} --node p1": "p1",
    "checkpoints p1": "p1",
    "checkpoints {prepared}": NODES,
    "artifacts report {prepared}": "tool",
    "verdicts": "{verdict}",
    "audit": ANY,
    "audit {live} --kind VoteCast": ANY,
    "audit --last 2": ANY,
    "audit --node nothing": "",
    "audit verify": "",
    "audit head": ANY,
    "clean p1 --dry-run": "p1",
    "plan preview {dir}/plan.yml": NODES,
    "plan preview {dir}/plan.yml --impact --diff": NODES,
    "plan validate {dir}/plan.yml": "",
    "artifacts manifest {dir}/files": "tool",
    "artifacts verify {dir}/files": "tool",
    "watch {cancelled}": "",
    "logs {live} p1": "",
    "logs {live} p2": "",
}
"""Commands that read, each with the names that it lists."""

CHANGING = {
    "train add night {live} {waiting} --reason x": "night",
    "train approve night --reason x": "night",
    "approve {live} train --reason x": "night",
    "train show": "night",
    "train show night": "night",
    "train remove night --reason x": "night",
    "leader step-down --reason x": "second",
    "plan submit {dir}/plan.yml": ANY,
    "approve {live} proceed --reason x": "{live}/proceed",
    "approve {waiting} start --reason x": "{waiting}/start",
    "withdraw {waiting} start --reason x": "{waiting}/start",
    "reject {waiting} start --reason x": "{waiting}/start",
    "retry {live} s1 --reason x": "s1",
    "advance {live} p2 --reason x": "p2",
    "skip {live} s2 --reason x": "s2",
    "pause {live} --reason x": "{live}",
    "resume {live} --reason x": "{live}",
    "rollback {live} p1 --reason x": "p1",
    "rollback {live} --withdraw --reason x": "p1",
    "rollback {live} --withdraw --reason y": "",
    "release p2 --as job": "p2",
    "release p2 --as job --socket {dir}/run/control.sock": "",
    f"hold p2 --as job --reason x {UNTIL}": "p2",
    f"freeze --scope rack/r1 --reason x {UNTIL}": "rack/r1",
    "unfreeze --scope rack/r1": "rack/r1",
    "unfreeze --scope node/p1": "",
    "team freeze payments --reason x": "team/payments",
    "team unfreeze payments": "team/payments",
    "team windows payments --none --reason x": "payments",
    "team canaries payments p2 --reason x": "payments",
    "inventory accept hosts --reason x": "hosts",
    "inventory pin p1 --reason x": "p1",
    "verdicts clear {verdict} --reason x": "{verdict}",
    "audit settle all --keep audit --reason x --yes": "",
    "return s2 --reason x": "s2",
    "cancel {live} --reason x --yes": "{live}",
    "cancel {prepared} --reason x --yes": "{prepared}",
    "clean p1 --reason x --yes": "p1",
    "rollouts delete {prepared} --yes": "{prepared}",
}
"""Commands that act, in an order in which the daemon accepts them, each with the names of what it changed."""
