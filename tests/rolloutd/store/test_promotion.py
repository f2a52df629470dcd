"""A standby server of PostgreSQL that is promoted: what a daemon finds there, and what it does not."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolloutd.errors import LeadershipLost, StoreFailed
from rolloutd.store.postgresql.commit_mark import FILE_NAME as MARK
from rolloutd.store.postgresql.connection import Address
from tests.contracts.store_backends import write
from tests.rolloutd.store.test_postgresql import all_entries, hold, opened
from tests.support.postgresql import ROLE, Postgresql, running_server

pytestmark = [pytest.mark.servers("postgresql"), pytest.mark.long]


@pytest.fixture
def servers() -> Iterator[tuple[Postgresql, Postgresql]]:
    """A primary and its standby server, which replicates asynchronously."""
    with running_server() as primary:
        directory = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
        standby = Postgresql(directory)
        try:
            standby.copy_of(primary)
            standby.start()
            yield primary, standby
        finally:
            standby.stop()
            shutil.rmtree(directory)


def await_replication(primary: Postgresql) -> None:
    sql = "SELECT count(*) FROM pg_stat_replication WHERE replay_lsn = pg_current_wal_lsn()"
    with primary.connect() as admin:
        while admin.execute(sql).fetchone() != (1,):
            pass


async def test_promoted_server_without_the_last_entries_is_refused(
    servers: tuple[Postgresql, Postgresql], tmp_path: Path
) -> None:
    primary, standby = servers
    address = Address(
        f"host={primary.directory},{standby.directory} port=5432,5432 dbname=prepared user={ROLE}"
    )
    store = await opened(address, tmp_path / "s")
    first_epoch = (await store.load_snapshot()).epoch
    await write(store, hold(1))
    await_replication(primary)
    standby.stop()
    lost = [(await write(store, hold(number)))[0] for number in (2, 3)]
    primary.stop()
    standby.start()
    standby.promote()
    with pytest.raises(StoreFailed):
        await write(store, hold(4))  # it may only find the connection lost
    for _ in range(2):
        with pytest.raises(
            LeadershipLost, match="last entry is 1, but 3 was written: entries 2 to 3 are gone"
        ):
            await write(store, hold(4))
    await store.close()
    with pytest.raises(StoreFailed, match="entries 2 to 3 are gone; inspect the nodes, then remove"):
        await opened(address, tmp_path / "s")
    # A person accepts the loss; the new terms are above each one that the old primary may have granted.
    (tmp_path / "s" / MARK).unlink()
    store = await opened(address, tmp_path / "s")
    assert (await store.load_snapshot()).epoch == 2 << 32 > first_epoch
    (entry,) = await write(store, hold(5))
    assert entry.seq == lost[0].seq
    assert entry.hash != lost[0].hash
    assert len(await all_entries(store)) == 2
    await store.close()


async def test_promotion_without_a_loss_goes_on(
    servers: tuple[Postgresql, Postgresql], tmp_path: Path
) -> None:
    primary, standby = servers
    address = Address(
        f"host={primary.directory},{standby.directory} port=5432,5432 dbname=prepared user={ROLE}"
    )
    store = await opened(address, tmp_path / "s")
    await write(store, hold(1))
    await_replication(primary)
    primary.stop()
    standby.promote()
    # At most the commit that finds the connection lost is refused.
    try:
        await write(store, hold(2))
    except LeadershipLost:
        raise
    except StoreFailed:
        await write(store, hold(2))
    assert [entry.seq for entry in await all_entries(store)] == [1, 2]
    assert (await store.verify_audit()).ok
    await store.close()
