"""Simulated stagers, snapshots and checkpoints; what is on a node outlives every daemon."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rolloutd.errors import NodeUnreachable
from rolloutd.ports import (
    Checkpoint,
    Failed,
    Host,
    NodeFile,
    Staged,
    StagedFile,
    StagingRequest,
    TakeBytes,
    without_rollout,
)
from tests.sim.fault_injection import FaultyAccess


def _refuse(node: str) -> None:
    raise NodeUnreachable(f"{node}: the connection was lost")


class SimStager:
    """ports.Stager and ports.StagedFiles: a set of digests on each node, some of them damaged."""

    def __init__(self, access: FaultyAccess) -> None:
        self._access = access

    async def stage(self, request: StagingRequest, *, take: TakeBytes, timeout_s: float) -> Staged | Failed:
        node, artifact = request.host.name, request.artifact
        label = f"stage {artifact.name} on {node}"
        self._access.check_leadership(label)  # before a slow login: what is on its way then may still land
        machine = await self._access.connect(node)
        if artifact.sha256 in machine.staged and artifact.sha256 not in machine.damaged:
            return Staged(0)
        await take(artifact.size)

        def put() -> Staged:
            machine.staged.add(artifact.sha256)
            if machine.damaged.pop(artifact.sha256, None) is not None:
                machine.repaired_at = self._access.world.loop.time()
            return Staged(artifact.size)

        result: Staged = await self._access.run_effect(
            label, put, on_refused=lambda: _refuse(node), already_started=True
        )
        return result

    async def remove(self, host: Host, to: str, digests: Collection[str], *, timeout_s: float) -> None:
        label = f"remove from {host.name}"
        self._access.check_leadership(label)
        machine = await self._access.connect(host.name)

        def drop() -> None:
            self._access.world.checker.cleaning.on_removed(host.name, machine.staged & set(digests))
            machine.staged.difference_update(digests)
            for digest in digests:
                machine.damaged.pop(digest, None)

        await self._access.run_effect(
            label, drop, on_refused=lambda: _refuse(host.name), already_started=True
        )

    async def compare(
        self, host: Host, files: Sequence[StagedFile], *, timeout_s: float
    ) -> Mapping[str, str]:
        machine = await self._access.connect(host.name)
        differs = {file.path: file for file in files if file.sha256 in machine.damaged}
        missing = {file.path: file for file in files if file.sha256 not in machine.staged}
        if differs:
            self._access.world.coverage.count("staged:differs")
        return {**dict.fromkeys(differs, "is altered"), **dict.fromkeys(missing, "is missing")}


class SimNodeFiles:
    """ports.NodeFiles: runs and guards leave no files here."""

    def __init__(self, access: FaultyAccess) -> None:
        self._access = access

    async def clean(self, host: Host, *, dry_run: bool, timeout_s: float) -> Sequence[NodeFile]:
        await self._access.connect(host.name)
        return ()


class SimSnapshots:
    """ports.NodeSnapshots: what runs on the node."""

    def __init__(self, access: FaultyAccess) -> None:
        self._access = access

    async def snapshot(self, host: Host, *, timeout_s: float) -> Mapping[str, str]:
        machine = await self._access.connect(host.name)
        return {"boot-id": "1", "unit/app.service": str(machine.service_starts)}


class SimCheckpoints:
    """ports.Checkpoints: the fact of each node."""

    def __init__(self, access: FaultyAccess) -> None:
        self._access = access

    async def read(self, host: Host, *, timeout_s: float) -> Mapping[tuple[str, str], Checkpoint]:
        return dict((await self._access.connect(host.name)).checkpoints)

    async def write(self, host: Host, checkpoint: Checkpoint, *, timeout_s: float) -> None:
        label = f"checkpoint {checkpoint.stage} on {host.name}"
        self._access.check_leadership(label)
        machine = await self._access.connect(host.name)
        await self._access.run_effect(
            label,
            lambda: machine.checkpoints.update({(checkpoint.plan, checkpoint.stage): checkpoint}),
            on_refused=lambda: _refuse(host.name),
            already_started=True,
        )

    async def remove(self, host: Host, rollout: str, *, timeout_s: float) -> None:
        label = f"forget {rollout} on {host.name}"
        self._access.check_leadership(label)
        machine = await self._access.connect(host.name)

        def forget() -> None:
            machine.checkpoints = without_rollout(machine.checkpoints, rollout)

        await self._access.run_effect(
            label, forget, on_refused=lambda: _refuse(host.name), already_started=True
        )
