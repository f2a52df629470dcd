"""Isolator and traffic probe `command`: commands of the plan, on the node or for it.

The isolator's `look` exits 0 if the node is isolated; without it `do` always runs.  The result of `look`
before `do` is the prior state: a node that was already isolated stays isolated.  A `look` that could not run
or was killed has no result: nothing is done, and isolation is not lost.
"""

from __future__ import annotations

import os

from rolloutd.adapters.command import run_command
from rolloutd.adapters.ssh.check import COMMAND_NOT_RUN, stderr_suffix
from rolloutd.adapters.ssh.shell_adapter import ShellAdapter
from rolloutd.errors import NodeUnreachable
from rolloutd.ports import Busy, Failed, IsolationStatus, Ok, ShellResult, StepContext, StepResult, Unknown

INSPECT_TIMEOUT_S = 60.0

MAX_EXIT_STATUS = 128
"""Greater statuses mean that a signal ended the command, or, with 255, that ssh did not connect."""

MIN_TIMEOUT_S = 5.0
"""A return to service is tried even after its deadline."""

MAX_OUTPUT_BYTES = 4096
"""Output kept of a command on this machine; only its first line is shown."""

MAX_SHOWN_CHARS = 200


class CommandIsolator(ShellAdapter):
    """ports.Isolator with the parameters `do`, `undo` and `look`."""

    async def inspect(self, ctx: StepContext) -> IsolationStatus | Busy:
        """Run `look`; Busy if it had no result; raises NodeUnreachable and TimeoutError."""
        command = ctx.params.get("look")
        if command is None:
            prior = {"isolated": False, "output": ""} if ctx.prior is None else ctx.prior
            return IsolationStatus(
                is_isolated=None, prior=prior, text="the plan has no look command: do always runs"
            )
        result = await self._shell.run(ctx.host, str(command), timeout_s=INSPECT_TIMEOUT_S)
        status = result.exit_status
        if status in COMMAND_NOT_RUN or status > MAX_EXIT_STATUS:
            cause = "it could not be run" if status in COMMAND_NOT_RUN else "a signal or ssh ended it"
            return Busy(
                f"`{command}` on {ctx.host.name} did not report whether the node is isolated: {cause} "
                f"(exit status {status}){stderr_suffix(result)}; run it there manually"
            )
        isolated = status == 0
        found = {"isolated": isolated, "output": result.stdout}
        return IsolationStatus(
            is_isolated=isolated,
            prior=found if ctx.prior is None else ctx.prior,
            text=f"`{command}` reports that {ctx.host.name} is {'isolated' if isolated else 'in service'}",
        )

    async def isolate(self, ctx: StepContext) -> StepResult:
        return await self._act(ctx, "do")

    async def return_to_service(self, ctx: StepContext) -> StepResult:
        """Run `undo`; its stdin is what `look` printed before `do`."""
        if ctx.prior is not None and ctx.prior["isolated"]:
            return Ok(f"{ctx.host.name} was already isolated, and stays isolated")
        return await self._act(ctx, "undo", stdin="" if ctx.prior is None else ctx.prior["output"])

    async def _act(self, ctx: StepContext, param: str, stdin: str = "") -> StepResult:
        command = str(ctx.params.get(param) or "")
        if not command:
            return Failed(f"the isolator command has no `{param}`")
        timeout_s = ctx.remaining_s(self._clock.now(), least=MIN_TIMEOUT_S)
        result = await self._run(ctx, command, timeout_s=timeout_s, stdin=stdin)
        if not isinstance(result, ShellResult):
            return result
        output = "\n".join(part for part in (result.stdout, result.stderr) if part)
        if result.exit_status == 0:
            return Ok(f"`{command}` ended with 0", output=output)
        return Failed(f"`{command}` on {ctx.host.name} ended with {result.exit_status}", output=output)


class CommandProbe(ShellAdapter):
    """ports.TrafficProbe with the parameters `run` and `on`."""

    async def probe(self, ctx: StepContext) -> Ok | Busy | Unknown:
        node, command = ctx.host.name, str(ctx.params["run"])
        timeout_s = ctx.remaining_s(self._clock.now())
        try:
            if ctx.params.get("on") == "daemon":
                status, output = await _run_here(command, timeout_s)
            else:
                result = await self._shell.run(ctx.host, command, timeout_s=timeout_s)
                status, output = result.exit_status, result.stdout
        except (NodeUnreachable, TimeoutError, OSError) as error:
            return Unknown(f"{node}: traffic is unknown: {error}")
        line = output.strip().partition("\n")[0][:MAX_SHOWN_CHARS]
        match status:  # as grep and test: all but 0 and 1 mean that the command did not work
            case 0:
                return Ok(f"{node} is idle: {line or f'`{command[:MAX_SHOWN_CHARS]}` exits 0'}")
            case 1:
                return Busy(f"{node} is busy: {line or f'`{command[:MAX_SHOWN_CHARS]}` exits 1'}")
            case _:
                cause = f"`{command[:MAX_SHOWN_CHARS]}` ended with {status}; 0 is idle, 1 is busy"
                return Unknown(f"{node}: traffic is unknown: {cause}")


async def _run_here(command: str, timeout_s: float) -> tuple[int, str]:
    """Run a command on this machine; return its exit status and the start of its output."""
    environment = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    try:
        ended = await run_command(
            # Without stderr, which a process in the background would hold open until the timeout.
            ["/bin/sh", "-c", f"exec 2>/dev/null\n{command}"],
            environment=environment,
            timeout_s=timeout_s,
            max_output_bytes=MAX_OUTPUT_BYTES,
            kill_children=True,
        )
    except TimeoutError:
        raise TimeoutError(f"`{command[:MAX_SHOWN_CHARS]}` did not end within {timeout_s:g}s") from None
    return ended.status, ended.stdout.decode(errors="replace")
