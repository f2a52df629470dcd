"""Whether the daemon starts: what is examined before it takes anything over, and what `--check` says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_service_manager import FakeServiceManager


@pytest.fixture
def service_manager(tmp_path: Path) -> Iterator[FakeServiceManager]:
    """A service_manager whose daemon has settings and was not started."""
    made = FakeServiceManager(tmp_path)
    made.configure()
    yield made
    made.close()


def test_a_second_daemon_is_told_who_was_first(service_manager: FakeServiceManager) -> None:
    """It names the first one's pid and since when, ends with an error, and changes nothing for the first."""
    service_manager.start()
    service_manager.wait_for_message(lambda message: "READY=1" in message)
    before = service_manager.client.get("/v1/audit")
    done = service_manager.run_once()
    assert done.returncode == 1
    assert service_manager.process is not None
    assert f"daemon pid {service_manager.process.pid}, started 2" in done.stderr
    assert "holds it and runs; stop that daemon first" in done.stderr
    assert service_manager.client.get("/v1/audit") == before
    assert service_manager.client.get("/v1/health")["pid"] == service_manager.process.pid


def test_a_start_that_cannot_listen_deposes_nobody(service_manager: FakeServiceManager) -> None:
    """Without the lock's file too, a second daemon leaves the first one its term, and begins none."""
    service_manager.start()
    service_manager.wait_for_message(lambda message: "READY=1" in message)
    (service_manager.directory / "state" / "lock").unlink()
    before = service_manager.client.get("/v1/health")["epoch"]
    done = service_manager.run_once()
    assert done.returncode == 1
    assert "another daemon answers" in done.stderr
    service_manager.client.post("/v1/freezes", {"scope": "all", "reason": "to write something"})
    assert service_manager.client.get("/v1/health")["epoch"] == before
    assert service_manager.stop() == 0


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"socket_group": "no-such-group-here"}, "no group 'no-such-group-here'"),
        ({"socket": "x" * 120}, "too long"),
        ({"socket": "taken"}, "is not a socket"),
    ],
)
def test_a_start_that_cannot_listen_spends_no_epoch(
    service_manager: FakeServiceManager, more: dict[str, str], told: str
) -> None:
    """It says why and has written nothing, not even a database."""
    (service_manager.directory / "taken").write_text("precious")
    service_manager.configure(**more)
    done = service_manager.run_once()
    assert done.returncode == 1
    assert told in done.stderr
    assert not (service_manager.directory / "state" / "rolloutd.sqlite").exists()


@pytest.mark.parametrize(("more", "says"), [({"max_parallel": "many"}, "max_parallel"), ({}, "is damaged")])
def test_a_start_that_fails_leaves_the_reason_in_the_status(
    service_manager: FakeServiceManager, more: dict[str, str], says: str
) -> None:
    """`systemctl status` goes on showing what was said last: not that the database is being opened."""
    service_manager.configure(**more)
    (service_manager.directory / "state").mkdir(mode=0o700)
    (service_manager.directory / "state" / "rolloutd.sqlite").write_bytes(b"no database" * 1000)
    service_manager.start()
    told = service_manager.wait_for_message(lambda message: message.startswith("STATUS=ENDED"))
    assert says in told
    assert service_manager.process is not None
    assert service_manager.process.wait() in (1, 2)


def test_check_judges_the_settings_and_starts_nothing(service_manager: FakeServiceManager) -> None:
    """0 for good ones; 2 and every mistake for bad ones."""
    assert service_manager.run_once("--check").returncode == 0
    service_manager.configure(max_parallel="many", observe_only="perhaps")
    done = service_manager.run_once("--check")
    assert done.returncode == 2
    assert "max_parallel" in done.stderr
    assert "observe_only" in done.stderr
    assert not (service_manager.directory / "state").exists()


def test_a_home_that_cannot_be_written_keeps_nobody_from_starting(
    service_manager: FakeServiceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon's home is its state directory, and its disk may be full: Ansible wants room."""
    monkeypatch.setenv("HOME", "/dev/null")
    done = service_manager.run_once("--check")
    assert (done.returncode, done.stderr) == (0, "")
    service_manager.start()
    service_manager.wait_for_message(lambda message: "READY=1" in message)


def test_check_names_everything_that_is_not_there(service_manager: FakeServiceManager) -> None:
    """Files, a group, a command and a path: each has its line, and what follows from it."""
    directory = service_manager.directory
    (directory / "open").write_text("k" * 64)
    (directory / "open").chmod(0o644)
    service_manager.configure(
        socket="s" * 120,
        socket_group="no-such-group-here",
        metrics={"path": "m", "group": "no-such-group-either"},
        ssh={"key_file": "no-key", "known_hosts": "."},
        ansible={"bin": "no-such-command"},
        notify={"urls_file": "no-urls"},
        service_accounts={
            "itsm": {"key_file": "no-secret", "teams": ["infra"]},
            "chat": {"key_file": "open", "teams": ["infra"]},
            "cron": {"key_file": "/run/credentials/no-such.service/key", "teams": ["infra"]},
        },
    )
    done = service_manager.run_once("--check")
    assert done.returncode == 2
    assert {line.split(": ")[0] for line in done.stderr.splitlines()} == {
        "socket",
        "socket_group",
        "metrics.group",
        "ssh.known_hosts",
        "ssh.key_file",
        "service_accounts.itsm.key_file",
        "service_accounts.chat.key_file",
        "notify.urls_file",
        "ansible.bin",
    }
    assert "no-secret cannot be read (No such file or directory), so itsm cannot vote" in done.stderr


def test_a_start_says_whose_key_is_not_there(service_manager: FakeServiceManager) -> None:
    """It starts: the service's votes are refused, everybody else's count."""
    service_manager.configure(service_accounts={"itsm": {"key_file": "no-secret", "teams": ["infra"]}})
    service_manager.start()
    service_manager.wait_for_message(lambda message: "READY=1" in message)
    assert "so itsm cannot vote" in service_manager.log()


def test_a_start_that_could_tell_nobody_spends_no_epoch(service_manager: FakeServiceManager) -> None:
    """Where to send is read before anything is taken over."""
    service_manager.configure(notify={"urls_file": "no-urls"})
    done = service_manager.run_once()
    assert done.returncode == 2
    assert "notify.urls_file" in done.stderr
    assert not (service_manager.directory / "state").exists()
