"""The isolator and the check, over the daemon's own ssh connections."""

from dataclasses import dataclass
from shlex import quote

from rolloutd.ports import AdapterContext, Failed, IsolationStatus, Ok, Shell, ShellResult, StepContext

TIMEOUT_S = 30.0


async def run(shell: Shell, ctx: StepContext, command: str) -> ShellResult:
    return await shell.run(ctx.host, f"{command} {quote(ctx.params['path'])}", timeout_s=TIMEOUT_S)


@dataclass
class FlagFileIsolator:
    shell: Shell

    async def inspect(self, ctx: StepContext) -> IsolationStatus:
        exists = (await run(self.shell, ctx, "test -e")).exit_status == 0
        # The first inspection of an attempt records what was there before; later ones keep it.
        prior = {"exists": exists} if ctx.prior is None else ctx.prior
        return IsolationStatus(is_isolated=exists, prior=prior, text=f"flag file exists: {exists}")

    async def isolate(self, ctx: StepContext) -> Ok | Failed:
        return self._result(ctx, await run(self.shell, ctx, "touch"))

    async def return_to_service(self, ctx: StepContext) -> Ok | Failed:
        if ctx.prior is not None and ctx.prior["exists"]:
            return Ok(f"{ctx.host.name} had the flag file before, and keeps it")
        return self._result(ctx, await run(self.shell, ctx, "rm -f"))

    def _result(self, ctx: StepContext, result: ShellResult) -> Ok | Failed:
        if result.exit_status == 0:
            return Ok(f"{ctx.host.name}: done")
        return Failed(f"{ctx.host.name}: {ctx.params['path']}: {result.stderr.strip()}")


@dataclass
class HealthCheck:
    shell: Shell

    async def check(self, ctx: StepContext) -> Ok | Failed:
        result = await run(self.shell, ctx, "head -n 1")
        if result.exit_status != 0:
            return Ok(f"{ctx.host.name} is healthy")
        return Failed(f"{ctx.host.name} is sick: {result.stdout.strip()}")


def create_isolator(context: AdapterContext) -> FlagFileIsolator:
    return FlagFileIsolator(context.shell)


def create_check(context: AdapterContext) -> HealthCheck:
    return HealthCheck(context.shell)
