"""Packages as `name` or `name=version`, and the words in which each package manager is asked for them.

A version has its release: `1.24.0-1.el9` of rpm, with an epoch before it where there is one.
"""

from __future__ import annotations

import re
from typing import Any

from ansible.errors import AnsibleFilterError

RPM = ("dnf", "dnf5", "yum", "zypper")

_RPM_QUERY = ["-q", "--qf", "%{NAME}\\t%{ARCH}\\t%|EPOCH?{%{EPOCH}:}:{}|%{VERSION}-%{RELEASE}\\n"]
_APT = ["apt-get", "-y", "-o", "DPkg::Lock::Timeout=60"]
_KEEP_FILES = ["-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold"]
# Not the manager's own: that removes also what needs the package, which is another's.
_RPM_REMOVE = ["rpm", "-e"]
_DNF = {
    "query": ["rpm", *_RPM_QUERY],
    "updates": ["dnf", "-q", "check-update"],
    "refresh": ["dnf", "-y", "makecache"],
    "install": ["dnf", "-y", "install"],
    "upgrade": ["dnf", "-y", "upgrade"],
    "remove": _RPM_REMOVE,
}

MANAGERS: dict[str, dict[str, list[str]]] = {
    "apt": {
        "query": [
            "dpkg-query",
            "-W",
            "-f",
            "${Package}\\t${Architecture}\\t${Version}\\t${db:Status-Status}\\n",
        ],
        "refresh": [*_APT, "update"],
        "repair": ["dpkg", "--configure", "-a"],
        "complete": [*_APT, *_KEEP_FILES, "--no-remove", "--fix-broken", "install"],
        "install": [*_APT, *_KEEP_FILES, "--allow-downgrades", "install"],
        "updates": [*_APT, "--simulate", "install"],
        "simulate": [*_APT, "--simulate", "--allow-downgrades", "install"],
        "remove": [*_APT, "remove"],
    },
    "dnf": _DNF,
    "dnf5": {name: ["dnf5", *words[1:]] if words[0] == "dnf" else words for name, words in _DNF.items()},
    "yum": {name: ["yum", *words[1:]] if words[0] == "dnf" else words for name, words in _DNF.items()},
    "zypper": {
        "query": ["rpm", *_RPM_QUERY],
        "refresh": ["zypper", "--non-interactive", "refresh"],
        "install": ["zypper", "--non-interactive", "install", "--oldpackage"],
        "updates": ["zypper", "--non-interactive", "install", "--dry-run"],
        "remove": _RPM_REMOVE,
    },
    "apk": {
        "query": ["apk", "info", "-v"],
        "refresh": ["apk", "update"],
        "install": ["apk", "add", "--upgrade"],
        "updates": ["apk", "add", "--upgrade", "--simulate"],
        "remove": ["apk", "del"],
    },
}
"""Commands by what they do; `install` also installs older versions, and updates if `upgrade` is missing."""


def package_commands(manager: str, programs: dict[str, str]) -> dict[str, list[str]]:
    """Return the manager's commands, with the paths of programs that are not where PATH finds them."""
    if manager not in MANAGERS:
        raise AnsibleFilterError(
            f"package manager {manager}: packages.yml does not know it; set packages_manager"
        )
    return {name: [programs.get(words[0], words[0]), *words[1:]] for name, words in MANAGERS[manager].items()}


def package_names(packages: list[str], manager: str = "") -> list[str]:
    """Return the names; refuses rpm's `name-version`, whose name and version cannot be separated."""
    for package in packages:
        if manager in RPM and "=" not in package and re.search(r"-\d[^-]*-\d[^-]*$|-\d+[.]\d[^-]*$", package):
            raise AnsibleFilterError(
                f"package {package}: its version is part of its name; write NAME=VERSION-RELEASE"
            )
    return [package.partition("=")[0] for package in packages]


def installed_versions(
    queried: dict[str, Any], names: list[str], manager: str, partly: bool = False
) -> dict[str, list[str]]:
    """Return the versions of each name that are installed, from the result of the manager's query.

    With `partly` also those whose installation was interrupted, or waits for another package.
    A query that fails must not look like packages that are not there: their undo would remove them.
    """
    found: dict[str, list[str]] = {name: [] for name in names}
    answered = set()
    for name, arch, version, state in _lines(queried["stdout"], manager):
        is_installed = state == "installed" or (partly and state not in ("not-installed", "config-files"))
        for known in {name, f"{name}:{arch}", f"{name}.{arch}"} & found.keys():
            answered.add(known)
            if is_installed and version not in found[known]:
                found[known].append(version)
    said = f"{queried['stdout']}\n{queried['stderr']}\n"
    for name in found.keys() - answered if manager != "apk" or queried["rc"] != 0 else ():
        if (
            f"package {name} is not installed\n" not in said
            and f"no packages found matching {name}\n" not in said
        ):
            raise AnsibleFilterError(
                f"package {name}: {manager} does not say whether it is installed: {said.strip()}"
            )
    return found


def has_updates(result: dict[str, Any], manager: str) -> bool:
    """Return whether the manager's `updates` named any; raises if it failed."""
    if result["rc"] not in ((0, 100) if manager in ("dnf", "dnf5", "yum") else (0,)):
        raise AnsibleFilterError(f"{manager} does not say whether there are updates: {result['stderr']}")
    if manager == "zypper":
        return "Nothing to do" not in result["stdout"]
    return result["rc"] == 100 or bool(re.search(r"(?m)^(Inst |[(]\d+/\d+[)])", result["stdout"]))


def packages_to_install(packages: list[str], installed: dict[str, list[str]], manager: str) -> list[str]:
    """Return the manager's words for those that are not installed, or not in the given version."""
    pairs = [package.partition("=")[::2] for package in packages]
    return [
        _word(name, version, manager)
        for name, version in pairs
        if not any(is_version(found, version, manager) for found in installed[name])
    ]


def package_items(
    there: dict[str, list[str]],
    packages: list[str],
    installed: dict[str, list[str]],
    manager: str,
    to_update: list[str],
) -> dict[str, Any]:
    """Return the items of the record: what is `there`, before and, if it is to stay, after."""
    changing = package_names(
        [*to_update, *(p for p in packages if packages_to_install([p], installed, manager))]
    )
    return {
        name: {"before": versions} if name in changing else {"before": versions, "after": versions}
        for name, versions in there.items()
    }


def other_removals(simulated: str, names: list[str]) -> list[str]:
    """Return the packages that apt would remove and that are not named."""
    known = {name.partition(":")[0] for name in names}
    return [name for name in re.findall(r"(?m)^(?:Remv|Purg) ([^ :]+)", simulated) if name not in known]


def is_version(found: str, wanted: str, manager: str) -> bool:
    """Return whether an installed version is the wanted one; without a release or an epoch any counts."""
    if not wanted or found == wanted:
        return True
    if manager not in RPM:
        return False
    without_epoch = found if ":" in wanted else found.partition(":")[2] or found
    return wanted in (without_epoch, without_epoch.rpartition("-")[0])


def versions_to_install(before: dict[str, list[str]], now: dict[str, list[str]], manager: str) -> list[str]:
    """Return the manager's words for the versions that are gone, to be installed in one transaction."""
    gone = [
        (name, version)
        for name, versions in before.items()
        for version in versions
        if version not in now[name]
    ]
    words = [_word(name, version, manager) for name, version in gone]
    new = [name for name, versions in before.items() if now[name] and not versions]
    # New packages may need the new versions: where the manager can, they go in the same transaction.
    marks = {"apt": "{}-", "zypper": "!{}"}
    return words + [marks[manager].format(name) for name in new] if words and manager in marks else words


def versions_to_remove(before: dict[str, list[str]], now: dict[str, list[str]], manager: str) -> list[str]:
    """Return the manager's words for versions that were not there; kernels of several versions coexist."""
    words = []
    for name, versions in before.items():
        if versions and manager in RPM and len(now[name]) > len(versions):
            words += [_word(name, version, manager) for version in now[name] if version not in versions]
        elif now[name] and not versions:
            words.append(name)
    return words


def _word(name: str, version: str, manager: str) -> str:
    joint = "-" if manager in ("dnf", "dnf5", "yum") else "="
    return f"{name}{joint}{version}" if version else name


def _lines(output: str, manager: str) -> list[tuple[str, str, str, str]]:
    """Return name, architecture, version and state, as dpkg names it, of each line."""
    if manager == "apk":
        matches = [re.fullmatch(r"(.+)-(\d[^-]*-r\d+)", line.strip()) for line in output.splitlines()]
        return [(match[1], "", match[2], "installed") for match in matches if match]
    fields = [line.split("\t") for line in output.splitlines() if "\t" in line]
    return [(each[0], each[1], each[2], each[3] if each[3:] else "installed") for each in fields]


class FilterModule:
    """The filters of the package playbooks."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by name."""
        return {
            "package_commands": package_commands,
            "has_updates": has_updates,
            "package_names": package_names,
            "package_items": package_items,
            "other_removals": other_removals,
            "installed_versions": installed_versions,
            "packages_to_install": packages_to_install,
            "versions_to_install": versions_to_install,
            "versions_to_remove": versions_to_remove,
        }
