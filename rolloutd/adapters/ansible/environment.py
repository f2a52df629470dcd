"""Environment, inventory and ssh wrapper of a run.

The tree's ansible.cfg applies; where the environment must override it (callback path, control sockets, remote
tmp), its values are merged.  Secrets reach a run only through its inventory and variables files.
"""

from __future__ import annotations

import configparser
import os
import pwd
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolloutd import ports
from rolloutd.adapters.ansible.stale_processes import ENTER_CGROUP, MARK_VARIABLE

CALLBACK_DIR = Path(__file__).parent / "callback"

SSH_ARGS = (
    "-C -o ControlMaster=auto -o ControlPersist=300s -o ServerAliveInterval=15 -o ServerAliveCountMax=8"
)
"""Ansible's own default with a longer ControlPersist: a master serves all runs of an attempt.

A node that is gone must not keep the master for ever.  If nothing ends an idle master, it ends itself.
"""

INHERITED_VARIABLES = (
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
"""Variables that a run inherits from the daemon: paths of programs and keys, never a key itself."""

GENERATION_ENV = "ROLLOUTD_INVENTORY"
"""Runs with the same value have the same inventory file."""

DEFAULT_REMOTE_TMP = "~/.ansible/tmp"
DEFAULT_CALLBACK_PATHS = "~/.ansible/plugins/callback:/usr/share/ansible/plugins/callback"
DEFAULT_COLLECTIONS_PATHS = "~/.ansible/collections:/usr/share/ansible/collections"
DEFAULT_ROLES_PATHS = "~/.ansible/roles:/usr/share/ansible/roles:/etc/ansible/roles"
"""Ansible's own defaults, which our environment would otherwise replace."""

MAX_RANK_PASSES = 50
"""Passes over the groups of all hosts: two sources may order the same groups differently."""

RESERVED_HOST_VARIABLES = (
    "ansible_remote_tmp",
    "ansible_ssh_executable",
    ports.GROUPS,
    ports.WITHHELD,
)
"""Host variables that would override the run's marks, and rolloutd's own variables."""

SSH_WRAPPER_TEMPLATE = """\
#!/bin/sh
# Stands for ssh in one run of rolloutd: the remote command gets a parent whose
# command line, environment and control group name the run, so that the node can
# be asked what is left of it, and that removes the run's temporary directory
# whenever it is empty.  It outlives a lost connection as long as the command
# does, and lets the command die of it.  A raw command is the login shell's own
# and stays in its language.  Where a command becomes another user, sudo drops the
# environment and root may use control groups, so it is marked there again.
# Each command first asks the node's fence whether the run was superseded.
# Calls with -O or -V have no remote command.
raw='{fence}; {enter_parent}; :'
tidy='{fence}; {enter}; trap : HUP; "$@"; status=$?; {tidy}; exit $status'
for argument do
    case $argument in -O | -V) exec {ssh} "$@" ;; esac
done
left=$#
for argument do
    shift
    left=$((left - 1))
    if [ "$left" -eq 0 ]; then
        case $argument in
        *"echo BECOME-SUCCESS-"*)
            before=${{argument%%"echo BECOME-SUCCESS-"*}}
            argument="$before"'{enter}; '"${{argument#"$before"}}" ;;
        esac
        case $argument in
        /*" -c "*) argument="/bin/sh -c '$tidy' {mark} $argument" ;;
        *) argument=": {mark}; /bin/sh -c '$raw' || exit 4; export {exported}; trap : HUP; $argument" ;;
        esac
    fi
    set -- "$@" "$argument"
done
exec {ssh} "$@"
"""


@dataclass(frozen=True, slots=True)
class TreeConfig:
    path: Path | None
    values: Mapping[str, Mapping[str, str]]

    @classmethod
    def load(cls, tree: Path) -> TreeConfig:
        """Read the file that Ansible reads; Ansible itself reports an unreadable one."""
        for path in (
            tree / "ansible.cfg",
            Path("~/.ansible.cfg").expanduser(),
            Path("/etc/ansible/ansible.cfg"),
        ):
            if path.is_file():
                return cls(path, _read_ini(path))
        return cls(None, {})

    def get(self, section: str, key: str) -> str | None:
        return self.values.get(section, {}).get(key) or None

    @property
    def common_args(self) -> str:
        """The ssh arguments of hosts without their own."""
        return self.get("ssh_connection", "ssh_common_args") or ""

    @property
    def names_control_path(self) -> bool:
        """Return whether the user decides where ssh's masters are; their lifetime is then the user's too."""
        section = self.values.get("ssh_connection", {})
        return bool(
            section.get("control_path")
            or section.get("control_path_dir")
            or "controlpath" in section.get("ssh_args", "").lower()
        )

    def search_paths(self, key: str, default: str) -> str:
        """Return the directories that a key of `defaults` names, without ours."""
        configured = self.get("defaults", key)
        if configured is None or self.path is None:
            return default
        base = self.path.parent
        return ":".join(
            part if part.startswith(("/", "~", "$", "{")) else str(base / part)
            for part in configured.split(":")
            if part
        )


@dataclass(frozen=True, slots=True)
class RunPaths:
    run_id: str
    events: Path
    local_tmp: Path
    sockets: Path
    ssh_wrapper: Path | None
    requirements: Path | None = None
    pipelining: bool = False
    generation: str = ""


def build_environment(paths: RunPaths, config: TreeConfig) -> dict[str, str]:
    inherited = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
    if "HOME" not in inherited:
        inherited["HOME"] = pwd.getpwuid(os.geteuid()).pw_dir
    callback_paths = config.search_paths("callback_plugins", DEFAULT_CALLBACK_PATHS)
    own = {
        "LC_ALL": "C.UTF-8",
        # A compiled plugin would be in the pinned tree, among the files that people vote for.
        "PYTHONDONTWRITEBYTECODE": "1",
        "ROLLOUTD_RUN": paths.run_id,
        "ROLLOUTD_RUN_DIR": str(paths.events.parent),
        "ROLLOUTD_EVENTS": str(paths.events),
        "ANSIBLE_CALLBACK_PLUGINS": f"{callback_paths}:{CALLBACK_DIR}",
        "ANSIBLE_INVENTORY_ENABLED": "yaml",
        "ANSIBLE_LOCAL_TEMP": str(paths.local_tmp),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_RETRY_FILES_ENABLED": "0",
    }
    if not config.names_control_path:
        # Ansible turns %% into %, and ssh turns %C into a hash, so the path stays short enough for a socket.
        own["ANSIBLE_SSH_CONTROL_PATH"] = "%(directory)s/%%C"
        own["ANSIBLE_SSH_CONTROL_PATH_DIR"] = str(paths.sockets)
    if not config.names_control_path and "ssh_args" not in config.values.get("ssh_connection", {}):
        own["ANSIBLE_SSH_ARGS"] = SSH_ARGS
    if config.path is not None:
        own["ANSIBLE_CONFIG"] = str(config.path)
    if paths.generation:
        own[GENERATION_ENV] = paths.generation
    if paths.pipelining:
        own["ANSIBLE_PIPELINING"] = "1"
    if paths.ssh_wrapper is not None:
        own["ANSIBLE_SSH_EXECUTABLE"] = str(paths.ssh_wrapper)
    if paths.requirements is not None:
        for name, folder, key, default in (
            ("ANSIBLE_COLLECTIONS_PATH", "collections", "collections_path", DEFAULT_COLLECTIONS_PATHS),
            ("ANSIBLE_ROLES_PATH", "roles", "roles_path", DEFAULT_ROLES_PATHS),
        ):
            others = inherited.get(name) or config.search_paths(key, default)
            own[name] = f"{paths.requirements / folder}:{others}"
    return {**inherited, **own}


def remote_tmp_base(config: TreeConfig, host: Mapping[str, Any]) -> str:
    """Return the parent of the run's temporary directory on the node."""
    return str(host.get("ansible_remote_tmp") or config.get("defaults", "remote_tmp") or DEFAULT_REMOTE_TMP)


def render_ssh_wrapper(
    marker: str, remote_tmp: str, config: TreeConfig, host: Mapping[str, Any], fence: str = ":"
) -> str:
    """Return the run's ssh wrapper, which puts `marker` on the command lines on the node.

    `fence` is run before each command there, and may end it.
    """
    executable = host.get("ansible_ssh_executable") or config.get("ssh_connection", "ssh_executable") or "ssh"
    # Only the last command of a task finds the directory empty, so the others start no rmdir.
    cleanup = (
        f"[ -d {remote_tmp} ] && "
        f"for f in {remote_tmp}/*; do [ -e $f ] || rmdir {remote_tmp} 2>/dev/null; break; done"
        if _SHELL_SAFE_PATH.fullmatch(remote_tmp)
        else ":"
    )
    prefix = "-".join([*marker.split("-")[:3], ""])
    enter = ENTER_CGROUP.format(prefix=prefix, marker=marker, pid="$$")
    return SSH_WRAPPER_TEMPLATE.format(
        ssh=shlex.quote(str(executable)),
        mark=marker,
        fence=fence,
        exported=f"{MARK_VARIABLE}={marker}",
        tidy=cleanup,
        enter=f"export {MARK_VARIABLE}={marker}; {enter}",
        enter_parent=ENTER_CGROUP.format(prefix=prefix, marker=marker, pid="$PPID"),
    )


_SHELL_SAFE_PATH = re.compile(r"(~?/)?[A-Za-z0-9._@:=+/-]+")
"""A path that needs no quotes: it is used inside two levels of quotes."""


def build_inventory(
    hosts: Mapping[str, Mapping[str, Any]],
    groups: Mapping[str, Sequence[str]],
    *,
    defaults: ports.ConnectionDefaults,
    common_args: str,
) -> dict[str, Any]:
    """Return the inventory in the YAML plugin's format, with our defaults; later groups take precedence."""
    host_variables = {
        name: _host_variables(variables, defaults, common_args) for name, variables in hosts.items()
    }
    ranks = _group_ranks(hosts.values())
    children: dict[str, Any] = {
        group: {"hosts": {name: {} for name in members if name in host_variables}}
        for group, members in sorted(groups.items(), key=lambda each: ranks.get(each[0], (0, each[0])))
        if group not in ports.IMPLICIT_GROUPS
    }
    return {"all": {"hosts": host_variables, "children": children}}


def _group_ranks(hosts: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, str]]:
    """Return a sort key of each group, which orders the groups of each host as its own list does."""
    orders = sorted({tuple(variables.get(ports.GROUPS, ())) for variables in hosts})
    ranks: dict[str, int] = {}
    for _ in range(MAX_RANK_PASSES):
        before = dict(ranks)
        for order in orders:
            rank = 0
            for name in order:
                rank = ranks[name] = max(rank + 1, ranks.get(name, 0))
        if ranks == before:
            break
    return {name: (rank, name) for name, rank in ranks.items()}


def build_node_inventory(node: str, interpreter: str) -> dict[str, Any]:
    """Return the run's own variables of its node, which Ansible reads after the shared inventory."""
    # The node itself says where its Python is.
    return {"all": {"hosts": {node: ports.without_templates({"ansible_python_interpreter": interpreter})}}}


def _host_variables(
    variables: Mapping[str, Any], defaults: ports.ConnectionDefaults, common_args: str
) -> dict[str, Any]:
    host = {name: value for name, value in variables.items() if name not in RESERVED_HOST_VARIABLES}
    if defaults.user and not {"ansible_user", "ansible_ssh_user"} & host.keys():
        host["ansible_user"] = defaults.user
    if defaults.key_file and not {"ansible_private_key_file", "ansible_ssh_private_key_file"} & host.keys():
        host["ansible_ssh_private_key_file"] = str(defaults.key_file)
    given = host.get("ansible_ssh_common_args", common_args)
    common_arguments = ports.plain_value(given)
    # What is not a text, such as a vaulted value, stays as it is: its text would be a template.
    if (
        defaults.known_hosts
        and isinstance(common_arguments, str)
        and "UserKnownHostsFile" not in common_arguments
    ):
        known = shlex.quote(f"UserKnownHostsFile={defaults.known_hosts}")
        host["ansible_ssh_common_args"] = ports.marked_as(given, f"{common_arguments} -o {known}".strip())
    return host


def _read_ini(path: Path) -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser(interpolation=None, inline_comment_prefixes=(";",), strict=False)
    try:
        parser.read_string(path.read_text())
    except (OSError, ValueError, configparser.Error):
        return {}
    return {section: dict(parser[section]) for section in parser.sections()}
