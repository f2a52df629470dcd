"""Ports for servers of tests that start later than their port is chosen.

The kernel gives its ephemeral ports to any connection, so a port that was free a moment ago may be a client's
for as long as that lives.  These ports are below that range, and a block of them belongs to one process: an
abstract socket of the block's name is its claim, and ends with the process.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from functools import cache

FIRST, END, BLOCK = 12_000, 32_000, 50


def _claimed_ports() -> Iterator[int]:
    """Yield the ports of each block that no other process has."""
    blocks = range(FIRST, END, BLOCK)
    claims = []
    for number in range(len(blocks)):
        first = blocks[(os.getpid() + number) % len(blocks)]
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0rolloutd-test-ports-{first}")
        except OSError:
            claim.close()
            continue
        claims.append(claim)
        yield from range(first, first + BLOCK)
    raise RuntimeError("no port is left; end the other test runs")


@cache
def _ports_of(_pid: int) -> Iterator[int]:
    return _claimed_ports()


def free_port() -> int:
    """Return a port on loopback that no process has, and that no other test is given."""
    for port in _ports_of(os.getpid()):
        with socket.socket() as probe:
            # As servers bind: what closed a moment ago on the port does not hold it.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("the generator raises before it ends")
