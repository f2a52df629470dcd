"""Upkeep over real files: what the doctor finds, what a copy holds, what a restore keeps safe."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from machines.model.events import RequestDenied
from machines.model.rollout import DAEMON
from rolloutd.admin.forgotten_runs import set_aside
from rolloutd.service.reload import TeamPlanCompiler
from rolloutd.store import SqliteBackend, StateLock, open_store
from rolloutd.store.sqlite import backup, database, files
from rolloutd.store.sqlite.backup import EPOCH_INCREMENT
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.forked_process import ADMIN, run_forked
from tests.support.haproxy import Haproxy

DATABASE = "rolloutd.sqlite"

LIMIT_S = 120.0
"""A command takes a second; on a loaded machine some times that."""

Ctl = Callable[..., subprocess.CompletedProcess[str]]


LISTING = {"_meta": {"hostvars": {"n1": {"team": "t1"}}}, "all": {"hosts": ["n1"]}}


@pytest.fixture(scope="module")
def ansible(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that answers as Ansible does, which takes most of the doctor's CPU time to start."""
    directory = tmp_path_factory.mktemp("bin")
    for name, answer in (
        ("ansible-playbook", "ansible-playbook [core 2.19.0]"),
        ("ansible-inventory", json.dumps(LISTING)),
    ):
        (directory / name).write_text(f"#!/bin/sh\necho '{answer}'\n")
        (directory / name).chmod(0o755)
    return directory / "ansible-playbook"


@pytest.fixture
def state_root(tmp_path: Path, ansible: Path) -> Path:
    """A directory with settings, an inventory of one node, and a state directory."""
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"n1": {"team": "t1"}}}}))
    settings = {
        "state_dir": "state",
        "socket": "s",
        "inventory": [{"ansible": {"path": "hosts.yml"}}],
        "ansible": {"bin": str(ansible)},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "state").mkdir(mode=0o700)
    return tmp_path


@pytest.fixture
def ctl(state_root: Path) -> Iterator[Ctl]:
    """Run an admin command on these settings, as rolloutctl does."""

    def run(verb: str, *words: str) -> subprocess.CompletedProcess[str]:
        options = [word if word.startswith("--") else f"--file={word}" for word in words]
        return run_forked(
            ADMIN, [verb, *options, "--config", str(state_root / "config.yaml")], timeout_s=LIMIT_S
        )

    return run


async def write(state_root: Path, *calls: str) -> None:
    """Be a daemon for a moment that audits these calls."""
    store = await open_store(state_root / "state", compile_plan=TeamPlanCompiler({}))
    for call in calls:
        await store.commit([RequestDenied(DAEMON, call, "why", 1.0)], actor=DAEMON, cause="test", at=1.0)
    await store.close()


def epoch_of(state_root: Path) -> int:
    """Return the epoch of the database."""
    with closing(sqlite3.connect(state_root / "state" / DATABASE)) as connection:
        (epoch,) = connection.execute("SELECT epoch FROM term").fetchone()
    return int(epoch)


def alter(state_root: Path) -> None:
    """Change the audit as somebody with a shell would."""
    with closing(sqlite3.connect(state_root / "state" / DATABASE)) as connection:
        connection.execute("UPDATE audit SET entry = replace(entry, 'why', 'wny') WHERE seq = 1")
        connection.commit()


def silent(path: Path) -> None:
    """Be somebody at the socket who takes one question and hangs up."""
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.listen(1)

    def hang_up() -> None:
        with sock:
            sock.accept()[0].close()

    threading.Thread(target=hang_up, daemon=True).start()


async def test_the_doctor_finds_nothing_where_nothing_is(state_root: Path, ctl: Ctl) -> None:
    """Every subject has its line, and the exit code is 0; with the real Ansible."""
    settings = yaml.safe_load((state_root / "config.yaml").read_text())
    del settings["ansible"]
    (state_root / "config.yaml").write_text(yaml.safe_dump(settings))
    await write(state_root, "one")
    done = ctl("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert all(line.startswith("ok    ") for line in said)
    subjects = [line.split(":")[0].removeprefix("ok    ") for line in said]
    assert subjects[:3] == ["settings", "state directory", "disk"]
    assert {"database", "audit", "invariants", "ansible", "ssh", "daemon"} <= set(subjects)
    assert any(line.endswith("hosts.yml: 1 node") for line in said)


def test_the_doctor_says_what_the_shelves_take(state_root: Path, ctl: Ctl) -> None:
    run = state_root / "state" / "runs" / "r.n1.1.configure.1"
    run.mkdir(parents=True)
    (run / "output").write_bytes(bytes(3 * 2**20))
    assert "runs 3 MiB, trees 0 MiB, git 0 MiB, artifacts 0 MiB" in ctl("doctor").stdout


def test_the_doctor_works_before_the_first_start(state_root: Path, ctl: Ctl) -> None:
    """No database is no mistake."""
    done = ctl("doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {f["subject"]: f["ok"] for f in json.loads(done.stdout)}["database"] is True


def test_the_doctor_misses_a_database_of_which_the_rest_is_there(state_root: Path, ctl: Ctl) -> None:
    """Logs of runs come of a database: a daemon that starts without it would know of no rollout."""
    (state_root / "state" / "runs" / "r.n1.1.configure.1").mkdir(parents=True)
    said = ctl("doctor").stdout
    assert "WRONG database: " in said
    assert "is gone, and what belongs to it is there (runs)" in said


@pytest.mark.parametrize(
    ("breaking", "subject", "advice"),
    [
        ("mistake", "settings", "max_parallel"),
        ("no inventory", "settings", "no inventory; run rolloutctl init"),
        ("open state", "state directory", "chmod 700"),
        ("altered audit", "audit", "compare with a backup"),
        ("damage", "database", "damaged"),
        (
            "no such person",
            "people",
            "teams.t1.members: nobody-here, teams.t1.members: @nor-they, socket_group: none",
        ),
        ("no ansible", "ansible", "install ansible-core"),
        ("no key", "ssh", "make it, or change"),
        ("no service key", "service_accounts.itsm.key_file", "so itsm cannot vote"),
        ("no hosts", "ansible:", "name an existing file"),
    ],
)
async def test_the_doctor_says_what_to_do(
    state_root: Path, ctl: Ctl, breaking: str, subject: str, advice: str
) -> None:
    """One thing that is wrong is one line, and exit code 1."""
    await write(state_root, *(str(number) for number in range(50)))
    settings = yaml.safe_load((state_root / "config.yaml").read_text())
    match breaking:
        case "mistake":
            settings["max_parallel"] = "many"
        case "no inventory":
            del settings["inventory"]
        case "open state":
            (state_root / "state").chmod(0o755)
        case "altered audit":
            alter(state_root)
        case "damage":
            with (state_root / "state" / DATABASE).open("r+b") as file:
                file.seek(4096 * 2)
                file.write(os.urandom(4096 * 4))
        case "no such person":
            settings["teams"] = {"t1": {"members": ["root", "nobody-here", "@nor-they"]}}
            settings["socket_group"] = "none"
        case "no ansible":
            settings["ansible"] = {"bin": "/nowhere/ansible-playbook"}
        case "no key":
            settings["ssh"] = {"key_file": "id_missing"}
        case "no service key":
            settings["service_accounts"] = {"itsm": {"key_file": "none", "teams": ["infra"]}}
        case "no hosts":
            del settings["ansible"]
            (state_root / "hosts.yml").unlink()
    (state_root / "config.yaml").write_text(yaml.safe_dump(settings))
    done = ctl("doctor")
    wrong = [line for line in done.stdout.splitlines() if line.startswith("WRONG ")]
    assert done.returncode == 1
    found = [line for line in wrong if line.startswith(f"WRONG {subject}")]
    assert found, done.stdout + done.stderr
    assert advice in found[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give the directory away")
def test_the_doctor_examines_a_state_directory_of_nobody(state_root: Path, ctl: Ctl) -> None:
    """It may come from another machine: an owner without a name here is shown by number."""
    os.chown(state_root / "state", 4242, 4242)
    done = ctl("doctor")
    assert done.returncode == 1
    assert "uid 4242, which is unknown on this machine; chown" in done.stdout, done.stderr
    assert "ok    ansible" in done.stdout


def test_the_doctor_tells_silence_from_absence(state_root: Path, ctl: Ctl) -> None:
    """A daemon that hangs up, as one does that cannot start, is not one that was never started."""
    assert "ok    daemon: not running" in ctl("doctor").stdout
    silent(state_root / "s")
    assert re.search("WRONG daemon: .* `systemctl status rolloutd`", ctl("doctor").stdout)


@pytest.mark.parametrize(
    ("enabled", "active", "listens", "expected"),
    [
        (
            "enabled",
            "failed",
            True,
            "WRONG daemon: not running at {socket}, but rolloutd.service is enabled and failed;",
        ),
        (
            "enabled",
            "inactive",
            True,
            "WRONG daemon: not running at {socket}, but rolloutd.service is enabled and inactive;",
        ),
        (
            "disabled",
            "activating",
            True,
            "WRONG daemon: not running at {socket}, but rolloutd.service is activating;",
        ),
        ("disabled", "inactive", True, "ok    daemon: not running at {socket}"),
        ("enabled", "active", False, "ok    daemon: not running at {socket}"),
    ],
)
def test_stopped_daemon_of_enabled_unit_fails(
    state_root: Path,
    ctl: Ctl,
    monkeypatch: pytest.MonkeyPatch,
    enabled: str,
    active: str,
    listens: bool,
    expected: str,
) -> None:
    socket_path = state_root / "s" if listens else "/run/other.sock"
    units = (
        f"Id=rolloutd.socket\nUnitFileState=disabled\nActiveState=inactive\nListen={socket_path} (Stream)\n",
        f"Id=rolloutd.service\nUnitFileState={enabled}\nActiveState={active}",
    )
    (state_root / "systemctl").write_text("#!/bin/sh\ncat <<END\n" + "\n".join(units) + "\nEND\n")
    (state_root / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{state_root}:{os.environ['PATH']}")
    done = ctl("doctor")
    assert expected.format(socket=state_root / "s") in done.stdout
    assert done.returncode == (1 if expected.startswith("WRONG") else 0), done.stdout


def test_socket_without_listener_fails(state_root: Path, ctl: Ctl) -> None:
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(state_root / "s"))
    done = ctl("doctor")
    assert (done.returncode, "WRONG daemon: not running at" in done.stdout) == (1, True)
    assert "but the socket is there; read journalctl -u rolloutd -e" in done.stdout


async def test_the_doctor_names_the_rights_that_a_cluster_lacks_one_by_one(
    state_root: Path, ctl: Ctl
) -> None:
    """Asked of the API server itself, whether or not a daemon runs."""
    async with FakeKubernetes() as fake:
        reading = {"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["get", "list", "watch"]}
        asking = {
            "apiGroups": ["authorization.k8s.io"],
            "resources": ["selfsubjectaccessreviews"],
            "verbs": ["create"],
        }
        fake.kubeconfig(state_root / "all")
        fake.kubeconfig(state_root / "few", token=fake.token((reading, asking)))
        clusters = [{"name": name, "kubeconfig": str(state_root / name)} for name in ("all", "few")]
        settings = yaml.safe_load((state_root / "config.yaml").read_text())
        settings["inventory"] = [{"kubernetes": cluster} for cluster in clusters]
        (state_root / "config.yaml").write_text(yaml.safe_dump(settings))
        said = (await asyncio.to_thread(ctl, "doctor")).stdout.splitlines()
    assert "ok    kubernetes/all rights: all that are needed" in said
    wrong = [line for line in said if line.startswith("WRONG kubernetes/few rights: ")]
    assert [line.partition("may not ")[2].partition(",")[0] for line in wrong] == [
        "patch nodes",
        "patch nodes/status",
        "create events",
        "patch events",
        "create pods/eviction",
        "list poddisruptionbudgets (policy)",
        "watch poddisruptionbudgets (policy)",
    ]


async def test_a_backup_is_whole_while_a_daemon_writes(state_root: Path, ctl: Ctl) -> None:
    """What was committed before is in it, and its chain verifies by itself."""
    store = await open_store(state_root / "state", compile_plan=TeamPlanCompiler({}))
    try:
        refused = RequestDenied(DAEMON, "call", "why", 1.0)
        await store.commit([refused], actor=DAEMON, cause="test", at=1.0)
        done = ctl("backup", str(state_root / "copy.sqlite"))
        await store.commit([refused], actor=DAEMON, cause="test", at=1.0)
    finally:
        await store.close()
    assert done.returncode == 0, done.stderr
    assert "trees" in done.stderr
    verdict = SqliteBackend(state_root / "copy.sqlite").verify_chain()
    assert (verdict.ok, verdict.entries) == (True, 1)
    assert verdict.head in done.stdout
    assert (state_root / "copy.sqlite").stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in state_root.iterdir()) == [
        "config.yaml",
        "copy.sqlite",
        "hosts.yml",
        "state",
    ]


@pytest.mark.parametrize("own", [DATABASE, f"{DATABASE}-wal", "lock"])
async def test_a_backup_never_takes_the_place_of_the_database(state_root: Path, ctl: Ctl, own: str) -> None:
    """By whatever way the path leads there: a daemon would write on into a file without a name."""
    store = await open_store(state_root / "state", compile_plan=TeamPlanCompiler({}))
    try:
        (state_root / "way").symlink_to(state_root / "state")
        before = (state_root / "state" / DATABASE).stat().st_ino
        done = await asyncio.to_thread(ctl, "backup", str(state_root / "way" / own))
        assert done.returncode == 1
        assert "the daemon itself uses it" in done.stderr
        assert (state_root / "state" / DATABASE).stat().st_ino == before
    finally:
        await store.close()


async def test_a_restore_that_is_ended_in_its_middle_leaves_a_database(
    state_root: Path, ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that starts then must find one: it would make an empty one, and know of nothing."""
    await write(state_root, "one")
    ctl("backup", str(state_root / "copy.sqlite"))
    await write(state_root, "two")

    def end(draft: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "move_into_place", end)
    with pytest.raises(KeyboardInterrupt):
        backup.restore(state_root / "state", state_root / "copy.sqlite", set_aside)
    assert SqliteBackend(state_root / "state" / DATABASE).verify_chain().entries == 2


async def test_two_restores_in_one_second_keep_both_databases(state_root: Path, ctl: Ctl) -> None:
    await write(state_root, "one")
    ctl("backup", str(state_root / "copy.sqlite"))
    kept = {
        backup.restore(state_root / "state", state_root / "copy.sqlite", set_aside).previous_database
        for _ in range(3)
    }
    assert len(kept) == 3
    assert all(path is not None and SqliteBackend(path).verify_chain().ok for path in kept)


async def test_a_restore_goes_back_in_everything_but_the_epoch(state_root: Path, ctl: Ctl) -> None:
    """Nodes refuse older epochs, so the epoch never goes back; the lost database is kept."""
    await write(state_root, "one")
    ctl("backup", str(state_root / "copy.sqlite"))
    await write(state_root, "two")
    await write(state_root, "three")
    newest = epoch_of(state_root)
    done = ctl("restore", str(state_root / "copy.sqlite"), "--json")
    assert done.returncode == 0, done.stderr
    assert epoch_of(state_root) == newest
    restored = json.loads(done.stdout)
    assert SqliteBackend(Path(restored["kept"])).verify_chain().entries == 3
    assert SqliteBackend(state_root / "state" / DATABASE).verify_chain().entries == 1
    await write(state_root, "four")
    assert SqliteBackend(state_root / "state" / DATABASE).verify_chain().ok


async def test_a_restore_over_a_lost_database_leaps(state_root: Path, ctl: Ctl) -> None:
    """Where nobody knows the newest epoch it goes far beyond the copy's."""
    await write(state_root, "one")
    ctl("backup", str(state_root / "copy.sqlite"))
    (state_root / "state" / DATABASE).write_bytes(b"no database")
    assert ctl("restore", str(state_root / "copy.sqlite")).returncode == 0
    assert epoch_of(state_root) == 1 + EPOCH_INCREMENT


async def test_a_restore_is_refused_under_a_daemon(state_root: Path, ctl: Ctl) -> None:
    """The daemon's lock stands before it, and nothing is changed."""
    await write(state_root, "one")
    ctl("backup", str(state_root / "copy.sqlite"))
    lock = StateLock(state_root / "state")
    await lock.acquire()
    try:
        done = ctl("restore", str(state_root / "copy.sqlite"))
    finally:
        await lock.release()
    assert done.returncode == 1
    assert f"pid {os.getpid()}" in done.stderr
    assert SqliteBackend(state_root / "state" / DATABASE).verify_chain().entries == 1


async def test_a_broken_chain_is_copied_loudly_and_never_restored(state_root: Path, ctl: Ctl) -> None:
    """A copy of what is there is worth having; going on from it is not."""
    await write(state_root, "one", "two")
    ctl("backup", str(state_root / "good.sqlite"))
    alter(state_root)
    done = ctl("backup", str(state_root / "copy.sqlite"))
    assert done.returncode == 1
    assert "BROKEN" in done.stderr
    done = ctl("restore", str(state_root / "copy.sqlite"))
    assert done.returncode == 1
    assert "audit chain is broken" in done.stderr
    assert "it stays" in ctl("backup", str(state_root / "good.sqlite")).stderr
    assert ctl("restore", str(state_root / "good.sqlite")).returncode == 0


@pytest.mark.parametrize("content", [b"", b"text", None])
async def test_what_is_no_copy_is_not_restored(state_root: Path, ctl: Ctl, content: bytes | None) -> None:
    """The database stays as it is."""
    await write(state_root, "one")
    if content is not None:
        (state_root / "copy.sqlite").write_bytes(content)
    done = ctl("restore", str(state_root / "copy.sqlite"))
    assert done.returncode == 1
    assert "stop the daemon" not in done.stderr
    assert SqliteBackend(state_root / "state" / DATABASE).verify_chain().entries == 1


@pytest.mark.parametrize(
    ("target", "says"), [("state", "it is a directory"), ("none/x", "no such directory")]
)
async def test_a_backup_that_has_no_place_is_told_so(
    state_root: Path, ctl: Ctl, target: str, says: str
) -> None:
    await write(state_root, "one")
    done = ctl("backup", str(state_root / target))
    assert done.returncode == 1
    assert says in done.stderr


def test_the_doctor_finds_nothing_wrong_with_a_database_of_an_older_version(
    state_root: Path, ctl: Ctl
) -> None:
    """As between an upgrade's two steps: the daemon that starts next brings it up to date."""
    path = state_root / "state" / DATABASE
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        database._migrate(connection, *database._migrations()[0])
    path.chmod(0o600)
    done = ctl("doctor")
    assert done.returncode == 0, done.stdout
    assert "older than this version: a start brings it up to date" in done.stdout


@pytest.mark.servers("haproxy")
@pytest.mark.parametrize(("level", "ok"), [("admin", True), ("operator", False)])
def test_doctor_requires_admin_level_of_balancers(state_root: Path, ctl: Ctl, level: str, ok: bool) -> None:
    balancer = Haproxy(state_root / "lb", {"n1": 9, "n2": 9}, level=level).start()
    try:
        settings = yaml.safe_load((state_root / "config.yaml").read_text())
        settings["haproxy"] = {
            "near": {"tcp": f"127.0.0.1:{balancer.admin_port}"},
            "far": {"node": "n1", "socket": "/x"},
        }
        (state_root / "config.yaml").write_text(yaml.safe_dump(settings))
        results = {each["subject"]: each for each in json.loads(ctl("doctor", "--json").stdout)}
    finally:
        balancer.stop()
    near = results["haproxy near"]
    assert near["ok"] is ok
    assert ("2 servers in 1 backend" in near["text"], "level admin" in near["text"]) == (ok, True)
    assert results["haproxy far"]["text"].startswith("not tested")
