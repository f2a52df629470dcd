"""The guard of a node over ssh: one script on the node, and the node's own timer.

The script (node_guard.sh) is on the node while a guard is armed, because the node must restore itself without
the daemon.  Each question uses a new connection, which proves that the node can be reached.
"""

from __future__ import annotations

import re
import shlex

from rolloutd.adapters.ssh.shell_adapter import read_node_script, run_as_root
from rolloutd.errors import AdapterFailed
from rolloutd.ports import AdapterContext, Clock, GuardReport, GuardState, Shell, StepContext

UNSURE = 75
"""Exit status of the script when its guard may be armed, although it could not do its work."""

_TOKEN = re.compile(r"[^A-Za-z0-9._-]")

GUARD_SCRIPT = read_node_script("node_guard.sh")
"""The script on the node; its first lines list its operations."""


def guard_directory(directory: str, node: str) -> str:
    """Return the directory of a node's guards, below `guard_dir` of the settings."""
    return f"{directory}/{_TOKEN.sub('_', node)}"


class SshNodeGuard:
    """ports.NodeGuard; `directory` is on the nodes, for root only."""

    def __init__(self, shell: Shell, clock: Clock, directory: str) -> None:
        self._shell = shell
        self._clock = clock
        self._directory = directory

    @classmethod
    def make(cls, context: AdapterContext) -> SshNodeGuard:
        """Return the daemon's guard; its directory on the nodes is a setting of ssh."""
        return cls(context.shell, context.clock, context.settings.ssh.guard_dir)

    async def arm(self, ctx: StepContext, *, order: str) -> GuardReport:
        paths, commands = list(ctx.params["paths"]), list(ctx.params["commands"])
        for path in paths:
            # Templates are rendered by now.
            if not path.startswith("/") or not {"", ".", ".."}.isdisjoint(path.split("/")[1:]):
                raise AdapterFailed(f"{ctx.host.name}: the guard cannot keep {path!r}; name an absolute path")
        if any("\n" in text for text in (*paths, *commands)):
            raise AdapterFailed(f"{ctx.host.name}: a path or command of the guard has two lines; shorten it")
        number, database, *_ = order.split()
        across_reboot = "yes" if ctx.params["across_reboot"] else ""
        arguments = [str(int(ctx.params["after"])), across_reboot, number, database]
        texts = {"paths": "\n".join(paths), "commands": "\n".join(commands)}
        return await self._ask(ctx, "arm", *arguments, **texts)

    async def renew(self, ctx: StepContext) -> GuardReport:
        return await self._ask(ctx, "renew")

    async def disarm(self, ctx: StepContext) -> GuardReport:
        return await self._ask(ctx, "disarm")

    async def restore(self, ctx: StepContext) -> GuardReport:
        return await self._ask(ctx, "restore")

    async def inspect(self, ctx: StepContext) -> GuardReport:
        return await self._ask(ctx, "inspect")

    async def _ask(self, ctx: StepContext, operation: str, *arguments: str, **texts: str) -> GuardReport:
        answers = [line.partition(" ")[::2] for line in await self._run(ctx, operation, *arguments, **texts)]
        words = dict(answers)
        if "state" not in words:
            raise AdapterFailed(f"{ctx.host.name}: the guard on the node gave no state")
        return GuardReport(
            GuardState(words["state"]),
            by=words.get("by", ""),
            restored=tuple(text for key, text in answers if key == "restored"),
            problems=tuple(text for key, text in answers if key == "problem"),
        )

    async def _run(self, ctx: StepContext, operation: str, *arguments: str, **texts: str) -> list[str]:
        """Return the lines of the script's answer; raises AdapterFailed if it could not do its work.

        Raises TimeoutError if it may have done its work nevertheless.
        """
        token = _TOKEN.sub("_", f"{ctx.rollout}.{ctx.attempt}")
        # The script gets itself as text: arm writes it to the node, which must restore without the daemon.
        values = {"body": GUARD_SCRIPT, "paths": "", "commands": "", **texts}
        script = "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())
        timeout_s = ctx.remaining_s(self._clock.now())
        await self._shell.disconnect(ctx.host.name)
        answer = await run_as_root(
            self._shell,
            ctx.host,
            f'{script}eval "$body"\n',
            operation,
            guard_directory(self._directory, ctx.host.name),
            token,
            *arguments,
            timeout_s=timeout_s,
        )
        lines = answer.stdout.splitlines()
        errors = [line.removeprefix("error ") for line in lines if line.startswith("error ")]
        if answer.exit_status != 0 or errors:
            problem = "; ".join(errors) or answer.stderr.strip()[-500:] or "no answer"
            error = TimeoutError if answer.exit_status == UNSURE else AdapterFailed
            raise error(f"{ctx.host.name}: the guard on the node: {problem}")
        return lines
