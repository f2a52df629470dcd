"""Commands and scripts on a node: what the adapters share that act by them.

A script runs as root if the login may become root.  That knows sudo only: other ways of Ansible's become need
a terminal.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Self

from rolloutd.errors import HostKeyChanged, NodeUnreachable
from rolloutd.ports import AdapterContext, Clock, Failed, Host, Shell, ShellResult, StepContext, Unknown

OUTPUT_MARK = "rolloutd-output"
"""The line after which the script's own output begins: the login shell's files may print a banner before."""

LAUNCHER = r"""
echo rolloutd-output
IFS= read -r password
if [ "$(id -u)" = 0 ]; then exec /bin/sh -s -- "$@" "$HOME"; fi
if sudo -n true; then exec sudo -n /bin/sh -s -- "$@" "$HOME"; fi
if [ -n "$password" ] && printf "%s\n" "$password" | sudo -k -S -p "" true; then
    { printf "%s\n" "$password"; cat; } | sudo -k -S -p "" /bin/sh -s -- "$@" "$HOME"
    exit
fi
exec /bin/sh -s -- "$@" "$HOME"
"""
"""Runs the rest of stdin as root if the login may become root, else as the login.

The first line of stdin is the password for sudo, or empty, so that it is on no command line.  The login's
home is the script's last argument, because sudo changes HOME.
"""


def read_node_script(name: str) -> str:
    """Return a script of this package that is run on nodes.

    Call it at import: an upgrade replaces the file below a running daemon, which sends the old arguments.
    """
    return files(__package__).joinpath(name).read_text()


async def run_as_root(
    shell: Shell, host: Host, script: str, *arguments: str, timeout_s: float
) -> ShellResult:
    """Run a POSIX sh script on the node, as the login where it may not become root; raises as Shell.run."""
    command = shlex.join(["/bin/sh", "-c", LAUNCHER, "rolloutd", *arguments])
    stdin = f"{_become_password(host)}\n{script}"
    return after_mark(await shell.run(host, command, timeout_s=timeout_s, stdin=stdin))


def after_mark(result: ShellResult) -> ShellResult:
    """Return the result without what the node printed before OUTPUT_MARK, if it printed that."""
    _, mark, output = result.stdout.partition(f"{OUTPUT_MARK}\n")
    return replace(result, stdout=output) if mark else result


def _become_password(host: Host) -> str:
    """Return the password for sudo on the node; empty if it is missing or a template."""
    for name in ("ansible_become_password", "ansible_become_pass", "ansible_sudo_pass"):
        value = host.connection.get(name)
        if isinstance(value, str) and "{{" not in value and "\n" not in value:
            return value
    return ""


@dataclass
class ShellAdapter:
    _shell: Shell
    _clock: Clock

    @classmethod
    def make(cls, context: AdapterContext) -> Self:
        return cls(context.shell, context.clock)

    async def _run(
        self, ctx: StepContext, command: str, *, timeout_s: float, stdin: str = ""
    ) -> ShellResult | Failed | Unknown:
        """Run a command on the node, or return why it has no result."""
        try:
            return await self._shell.run(ctx.host, command, timeout_s=timeout_s, stdin=stdin)
        except HostKeyChanged as error:
            # No retry helps, and an attacker may answer: a person must compare the keys.
            return Failed(str(error))
        except (NodeUnreachable, TimeoutError) as error:
            # The command may have run all the same.
            return Unknown(str(error))
