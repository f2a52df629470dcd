"""Check `node`: the node itself reaches a TCP port or an address, or resolves a name.

The probe is a command on the node, so it judges the node's own routes and resolver.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from rolloutd.adapters.ssh.check import stderr_suffix
from rolloutd.adapters.ssh.shell_adapter import ShellAdapter
from rolloutd.ports import JSON, Failed, Ok, ShellResult, StepContext, Unknown

NO_TOOL = 75
"""Exit status of a probe for which the node has no program (EX_TEMPFAIL)."""

LOGIN_MARGIN_S = 10.0

_TCP = (
    "if command -v bash >/dev/null; then timeout {limit} bash -c 'exec 3<>\"/dev/tcp/$0/$1\"' {host} {port}; "
    "elif command -v nc >/dev/null; then timeout {limit} nc -z {host} {port}; "
    f"else exit {NO_TOOL}; fi"
)
_ICMP = f"command -v ping >/dev/null || exit {NO_TOOL}; ping -c 1 -W {{limit}} {{host}} >/dev/null"
_DNS = f"command -v getent >/dev/null || exit {NO_TOOL}; timeout {{limit}} getent ahosts {{host}} >/dev/null"


class NodeProbe(ShellAdapter):
    """ports.Check with one of the parameters `tcp`, `icmp` and `dns`."""

    async def check(self, ctx: StepContext) -> Ok | Failed | Unknown:
        limit_s = int(ctx.remaining_s(self._clock.now()))
        what, command = _command(ctx.params, limit_s)
        node = ctx.host.name
        if not command:
            return Failed(f"the check node: {what!r} is not HOST:PORT; correct the plan")
        answer = await self._run(ctx, command, timeout_s=limit_s + LOGIN_MARGIN_S)
        if not isinstance(answer, ShellResult):
            return answer
        if answer.exit_status == 0:
            return Ok(f"{node} reaches {what}")
        if answer.exit_status == NO_TOOL:
            return Failed(f"{node} has no program to probe {what}; install bash, ping or getent")
        return Failed(f"{node} does not reach {what}{stderr_suffix(answer)}")


def _command(params: Mapping[str, JSON], limit_s: int) -> tuple[str, str]:
    """Return what is probed, and the command; no command if the address cannot be read."""
    if params.get("icmp") is not None:
        host = str(params["icmp"])
        return f"{host} by ICMP", _ICMP.format(limit=limit_s, host=shlex.quote(host))
    if params.get("dns") is not None:
        name = str(params["dns"])
        return f"the address of {name}", _DNS.format(limit=limit_s, host=shlex.quote(name))
    text = str(params.get("tcp"))
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        return text, ""
    host = host.removeprefix("[").removesuffix("]")
    return text, _TCP.format(limit=limit_s, host=shlex.quote(host), port=port)
