"""Navigation between pages, the command palette, and the help page.

The console must start quickly, so a page's module is imported after the first screen, or on its first visit.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

from textual.app import App
from textual.command import DiscoveryHit, Hit, Hits, Provider

import tui.screens
from tui.formatting.glyphs import PHASE_GLYPHS
from tui.formatting.lines import Line, fit, justify, line_width
from tui.operations import actions
from tui.operations.dialog import TextViewer
from tui.screens.console_context import ConsoleContext
from tui.screens.page import Item, Page, heading, static_line

MAX_NODE_MATCHES = 50

ACTION_GROUPS = (("move", "MOVE"), ("decide", "DECIDE AND ACT"), ("app", "THE CONSOLE"))

CURSOR_KEYS = (
    ("↑ ↓  j k", "move the cursor"),
    ("pgup pgdn space", "move by a page"),
    ("home end  g G", "move to the first or the last row"),
    ("mouse", "click to move the cursor, double-click to open, wheel to scroll"),
)


def import_pages() -> None:
    """Import the modules of all pages: an upgrade of the package must not replace them under a console."""
    for module in pkgutil.iter_modules(tui.screens.__path__, "tui.screens."):
        importlib.import_module(module.name)


class NavigationApp(App[None]):
    """An app that opens pages on a stack whose bottom is the fleet."""

    def do_back(self) -> None:
        """Return to the page before; on a filtered page, first to all of its rows."""
        if isinstance(self.screen, Page) and self.screen.filter_text:
            self.screen.set_filter("")
        elif len(self.screen_stack) > 1:
            self.pop_screen()

    def do_leave(self) -> None:
        if len(self.screen_stack) > 1:
            self.pop_screen()
        else:
            self.exit()

    def do_fleet(self) -> None:
        while len(self.screen_stack) > 1:
            self.pop_screen()

    def do_gates(self) -> None:
        self.open_gate("")

    def do_whole(self) -> None:
        full_text = self.screen.full_text() if isinstance(self.screen, Page) else None
        if full_text is not None:
            self.push_screen(TextViewer(*full_text))

    def do_locks(self) -> None:
        from tui.screens.locks import LocksPage

        self._switch_to(LocksPage)

    def do_audit(self) -> None:
        from tui.screens.audit import AuditPage

        self._switch_to(AuditPage)

    def do_teams(self) -> None:
        from tui.screens.teams import TeamsPage

        self._switch_to(TeamsPage)

    def do_changes(self) -> None:
        from tui.screens.fetched import ChangesPage

        self._switch_to(ChangesPage)

    def open_comparison(self, rollout: str) -> None:
        from tui.screens.fetched import ComparisonPage

        self.push_screen(ComparisonPage(rollout))

    def open_forecast(self, rollout: str) -> None:
        from tui.screens.forecast import ForecastPage

        self.push_screen(ForecastPage(rollout))

    def do_help(self) -> None:
        if not isinstance(self.screen, HelpPage):
            self.push_screen(HelpPage())

    def _switch_to(self, page: Callable[..., Page], *args: str) -> None:
        if type(self.screen) is not page:
            self.do_fleet()
            self.push_screen(page(*args))

    def open_rollout(self, rollout: str) -> None:
        from tui.screens.rollout import RolloutPage

        self.push_screen(RolloutPage(rollout))

    def open_gate(self, key: str) -> None:
        """Open the gates page with the cursor on a gate."""
        from tui.screens.gates import GatesPage

        self._switch_to(GatesPage, key)

    def open_nodes(self, rollout: str, *, pool: str = "", reason: str = "") -> None:
        from tui.screens.nodes import NodesPage

        self.push_screen(NodesPage(rollout, pool=pool, reason=reason))

    def open_node(self, rollout: str, node: str) -> None:
        from tui.screens.node import NodePage

        self.push_screen(NodePage(rollout, node))


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
        console = cast("ConsoleContext", self.app)
        for action in actions.ACTIONS:
            yield (
                f"{action.title}  ({action.key_label})",
                action.help,
                partial(console.action_perform, action.name),
            )

    def _rollouts_and_nodes(self, query: str) -> Iterator[tuple[str, str, Callable[[], None]]]:
        console, word = cast("ConsoleContext", self.app), (query.lower().split() or [""])[-1]
        found = 0
        for rollout in console.model.rollouts.values():
            yield f"rollout {rollout.id}", rollout.state, partial(console.open_rollout, rollout.id)
            for node in rollout.nodes or {}:
                if found < MAX_NODE_MATCHES and word in node.lower():
                    found += 1
                    yield f"node {node}", f"of {rollout.id}", partial(console.open_node, rollout.id, node)


class HelpPage(Page):
    """All keys, from the registry of actions, and all glyphs."""

    screen_name = "help"

    def build_items(self) -> Iterator[Item]:
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
        yield heading("GLYPHS")
        for name, (glyph, role) in PHASE_GLYPHS.items():
            yield f"glyph:{name}", static_line([("  ", ""), (f"{glyph:<17}", role), (name, "")])


def _key_row(keys: str, title: str, text: str, screens: str = "") -> Callable[[int], Line]:
    line: Line = [("  ", ""), (fit(keys, 16), "key"), (fit(title, 12), "bold"), (text, "dim")]
    note: Line = [(f"  {screens} ", "faint")] if screens else []
    # The help text matters more than where the key works, so the screens appear only if both fit.
    return lambda width: justify(line, note, width) if line_width(line) + line_width(note) <= width else line
