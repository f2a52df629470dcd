"""The command of a person's shell: by the inventory's route, without the daemon's user and key."""

from __future__ import annotations

from typing import Any

import pytest

from machines.model.node import NodeKind
from rolloutd.adapters.ssh.person_shell import shell_command
from rolloutd.errors import NodeUnreachable
from rolloutd.ports import Host
from rolloutd.settings.model import ShellCommands


def command_for(variables: dict[str, Any], kind: NodeKind = NodeKind.HOST, **settings: Any) -> list[str]:
    commands = ShellCommands.model_validate(settings)
    host = Host("n1", kind, {}, variables)
    return list(shell_command(host, on_host=commands.host, on_kubernetes=commands.kubernetes))


def test_ssh_takes_the_route_and_no_identity() -> None:
    secret = {
        "ansible_user": "daemon",
        "ansible_password": "hunter2",
        "ansible_ssh_private_key_file": "/etc/rolloutd/key",
    }
    assert command_for({"ansible_host": "10.0.0.7", **secret}) == ["ssh", "--", "10.0.0.7"]
    jump = "-o ProxyJump=ops@bastion -o HostKeyAlias=n1.example -i /etc/rolloutd/key -l daemon"
    assert command_for({"ansible_port": 2222, "ansible_ssh_common_args": jump}) == [
        *("ssh", "-p", "2222", "-J", "ops@bastion", "-o", "HostKeyAlias=n1.example", "--", "n1")
    ]


def test_address_like_an_option_stays_an_address() -> None:
    assert command_for({"ansible_host": "-oProxyCommand=id"})[-2:] == ["--", "-oProxyCommand=id"]


def test_settings_replace_words_only() -> None:
    words = ["mosh", "--ssh=ssh -p {port}", "{address}", "{other}"]
    assert command_for({"ansible_host": "h; id", "ansible_port": 22}, host=words) == [
        *("mosh", "--ssh=ssh -p 22", "h; id", "{other}")
    ]


def test_kubernetes_node_gets_a_debug_container() -> None:
    assert command_for({}, NodeKind.KUBERNETES)[:3] == ["kubectl", "debug", "node/n1"]


def test_proxy_command_is_neither_shown_nor_run() -> None:
    proxy = {"ansible_ssh_common_args": "-o ProxyCommand='sshpass -p hunter2 ssh -W %h:%p bastion'"}
    with pytest.raises(NodeUnreachable, match=r"^n1: it is reached by a ProxyCommand; set shell.host"):
        command_for(proxy)
