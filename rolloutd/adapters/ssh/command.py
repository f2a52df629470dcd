"""The isolator `command`: a node is taken out of service, and put back, by commands on it.

Parameters: `do`, `undo`, and perhaps `look`, which ends with 0 where the node is
isolated.  Without `look` nobody can tell, so `do` is always run: it must be
idempotent, as `undo` must.  What `look` found before `do` is the prior state: a
node that was isolated before we came is left so.  A `look` that could not be run
or was killed found nothing, and nothing is done or taken for lost on its word.
"""

from __future__ import annotations

from rolloutd.adapters.kit import Kit
from rolloutd.adapters.ssh.check import NEVER_RAN, said
from rolloutd.errors import HostKeyChanged, NodeUnreachable
from rolloutd.ports import Busy, Clock, Failed, Look, Ok, Shell, StepContext, StepResult, Unknown

LOOK_TIMEOUT_S = 60.0
"""A look only reads."""

LAST_ANSWER = 128
"""Above it are a shell's word for an end by a signal, and with 255 ssh's for no connection."""

MIN_COMMAND_S = 5.0
"""A put-back whose deadline has passed is tried all the same."""


def make(kit: Kit) -> CommandIsolator:
    """Return the isolator `command`."""
    return CommandIsolator(kit.shell, kit.clock)


class CommandIsolator:
    """ports.Isolator with the parameters `do`, `undo` and `look`."""

    def __init__(self, shell: Shell, clock: Clock) -> None:
        self._shell = shell
        self._clock = clock

    async def look(self, ctx: StepContext) -> Look | Busy:
        """Run `look`; Busy where it could not say; raises NodeUnreachable and TimeoutError."""
        command = ctx.params.get("look")
        if command is None:
            prior = {"isolated": False, "output": ""} if ctx.prior is None else ctx.prior
            return Look(done=None, prior=prior, text="there is no look command: do is run in any case")
        result = await self._shell.run(ctx.host, str(command), timeout_s=LOOK_TIMEOUT_S)
        status = result.exit_status
        if status in NEVER_RAN or status > LAST_ANSWER:
            return Busy(
                f"`{command}` did not say whether {ctx.host.name} is isolated: "
                f"{_no_answer(status)}{said(result)}; run it there by hand"
            )
        isolated = status == 0
        found = {"isolated": isolated, "output": result.stdout}
        return Look(
            done=isolated,
            prior=found if ctx.prior is None else ctx.prior,
            text=f"`{command}` says that {ctx.host.name} is {'isolated' if isolated else 'in service'}",
        )

    async def do(self, ctx: StepContext) -> StepResult:
        """Run `do`; its exit status 0 means isolated."""
        return await self._run(ctx, "do")

    async def undo(self, ctx: StepContext) -> StepResult:
        """Run `undo`, with what `look` printed before `do` as its input."""
        if ctx.prior is not None and ctx.prior["isolated"]:
            return Ok(f"{ctx.host.name} was isolated before we came, and stays so")
        return await self._run(ctx, "undo", stdin="" if ctx.prior is None else ctx.prior["output"])

    async def _run(self, ctx: StepContext, which: str, stdin: str = "") -> StepResult:
        command = str(ctx.params.get(which) or "")
        if not command:
            return Failed(f"the isolator command has no `{which}`")
        timeout_s = max(MIN_COMMAND_S, ctx.deadline - self._clock.now())
        try:
            result = await self._shell.run(ctx.host, command, timeout_s=timeout_s, stdin=stdin)
        except HostKeyChanged as error:
            return Failed(str(error))
        except (NodeUnreachable, TimeoutError) as error:
            return Unknown(str(error))
        output = "\n".join(part for part in (result.stdout, result.stderr) if part)
        if result.exit_status == 0:
            return Ok(f"`{command}` ended with 0", output=output)
        return Failed(f"`{command}` on {ctx.host.name} ended with {result.exit_status}", output=output)


def _no_answer(status: int) -> str:
    how = "it could not be run" if status in NEVER_RAN else "it was ended by a signal, or never got through"
    return f"{how} (exit status {status})"
