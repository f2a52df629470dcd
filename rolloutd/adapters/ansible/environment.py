"""What a run is given: its environment, its inventory and the script that stands for ssh.

The tree's own ansible.cfg is honoured; where the environment must override it
(callback path, control sockets, remote tmp) what it says is joined or kept.
Secrets reach a run only through its inventory and variables files.
"""

from __future__ import annotations

import configparser
import os
import pwd
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolloutd.ports import GROUPS

CALLBACKS = Path(__file__).parent / "callback"

PASSED_ON = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "TZ",
    "SSH_AUTH_SOCK",
    "ANSIBLE_COLLECTIONS_PATH",
    "ANSIBLE_ROLES_PATH",
    "ANSIBLE_VAULT_IDENTITY_LIST",
    "ANSIBLE_VAULT_PASSWORD_FILE",
)
"""All that a run inherits from the daemon: where programs and keys are, never a key itself."""

DEFAULT_REMOTE_TMP = "~/.ansible/tmp"
DEFAULT_CALLBACKS = "~/.ansible/plugins/callback:/usr/share/ansible/plugins/callback"
"""Ansible's own defaults, which our environment would otherwise replace."""

OWN_VARIABLES = (
    "ansible_control_path",
    "ansible_control_path_dir",
    "ansible_remote_tmp",
    "ansible_ssh_executable",
    GROUPS,
)
"""Host variables that stronger than the environment would send a run's sockets and marks elsewhere.

And the groups, which stand in the inventory as what they are.
"""

SSH_SCRIPT = """\
#!/bin/sh
# Stands for ssh in one run of rolloutd: the remote command gets a parent whose
# command line names the run, so that the node can be asked what is left of it,
# and that removes the run's temporary directory whenever it is empty.  It outlives
# a lost connection as long as the command does, and lets the command die of it.
# A raw command is the login shell's own and stays in its language.
tidy='trap : HUP; "$@"; status=$?; {tidy}; exit $status'
for argument do
    case $argument in -O | -V) exec {ssh} "$@" ;; esac
done
left=$#
for argument do
    shift
    left=$((left - 1))
    if [ "$left" -eq 0 ]; then
        case $argument in
        /*" -c "*) argument="/bin/sh -c '$tidy' {mark} $argument" ;;
        *) argument=": {mark}; trap : HUP; $argument" ;;
        esac
    fi
    set -- "$@" "$argument"
done
exec {ssh} "$@"
"""


@dataclass(frozen=True, slots=True)
class Defaults:
    """How nodes are reached where the inventory says nothing."""

    known_hosts: Path | None = None
    user: str | None = None
    key_file: Path | None = None


@dataclass(frozen=True, slots=True)
class TreeConfig:
    """What the ansible.cfg that holds for a tree says of the things we must join."""

    path: Path | None
    values: Mapping[str, Mapping[str, str]]

    @classmethod
    def of(cls, tree: Path) -> TreeConfig:
        """Read the file that Ansible would read; an unreadable one is left for Ansible to complain of."""
        for path in (
            tree / "ansible.cfg",
            Path("~/.ansible.cfg").expanduser(),
            Path("/etc/ansible/ansible.cfg"),
        ):
            if path.is_file():
                return cls(path, _read_ini(path))
        return cls(None, {})

    def get(self, section: str, key: str) -> str | None:
        """Return a setting as it is written."""
        return self.values.get(section, {}).get(key) or None

    @property
    def common_args(self) -> str:
        """The arguments of ssh that hold where a host has none of its own."""
        return self.get("ssh_connection", "ssh_common_args") or ""

    def callback_paths(self) -> str:
        """Return the directories of callback plugins that hold without us."""
        said = self.get("defaults", "callback_plugins")
        if said is None or self.path is None:
            return DEFAULT_CALLBACKS
        base = self.path.parent
        return ":".join(
            part if part.startswith(("/", "~", "$", "{")) else str(base / part)
            for part in said.split(":")
            if part
        )


@dataclass(frozen=True, slots=True)
class Places:
    """Where one run keeps its things on this machine."""

    run: str
    events: Path
    local_tmp: Path
    sockets: Path
    ssh: Path | None


def environment(places: Places, config: TreeConfig) -> dict[str, str]:
    """Return the whole environment of a run."""
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    passed.setdefault("HOME", pwd.getpwuid(os.geteuid()).pw_dir)
    own = {
        "LC_ALL": "C.UTF-8",
        "ROLLOUTD_RUN": places.run,
        "ROLLOUTD_RUN_DIR": str(places.events.parent),
        "ROLLOUTD_EVENTS": str(places.events),
        "ANSIBLE_CALLBACK_PLUGINS": f"{config.callback_paths()}:{CALLBACKS}",
        "ANSIBLE_INVENTORY_ENABLED": "yaml",
        "ANSIBLE_LOCAL_TEMP": str(places.local_tmp),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_RETRY_FILES_ENABLED": "0",
        "ANSIBLE_SSH_CONTROL_PATH": "%(directory)s/%%C",
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(places.sockets),
    }
    said = config.get("ssh_connection", "ssh_args") or ""
    if _CONTROL_PATH.search(said):
        own["ANSIBLE_SSH_ARGS"] = _CONTROL_PATH.sub("", said).strip()
    if config.path is not None:
        own["ANSIBLE_CONFIG"] = str(config.path)
    if places.ssh is not None:
        own["ANSIBLE_SSH_EXECUTABLE"] = str(places.ssh)
    return {**passed, **own}


_CONTROL_PATH = re.compile(r"""(?<!\S)-o\s*["']?ControlPath[= ]\S+""", re.IGNORECASE)
"""A path of the user's own for ssh's sockets: a master there would outlive the run unfound."""


def remote_tmp_base(config: TreeConfig, host: Mapping[str, Any]) -> str:
    """Return the directory on the node under which the run gets one of its own."""
    return str(host.get("ansible_remote_tmp") or config.get("defaults", "remote_tmp") or DEFAULT_REMOTE_TMP)


def ssh_script(mark: str, remote_tmp: str, config: TreeConfig, host: Mapping[str, Any]) -> str:
    """Return the script that stands for ssh in the run; `mark` is then on its command lines on the node."""
    said = host.get("ansible_ssh_executable") or config.get("ssh_connection", "ssh_executable") or "ssh"
    tidy = f"rmdir {remote_tmp} 2>/dev/null" if _PLAIN_PATH.fullmatch(remote_tmp) else ":"
    return SSH_SCRIPT.format(ssh=shlex.quote(str(said)), mark=mark, tidy=tidy)


_PLAIN_PATH = re.compile(r"(~?/)?[A-Za-z0-9._@:=+/-]+")
"""A path that needs no quoting within quotes within quotes."""


def static_inventory(
    hosts: Mapping[str, Mapping[str, Any]],
    groups: Mapping[str, Sequence[str]],
    *,
    defaults: Defaults,
    common: str,
) -> dict[str, Any]:
    """Return the inventory as Ansible's YAML plugin reads it, with our defaults filled in."""
    named = {name: _host(variables, defaults, common) for name, variables in hosts.items()}
    children: dict[str, Any] = {
        group: {"hosts": {name: {} for name in members if name in named}}
        for group, members in groups.items()
        if group not in {"all", "ungrouped"}
    }
    return {"all": {"hosts": named, "children": children}}


def own_inventory(node: str, interpreter: str) -> dict[str, Any]:
    """Return what a run alone knows of its node, to be read after the inventory of all."""
    return {"all": {"hosts": {node: {"ansible_python_interpreter": interpreter}}}}


def _host(variables: Mapping[str, Any], defaults: Defaults, common: str) -> dict[str, Any]:
    host = {name: value for name, value in variables.items() if name not in OWN_VARIABLES}
    if defaults.user and not {"ansible_user", "ansible_ssh_user"} & host.keys():
        host["ansible_user"] = defaults.user
    if defaults.key_file and not {"ansible_private_key_file", "ansible_ssh_private_key_file"} & host.keys():
        host["ansible_ssh_private_key_file"] = str(defaults.key_file)
    said = str(host.get("ansible_ssh_common_args", common))
    if defaults.known_hosts and "UserKnownHostsFile" not in said:
        known = shlex.quote(f"UserKnownHostsFile={defaults.known_hosts}")
        host["ansible_ssh_common_args"] = f"{said} -o {known}".strip()
    return host


def _read_ini(path: Path) -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser(interpolation=None, inline_comment_prefixes=(";",), strict=False)
    try:
        parser.read_string(path.read_text())
    except (OSError, ValueError, configparser.Error):
        return {}
    return {section: dict(parser[section]) for section in parser.sections()}
