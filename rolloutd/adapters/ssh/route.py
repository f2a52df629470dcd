"""Route to a node over ssh, read from its Ansible variables.

Ansible's runs and our own logins must reach the same sshd with the same user and key, so this module reads
the variables of Ansible's ssh plugin with its precedence, `ansible_ssh_*_args` included; the settings supply
defaults. Variables cannot disable the host key check (`StrictHostKeyChecking=no`,
`UserKnownHostsFile=/dev/null`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rolloutd.errors import NodeUnreachable
from rolloutd.ports import JSON, ConnectionDefaults, Host

DEFAULT_PORT = 22

SSH_CONNECTIONS = frozenset({"ssh", "smart", "ansible.builtin.ssh", "paramiko", "paramiko_ssh"})

_OPTIONS_WITH_ARGUMENT = frozenset("BbcDEeFIiJLlmOoPpQRSWw")
"""The letters of ssh's options that take an argument (ssh(1))."""

_INVENTORY_HOSTNAME = re.compile(r"\{\{\s*inventory_hostname\s*\}\}")


@dataclass(frozen=True, slots=True)
class Route:
    """Parameters of a connection; None leaves a value to the user's own ssh configuration."""

    host: str
    port: int
    user: str | None
    key_files: tuple[Path, ...]
    known_hosts: tuple[Path, ...]
    password: str | None = field(default=None, repr=False)
    alias: str | None = None
    jumps: tuple[str, ...] = ()
    proxy_command: str | None = None
    config: tuple[Path, ...] | None = None

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_direct(self) -> bool:
        """Whether a plain TCP connection from here ends at the node's sshd."""
        return not self.jumps and self.proxy_command is None

    @property
    def known_hosts_name(self) -> str:
        """The name under which known_hosts keeps the node's key."""
        name = self.alias or self.host
        return name if self.port == DEFAULT_PORT else f"[{name}]:{self.port}"


def read_route(host: Host, defaults: ConnectionDefaults) -> Route:
    """Return the route to a node; raises NodeUnreachable if its variables are invalid."""
    variables = _Variables(host.name, host.connection)
    connection = variables.text("ansible_connection")
    if connection is not None and connection not in SSH_CONNECTIONS:
        raise NodeUnreachable(
            f"{host.name}: ansible_connection is {connection}; rolloutd reaches nodes by ssh only"
        )
    options = _SshOptions(variables)
    key_file = variables.text("ansible_ssh_private_key_file", "ansible_private_key_file")
    keys = [key_file] if key_file else []
    keys += [path for path in options.all("identityfile") if path.lower() != "none"]
    jump = options.first("proxyjump")
    proxy = options.first("proxycommand")
    config = options.first("configfile")
    return Route(
        host=variables.text("ansible_host", "ansible_ssh_host") or options.first("hostname") or host.name,
        port=variables.port("ansible_port", "ansible_ssh_port", default=options.first("port")),
        user=variables.text("ansible_user", "ansible_ssh_user") or options.first("user") or defaults.user,
        key_files=_paths(keys) or ((defaults.key_file,) if defaults.key_file else ()),
        known_hosts=_known_hosts(options, defaults),
        password=variables.plain_text("ansible_password", "ansible_ssh_pass", "ansible_ssh_password"),
        alias=options.first("hostkeyalias"),
        jumps=tuple(jump.split(",")) if jump and jump.lower() != "none" else (),
        proxy_command=proxy if proxy and proxy.lower() != "none" else None,
        config=None if config is None else _paths([config]),
    )


class _Variables:
    """The Ansible variables of a node; its errors name the node."""

    def __init__(self, node: str, values: Mapping[str, JSON]) -> None:
        self._node = node
        self._values = values

    def text(self, *names: str) -> str | None:
        """Return the first variable that is set; raises NodeUnreachable for a template."""
        for name in names:
            value = self._values.get(name)
            if value in (None, ""):
                continue
            text = _INVENTORY_HOSTNAME.sub(self._node, str(value))
            if isinstance(value, dict | list) or "{{" in text or "{%" in text:
                raise NodeUnreachable(
                    f"{self._node}: {name} is a template or a vaulted value, which only Ansible can read; "
                    "give it as plain text"
                )
            return text
        return None

    def plain_text(self, *names: str) -> str | None:
        """Return the first variable that is plain text; ignores others."""
        for name in names:
            value = self._values.get(name)
            # A vaulted password is for Ansible alone; our own login then uses keys.
            if isinstance(value, str) and value and "{{" not in value:
                return value
        return None

    def port(self, *names: str, default: str | None) -> int:
        text = self.text(*names) or default or str(DEFAULT_PORT)
        if not text.isdecimal() or not 0 < int(text) < 65536:
            raise NodeUnreachable(f"{self._node}: the inventory names port {text!r}; allowed are 1 to 65535")
        return int(text)


class _SshOptions:
    """The options in a node's `ansible_ssh_*_args`; as in ssh, the first value of a name wins."""

    def __init__(self, variables: _Variables) -> None:
        self._found: dict[str, list[str]] = {}
        for name in ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args"):
            text = variables.text(name)
            for key, value in _parse_arguments(text) if text else ():
                self._found.setdefault(key, []).append(value)

    def first(self, key: str) -> str | None:
        return self._found[key][0] if key in self._found else None

    def all(self, key: str) -> list[str]:
        return self._found.get(key, [])


_OPTION_LETTERS = {
    "J": "proxyjump",
    "i": "identityfile",
    "p": "port",
    "l": "user",
    "F": "configfile",
}


def _parse_arguments(text: str) -> Iterator[tuple[str, str]]:
    words = iter(_split(text))
    for word in words:
        if not word.startswith("-") or len(word) < 2 or word[1] not in _OPTIONS_WITH_ARGUMENT:
            continue
        letter, value = word[1], word[2:] or next(words, "")
        if letter == "o":
            key, _, value = value.replace("=", " ", 1).strip().partition(" ")
            yield key.lower(), _unquote(key, value.strip())
        elif letter in _OPTION_LETTERS:
            yield _OPTION_LETTERS[letter], value


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        problem = f"the inventory's ssh arguments {text!r} cannot be read: {error}; correct them there"
        raise NodeUnreachable(problem) from error


def _unquote(key: str, value: str) -> str:
    """Remove the quotes of ssh_config(5), except in lists of files and in commands."""
    if key.lower() in {"userknownhostsfile", "globalknownhostsfile", "proxycommand"}:
        return value
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value


GLOBAL_KNOWN_HOSTS = Path("/etc/ssh/ssh_known_hosts")


def _known_hosts(options: _SshOptions, defaults: ConnectionDefaults) -> tuple[Path, ...]:
    user_files = options.first("userknownhostsfile")
    own = _paths(_split(user_files)) if user_files else ()
    own = tuple(path for path in own if path not in {Path("/dev/null"), Path("none")})
    global_files = options.first("globalknownhostsfile")
    shared = (GLOBAL_KNOWN_HOSTS,) if global_files is None else _paths(_split(global_files))
    return (*(own or (defaults.known_hosts or Path("~/.ssh/known_hosts").expanduser(),)), *shared)


def _paths(names: list[str]) -> tuple[Path, ...]:
    return tuple(Path(name).expanduser() for name in names)
