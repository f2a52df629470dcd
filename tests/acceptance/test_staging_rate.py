"""The rate of transfers to several real nodes, as their disks see it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from machines.model.preparation import ArtifactKind, ManifestEntry
from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.adapters.ssh.stager import SshStager
from rolloutd.engine.preparation.rate_limit import RateLimit
from rolloutd.ports import Staged, StagingRequest
from tests.contracts.ssh_fixtures import LIMIT_S, host_of, real_sshd

MIB = 1 << 20
RATE_BPS = 4 * MIB
SIZE = 4 * MIB
NODES = 3

pytestmark = pytest.mark.long  # three seconds by the clock


async def test_rate_of_all_nodes_is_the_cap(tmp_path: Path) -> None:
    content = os.urandom(SIZE)
    (tmp_path / "app.bin").write_bytes(content)
    artifact = ManifestEntry(
        *("app", "1", ArtifactKind.FILE, SIZE, hashlib.sha256(content).hexdigest()), path="app.bin"
    )
    limit, shell = RateLimit(RATE_BPS), SshShell()
    stager, places = SshStager(shell), [tmp_path / f"node{number}" for number in range(NODES)]

    async def received() -> list[tuple[float, list[int]]]:
        seen: list[tuple[float, list[int]]] = []
        while not seen or sum(seen[-1][1]) < NODES * SIZE * 0.95:
            sizes = [sum(f.stat().st_size for f in place.rglob("*") if f.is_file()) for place in places]
            seen.append((time.monotonic(), sizes))
            await asyncio.sleep(0.02)
        return seen

    with ExitStack() as servers:
        hosts = [
            host_of(servers.enter_context(real_sshd(tmp_path / f"sshd{number}")), f"n{number}")
            for number in range(NODES)
        ]
        for host in hosts:
            await shell.run(host, "true", timeout_s=LIMIT_S)  # a login takes time and no bytes
        watch = asyncio.ensure_future(received())
        results = await asyncio.gather(
            *(
                stager.stage(
                    StagingRequest(host, artifact, str(place), tmp_path), take=limit.take, timeout_s=LIMIT_S
                )
                for host, place in zip(hosts, places, strict=True)
            )
        )
        seen = await watch
        await shell.close()
    assert all(isinstance(result, Staged) for result in results)
    begin = next(each for each in seen if sum(each[1]) > NODES * SIZE * 0.1)
    rate = (sum(seen[-1][1]) - sum(begin[1])) / (seen[-1][0] - begin[0])
    assert 0.9 * RATE_BPS < rate < 1.1 * RATE_BPS
    half = next(sizes for _, sizes in seen if sum(sizes) > NODES * SIZE * 0.5)
    assert max(half) - min(half) < SIZE * 0.2
