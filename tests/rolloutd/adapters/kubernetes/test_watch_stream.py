"""A watch's connection ends when its peer is gone, before what was observed expires."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from machines.model.limits import DEFAULT_OBSERVATION_MAX_AGE_S
from rolloutd.adapters.kubernetes.cluster import Cluster
from tests.support.fake_kubernetes import FakeKubernetes


def keepalives_to(address: tuple[str, int]) -> set[tuple[int, ...]]:
    """Return the keepalive settings (on, idle, interval, probes) of our connections to a server."""
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names only
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as each:
            if each.family == socket.AF_INET and each.getpeername() == address:
                options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                values = (each.getsockopt(socket.IPPROTO_TCP, option) for option in options)
                found.add((each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), *values))
    return found


async def test_watch_notices_peer_that_is_gone(tmp_path: Path) -> None:
    async with FakeKubernetes() as fake:
        cluster = Cluster("ams", fake.kubeconfig(tmp_path / "kubeconfig"))
        async with cluster.watch("/api/v1/nodes", {}, idle_timeout_s=60.0):
            keepalives = keepalives_to(("127.0.0.1", fake.port))
        await cluster.close()
    noticed_after_s = [idle + interval * probes for on, idle, interval, probes in keepalives if on]
    assert noticed_after_s
    assert min(noticed_after_s) < DEFAULT_OBSERVATION_MAX_AGE_S / 2
