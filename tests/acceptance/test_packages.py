"""The Debian package on a minimal Debian: the first hour, an upgrade from 0.1 during a rollout, a purge.

Only the nodes are not installed there: they are sshds of this machine in namespaces of their own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rolloutd import __version__
from tests.support.daemon_environment import CHANGE_PLAYBOOK, plan
from tests.support.debian_root import make_debian_root
from tests.support.packaged_daemon import PackagedDaemon
from tests.support.release import (
    COMMIT_0_1,
    build_package_of,
    build_release,
    has_commit,
    left_out,
    shared_directory,
)

NODES = {f"n{number}": {"team": "t1", "role": "worker"} for number in (1, 2, 3)}

CHANGING = ("var/lib/dpkg", "var/lib/apt", "var/cache", "var/log", "var/lib/systemd", "root", "run", "tmp")
"""What Debian itself writes while packages come and go, and our copies of the packages."""


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the packages of this checkout."""
    return build_release(shared_directory(tmp_path_factory.getbasetemp()))


@pytest.fixture
def debian(tmp_path: Path) -> Iterator[PackagedDaemon]:
    """Three nodes, and a minimal Debian that has booted beside them."""
    if os.geteuid() != 0 or shutil.which("mmdebstrap") is None:
        left_out("only root with mmdebstrap can make a Debian (apt-get install mmdebstrap)")
    debian = PackagedDaemon(tmp_path / "fleet", NODES)
    try:
        root = make_debian_root(tmp_path / "root")
        debian.make_networks()
        debian.start_nodes()
        debian.boot(root)
        yield debian
    finally:
        debian.stop()
        for place in ("root", "fleet/systemd"):
            shutil.rmtree(tmp_path / place, ignore_errors=True)


@pytest.mark.long
@pytest.mark.servers
def test_package_walks_fleet_and_purge_leaves_state(debian: PackagedDaemon, release: Path) -> None:
    (package,) = release.glob("*.deb")
    before = files_of(debian)
    printed = debian.install(package)
    assert "observes and changes nothing" in printed
    assert debian.run("rolloutctl --version").strip() == f"rolloutctl {__version__}"
    debian.run("systemctl is-enabled rolloutd.socket rolloutd.service")
    debian.run("systemctl is-active rolloutd.socket rolloutd.service")
    assert debian.client.get("/v1/health")["observe_only"]

    write_settings(debian)
    debian.run("rolloutctl doctor")
    rollout = submit(debian)
    debian.run(f"rolloutctl approve {rollout} start --reason seen")
    debian.wait_for_gate(rollout, "continue")
    debian.run(f"rolloutctl approve {rollout} continue --reason seen")
    debian.wait_until(lambda: debian.status(rollout)["state"] == "done", "the rollout ends")
    assert sorted(span.node for span in debian.spans()) == sorted(NODES)
    debian.run("rolloutctl audit verify")

    purge_leaves_only_what_it_says(debian, before)
    print("\nthe first hour, in seconds:")
    for command, seconds in debian.stopwatch:
        print(f"{seconds:8.1f}  {command}")


@pytest.mark.long
@pytest.mark.servers
def test_upgrade_from_0_1_continues_the_rollout(
    debian: PackagedDaemon, release: Path, tmp_path: Path
) -> None:
    if not has_commit(COMMIT_0_1):
        left_out(f"this clone has no commit {COMMIT_0_1[:8]}, which was 0.1 (git fetch --unshallow)")
    debian.install(build_package_of(COMMIT_0_1, tmp_path / "0.1"))
    assert debian.run("rolloutctl --version").strip() == "rolloutctl 0.1.0"
    write_settings(debian)
    settings = (debian.etc / "config.yaml").read_text()
    rollout = submit(debian)
    debian.run(f"rolloutctl approve {rollout} start --reason seen")
    debian.wait_until(lambda: "waiting" in gate_state(debian, rollout, "continue"), "the canary is done")
    debian.pause_playbooks()
    debian.run(f"rolloutctl approve {rollout} continue --reason seen")
    debian.wait_until(lambda: in_work(debian), "the second playbook is in the middle of its work")
    entries = audit_entries(debian)

    (package,) = release.glob("*.deb")
    debian.install(package)
    assert in_work(debian), "the upgrade was in the middle of it"
    assert debian.client.get("/v1/health")["version"] == __version__
    assert (debian.etc / "config.yaml").read_text() == settings
    debian.resume_playbooks()
    debian.wait_until(lambda: debian.status(rollout)["state"] == "done", "the rollout ends")
    assert sorted(span.node for span in debian.spans()) == sorted(NODES), "each node exactly once"
    assert audit_entries(debian)[: len(entries)] == entries, "the audit of 0.1 is there"
    debian.run("rolloutctl audit verify")


def write_settings(debian: PackagedDaemon) -> None:
    """Write settings, inventory and keys as an administrator would, and restart the daemon."""
    debian.copy_keys()
    (debian.etc / "hosts.yml").write_text(debian.inventory())
    debian.write_node_places()
    settings = {
        "inventory": [{"ansible": {"path": "hosts.yml", "labels": ["team", "role"]}}],
        "teams": {"infra": {"members": ["root"]}, "t1": {"members": ["root"]}},
        "ssh": {"known_hosts": "known_hosts"},
    }
    (debian.etc / "config.yaml").write_text(yaml.safe_dump(settings))
    debian.run("systemctl restart rolloutd.service")
    debian.wait_until(debian.is_ready, "the daemon has its nodes")


def submit(debian: PackagedDaemon) -> str:
    """Submit a plan over all nodes; return the rollout."""
    directory = debian.root / "root/change"
    (directory / "playbooks").mkdir(parents=True, exist_ok=True)
    (directory / "playbooks" / "change.yml").write_text(CHANGE_PLAYBOOK)
    variables = {"log_file": str(debian.log_file)}
    text = yaml.safe_dump(plan("packaged", soak="0s", maintain={"playbook": "change.yml", "vars": variables}))
    (directory / "plan.yml").write_text(text)
    debian.run("rolloutctl plan validate change/plan.yml")
    return str(json.loads(debian.run("rolloutctl plan submit --json change/plan.yml 2>/dev/null"))["rollout"])


def gate_state(debian: PackagedDaemon, rollout: str, gate: str) -> list[str]:
    """Return the states of a gate."""
    return [each["state"] for each in debian.status(rollout)["gates"] if each["gate"] == gate]


def in_work(debian: PackagedDaemon) -> bool:
    """Return whether the second playbook has begun and not ended."""
    spans = debian.spans()
    return len(spans) == 2 and spans[-1].end is None


def audit_entries(debian: PackagedDaemon) -> list[tuple[int, str]]:
    """Return the sequence and hash of the audit's entries."""
    return [(each["seq"], each["hash"]) for each in debian.client.get("/v1/audit")["entries"]]


def files_of(debian: PackagedDaemon) -> set[str]:
    """Return all paths of the Debian's disk but those that change anyway."""
    omitted = " -o ".join(f"-path /{place}" for place in CHANGING)
    return set(
        debian.systemd.inside("sh", "-c", f"find / -xdev \\( {omitted} \\) -prune -o -print").splitlines()
    )


def purge_leaves_only_what_it_says(debian: PackagedDaemon, before: set[str]) -> None:
    """Purge the package and what it needed; compare with the disk before."""
    printed = debian.run("apt-get purge -y -q --autoremove rolloutd")
    said = re.findall(r"left (/\S+); to remove it: rm -r \1", printed)
    assert said == ["/var/lib/rolloutd", "/etc/rolloutd"]
    # apt keeps a library that the remaining packages recommend.
    owned = set(debian.systemd.inside("sh", "-c", "cat /var/lib/dpkg/info/*.list").splitlines())
    left = {path for path in files_of(debian) - before - owned if not path.startswith(tuple(said))}
    assert left == set()
    assert "left passwd entry rolloutd" in printed
    assert not (debian.root / "run/rolloutd").exists()
    assert debian.systemd.ctl("list-unit-files", "rolloutd*", "--no-legend", check=False) == ""
    for path in said:
        debian.run(f"rm -r {path}")
