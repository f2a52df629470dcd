"""The daemon under a service manager that the test plays: what it says, when, and what feeds the watchdog."""

from __future__ import annotations

import grp
import json
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolloutd.service import logs
from rolloutd.service.logs import JournalHandler
from rolloutd.service.systemd import SystemdNotifier, inherited_socket
from tests.support.fake_service_manager import LIMIT_S, FakeServiceManager

FAKETIME = next(Path("/usr/lib").rglob("libfaketimeMT.so.1"), None)


@pytest.fixture
def service_manager(tmp_path: Path) -> Iterator[FakeServiceManager]:
    """A service_manager whose daemon has settings and was not started."""
    made = FakeServiceManager(tmp_path)
    made.configure()
    yield made
    made.close()


# -- what is said -------------------------------------------------------------


def test_ready_is_said_after_the_first_decision_and_the_end_is_announced(
    service_manager: FakeServiceManager,
) -> None:
    """READY with a sentence, STOPPING with another, exit code 0."""
    service_manager.start()
    ready = service_manager.wait_for_message(lambda message: "READY=1" in message)
    assert "STATUS=No rollout is live; 0 nodes known." in ready
    assert any("Opening the database" in message for message in service_manager.messages)
    assert service_manager.client.get("/v1/health")["trouble"] is None
    assert service_manager.stop() == 0
    assert "runs continue" in service_manager.wait_for_message(lambda message: "STOPPING=1" in message)


def test_the_watchdog_is_fed_as_long_as_the_loop_turns(service_manager: FakeServiceManager) -> None:
    """Idle as it is, the loop is made to turn and feeds; stopped, it does not."""
    service_manager.start(watchdog_s=0.3)
    for _ in range(5):
        service_manager.wait_for_message(lambda message: message == "WATCHDOG=1")


@pytest.mark.skipif(FAKETIME is None, reason="needs libfaketime (Debian: faketime)")
def test_the_watchdog_is_fed_also_after_the_clock_was_set_back(
    service_manager: FakeServiceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour that comes twice is no hour in which nothing rings; systemd would end the daemon."""
    offset = service_manager.directory / "offset"
    offset.write_text("+0\n")
    monkeypatch.setenv("LD_PRELOAD", str(FAKETIME))
    monkeypatch.setenv("FAKETIME_TIMESTAMP_FILE", str(offset))
    monkeypatch.setenv("FAKETIME_NO_CACHE", "1")
    monkeypatch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
    service_manager.start(watchdog_s=0.9)
    service_manager.wait_for_message(lambda message: message == "WATCHDOG=1")
    offset.write_text("-3600\n")
    service_manager.wait_for_message(lambda message: "the clock was set by -3600 s" in service_manager.log())
    for _ in range(3):
        service_manager.wait_for_message(lambda message: message == "WATCHDOG=1")


def test_a_reload_is_announced_taken_up_and_audited(service_manager: FakeServiceManager) -> None:
    """RELOADING, then READY; who may do what is as the new file says."""
    service_manager.start()
    service_manager.wait_for_message(lambda message: "READY=1" in message)
    service_manager.configure(
        teams={"infra": {"members": ["root"]}, "web": {"members": ["root"]}}, max_parallel=3
    )
    service_manager.signal(signal.SIGHUP)
    service_manager.wait_for_message(lambda message: message.startswith("RELOADING=1\nMONOTONIC_USEC="))
    service_manager.wait_for_message(lambda message: "READY=1" in message)
    assert "web" in service_manager.client.get("/v1/whoami")["teams"]
    (entry,) = service_manager.client.get("/v1/audit?kind=SettingsChanged")["entries"]
    assert entry["entry"]["fields"]["changed"] == ["max_parallel", "teams"]


def test_mistakes_are_refused_said_and_forgotten_once_mended(service_manager: FakeServiceManager) -> None:
    """The old settings stay; status, log and clients are told."""
    service_manager.start()
    service_manager.wait_for_message(lambda message: "READY=1" in message)
    service_manager.configure(max_parallel="many")
    service_manager.signal(signal.SIGHUP)
    service_manager.wait_for_message(lambda message: "RELOADING=1" in message)
    assert "the old ones stay" in service_manager.wait_for_message(lambda message: "READY=1" in message)
    assert "max_parallel" in service_manager.client.get("/v1/status")["trouble"]
    assert "config.yaml:" in service_manager.log()
    service_manager.configure(max_parallel=5)
    service_manager.signal(signal.SIGHUP)
    service_manager.wait_for_message(lambda message: "READY=1" in message)
    assert service_manager.client.get("/v1/status")["trouble"] is None


def test_what_needs_a_restart_is_said(service_manager: FakeServiceManager) -> None:
    """It is not taken up, and nobody has to guess."""
    service_manager.start()
    service_manager.wait_for_message(lambda message: "READY=1" in message)
    service_manager.configure(ssh={"user": "other"})
    service_manager.signal(signal.SIGHUP)
    service_manager.wait_for_message(lambda message: "RELOADING=1" in message)
    assert "restart required to apply: ssh" in service_manager.wait_for_message(lambda m: "READY=1" in m)


def test_a_broken_audit_stops_nothing_and_is_said_loudly(service_manager: FakeServiceManager) -> None:
    """The daemon starts on it; log, status and clients say it."""
    import sqlite3
    from contextlib import closing

    service_manager.start()
    service_manager.wait_for_message(lambda message: "READY=1" in message)
    service_manager.stop()
    with closing(sqlite3.connect(service_manager.directory / "state" / "rolloutd.sqlite")) as connection:
        connection.execute("UPDATE audit SET entry = replace(entry, 'daemon', 'demon') WHERE seq = 1")
        connection.commit()
    # Else the entry is found by the next whole verification, up to a day later.
    (service_manager.directory / "state" / "audit-checkpoint.key").unlink()
    service_manager.start()
    service_manager.wait_for_message(lambda message: "the audit's chain is BROKEN" in message)
    assert "BROKEN" in service_manager.client.get("/v1/status")["trouble"]
    assert "CRITICAL" in service_manager.log()


# -- what is handed over ------------------------------------------------------


def test_a_handed_socket_outlives_the_daemon(service_manager: FakeServiceManager) -> None:
    """Who asks between two daemons is answered by the second one."""
    path = service_manager.directory / "s"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        inode = path.stat().st_ino
        for _ in range(2):
            _start_with(service_manager, listening)
            assert service_manager.client.get("/v1/health")["trouble"] is None
            assert service_manager.stop() == 0
            assert path.stat().st_ino == inode


HAND_OVER = """\
import os, sys
count = int(sys.argv[2])
for number in range(3, 3 + count):
    os.dup2(int(sys.argv[1]), number)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(count), LISTEN_FDNAMES="control")
os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
"""
"""Hands a descriptor over as systemd does: from 3 on, to the very process that LISTEN_PID names."""


def _handed(descriptor: int, count: int, *words: str) -> list[str]:
    return [sys.executable, "-c", HAND_OVER, str(descriptor), str(count), *words]


def _start_with(service_manager: FakeServiceManager, listening: socket.socket) -> None:
    words = ("-m", "rolloutd", "--config", str(service_manager.directory / "config.yaml"))
    with (service_manager.directory / "log").open("ab") as log:
        service_manager.process = subprocess.Popen(
            _handed(listening.fileno(), 1, *words),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[listening.fileno()],
        )


def test_sockets_meant_for_others_are_left_alone() -> None:
    """The variables of another process say nothing, and are not passed on."""
    environ = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x"}
    assert inherited_socket(environ) is None
    assert environ == {}
    assert inherited_socket({}) is None
    assert inherited_socket({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "many"}) is None


def test_more_than_one_socket_is_refused(service_manager: FakeServiceManager) -> None:
    """Which one people use cannot be guessed: the daemon says so and does not start."""
    words = ("-m", "rolloutd", "--config", str(service_manager.directory / "config.yaml"))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(service_manager.directory / "s"))
        listening.listen()
        done = subprocess.run(
            _handed(listening.fileno(), 2, *words),
            pass_fds=[listening.fileno()],
            capture_output=True,
            text=True,
        )
    assert done.returncode == 1
    assert "2 sockets were handed over" in done.stderr


def test_without_a_manager_nothing_is_said() -> None:
    """No socket, no watchdog, no error; a manager that is gone is no error either."""
    quiet = SystemdNotifier.from_environment({})
    quiet.notify_ready("x")
    quiet.ping_watchdog()
    assert quiet.watchdog_ping_interval_s is None
    SystemdNotifier("/nowhere/notify").set_status("x")
    assert (
        SystemdNotifier.from_environment({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}).watchdog_s is None
    )


# -- the log ------------------------------------------------------------------


def test_json_lines_carry_the_cause_and_the_fields(service_manager: FakeServiceManager) -> None:
    """One object per line; a transition names its cause and its actor."""
    service_manager.start("--log-format", "json")
    service_manager.wait_for_message(lambda message: "READY=1" in message)
    service_manager.stop()
    lines = [json.loads(line) for line in service_manager.log().splitlines()]
    (started,) = [line for line in lines if line.get("event") == "DaemonStarted"]
    assert (started["cause"], started["actor"], started["level"]) == ("daemon started", "rolloutd", "info")


def test_the_journal_gets_fields_also_over_several_lines(tmp_path: Path) -> None:
    """The native protocol: NAME=value, or NAME, length and value where there are line breaks."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(tmp_path / "j"))
        handler = JournalHandler(tmp_path / "j")
        record = logging.LogRecord("rolloutd.x", logging.ERROR, __file__, 7, "one\n%s", ("two",), None)
        record.node, record.rollout = "n1", "r-1"
        handler.handle(record)
        handler.close()
        entry = journal.recv(65536)
    assert entry.startswith(b"MESSAGE\n" + struct.pack("<Q", 7) + b"one\ntwo\n")
    for field in (
        b"PRIORITY=3\n",
        b"SYSLOG_IDENTIFIER=rolloutd\n",
        b"ROLLOUTD_NODE=n1\n",
        b"ROLLOUTD_ROLLOUT=r-1\n",
    ):
        assert field in entry


def test_a_lost_journal_is_found_again(tmp_path: Path) -> None:
    """A line is lost with it, the daemon goes on, and the next line arrives."""
    handler = JournalHandler(tmp_path / "j")
    record = logging.LogRecord("rolloutd.x", logging.INFO, __file__, 7, "text", (), None)
    handler.handle(record)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(tmp_path / "j"))
        handler.handle(record)
        assert b"MESSAGE=text\n" in journal.recv(65536)
    handler.close()


def test_the_journal_is_known_by_its_stream(tmp_path: Path) -> None:
    """JOURNAL_STREAM names the device and inode of stderr, or it is not meant for us."""
    with (tmp_path / "stream").open("w") as stream:
        found = os.fstat(stream.fileno())
        told = f"{found.st_dev}:{found.st_ino}"
        assert logs.is_connected_to_journal({"JOURNAL_STREAM": told}, stream.fileno())
        assert not logs.is_connected_to_journal({"JOURNAL_STREAM": "1:2"}, stream.fileno())
        assert not logs.is_connected_to_journal({}, stream.fileno())


# -- metrics ------------------------------------------------------------------


def test_metrics_are_served_where_the_settings_say(service_manager: FakeServiceManager) -> None:
    """On a Unix socket: what is known of the daemon, and what its decisions take."""
    service_manager.configure(metrics={"path": "m", "group": "nogroup"})
    service_manager.start()
    service_manager.wait_for_message(lambda message: "READY=1" in message)
    text = _scraped(service_manager.directory / "m")
    for line in ("rolloutd_known_nodes 0.0", "rolloutd_epoch 1.0", "rolloutd_fork_servers 0.0"):
        assert line in text.splitlines()
    assert "rolloutd_decision_seconds_count" in text
    assert "rolloutd_commit_seconds_bucket" in text
    assert "rolloutd_loop_lag_seconds_count" in text
    found = (service_manager.directory / "m").stat()
    assert (found.st_mode & 0o777, found.st_gid) == (0o660, grp.getgrnam("nogroup").gr_gid)
    service_manager.stop()
    assert not (service_manager.directory / "m").exists()


def _scraped(path: Path) -> str:
    deadline = time.monotonic() + LIMIT_S
    while True:
        with socket.socket(socket.AF_UNIX) as sock:
            try:
                sock.connect(str(path))
            except OSError:
                assert time.monotonic() < deadline
                select.select([], [], [], 0.05)
                continue
            sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            chunks = list(iter(lambda: sock.recv(65536), b""))
        return b"".join(chunks).decode()


@pytest.mark.parametrize(
    "listen", ["0.0.0.0:9477", "10.0.0.1:9477", "9477", "localhost", "127.0.0.1:0", "[::]:1"]
)
def test_metrics_for_others_are_refused(service_manager: FakeServiceManager, listen: str) -> None:
    """Only this machine: nobody is asked who he is there."""
    service_manager.configure(metrics={"listen": listen})
    done = service_manager.run_once("--check")
    assert done.returncode == 2
    assert "metrics.listen" in done.stderr
