"""The in-memory fake of the Check: what a test says, one answer after another."""

from __future__ import annotations

from collections.abc import Sequence

from rolloutd.ports import Failed, Ok, StepContext, Unknown


class FakeCheck:
    """ports.Check; nodes pass unless `answers` says otherwise, the last answer stays."""

    def __init__(self) -> None:
        self.results: dict[str, Sequence[Ok | Failed | Unknown]] = {}
        self.checked_nodes: list[str] = []

    async def check(self, ctx: StepContext) -> Ok | Failed | Unknown:
        """Give the node's next answer."""
        node = ctx.host.name
        self.checked_nodes.append(node)
        answers = self.results.get(node)
        if not answers:
            return Ok(f"{node} is well")
        self.results[node] = answers[1:] or answers[:1]
        return answers[0]
