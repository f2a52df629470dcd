"""The in-memory twin of the Isolator: nodes that are in service or out of it."""

from __future__ import annotations

from rolloutd.ports import Busy, Failed, Look, Ok, StepContext, StepResult, Unknown


class FakeIsolator:
    """ports.Isolator; `isolated` are the nodes out of service, by whomever.

    `answers` are results that take the place of an action, by (node, "do" or
    "undo"); `acts` are all actions that changed something or would have.
    """

    def __init__(self) -> None:
        self.isolated: set[str] = set()
        self.answers: dict[tuple[str, str], Busy | Failed | Unknown] = {}
        self.acts: list[tuple[str, str]] = []

    async def look(self, ctx: StepContext) -> Look:
        """Say whether the node is out of service, and was before we came."""
        isolated = ctx.host.name in self.isolated
        prior = {"isolated": isolated} if ctx.prior is None else ctx.prior
        return Look(isolated, prior, "isolated" if isolated else "in service")

    async def do(self, ctx: StepContext) -> StepResult:
        """Take the node out of service."""
        return self._act(ctx, "do", isolated=True)

    async def undo(self, ctx: StepContext) -> StepResult:
        """Put the node back as it was."""
        before = ctx.prior is not None and ctx.prior["isolated"]
        return self._act(ctx, "undo", isolated=before)

    def _act(self, ctx: StepContext, action: str, *, isolated: bool) -> StepResult:
        node = ctx.host.name
        self.acts.append((node, action))
        answer = self.answers.get((node, action))
        if answer is not None:
            return answer
        (self.isolated.add if isolated else self.isolated.discard)(node)
        return Ok(f"{node} is {'isolated' if isolated else 'in service'}")
