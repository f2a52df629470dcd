"""How a node is reached, from its Ansible variables and the settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rolloutd.adapters.ssh.route import GLOBAL_KNOWN_HOSTS, Route, read_route
from rolloutd.errors import NodeUnreachable
from rolloutd.ports import ConnectionDefaults, Host

SETTINGS = ConnectionDefaults(Path("/etc/rolloutd/known_hosts"), "ops", Path("/etc/rolloutd/id"))


def route(settings: ConnectionDefaults = SETTINGS, **variables: Any) -> Route:
    """Read the route of a node n1."""
    return read_route(Host("n1", connection=variables), settings)


def test_the_settings_fill_what_the_inventory_leaves_open() -> None:
    read = route()
    assert (read.host, read.port, read.user, read.address) == ("n1", 22, "ops", "n1:22")
    assert read.key_files == (Path("/etc/rolloutd/id"),)
    assert read.known_hosts == (Path("/etc/rolloutd/known_hosts"), GLOBAL_KNOWN_HOSTS)
    assert read.is_direct
    own = Path("~/.ssh/known_hosts").expanduser()
    assert route(ConnectionDefaults()).known_hosts[0] == own


def test_the_inventory_comes_before_the_settings() -> None:
    read = route(
        ansible_host="10.0.0.7",
        ansible_port="2222",
        ansible_user="root",
        ansible_ssh_private_key_file="/k",
        ansible_password="x",
    )
    assert (read.host, read.port, read.user, read.key_files) == ("10.0.0.7", 2222, "root", (Path("/k"),))
    assert read.password == "x"
    assert "password" not in repr(read)
    assert read.known_hosts_name == "[10.0.0.7]:2222"


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ("-J ops@gate:2200,inner", "jumps", ("ops@gate:2200", "inner")),
        ("-o ProxyJump=gate", "jumps", ("gate",)),
        ("-oProxyJump=none", "jumps", ()),
        ("-o 'ProxyCommand=ssh -W %h:%p \"gate\"'", "proxy_command", 'ssh -W %h:%p "gate"'),
        ("-C -o ControlMaster=auto -p 2022", "port", 2022),
        ("-o Port=2022 -p 1", "port", 2022),
        ("-l admin", "user", "admin"),
        ("-o User=admin", "user", "admin"),
        ("-i ~/k -o IdentityFile=/l", "key_files", (Path("~/k").expanduser(), Path("/l"))),
        ("-o HostKeyAlias=alias", "alias", "alias"),
        ("-F /dev/null", "config", (Path("/dev/null"),)),
        ("-o HostName=10.1.1.1", "host", "10.1.1.1"),
        (
            "-o 'UserKnownHostsFile=\"/a b\" /c' -o GlobalKnownHostsFile=/dev/null",
            "known_hosts",
            (Path("/a b"), Path("/c"), Path("/dev/null")),
        ),
        ("-o UserKnownHostsFile=/dev/null", "known_hosts", (SETTINGS.known_hosts, GLOBAL_KNOWN_HOSTS)),
    ],
)
def test_reads_the_ssh_arguments_of_ansible(arguments: str, field: str, value: Any) -> None:
    for name in ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args"):
        assert getattr(route(**{name: arguments}), field) == value


def test_the_variables_come_before_the_arguments() -> None:
    read = route(ansible_port=22022, ansible_user="root", ansible_ssh_common_args="-p 1 -l other")
    assert (read.port, read.user) == (22022, "root")


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"ansible_host": "{{ address }}"}, "ansible_host is a template"),
        ({"ansible_user": {"__ansible_vault": "x"}}, "ansible_user is a template or a vaulted value"),
        ({"ansible_port": "ssh"}, "names port 'ssh'"),
        ({"ansible_port": 70000}, "names port '70000'"),
        ({"ansible_connection": "local"}, "ansible_connection is local"),
        ({"ansible_ssh_common_args": "-o 'x"}, "cannot be read: No closing quotation; correct"),
        ({"ansible_ssh_common_args": "-o 'UserKnownHostsFile=\"/a'"}, "cannot be read"),
        ({"ansible_ssh_args": "-o 'GlobalKnownHostsFile=\"/a'"}, "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_said(variables: dict[str, Any], says: str) -> None:
    with pytest.raises(NodeUnreachable, match=says):
        route(**variables)


def test_own_name_templated_and_vaulted_password_ignored() -> None:
    read = route(ansible_host="{{ inventory_hostname }}.example", ansible_password={"__ansible_vault": "x"})
    assert (read.host, read.password) == ("n1.example", None)
