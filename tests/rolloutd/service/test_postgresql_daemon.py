"""Daemons whose store is in a real PostgreSQL: one leads, the other takes over, `doctor` examines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from rolloutd import app
from rolloutd.admin.__main__ import main
from rolloutd.admin.disk import check_database
from rolloutd.control import standby
from rolloutd.control.client import ApiError, Client, DaemonUnreachable
from rolloutd.control.route_table import ROUTES
from rolloutd.engine.background import standby_follower
from rolloutd.errors import InvalidFile, LeadershipLost, StoreFailed
from rolloutd.settings import Settings, load
from rolloutd.store import open_store
from rolloutd.store.postgresql import lease
from rolloutd.store.postgresql.connection import Address
from tests.contracts.store_backends import plan_of
from tests.rolloutd.service.test_leadership import until
from tests.support.postgresql import OWNER, Postgresql

pytestmark = pytest.mark.servers("postgresql")


def settings_of(root: Path, name: str, dsn: str, key: bytes = b"k" * 32) -> Settings:
    root.joinpath(name).mkdir(mode=0o700)
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
    first, second = (settings_of(tmp_path, each, dsn) for each in ("a", "b"))
    leading = asyncio.create_task(app.serve(first))
    await until(first.socket.exists)
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
    await until(second.socket.exists)
    health = await asyncio.to_thread(Client(second.socket).get, "/v1/health")
    assert health["epoch"] == epoch + 1
    assert not health["trouble"]
    waiting.cancel()
    await asyncio.wait((waiting,))


@asynccontextmanager
async def leader_and_standby(
    postgresql: Postgresql, root: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Client, Client, asyncio.Task[None]]]:
    """A leader, and a standby that answers."""
    monkeypatch.setattr(lease, "POLL_S", 0.05)
    monkeypatch.setattr(app, "RENEW_S", 0.1)
    monkeypatch.setattr(standby_follower, "POLL_S", 0.05)
    dsn = postgresql.address(postgresql.emptied_database()).dsn
    first, second = (settings_of(root, each, dsn) for each in ("a", "b"))
    leading = asyncio.create_task(app.serve(first))
    await until(first.socket.exists)
    await asyncio.to_thread(Client(first.socket).get, "/v1/health")
    # Not before: the first would answer as a standby until it leads.
    monkeypatch.setattr(standby, "STANDBY_AFTER_S", 0.05)
    waiting = asyncio.create_task(app.serve(second))
    try:
        await until(second.socket.exists)
        async with asyncio.timeout(30):
            while not (await asyncio.to_thread(Client(first.socket).get, "/v1/status"))["standbys"]:
                await asyncio.sleep(0.05)
        yield Client(first.socket), Client(second.socket), leading
    finally:
        for task in (waiting, leading):
            task.cancel()
        await asyncio.wait((waiting, leading))


async def test_standby_answers_what_the_store_knows(
    postgresql: Postgresql, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leader_and_standby(postgresql, tmp_path, monkeypatch) as (leader, other, _):
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
    async with leader_and_standby(postgresql, tmp_path, monkeypatch) as (leader, other, leading):
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


async def test_daemon_with_another_redaction_key_is_refused(postgresql: Postgresql, tmp_path: Path) -> None:
    dsn = postgresql.address(postgresql.emptied_database()).dsn
    first = settings_of(tmp_path, "a", dsn)
    leading = asyncio.create_task(app.serve(first))
    await until(first.socket.exists)
    await asyncio.to_thread(Client(first.socket).get, "/v1/health")
    leading.cancel()
    await asyncio.wait((leading,))
    with pytest.raises(StoreFailed, match="redaction key: it is not the key of this store; copy that of"):
        await app.serve(settings_of(tmp_path, "b", dsn, b"another" * 5))


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
    settings_of(tmp_path, "a", postgresql.address("x").dsn)
    assert main([verb, f"--config={tmp_path / 'a.yaml'}", f"--file={tmp_path / 'copy'}"]) == 1
    assert "use pg_dump and pg_restore, see docs/postgresql.md" in capsys.readouterr().err
