"""The command with which a person opens a shell on a node.

It runs as the person: it names no user, key or password of the daemon.
"""

from __future__ import annotations

from collections.abc import Sequence

from machines.model.node import NodeKind
from rolloutd.adapters.ssh.route import DEFAULT_PORT, read_route
from rolloutd.errors import NodeUnreachable
from rolloutd.ports import ConnectionDefaults, Host


def shell_command(
    host: Host, *, on_host: Sequence[str] | None, on_kubernetes: Sequence[str]
) -> Sequence[str]:
    """Return the words of the command; raises NodeUnreachable if the node's variables are invalid.

    Without words of the settings for a plain host it is ssh, by the route that the inventory names.
    """
    if host.kind is NodeKind.KUBERNETES:
        return [word.replace("{node}", host.name) for word in on_kubernetes]
    route = read_route(host, ConnectionDefaults())
    if on_host is not None:
        values = {"{node}": host.name, "{address}": route.host, "{port}": str(route.port)}
        return [_fill(word, values) for word in on_host]
    if route.proxy_command is not None:
        # Not shown and not run: a proxy's command may hold a password.
        raise NodeUnreachable(f"{host.name}: it is reached by a ProxyCommand; set shell.host in the settings")
    command = ["ssh"]
    if route.port != DEFAULT_PORT:
        command += ["-p", str(route.port)]
    if route.jumps:
        command += ["-J", ",".join(route.jumps)]
    if route.alias is not None:
        command += ["-o", f"HostKeyAlias={route.alias}"]
    # After "--" no address is an option.
    return [*command, "--", route.host]


def _fill(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word
