"""What the adapters share that act by commands on a node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rolloutd.errors import HostKeyChanged, NodeUnreachable
from rolloutd.ports import AdapterContext, Clock, Failed, Shell, ShellResult, StepContext, Unknown


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
