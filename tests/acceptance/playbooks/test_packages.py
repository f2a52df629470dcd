"""Packages: of a real dpkg and apt with a repository of the test's own, and the words of other managers."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError

from tests.acceptance.playbooks.test_records import load
from tests.support.playbook_node import Node

PACKAGES = load("packages")

CONTROL = """\
Package: {name}
Version: {version}
Architecture: all
Maintainer: tests <tests@example.org>
Depends: {depends}
Description: a package of the tests
"""

PROGRAM = """#!/bin/sh
# {program} of a root directory, as the whole machine's.
echo "$*" >> {log}
exec {program} {options} "$@"
"""


class Debian:
    """A root directory with real packages: `tool` needs `library`, both in the same version."""

    def __init__(self, node: Node) -> None:
        self.node, self.directory = node, node.directory / "debian"
        self.root, self.repository = self.directory / "root", self.directory / "repository"
        self.repository.mkdir(parents=True)
        for place in ("etc/apt/apt.conf.d", "etc/apt/preferences.d", "var/lib/apt/lists/partial",
                      "var/lib/dpkg/info", "var/lib/dpkg/updates", "var/lib/dpkg/triggers",
                      "var/cache/apt/archives/partial", "var/log/apt"):  # fmt: skip
            (self.root / place).mkdir(parents=True)
        (self.root / "var/lib/dpkg/status").touch()
        (self.root / "etc/apt/sources.list").write_text(f"deb [trusted=yes] file:{self.repository} ./\n")
        self.log = self.directory / "log"
        self.log.touch()
        # Without --log it writes to this machine's log.
        dpkg = f"--root={self.root} --log={self.root}/var/log/dpkg.log --force-not-root --force-bad-path"
        apt = [f"-o Dir={self.root}", f"-o Dir::State::status={self.root}/var/lib/dpkg/status"]
        apt += [f"-o Dpkg::Options::={word}" for word in dpkg.split()] + ["-o APT::Sandbox::User=root"]
        self.commands = {
            "apt-get": self._write("apt-get", " ".join(apt)),
            "dpkg": self._write("dpkg", dpkg),
            "dpkg-query": self._write("dpkg-query", f"--admindir={self.root}/var/lib/dpkg"),
        }
        self._index: list[str] = []

    def _write(self, program: str, options: str) -> str:
        path = self.directory / program
        found = shutil.which(program)
        path.write_text(PROGRAM.format(program=found, options=options, log=self.log))
        path.chmod(0o755)
        return str(path)

    def publish(self, name: str, version: str, depends: str = "") -> None:
        """Add a package to the repository, in one version."""
        tree, package = self.directory / f"{name}-{version}", self.repository / f"{name}_{version}_all.deb"
        control = CONTROL.format(name=name, version=version, depends=depends).replace("Depends: \n", "")
        for path, text in ((f"usr/share/{name}/version", f"{version}\n"), ("DEBIAN/control", control)):
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(text)
        subprocess.run(["dpkg-deb", "--build", tree, package], check=True, capture_output=True)
        content = package.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        facts = f"Filename: ./{package.name}\nSize: {len(content)}\nSHA256: {digest}\n"
        self._index.append(control + facts)
        (self.repository / "Packages").write_text("\n".join(self._index))

    def variables(self, *packages: str, rollout: str = "r1") -> dict[str, Any]:
        return {
            "rollout": rollout,
            "packages": list(packages),
            "packages_commands": self.commands,
            "packages_state_dir": str(self.directory / "record"),
            "packages_reboot_marker": str(self.directory / "reboot-required"),
        }

    def run(self, program: str, *words: str) -> None:
        subprocess.run([self.commands[program], *words], check=True, capture_output=True)

    def interrupt(self, name: str) -> None:
        """Leave a package as a kill in the middle of its configuration does."""
        status = self.root / "var/lib/dpkg/status"
        text = status.read_text()
        start = text.index(f"Package: {name}\n")
        status.write_text(text[:start] + text[start:].replace("ok installed", "ok half-configured", 1))

    def installed(self) -> dict[str, str]:
        """Return the versions of the files that are there, not what dpkg says."""
        return {path.parent.name: path.read_text().strip() for path in self.root.glob("usr/share/*/version")}


@pytest.fixture
def debian(node: Node) -> Debian:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        pytest.skip("needs apt")
    made = Debian(node)
    for version in ("1.0-1", "2.0-1"):
        made.publish("library", version)
        made.publish("tool", version, f"library (= {version})")
    return made


@pytest.mark.long
async def test_packages_are_installed_verified_and_taken_back(node: Node, debian: Debian) -> None:
    old, new = (
        debian.variables("tool=1.0-1", "library=1.0-1"),
        debian.variables("tool=2.0-1", "library=2.0-1", rollout="r2"),
    )
    assert await node.check("packages.yml", **old) == ["Say what would change"]
    assert "tool=1.0-1 is not installed (no version is)" in await node.fail("packages-verify.yml", **old)
    await node.play("packages.yml", **old)
    assert debian.installed() == {"library": "1.0-1", "tool": "1.0-1"}
    assert await node.play("packages.yml", **old) == 0
    assert await node.check("packages.yml", **old) == []
    await node.play("packages.yml", **new)
    await node.play("packages-verify.yml", **new)
    assert "Say what would change" in await node.check("packages-undo.yml", **new)
    await node.play("packages-undo.yml", **new)
    assert debian.installed() == {"library": "1.0-1", "tool": "1.0-1"}, (
        "in one transaction: they need each other"
    )
    await node.play("packages-undo.yml", **old)
    assert debian.installed() == {}
    assert await node.play("packages-undo.yml", **old) == 0


@pytest.mark.long
async def test_package_that_was_there_keeps_a_later_update(node: Node, debian: Debian) -> None:
    variables = debian.variables("library", "tool=1.0-1")
    await node.play("packages.yml", **debian.variables("library=1.0-1", rollout="r0"))
    await node.play("packages.yml", **variables)
    debian.run("apt-get", "-y", "install", "library=2.0-1", "tool=2.0-1")  # a person, or unattended-upgrades
    await node.play("packages-undo.yml", **variables)
    assert debian.installed() == {"library": "2.0-1"}


@pytest.mark.long
async def test_half_installed_package_of_before_stays(node: Node, debian: Debian) -> None:
    variables = debian.variables("library")
    await node.play("packages.yml", **debian.variables("library", rollout="r0"))
    debian.interrupt("library")
    await node.play("packages.yml", **variables)
    await node.play("packages-undo.yml", **variables)
    assert debian.installed() == {"library": "2.0-1"}


@pytest.mark.long
async def test_undo_removes_what_a_kill_left_half_installed(node: Node, debian: Debian) -> None:
    variables = debian.variables("library")
    await node.play("packages.yml", **variables)
    debian.interrupt("library")
    await node.play("packages-undo.yml", **variables)
    assert debian.installed() == {}


@pytest.mark.long
@pytest.mark.parametrize("state", ["present", "latest"])
async def test_kill_between_packages_that_need_each_other(node: Node, debian: Debian, state: str) -> None:
    """dpkg cannot configure the new tool: the library is still the old one."""
    named = "tool=2.0-1" if state == "present" else "tool"
    variables = debian.variables(named) | {"packages_state": state}
    await node.play("packages.yml", **debian.variables("tool=1.0-1", "library=1.0-1", rollout="r0"))
    debian.run("dpkg", "--unpack", str(debian.repository / "tool_2.0-1_all.deb"))
    await node.play("packages.yml", **variables)
    assert debian.installed() == {"library": "2.0-1", "tool": "2.0-1"}
    await node.play("packages-verify.yml", **variables)


@pytest.mark.long
async def test_package_that_another_needs_is_not_taken_away(node: Node, debian: Debian) -> None:
    variables = debian.variables("library")
    await node.play("packages.yml", **variables)
    debian.run("apt-get", "-y", "install", "tool")  # a person's, which needs the library
    assert "tool would be removed too" in await node.fail("packages-undo.yml", **variables)
    assert debian.installed() == {"library": "2.0-1", "tool": "2.0-1"}


@pytest.mark.long
async def test_packages_undone_oldest_first_keep_the_newer(node: Node, debian: Debian) -> None:
    old, new = debian.variables("library=1.0-1"), debian.variables("library=2.0-1", rollout="r2")
    await node.play("packages.yml", **old)
    await node.play("packages.yml", **new)
    await node.play("packages-undo.yml", **old)
    assert debian.installed() == {"library": "2.0-1"}
    await node.play("packages-undo.yml", **new)
    assert debian.installed() == {}


@pytest.mark.long
async def test_latest_reads_the_index_anew(node: Node, debian: Debian) -> None:
    latest = debian.variables("library", rollout="r2") | {"packages_state": "latest"}
    await node.play("packages.yml", **debian.variables("library"))
    assert await node.play("packages.yml", **latest) == 0
    debian.publish("library", "3.0-1")
    await node.play("packages.yml", **latest)
    assert debian.installed() == {"library": "3.0-1"}
    await node.play("packages-undo.yml", **latest)
    assert debian.installed() == {"library": "2.0-1"}


@pytest.mark.long
async def test_packages_killed_after_each_task_are_complete(node: Node, debian: Debian) -> None:
    variables = debian.variables("tool=1.0-1", "library=1.0-1")
    await node.play("packages.yml", **debian.variables("library=2.0-1", rollout="r0"))
    assert await node.play_killed("packages.yml", **variables) >= 4
    assert await node.play("packages.yml", **variables) == 0
    assert await node.play_killed("packages-undo.yml", **variables) >= 4
    assert debian.installed() == {"library": "2.0-1"}


# -- the words of the managers ----------------------------------------------------


STUB = """#!/bin/sh
printf '%s\\n' "${{0##*/}} $*" >> {log}
case "${{0##*/}}" in
rpm) cat {answer} ;;
apk) [ "$1" != info ] || cat {answer} ;;
esac
"""

RPM_BEFORE = "nginx\tx86_64\t1:1.20.1-14.el9\npackage libfoo is not installed\n"
RPM_AFTER = "nginx\tx86_64\t1:1.24.0-1.el9\nlibfoo\tx86_64\t2.0-3.el9\n"
APK_BEFORE, APK_AFTER = "nginx-1.20.1-r3\nmusl-1.2-r0\n", "nginx-1.24.0-r1\nlibfoo-2.0-r0\nmusl-1.2-r0\n"

WORDS = {
    "dnf": (
        RPM_BEFORE, RPM_AFTER,
        ["dnf -y makecache", "dnf -y install nginx-1.24.0-1.el9 libfoo"],
        ["dnf -y makecache", "dnf -y install nginx-1:1.20.1-14.el9", "rpm -e libfoo"],
    ),
    "yum": (
        RPM_BEFORE, RPM_AFTER,
        ["yum -y makecache", "yum -y install nginx-1.24.0-1.el9 libfoo"],
        ["yum -y makecache", "yum -y install nginx-1:1.20.1-14.el9", "rpm -e libfoo"],
    ),
    "zypper": (
        RPM_BEFORE, RPM_AFTER,
        [
            "zypper --non-interactive refresh",
            "zypper --non-interactive install --oldpackage nginx=1.24.0-1.el9 libfoo",
        ],
        [
            "zypper --non-interactive refresh",
            "zypper --non-interactive install --oldpackage nginx=1:1.20.1-14.el9 !libfoo",
            "rpm -e libfoo",
        ],
    ),
    "apk": (
        APK_BEFORE, APK_AFTER,
        ["apk update", "apk add --upgrade nginx=1.24.0-r1 libfoo"],
        ["apk update", "apk add --upgrade nginx=1.20.1-r3", "apk del libfoo"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "manager", ["dnf", *(pytest.param(each, marks=pytest.mark.long) for each in [*WORDS][1:])]
)
async def test_other_managers_get_their_words(node: Node, manager: str) -> None:
    """The stub records commands: it shows what is asked for, not that the manager does it."""
    before, after, forward, back = WORDS[manager]
    log, answer = node.directory / "log", node.directory / "answer"
    programs = {name: node.directory / name for name in (manager, "rpm")}
    for path in programs.values():
        path.write_text(STUB.format(log=log, answer=answer))
        path.chmod(0o755)
    variables = {
        "packages": [f"nginx={'1.24.0-r1' if manager == 'apk' else '1.24.0-1.el9'}", "libfoo"],
        "packages_manager": manager,
        "packages_commands": {name: str(path) for name, path in programs.items()},
        "packages_state_dir": str(node.directory / "record"),
        "packages_reboot": "never",
    }

    def asked() -> list[str]:
        lines = log.read_text().splitlines()
        log.unlink()
        return [line for line in lines if not line.startswith("rpm -q ") and line != "apk info -v"]

    answer.write_text(before)
    await node.play("packages.yml", **variables)
    assert asked() == forward
    answer.write_text(after)
    assert await node.play("packages.yml", **variables) == 0
    await node.play("packages-verify.yml", **variables)
    assert asked() == []
    await node.play("packages-undo.yml", **variables)
    assert asked() == back


@pytest.mark.parametrize(
    "package", ["-oDir=/", *(pytest.param(each, marks=pytest.mark.long) for each in ("a*", "a b"))]
)
async def test_word_that_is_no_package_is_refused(node: Node, package: str) -> None:
    assert "name the packages to install" in await node.fail("packages.yml", packages=[package])


def test_kernels_side_by_side_go_alone() -> None:
    before, now = {"kernel": ["5.14.0-70.el9"]}, {"kernel": ["5.14.0-70.el9", "5.14.0-162.el9"]}
    assert PACKAGES.versions_to_install(before, now, "dnf") == []
    assert PACKAGES.versions_to_remove(before, now, "dnf") == ["kernel-5.14.0-162.el9"]


def test_package_that_stays_is_recorded_as_unchanged() -> None:
    found = {"nginx": ["1.0-1"], "libfoo": ["1.0-1"], "new": [], "tool": ["1.0-1"]}
    items = PACKAGES.package_items(found, ["nginx", "libfoo=2.0-1", "new", "tool"], found, "apt", ["tool"])
    assert items == {
        "nginx": {"before": ["1.0-1"], "after": ["1.0-1"]},
        "libfoo": {"before": ["1.0-1"]},
        "new": {"before": []},
        "tool": {"before": ["1.0-1"]},
    }


def test_half_installed_package_is_there() -> None:
    """A record that lacks it would make the undo remove it."""
    lines = [
        "a\tall\t1\thalf-configured",
        "b\tall\t1\ttriggers-pending",
        "c\tall\t1\tconfig-files",
        "d\tall\t\tnot-installed",
    ]
    queried = {"rc": 0, "stdout": "\n".join(lines), "stderr": ""}
    names = ["a", "b", "c", "d"]
    assert PACKAGES.installed_versions(queried, names, "apt") == {"a": [], "b": [], "c": [], "d": []}
    there = PACKAGES.installed_versions(queried, names, "apt", partly=True)
    assert there == {"a": ["1"], "b": ["1"], "c": [], "d": []}
    items = PACKAGES.package_items({"a": ["1"]}, ["a"], {"a": []}, "apt", [])
    assert items == {"a": {"before": ["1"]}}


def test_version_without_release_or_epoch_is_enough() -> None:
    found = "1:1.24.0-1.el9"
    wanted = ["", "1.24.0", "1.24.0-1.el9", "1:1.24.0-1.el9", "1.24", "1.24.0-1"]
    assert [PACKAGES.is_version(found, version, "dnf") for version in wanted] == [True] * 4 + [False] * 2
    assert not PACKAGES.is_version("1.24.0-1", "1.24.0", "apt")


def test_version_in_a_name_is_refused() -> None:
    for package in ("kernel-5.14.0", "nginx-1.24.0-1.el9", "nginx-1:1.24.0-1.el9.x86_64"):
        with pytest.raises(AnsibleFilterError, match="write NAME=VERSION-RELEASE"):
            PACKAGES.package_names([package], "dnf")
    names = ["java-1.8.0-openjdk", "gcc-toolset-12", "python3.11", "gtk2"]
    assert PACKAGES.package_names(names, "dnf") == names


def test_query_that_fails_is_no_absence() -> None:
    broken = {"rc": 1, "stdout": "", "stderr": "error: rpmdb: damaged"}
    with pytest.raises(AnsibleFilterError, match="does not say whether it is installed"):
        PACKAGES.installed_versions(broken, ["nginx"], "dnf")
    with pytest.raises(AnsibleFilterError, match="package manager pacman: packages"):
        PACKAGES.package_commands("pacman", {})
