"""The Debian package on a minimal Debian: the tutorial word by word, an upgrade from 0.1, a purge.

The tutorial's nodes are minimal Debians too; those of the other tests are sshds of this machine in
namespaces of their own.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutd import __version__
from tests.docs.console_page import difference, read_steps
from tests.support.daemon_environment import CHANGE_PLAYBOOK, plan
from tests.support.debian_machines import PACKAGES, DebianMachines
from tests.support.debian_root import install_in_layer, make_debian_root
from tests.support.packaged_daemon import PackagedDaemon
from tests.support.release import (
    CHECKOUT,
    COMMIT_0_1,
    build_package_of,
    build_release,
    has_commit,
    left_out,
)
from tests.support.shared_directory import made_once, memory_directory, shared_directory

TUTORIAL = CHECKOUT / "docs" / "first-rollout.md"

NODES = {f"n{number}": {"team": "t1", "role": "worker"} for number in (1, 2, 3)}

SETTINGS = {
    "inventory": [{"ansible": {"path": "hosts.yml", "labels": ["team", "role"]}}],
    "teams": {"infra": {"members": ["root"]}, "t1": {"members": ["root"]}},
    "ssh": {"known_hosts": "known_hosts"},
}

CHANGING = ("var/lib/dpkg", "var/lib/apt", "var/cache", "var/log", "var/lib/systemd", "root", "run", "tmp")
"""What Debian itself writes while packages come and go, and our copies of the packages."""


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the packages of this checkout."""
    return build_release(shared_directory(tmp_path_factory.getbasetemp()))


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A minimal Debian, of which each test boots a copy; of all workers, until the last one's end."""
    if os.geteuid() != 0 or shutil.which("mmdebstrap") is None:
        left_out("only root with mmdebstrap can make a Debian (apt-get install mmdebstrap)")
    with made_once(shared_directory(tmp_path_factory.getbasetemp()) / "debian", make_debian_root) as made:
        yield made


@pytest.fixture(scope="session")
def server(root: Path) -> Iterator[Sequence[Path]]:
    """The layers of a Debian with what servers have, so with most that the package needs."""

    def install(directory: Path) -> None:
        # python3-apt: Ansible's module apt needs it on the node.
        install_in_layer(root, directory, (*PACKAGES, "python3-apt"))

    with made_once(root.with_name("server"), install) as made:
        yield made / "upper", root


@pytest.fixture
def fleet_directory() -> Iterator[Path]:
    """Where machines write: apt unpacks ten thousand files there."""
    with tempfile.TemporaryDirectory(dir=memory_directory(), ignore_cleanup_errors=True) as place:
        yield Path(place) / "fleet"


@pytest.fixture
def debian(server: Sequence[Path], fleet_directory: Path) -> Iterator[PackagedDaemon]:
    """Three nodes, and a Debian that has booted beside them."""
    debian = PackagedDaemon(fleet_directory, NODES)
    try:
        debian.make_networks()
        debian.start_nodes()
        debian.boot(server)
        yield debian
    finally:
        debian.stop()


@pytest.fixture
def tutorial(
    root: Path, server: Sequence[Path], fleet_directory: Path, tmp_path: Path
) -> Iterator[DebianMachines]:
    """The machines of docs/first-rollout.md: three servers, and an empty machine that may log in there."""
    machines = DebianMachines(fleet_directory, {f"web-{number}": {} for number in (1, 2, 3)})
    key = tmp_path / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    try:
        machines.make_networks()
        machines.start_machines(server, key.with_suffix(".pub").read_text())
        machines.boot((root,))
        ssh = machines.root / "root/.ssh"
        ssh.mkdir(mode=0o700, exist_ok=True)
        shutil.copy(key, ssh / key.name)
        (ssh / "known_hosts").write_text(machines.known_hosts_lines())
        yield machines
    finally:
        machines.stop()


@pytest.mark.long
def test_release_has_what_the_lock_names(release: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=release, check=True)
    (bill,) = release.glob("*.cdx.json")
    listed = {
        (each["name"].lower().replace("_", "-").replace(".", "-"), each["version"])
        for each in json.loads(bill.read_text())["components"]
    }
    lock = (CHECKOUT / "requirements.lock").read_text()
    locked = set(re.findall(r"(?m)^([\w.-]+)==([\w.]+)", lock))
    assert listed <= locked
    # setuptools only builds; another version of pynetbox is for other Pythons.
    assert {name for name, _ in locked} - {name for name, _ in listed} == {"setuptools"}

    (wheel,) = release.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"rolloutd/playbooks/sysctl.yml", "rolloutd/examples/hello/plan.yml"} <= names
    (package,) = release.glob("*.deb")
    packed = subprocess.run(["dpkg-deb", "-c", package], capture_output=True, text=True, check=True).stdout
    for path in (
        "lib/systemd/system/rolloutd.service",
        "usr/share/man/man1/rolloutctl.1.gz",
        "usr/share/man/man8/rolloutd.8.gz",
        "usr/share/bash-completion/completions/rolloutctl",
        "usr/share/zsh/vendor-completions/_rolloutctl",
        "usr/share/fish/vendor_completions.d/rolloutctl.fish",
        "usr/share/doc/rolloutd/monitoring/rolloutd.rules.yml",
    ):
        assert f" ./{path}\n" in packed
    page = subprocess.run(["dpkg-deb", "--fsys-tarfile", package], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(page)) as archive:
        member = archive.extractfile("./usr/share/man/man1/rolloutctl.1.gz")
        assert member is not None
        assert b"rolloutctl plan submit" in gzip.decompress(member.read())
        assert {each.mtime for each in archive} == {max(each.mtime for each in archive)}, "one time for all"


@pytest.mark.long
@pytest.mark.servers
def test_tutorial_ends_and_purge_leaves_state(tutorial: DebianMachines, release: Path) -> None:
    (package,) = release.glob("*.deb")
    refuses_installation_by_hand(tutorial, package)
    before = files_of(tutorial)
    shutil.copy(package, tutorial.root / "root" / package.name)
    install, *steps = read_steps(TUTORIAL.read_text())
    printed = tutorial.follow(install.command)
    assert difference(install, printed) == ""
    assert "observes and changes nothing" in printed
    tutorial.run("systemctl is-enabled rolloutd.socket rolloutd.service")
    tutorial.run("systemctl is-active rolloutd.socket rolloutd.service")
    assert tutorial.client.get("/v1/health")["observe_only"]

    differences = [difference(step, tutorial.follow(step.command)) for step in steps]
    if any(differences):
        pytest.fail("\n\n".join(filter(None, differences)))
    print("\nthe first hour, in seconds:")
    for command, seconds in tutorial.stopwatch:
        print(f"{seconds:8.1f}  {command.partition(chr(10))[0]}")
    print(f"{sum(seconds for _, seconds in tutorial.stopwatch):8.1f}  all")
    tutorial.run("rolloutctl audit verify")
    purge_leaves_only_what_it_says(tutorial, before)


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


def refuses_installation_by_hand(debian: PackagedDaemon, package: Path) -> None:
    """Check that the package is not unpacked over files that no package owns."""
    shutil.copy(package, debian.root / "root/by-hand.deb")
    debian.systemd.inside("sh", "-c", "mkdir /opt/rolloutd && touch /opt/rolloutd/pyvenv.cfg")
    printed = debian.systemd.inside("sh", "-c", "dpkg -i /root/by-hand.deb 2>&1", check=False)
    assert "/opt/rolloutd: a pip installation, not a package; move it" in printed
    debian.systemd.inside("rm", "-r", "/opt/rolloutd", "/root/by-hand.deb")


def write_settings(debian: PackagedDaemon) -> None:
    """Write settings, inventory and keys as an administrator would, and restart the daemon."""
    debian.copy_keys()
    (debian.etc / "hosts.yml").write_text(debian.inventory(with_keys=True))
    debian.write_node_places()
    (debian.etc / "config.yaml").write_text(yaml.safe_dump(SETTINGS))
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
    return submit_plan(debian, "change/plan.yml")


def submit_plan(debian: PackagedDaemon, path: str) -> str:
    """Submit a plan that is a file of the Debian; return the rollout."""
    debian.run(f"rolloutctl plan validate {path}")
    return str(json.loads(debian.run(f"rolloutctl plan submit --json {path} 2>/dev/null"))["rollout"])


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


@pytest.mark.long
@pytest.mark.servers
def test_role_installs_daemon_and_repeats_nothing(
    debian: PackagedDaemon, release: Path, tmp_path: Path
) -> None:
    (package,) = release.glob("*.deb")
    ssh = tmp_path / "ssh"
    ssh.mkdir(mode=0o700)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", ssh / "key"], check=True)
    (debian.root / "root/.ssh").mkdir(mode=0o700, exist_ok=True)
    (debian.root / "root/.ssh/authorized_keys").write_text((ssh / "key.pub").read_text())
    host_key = (debian.root / "etc/ssh/ssh_host_ed25519_key.pub").read_text().split()[:2]
    (ssh / "known_hosts").write_text(f"{debian.address} {' '.join(host_key)}\n")
    for name, sshd in debian.sshds.items():
        shutil.copy(sshd.key_file, ssh / f"{name}.key")
    (ssh / "hosts.yml").write_text(debian.inventory(with_keys=True))
    variables = {
        "rolloutd_package": str(package),
        "rolloutd_settings": SETTINGS,
        "rolloutd_team_settings": {"test-nodes": debian.node_places()},
        "rolloutd_files": {
            "hosts.yml": str(ssh / "hosts.yml"),
            "known_hosts": str(debian.directory / "known_hosts"),
        },
        "rolloutd_secrets": {f"{name}.key": str(ssh / f"{name}.key") for name in debian.sshds},
        "rolloutd_users": ["alice"],
    }
    first = play(debian, ssh, variables)
    assert first["failed"] == first["unreachable"] == 0
    assert first["changed"] > 0
    debian.wait_until(debian.is_ready, "the daemon has its nodes")
    assert "alice" in debian.run("getent group rolloutctl")
    again = play(debian, ssh, variables)
    assert (again["failed"], again["changed"]) == (0, 0)

    invalid = {**variables, "rolloutd_settings": {**SETTINGS, "max_parallel": "many"}}
    assert play(debian, ssh, invalid)["failed"] == 1
    assert yaml.safe_load((debian.etc / "config.yaml").read_text()) == SETTINGS
    debian.run("systemctl is-active rolloutd.service")

    rollout = submit(debian)
    assert debian.finish(rollout)["done"] == len(NODES)


def play(debian: PackagedDaemon, ssh: Path, variables: dict[str, Any]) -> dict[str, int]:
    """Run the role over ssh on the Debian; return Ansible's counts."""
    playbook = [{"hosts": "all", "gather_facts": False, "roles": [{"role": "rolloutd", "vars": variables}]}]
    (ssh / "install.yml").write_text(yaml.safe_dump(playbook))
    common = f"-o UserKnownHostsFile={ssh / 'known_hosts'} -o IdentitiesOnly=yes"
    (ssh / "ops.ini").write_text(
        f"{debian.address} ansible_user=root ansible_ssh_private_key_file={ssh / 'key'} "
        f"ansible_python_interpreter=/usr/bin/python3 ansible_ssh_common_args='{common}'\n"
    )
    program = Path(sys.executable).parent / "ansible-playbook"
    roles = {
        "ANSIBLE_ROLES_PATH": str(CHECKOUT / "deploy/ansible/roles"),
        "ANSIBLE_HOME": str(ssh / "ansible"),
    }
    done = subprocess.run(
        [*debian.daemon_prefix, program, "-i", "ops.ini", "install.yml"],
        cwd=ssh,
        env={**os.environ, **roles},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    print(done.stdout[-6000:], done.stderr[-2000:])
    recap = done.stdout.rpartition("PLAY RECAP")[2]
    return {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", recap)}
