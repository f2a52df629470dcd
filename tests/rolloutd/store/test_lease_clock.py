"""The lease of a daemon whose clocks libfaketime moves by an hour, the monotonic one too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fast_clock import LIBRARY as FAKETIME
from tests.support.postgresql import Postgresql

pytestmark = pytest.mark.servers("postgresql")


RENEW_TWICE = """
import asyncio, sys
from pathlib import Path
from rolloutd.store.postgresql.connection import Address, PostgresqlConnection
from rolloutd.store.postgresql.lease import PostgresqlLease

async def main() -> None:
    address = Address(sys.argv[1], lease_s=6.0)
    lease, session = PostgresqlLease(address, Path(sys.argv[2])), PostgresqlConnection(address, {})
    await lease.acquire()
    counters = set()
    while len(counters) < 3 and not lease.lost.is_set():
        counters.add(session.execute("SELECT counter FROM lease").fetchone())
        await asyncio.sleep(0.05)
    print("lost" if lease.lost.is_set() else "leads")
    await lease.release()

asyncio.run(main())
"""


@pytest.mark.skipif(FAKETIME is None, reason="needs libfaketime (Debian: faketime)")
def test_daemon_with_another_clock_keeps_its_lease(postgresql: Postgresql, tmp_path: Path) -> None:
    address = postgresql.address(postgresql.emptied_database())
    done = subprocess.run(
        [sys.executable, "-c", RENEW_TWICE, address.dsn, tmp_path],
        env={**os.environ, "LD_PRELOAD": str(FAKETIME), "FAKETIME": "+1h"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.stdout == "leads\n", done.stderr
