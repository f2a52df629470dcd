"""Search of this machine for inventories, clusters, balancers, NetBox and ssh's own configuration.

It reads files and variables of the environment, and connects to nothing.
"""

from __future__ import annotations

import configparser
import os
import pwd
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rolloutd.texts.formats import join_limited

JSON = Any

MAX_FILE_BYTES = 1024 * 1024
"""Bytes read of a file that is searched: a kubeconfig with a hundred clusters has 300 KiB."""

PROGRAM_TIMEOUT_S = 10.0
"""Limit of ssh -G and ssh-add, which answer in milliseconds unless a name service hangs."""

MAX_SSH_HOSTS = 20
"""Hosts whose effective ssh configuration is read: one process of 10 ms each."""

MAX_NAMED = 5
"""Hosts named in one sentence; the others are counted."""

INVENTORY_NAMES = ("hosts.yml", "hosts.yaml", "hosts", "inventory.yml", "inventory.yaml", "inventory")

ADMIN_LEVEL = "admin"

_STATS_SOCKET = re.compile(r"stats\s+socket\s+(\S+)(.*)")

_UNSAFE = re.compile(r"[^a-z0-9-]+")


@dataclass(frozen=True, slots=True)
class Machine:
    """Where to search: the environment, the directories and the root of this machine."""

    environ: Mapping[str, str]
    home: Path
    cwd: Path
    root: Path = Path("/")

    def path(self, text: str, base: Path | None = None) -> Path:
        """Return a path as the user's programs read it."""
        if text.startswith("~/"):
            return self.home / text[2:]
        return (base or self.cwd) / text


@dataclass(frozen=True, slots=True)
class Candidate:
    """A system that may belong into the settings.

    `is_personal`: it belongs to the user who runs init, and the daemon's user cannot read it.
    `problem`: why it cannot be used at all.
    """

    kind: str
    params: Mapping[str, JSON]
    origin: str
    is_personal: bool = False
    name: str = ""
    problem: str = ""

    @property
    def text(self) -> str:
        """Return what users recognise it by."""
        for key in ("path", "kubeconfig", "url", "socket", "tcp"):
            if key in self.params:
                context = self.params.get("context")
                return f"{self.params[key]}" + (f" (context {context})" if context else "")
        return self.name


@dataclass(frozen=True, slots=True)
class SshView:
    """The effective ssh configuration of the caller for one host, where it differs from ssh's defaults."""

    host: str
    user: str
    port: str
    hostname: str
    jump: str


def find_inventories(machine: Machine, directory: Path) -> list[Candidate]:
    """Return Ansible inventories: named by variables and ansible.cfg, or in the usual files."""
    named: list[tuple[Path, str]] = []
    listed = [part.strip() for part in machine.environ.get("ANSIBLE_INVENTORY", "").split(",")]
    named += [(machine.path(part), "$ANSIBLE_INVENTORY") for part in listed if part]
    for config in _ansible_configs(machine):
        named += [(path, str(config)) for path in _inventories_of_config(machine, config)]
        break  # as Ansible, which reads only the first
    for place in dict.fromkeys((directory, machine.cwd)):
        named += [(place / name, f"a file in {place}") for name in INVENTORY_NAMES]
    named.append((machine.root / "etc/ansible/hosts", "Ansible's default"))
    candidates: dict[Path, Candidate] = {}
    for path, origin in named:
        whole = path.absolute()
        if whole not in candidates and _names_a_host(whole):
            candidates[whole] = Candidate("ansible", {"path": str(whole)}, origin)
    return list(candidates.values())


def find_clusters(machine: Machine, directory: Path) -> list[Candidate]:
    """Return clusters of kubeconfigs: the daemon's in the directory of the settings, others the caller's."""
    places = [(path, f"a file in {directory}", False) for path in sorted(directory.glob("*.kubeconfig"))]
    named = [part for part in machine.environ.get("KUBECONFIG", "").split(":") if part]
    places += [(machine.path(part), "$KUBECONFIG", True) for part in named]
    if not named:
        places.append((machine.home / ".kube/config", "kubectl's default", True))
    candidates: dict[Path, Candidate] = {}
    for path, origin, is_personal in places:
        if path in candidates or not path.exists():
            continue
        content = _read_yaml(path)
        context = content.get("current-context") if isinstance(content, dict) else None
        if isinstance(context, str) and context:
            name = short_name(path.stem if path.suffix == ".kubeconfig" else context)
            params = {"name": name, "kubeconfig": str(path), "context": context}
            candidates[path] = Candidate("kubernetes", params, origin, is_personal, name)
        elif not is_personal:  # a file of the user's own that names no cluster is usual
            problem = "it is not YAML with a current-context; correct it, or move it away"
            params, name = {"kubeconfig": str(path)}, short_name(path.stem)
            candidates[path] = Candidate("kubernetes", params, origin, name=name, problem=problem)
    return list(candidates.values())


def find_balancers(machine: Machine) -> list[Candidate]:
    """Return HAProxy's sockets of level admin on this machine."""
    config = machine.root / "etc/haproxy/haproxy.cfg"
    candidates: list[Candidate] = []
    for line in _read_text(config).splitlines():
        matched = _STATS_SOCKET.match(line.strip())
        if matched is None or f"level {ADMIN_LEVEL}" not in " ".join(matched[2].split()):
            continue
        address = re.sub(r"^(ipv4@|ipv6@|unix@)", "", matched[1])
        params = {"socket": address} if address.startswith("/") else {"tcp": address}
        name = f"lb{len(candidates) + 1}"
        candidates.append(Candidate("haproxy", params, str(config), name=name))
    return candidates


def find_netbox(machine: Machine, directory: Path) -> list[Candidate]:
    """Return the NetBox that the environment names; its token must be in a file."""
    url = machine.environ.get("NETBOX_URL") or machine.environ.get("NETBOX_API") or ""
    token_file = directory / "netbox-token"
    if not url:
        return []
    params: dict[str, JSON] = {"url": url.rstrip("/").removesuffix("/api")}
    if token_file.is_file():
        params["token_file"] = str(token_file)
    return [Candidate("netbox", params, "$NETBOX_URL or $NETBOX_API", is_personal="token_file" not in params)]


def read_ssh_views(machine: Machine, hosts: Sequence[str]) -> list[SshView]:
    """Return the caller's effective ssh configuration for some hosts, as ssh itself reads it."""
    return [view for host in hosts[:MAX_SSH_HOSTS] if (view := _read_ssh_view(machine, host)) is not None]


def describe_ssh_views(views: Sequence[SshView], hosts: int) -> list[str]:
    """Return what the daemon's user lacks of the caller's ssh configuration, each difference once."""
    hosts_of: dict[str, list[str]] = {}
    for view in views:
        if view.jump:
            advice = f"add ansible_ssh_common_args: '-J {view.jump}' to the inventory"
            if view.jump.startswith("/") or " " in view.jump:
                advice = "add its ProxyCommand to ansible_ssh_common_args in the inventory"
            hosts_of.setdefault(f"your ssh goes through {view.jump}; {advice}", []).append(view.host)
        if view.hostname != view.host:
            advice = "set ansible_host to that in the inventory"
            hosts_of.setdefault(f"your ssh reaches it as {view.hostname}; {advice}", []).append(view.host)
    notes = [f"{join_limited(names, MAX_NAMED)}: {text}" for text, names in hosts_of.items()]
    if notes and hosts > len(views):
        advice = "compare the others with ssh -G HOST"
        notes.append(f"ssh configuration: read for {len(views)} of {hosts} hosts; {advice}")
    return notes


def count_agent_keys(machine: Machine) -> int:
    """Return how many keys the caller's ssh agent has; 0 without an agent."""
    if not machine.environ.get("SSH_AUTH_SOCK"):
        return 0
    output = _run(machine, ["ssh-add", "-l"])
    return sum(1 for line in output.splitlines() if line[:1].isdigit())


def short_name(text: str) -> str:
    """Return a text as a name that people can type."""
    return _UNSAFE.sub("-", text.lower()).strip("-")[:60] or "cluster"


def _read_ssh_view(machine: Machine, host: str) -> SshView | None:
    if host.startswith("-"):
        return None
    # ssh reads the configuration of the account's home, whatever $HOME says.
    config = machine.home / ".ssh/config"
    is_other = config.is_file() and machine.home != Path(pwd.getpwuid(os.geteuid()).pw_dir)
    output = _run(machine, ["ssh", *(["-F", str(config)] if is_other else []), "-G", "--", host])
    values: dict[str, list[str]] = {}
    for line in output.splitlines():
        key, _, value = line.partition(" ")
        values.setdefault(key, []).append(value)
    if "hostname" not in values:
        return None
    jump = values.get("proxyjump", values.get("proxycommand", [""]))[0]
    return SshView(
        host,
        values.get("user", [""])[0],
        values.get("port", [""])[0],
        values["hostname"][0],
        "" if jump.lower() == "none" else jump,
    )


def _run(machine: Machine, command: list[str]) -> str:
    environment = {**machine.environ, "HOME": str(machine.home), "LC_ALL": "C"}
    try:
        result = subprocess.run(
            command, capture_output=True, timeout=PROGRAM_TIMEOUT_S, check=False, env=environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout[:MAX_FILE_BYTES].decode(errors="replace")


def _ansible_configs(machine: Machine) -> Iterator[Path]:
    named = machine.environ.get("ANSIBLE_CONFIG")
    places = [machine.path(named)] if named else []
    places += [
        machine.cwd / "ansible.cfg",
        machine.home / ".ansible.cfg",
        machine.root / "etc/ansible/ansible.cfg",
    ]
    return (path for path in places if path.is_file())


def _inventories_of_config(machine: Machine, config: Path) -> list[Path]:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(_read_text(config))
    except configparser.Error:
        return []
    value = parser.get("defaults", "inventory", fallback="")
    return [machine.path(part.strip(), config.parent) for part in value.split(",") if part.strip()]


def _names_a_host(path: Path) -> bool:
    """Return whether a file has more than comments; a directory may be an inventory of many files."""
    if path.is_dir():
        return path.name.startswith("inventory") and any(path.iterdir())
    lines = _read_text(path).splitlines()
    return any(line.strip() and not line.lstrip().startswith(("#", ";")) for line in lines)


def _read_yaml(path: Path) -> JSON:
    try:
        return yaml.safe_load(_read_text(path))
    except yaml.YAMLError:
        return None


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as opened:
            return opened.read(MAX_FILE_BYTES).decode(errors="replace")
    except OSError:
        return ""
