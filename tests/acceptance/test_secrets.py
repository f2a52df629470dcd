"""Passwords of nodes while a real daemon runs a playbook: where they are, and that they go with the run."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import yaml

from rolloutd.store.sqlite.backup import backup
from tests.support.daemon_environment import CHANGE_PLAYBOOK, DaemonEnvironment, plan

SECRETS = ("hunter2-become", "hunter2-login", "hunter2-vault", "hunter2-community")

RUN_FILES = {"inventory.json", "connection.json"}
"""Files of an active run that have the fleet's variables."""


def plant(made: DaemonEnvironment) -> None:
    """Give the node secrets, by which this daemon's login happens not to need them."""
    hosts = yaml.safe_load((made.directory / "hosts.yml").read_text())
    hosts["all"]["hosts"]["n1"] |= {
        "ansible_become_password": SECRETS[0],
        "app": {"users": [{"ansible_ssh_pass": SECRETS[1]}]},
        "vault_db": SECRETS[2],
        "snmp": [{"community": SECRETS[3]}],
    }
    (made.directory / "hosts.yml").write_text(yaml.safe_dump(hosts))


def has_secret(content: bytes) -> bool:
    return any(secret.encode() in content for secret in SECRETS)


def files_with_secrets(made: DaemonEnvironment) -> list[Path]:
    """Return the files of the daemon with a secret; its inventory and this test's nodes are not its files."""
    directories = (made.directory / "state", made.directory / "backups")
    files = [path for each in directories for path in each.rglob("*") if path.is_file()]
    files.append(made.directory / "daemon.log")
    return sorted(path for path in files if has_secret(path.read_bytes()))


def processes_with_secrets() -> list[bytes]:
    """Return the command lines and environments on this machine, which is also the node, with a secret."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                found.append((entry / name).read_bytes())
            except OSError:
                continue
    return [each for each in found if has_secret(each)]


def audit_and_api(made: DaemonEnvironment, rollout: str) -> str:
    paths = (
        "audit",
        "inventory",
        "status",
        "settings",
        f"rollouts/{rollout}",
        f"rollouts/{rollout}/nodes/n1",
    )
    return "".join(str(made.client.get(f"/v1/{path}")) for path in paths)


@pytest.mark.servers
def test_password_is_on_disk_only_during_the_run(tmp_path: Path) -> None:
    made = DaemonEnvironment(tmp_path, {"n1": {"team": "t1", "role": "worker"}})
    (tmp_path / "backups").mkdir()
    state = tmp_path / "state"
    try:
        made.start_nodes()
        plant(made)
        made.write_settings()
        made.start_daemon()
        assert files_with_secrets(made) == []
        made.pause_playbooks()
        variables = {"log_file": str(made.log_file)}
        spec = plan("secret", soak="0s", maintain={"playbook": "change.yml", "vars": variables})
        rollout = made.submit(spec, {"change.yml": CHANGE_PLAYBOOK})
        made.vote(rollout, "start")
        made.wait_until(lambda: made.spans(), "the playbook runs")

        during = files_with_secrets(made)
        assert {path.name for path in during} == RUN_FILES
        assert {path.parent.parent for path in during} == {state / "runs"}
        assert [path for path in during if stat.S_IMODE(path.stat().st_mode) & 0o077] == []
        assert backup(state, tmp_path / "backups" / "during.sqlite").ok
        assert processes_with_secrets() == []

        made.kill_daemon()
        assert files_with_secrets(made) == during, "nothing but the run has them, and not the backup"
        made.resume_playbooks()
        made.wait_until(lambda: not made.run_processes(), "the run ends without the daemon")
        assert files_with_secrets(made) == []

        made.start_daemon()
        made.wait_until(lambda: made.status(rollout)["state"] == "done", "the rollout ends")
        assert len(made.spans()) == 1
        assert files_with_secrets(made) == []
        assert not has_secret(audit_and_api(made, rollout).encode())
        assert processes_with_secrets() == []
    finally:
        made.stop()
