"""The command palette: every action, every rollout, every node that is known, by any part of its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

from textual.command import DiscoveryHit, Hit, Hits, Provider

from tui import actions
from tui.desk import Desk

MOST_NODES_MATCHED = 50
"""Nodes offered at once: a longer word offers fewer."""


class Commands(Provider):
    """Offers what the registry has, and the things it can be done to."""

    @property
    def console(self) -> Desk:
        """The app, as pages know it."""
        return cast("Desk", self.app)

    async def discover(self) -> Hits:
        """Offer all actions before anything is typed."""
        for action in actions.ACTIONS:
            yield DiscoveryHit(
                f"{action.title}  ({action.shown_key})",
                partial(self.console.act, action.name),
                help=action.help,
            )

    async def search(self, query: str) -> Hits:
        """Offer what matches."""
        matcher = self.matcher(query)
        for name, text, run in self._known(query):
            score = matcher.match(name)
            if score > 0:
                yield Hit(score, matcher.highlight(name), run, help=text)

    def _known(self, query: str) -> Iterator[tuple[str, str, Callable[[], None]]]:
        console = self.console
        for action in actions.ACTIONS:
            yield (f"{action.title}  ({action.shown_key})", action.help, partial(console.act, action.name))
        for rollout in console.model.rollouts.values():
            yield (f"rollout {rollout.id}", rollout.state, partial(console.open_rollout, rollout.id))
        found = 0
        word = query.split()[-1].lower() if query.split() else ""
        for rollout in console.model.rollouts.values():
            for node in rollout.nodes or {}:
                if found < MOST_NODES_MATCHED and word in node.lower():
                    found += 1
                    yield (f"node {node}", f"of {rollout.id}", partial(console.open_node, rollout.id, node))
