"""Daemons whose store is in a real PostgreSQL: one leads, the other takes over, `doctor` examines."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from rolloutd import app
from rolloutd.admin import __main__ as admin
from rolloutd.admin.__main__ import main
from rolloutd.admin.disk import check_database
from rolloutd.control import standby
from rolloutd.control.client import ApiError, Client, DaemonUnreachable
from rolloutd.control.route_table import ROUTES
from rolloutd.engine.background import standby_follower
from rolloutd.errors import InvalidFile, LeadershipLost, StoreFailed
from rolloutd.settings import Settings, load
from rolloutd.store import open_store, prepare_postgresql
from rolloutd.store.postgresql import lease
from rolloutd.store.postgresql.commit_mark import FILE_NAME as MARK
from rolloutd.store.postgresql.commit_mark import CommitMark
from rolloutd.store.postgresql.connection import Address
from tests.contracts.store_backends import plan_of
from tests.support.postgresql import OWNER, ROLE, Postgresql, running_server
from tests.support.waiting import wait_in_loop_until

pytestmark = pytest.mark.servers("postgresql")


def write_settings(root: Path, name: str, dsn: str, key: bytes = b"k" * 32) -> Settings:
    root.joinpath(name).mkdir(mode=0o700, exist_ok=True)
    key_file = root / f"{key[0]}.key"
    key_file.write_bytes(key)
    file = root / f"{name}.yaml"
    file.write_text(
        f"name: daemon-{name}\nstate_dir: {root / name}\nsocket: {root / name}.sock\n"
        f"redaction_key_file: {key_file}\n"
        f"store: {{postgresql: {{dsn: '{dsn}', lease: 60s}}}}\n"
    )
    return load(file)


async def test_standby_serves_after_the_leader_has_lost_its_lease(
    postgresql: Postgresql, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "POLL_S", 0.05)
    monkeypatch.setattr(app, "RENEW_S", 0.1)
    name = postgresql.emptied_database()
    dsn = postgresql.address(name).dsn
    first, second = (write_settings(tmp_path, each, dsn) for each in ("a", "b"))
    leading = asyncio.create_task(app.serve(first))
    await wait_in_loop_until(first.socket.exists)
    epoch = (await asyncio.to_thread(Client(first.socket).get, "/v1/health"))["epoch"]
    waiting = asyncio.create_task(app.serve(second))
    await asyncio.wait((waiting, leading), timeout=0.5)
    assert not second.socket.exists()
    assert not leading.done()
    with postgresql.connect(name) as admin:
        admin.execute("UPDATE rolloutd.lease SET holder = ''")
    with pytest.raises(ExceptionGroup) as ended:
        await asyncio.wait_for(leading, 30)
    assert ended.group_contains(LeadershipLost)
    await wait_in_loop_until(second.socket.exists)
    health = await asyncio.to_thread(Client(second.socket).get, "/v1/health")
    assert health["epoch"] == epoch + 1
    assert not health["trouble"]
    waiting.cancel()
    await asyncio.wait((waiting,))


@asynccontextmanager
async def leader_and_standby(
    dsn: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Client, Client, asyncio.Task[None], asyncio.Task[None]]]:
    """A leader, and a standby that answers, with their tasks."""
    monkeypatch.setattr(lease, "POLL_S", 0.05)
    monkeypatch.setattr(app, "RENEW_S", 0.1)
    monkeypatch.setattr(standby_follower, "POLL_S", 0.05)
    monkeypatch.setattr(standby, "STANDBY_AFTER_S", 30.0)
    first, second = (write_settings(root, each, dsn) for each in ("a", "b"))
    leading = asyncio.create_task(app.serve(first))
    await wait_in_loop_until(first.socket.exists)
    await asyncio.to_thread(Client(first.socket).get, "/v1/health")
    # Not before: the first would answer as a standby until it leads.
    monkeypatch.setattr(standby, "STANDBY_AFTER_S", 0.05)
    waiting = asyncio.create_task(app.serve(second))
    try:
        await wait_in_loop_until(second.socket.exists)
        async with asyncio.timeout(30):
            while not (await asyncio.to_thread(Client(first.socket).get, "/v1/status"))["standbys"]:
                await asyncio.sleep(0.05)
        yield Client(first.socket), Client(second.socket), leading, waiting
    finally:
        for task in (waiting, leading):
            task.cancel()
        await asyncio.wait((waiting, leading))


async def test_standby_answers_what_the_store_knows(
    postgresql: Postgresql, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dsn = postgresql.address(postgresql.emptied_database()).dsn
    async with leader_and_standby(dsn, tmp_path, monkeypatch) as (leader, other, *_):
        body = {"scope": "all", "reason": "a storm"}
        await asyncio.to_thread(leader.post, "/v1/freezes", body)
        seq = (await asyncio.to_thread(leader.get, "/v1/audit/head"))["seq"]

        async def has_followed() -> bool:
            status = await asyncio.to_thread(leader.get, "/v1/status")
            return [each["behind_entries"] for each in status["standbys"]] == [0] and status["seq"] == seq

        async with asyncio.timeout(30):
            while not await has_followed():
                await asyncio.sleep(0.05)
        there = await asyncio.to_thread(leader.get, "/v1/status")
        here = await asyncio.to_thread(other.get, "/v1/status")
        assert (there["role"], here["role"]) == ("leader", "standby")
        name = there["leader"]["name"]
        assert name == "daemon-a"
        assert (here["leader"]["name"], here["leader"]["epoch"]) == (name, there["leader"]["epoch"])
        assert here["seq"] == there["seq"]
        assert [each["name"] for each in there["standbys"]] == ["daemon-b"]
        assert there["synchronous"] is False
        for path in (each.path for each in ROUTES if each.on_standby and "{" not in each.path):
            if path not in ("/v1/status", "/v1/health", "/v1/events", "/v1/settings"):
                answers = [await asyncio.to_thread(client.get, path) for client in (leader, other)]
                assert answers[0] == answers[1], path
        refused = "this daemon: it is a standby, daemon-a leads; send the request there"
        for call in (
            lambda: other.post("/v1/freezes", body),
            lambda: other.get("/v1/rollouts/x/nodes/y/why"),
        ):
            with pytest.raises(ApiError, match=refused) as error:
                await asyncio.to_thread(call)
            assert (error.value.status, error.value.code) == (503, "not-leader")


async def test_leader_that_steps_down_is_followed_at_once(
    postgresql: Postgresql, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dsn = postgresql.address(postgresql.emptied_database()).dsn
    async with leader_and_standby(dsn, tmp_path, monkeypatch) as (leader, other, leading, _):
        reason = {"reason": "new kernel"}
        answer = await asyncio.to_thread(leader.post, "/v1/leader/step-down", reason)
        assert answer == {"standbys": ["daemon-b"]}
        with pytest.raises(LeadershipLost, match="it stepped down; its next start is a standby"):
            await asyncio.wait_for(asyncio.shield(leading), 30)
        async with asyncio.timeout(30):
            while True:
                with suppress(DaemonUnreachable):
                    status = await asyncio.to_thread(other.get, "/v1/status")
                    if status["role"] == "leader":
                        break
                await asyncio.sleep(0.05)
        assert status["leader"]["name"] == "daemon-b"
        entries = (await asyncio.to_thread(other.get, "/v1/audit?kind=LeaderSteppedDown"))["entries"]
        assert len(entries) == 1
        with pytest.raises(ApiError, match="no standby is there; start a second daemon first"):
            await asyncio.to_thread(other.post, "/v1/leader/step-down", reason)


async def test_pair_stops_where_a_promoted_server_lacks_the_tail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server() as primary, tempfile.TemporaryDirectory(prefix="pg", dir="/tmp") as directory:
        spare = Postgresql(Path(directory))
        dsn = f"host={primary.directory},{directory} dbname={primary.make_database()} user={ROLE}"
        try:
            spare.copy_of(primary)
            spare.start()
            async with leader_and_standby(dsn, tmp_path, monkeypatch) as (leader, _, *daemons):
                head = (await asyncio.to_thread(leader.get, "/v1/audit/head"))["seq"]
                await wait_in_loop_until(lambda: _replayed(spare) == head)
                with spare.connect() as session:
                    (receiver,) = session.execute("SELECT pid FROM pg_stat_wal_receiver").fetchone() or (0,)
                os.kill(receiver, signal.SIGSTOP)
                await asyncio.to_thread(leader.post, "/v1/freezes", {"scope": "all", "reason": "a storm"})
                lost = (await asyncio.to_thread(leader.get, "/v1/audit/head"))["seq"]
                assert lost > head
                mark = CommitMark(tmp_path / "b")
                await wait_in_loop_until(lambda: (mark.read() or (0, 0))[1] == lost)
                await asyncio.to_thread(primary.stop)
                os.kill(receiver, signal.SIGKILL)
                await asyncio.to_thread(spare.promote)
                results = await asyncio.wait_for(asyncio.gather(*daemons, return_exceptions=True), 60)
        finally:
            spare.stop()
    for result in results:
        assert f"entries {head + 1} to {lost} are gone" in repr(result)


async def test_pair_ends_where_an_older_copy_was_restored_below_it(
    postgresql: Postgresql, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `pg_restore --clean` does it: the database and the sessions stay, its rows are older."""
    name = postgresql.emptied_database()
    async with leader_and_standby(postgresql.dsn(name, ROLE), tmp_path, monkeypatch) as (leader, _, *daemons):
        await asyncio.to_thread(leader.post, "/v1/freezes", {"scope": "all", "reason": "a storm"})
        head = (await asyncio.to_thread(leader.get, "/v1/audit/head"))["seq"]
        await wait_in_loop_until(lambda: (CommitMark(tmp_path / "b").read() or (0, 0))[1] >= head)
        with postgresql.connect(name) as admin:
            admin.execute(
                "BEGIN; SET LOCAL session_replication_role = replica; SET LOCAL search_path = rolloutd;"
                f"ALTER TABLE audit DISABLE TRIGGER refuse_change; DELETE FROM audit WHERE seq >= {head};"
                "ALTER TABLE audit ENABLE ALWAYS TRIGGER refuse_change; COMMIT"
            )
        results = await asyncio.wait_for(asyncio.gather(*daemons, return_exceptions=True), 60)
    # The leader may notice at its next commit, or when it renews its lease.
    assert re.search(rf"entries {head} to \d+ are gone|its last entry is {head - 1}, not", repr(results[0]))
    assert f"entries {head} to" in repr(results[1])


async def test_restored_pair_leads_in_a_later_term(
    postgresql: Postgresql, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of docs/postgresql.md, which an upgrade with a migration shares: both down, prepare."""
    name, restored = postgresql.make_database(), postgresql.make_database("template1")
    prepare_postgresql(postgresql.dsn(name, OWNER), None, ROLE)
    backup = postgresql.directory / "backup"
    async with leader_and_standby(postgresql.address(name).dsn, tmp_path, monkeypatch) as (leader, *_):
        await asyncio.to_thread(postgresql.run, "pg_dump", "-Fc", "-f", backup, "-d", postgresql.dsn(name))
        await asyncio.to_thread(leader.post, "/v1/freezes", {"scope": "all", "reason": "a storm"})
        seq = (await asyncio.to_thread(leader.get, "/v1/audit/head"))["seq"]
        epoch = (await asyncio.to_thread(leader.get, "/v1/health"))["epoch"]
        await wait_in_loop_until(lambda: (CommitMark(tmp_path / "b").read() or (0, 0))[1] == seq)
    await asyncio.to_thread(postgresql.run, "pg_restore", "-d", postgresql.dsn(restored), backup)
    dsn = postgresql.address(restored).dsn
    both = [write_settings(tmp_path, each, dsn) for each in ("a", "b")]
    for refusal in ("it is a copy of another database; run", f"entries {seq} to {seq} are gone"):
        for settings in both:
            with pytest.raises(StoreFailed, match=refusal):
                await app.serve(settings)
        prepare_postgresql(postgresql.dsn(restored, OWNER), None, ROLE)
    for settings in both:
        (settings.state_dir / MARK).unlink()
    async with leader_and_standby(dsn, tmp_path, monkeypatch) as (leader, *_):
        assert (await asyncio.to_thread(leader.get, "/v1/health"))["epoch"] > epoch
        assert "a storm" not in str(await asyncio.to_thread(leader.get, "/v1/audit"))
        assert (await asyncio.to_thread(leader.get, "/v1/audit/verify"))["ok"]
    backup.unlink()
    for each in (name, restored):
        postgresql.drop_database(each)


def _replayed(server: Postgresql) -> int:
    with server.connect("test_1") as session:
        (seq,) = session.execute("SELECT max(seq) FROM rolloutd.audit").fetchone() or (0,)
        return int(seq)


async def test_store_of_a_live_daemon_is_not_moved(
    postgresql: Postgresql,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dsn = postgresql.address(postgresql.emptied_database()).dsn
    leader = write_settings(tmp_path, "a", dsn)
    write_settings(tmp_path, "b", dsn)
    key = tmp_path / "107.key"  # as write_settings() names it
    (tmp_path / "file.yaml").write_text(f"state_dir: {tmp_path / 'c'}\nredaction_key_file: {key}\n")
    # Two leases and this: the move waits, because a leader may have been killed.
    monkeypatch.setattr(admin, "LEAD_MARGIN_S", -119.5)
    leading = asyncio.create_task(app.serve(leader))
    await wait_in_loop_until(leader.socket.exists)
    for name, refusal in (
        ("a", "holds it and runs; stop that daemon"),
        ("b", "the daemon of this store runs; stop it, and each"),
    ):
        words = ["move", f"--from={tmp_path / name}.yaml", f"--to={tmp_path / 'file.yaml'}"]
        assert await asyncio.to_thread(main, words) == 1
        assert refusal in capsys.readouterr().err
    assert not leading.done()
    leading.cancel()
    await asyncio.wait((leading,))


async def test_daemon_with_another_redaction_key_is_refused(postgresql: Postgresql, tmp_path: Path) -> None:
    dsn = postgresql.address(postgresql.emptied_database()).dsn
    first = write_settings(tmp_path, "a", dsn)
    leading = asyncio.create_task(app.serve(first))
    await wait_in_loop_until(first.socket.exists)
    await asyncio.to_thread(Client(first.socket).get, "/v1/health")
    leading.cancel()
    await asyncio.wait((leading,))
    with pytest.raises(StoreFailed, match="redaction key: it is not the key of this store; copy that of"):
        await app.serve(write_settings(tmp_path, "b", dsn, b"another" * 5))


async def test_database_that_is_not_there_is_named(
    postgresql: Postgresql, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(standby, "STANDBY_AFTER_S", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(0.0)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        waiting = asyncio.create_task(
            app.serve(write_settings(tmp_path, "a", postgresql.dsn("absent", ROLE)))
        )
        await wait_in_loop_until(lambda: "it answers nothing" in caplog.text)
        said = b""
        while b"READY=1" not in said:
            with suppress(BlockingIOError):
                said += manager.recv(4096)
            await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait((waiting,))
    assert b"another daemon leads" not in said
    assert 'database "absent" does not exist' in said.decode()


async def test_doctor_examines_server_role_and_replication(postgresql: Postgresql, tmp_path: Path) -> None:
    name = postgresql.emptied_database()
    await (await open_store(tmp_path, postgresql.address(name), compile_plan=plan_of)).close()
    results, is_loadable = check_database(tmp_path, postgresql.address(name))
    checks = {each.subject: each for each in results}
    assert is_loadable
    assert all(each.ok for each in results)
    role = "fleet_daemon may append to the audit, and neither alter nor remove entries"
    assert checks["postgresql role"].text == role
    assert "no standby server" in checks["postgresql replication"].text
    assert "a round trip takes" in checks["postgresql latency"].text
    results, _ = check_database(tmp_path, Address(postgresql.dsn(name, OWNER)))
    assert [each.subject for each in results if not each.ok] == ["postgresql role"]


@pytest.mark.parametrize("owned", ["SCHEMA rolloutd", "DATABASE {name}"])
async def test_doctor_names_a_role_that_may_drop_the_audit(
    postgresql: Postgresql, tmp_path: Path, owned: str
) -> None:
    name = postgresql.make_database()
    with postgresql.connect(name) as superuser:
        superuser.execute(f"ALTER {owned.format(name=name)} OWNER TO {ROLE}")
    await (await open_store(tmp_path, postgresql.address(name), compile_plan=plan_of)).close()
    results, _ = check_database(tmp_path, postgresql.address(name))
    assert [each.subject for each in results if not each.ok] == ["postgresql role"]
    postgresql.drop_database(name)


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ("{postgresql: {dsn: 'host=a password=x'}}", "it has a password"),
        ("{postgresql: {dsn: 'nonsense'}}", "missing"),
        ("{postgresql: {dsn: 'host=a', lease: 1s}}", "each pause would cost the leadership"),
        ("{postgresql: {dsn: 'host=a'}}\nkeep: {audit: 90d}", "the daemon's role removes no entries"),
    ],
)
def test_unusable_database_settings_are_refused(tmp_path: Path, store: str, message: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"state_dir: {tmp_path}\nstore: {store}\n")
    with pytest.raises(InvalidFile, match=message) as invalid:
        load(file)
    assert "password=x" not in str(invalid.value)


@pytest.mark.parametrize("verb", ["backup", "restore"])
def test_backup_of_a_file_names_postgresqls_own(
    postgresql: Postgresql, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    write_settings(tmp_path, "a", postgresql.address("x").dsn)
    assert main([verb, f"--config={tmp_path / 'a.yaml'}", f"--file={tmp_path / 'copy'}"]) == 1
    assert "use pg_dump and pg_restore, see docs/postgresql.md" in capsys.readouterr().err
