"""The command palette and the help page, both made from the registry of actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

from textual.command import DiscoveryHit, Hit, Hits, Provider

from tui.console import ConsoleApp
from tui.formatting.glyphs import PHASE_GLYPHS
from tui.formatting.lines import Line, fit, justify, line_width
from tui.operations import actions
from tui.screens.page import Item, Page, heading, static_line

MAX_NODE_MATCHES = 50

ACTION_GROUPS = (("move", "MOVE"), ("decide", "DECIDE AND ACT"), ("app", "THE CONSOLE"))

CURSOR_KEYS = (
    ("↑ ↓  j k", "move the cursor"),
    ("pgup pgdn space", "move by a page"),
    ("home end  g G", "move to the first or the last row"),
    ("mouse", "click a row, a key or a page; double-click opens"),
)


class PaletteProvider(Provider):
    """Finds actions, rollouts and nodes by any part of their names."""

    async def discover(self) -> Hits:
        for name, text, run in self._actions():
            yield DiscoveryHit(name, run, help=text)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for name, text, run in [*self._actions(), *self._rollouts_and_nodes(query)]:
            score = matcher.match(name)
            if score > 0:
                yield Hit(score, matcher.highlight(name), run, help=text)

    def _actions(self) -> Iterator[tuple[str, str, Callable[[], None]]]:
        console = cast("ConsoleApp", self.app)
        for action in actions.ACTIONS:
            yield (
                f"{action.title}  ({action.key_label})",
                action.help,
                partial(console.action_perform, action.name),
            )

    def _rollouts_and_nodes(self, query: str) -> Iterator[tuple[str, str, Callable[[], None]]]:
        console, word = cast("ConsoleApp", self.app), (query.lower().split() or [""])[-1]
        found = 0
        for rollout in console.model.rollouts.values():
            yield f"rollout {rollout.id}", rollout.state, partial(console.open_page, "rollout", rollout.id)
            for node in rollout.nodes or {}:
                if found < MAX_NODE_MATCHES and word in node.lower():
                    found += 1
                    yield (
                        f"node {node}",
                        f"of {rollout.id}",
                        partial(console.open_page, "node", rollout.id, node),
                    )


class HelpPage(Page):
    screen_name = "help"

    def __init__(self, opened_from: str = "") -> None:
        super().__init__()
        self._opened_from = opened_from

    def build_items(self) -> Iterator[Item]:
        yield heading("ON THIS PAGE", self._opened_from)
        for action in actions.ACTIONS:
            if self._opened_from in action.screens:
                yield f"here:{action.name}", _key_row(action.key_label, action.title, action.help)
        for group, title in ACTION_GROUPS:
            yield heading(title)
            if group == "move":
                for keys, text in CURSOR_KEYS:
                    yield keys, _key_row(keys, "", text)
            for action in actions.ACTIONS:
                if action.group == group:
                    is_narrow = action.operation is not None and len(action.screens) < 5
                    screens = f"on {', '.join(sorted(action.screens))}" if is_narrow else ""
                    yield action.name, _key_row(action.key_label, action.title, action.help, screens)
        yield heading("KEYS THAT MOVED SINCE 0.1")
        for key, title, now in actions.MOVED:
            yield f"moved:{key}", _key_row(key, title, f"now {now}")
        yield heading("GLYPHS")
        for name, (glyph, role) in PHASE_GLYPHS.items():
            yield f"glyph:{name}", static_line([("  ", ""), (f"{glyph:<17}", role), (name, "")])


def _key_row(keys: str, title: str, text: str, screens: str = "") -> Callable[[int], Line]:
    line: Line = [("  ", ""), (fit(keys, 16), "key"), (fit(title, 12), "bold"), (text, "dim")]
    note: Line = [(f"  {screens} ", "faint")] if screens else []
    # The help text matters more than where the key works, so the screens appear only if both fit.
    return lambda width: justify(line, note, width) if line_width(line) + line_width(note) <= width else line
