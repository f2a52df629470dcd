"""The in-memory fake of the Isolator: nodes that are in service or out of it."""

from __future__ import annotations

from rolloutd.ports import Busy, Failed, IsolationStatus, Ok, StepContext, StepResult, Unknown


class FakeIsolator:
    """ports.Isolator; `isolated` are the nodes out of service for any cause.

    `answers` are results that take the place of an action, by (node, "do" or
    "undo"); `acts` are all actions that changed something or would have.
    """

    def __init__(self) -> None:
        self.isolated: set[str] = set()
        self.results: dict[tuple[str, str], Busy | Failed | Unknown] = {}
        self.actions: list[tuple[str, str]] = []

    async def inspect(self, ctx: StepContext) -> IsolationStatus:
        """Say whether the node is out of service, and was before we came."""
        isolated = ctx.host.name in self.isolated
        prior = {"isolated": isolated} if ctx.prior is None else ctx.prior
        return IsolationStatus(isolated, prior, "isolated" if isolated else "in service")

    async def isolate(self, ctx: StepContext) -> StepResult:
        """Take the node out of service."""
        return self._apply(ctx, "do", isolated=True)

    async def return_to_service(self, ctx: StepContext) -> StepResult:
        """Put the node back as it was."""
        before = ctx.prior is not None and ctx.prior["isolated"]
        return self._apply(ctx, "undo", isolated=before)

    def _apply(self, ctx: StepContext, action: str, *, isolated: bool) -> StepResult:
        node = ctx.host.name
        self.actions.append((node, action))
        answer = self.results.get((node, action))
        if answer is not None:
            return answer
        (self.isolated.add if isolated else self.isolated.discard)(node)
        return Ok(f"{node} is {'isolated' if isolated else 'in service'}")
