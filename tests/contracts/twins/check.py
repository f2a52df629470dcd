"""The in-memory twin of the Check: what a test says, one answer after another."""

from __future__ import annotations

from collections.abc import Sequence

from rolloutd.ports import Failed, Ok, StepContext, Unknown


class FakeCheck:
    """ports.Check; nodes pass unless `answers` says otherwise, the last answer stays."""

    def __init__(self) -> None:
        self.answers: dict[str, Sequence[Ok | Failed | Unknown]] = {}
        self.asked: list[str] = []

    async def check(self, ctx: StepContext) -> Ok | Failed | Unknown:
        """Give the node's next answer."""
        node = ctx.host.name
        self.asked.append(node)
        answers = self.answers.get(node)
        if not answers:
            return Ok(f"{node} is well")
        self.answers[node] = answers[1:] or answers[:1]
        return answers[0]
