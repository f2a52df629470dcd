"""Navigation between pages, the command palette, and the help page.

The console must start quickly, so a page's module is imported after the first screen, or on its first visit.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import cast

from textual.app import App
from textual.command import DiscoveryHit, Hit, Hits, Provider

import tui.screens
from tui.formatting.documents import describe_node, to_yaml
from tui.formatting.glyphs import PHASE_GLYPHS
from tui.formatting.lines import Line, fit, justify, line_width, sanitize
from tui.operations import actions
from tui.operations.confirm import Selection
from tui.operations.programs import has_terminal, pager_command, run_program
from tui.screens.console_context import ConsoleContext
from tui.screens.page import Item, Page, heading, static_line

MAX_NODE_MATCHES = 50

ACTION_GROUPS = (("move", "MOVE"), ("decide", "DECIDE AND ACT"), ("app", "THE CONSOLE"))

CURSOR_KEYS = (
    ("↑ ↓  j k", "move the cursor"),
    ("pgup pgdn space", "move by a page"),
    ("home end  g G", "move to the first or the last row"),
    ("mouse", "click a row, a key or a page; double-click opens"),
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
            self.open_text(*full_text)

    def do_yaml(self) -> None:
        shown = self.screen.object_under_cursor() if isinstance(self.screen, Page) else None
        if shown is None:
            self.context.show_message("YAML: nothing is under the cursor")
            return
        title, value = shown
        if isinstance(value, tuple):
            self._open_fetched(f"{title} YAML", self._fetch_yaml(*value))
        else:
            self.open_text(f"{title} YAML", to_yaml(value))

    async def _fetch_yaml(self, *path: str) -> str:
        response = await self.context.fetch_path(*path)
        return str(response.error or response.unreachable or to_yaml(response.result))

    def do_logs(self) -> None:
        if (node := self._node_under_cursor("logs")) is not None:
            self.open_node(*node, shows_steps=False)

    def do_describe(self) -> None:
        if (node := self._node_under_cursor("describe")) is not None:
            self._open_fetched(f"{node[1]} description", self._fetch_description(*node))

    async def _fetch_description(self, rollout: str, node: str) -> str:
        detail = await self.context.fetch_path("rollouts", rollout, "nodes", node)
        configuration = await self.context.fetch_path("nodes", node, "configuration")
        if detail.result is None:
            return str(detail.error or detail.unreachable)
        return describe_node(rollout, detail.result, configuration.result)

    def _node_under_cursor(self, action: str) -> tuple[str, str] | None:
        """Return the rollout and the name of the selected node, or say that there is none."""
        selection = self.screen.selection() if isinstance(self.screen, Page) else Selection()
        name, locks = selection.node_name, self.context.model.locks
        pools = () if locks is None else locks["pools"]
        holders = (each for pool in pools for each in pool["holders"] if each["node"] == name)
        rollouts = [selection.rollout.id] if selection.rollout is not None else []
        rollouts += [each["rollout"] for each in holders if each["rollout"]]
        if name and rollouts:
            return rollouts[0], name
        where = f"{name} is in no live rollout" if name else "no node is selected"
        self.context.show_message(f"{action}: {where}")
        return None

    def do_plan(self) -> None:
        """Show the plan in the user's pager, or on a page where no program can take the terminal."""
        rollout = self.screen.selection().rollout if isinstance(self.screen, Page) else None
        if rollout is None:
            self.context.show_message("plan: no rollout is selected")
            return
        load = self._fetch_yaml("rollouts", rollout.id, "plan")
        if has_terminal(self) and pager_command():
            self.run_worker(self._page_through(load), group="pager", exclusive=True)
        else:
            self._open_fetched(f"{rollout.id} plan", load)

    async def _page_through(self, load: Awaitable[str]) -> None:
        text = "\n".join(sanitize(line) for line in (await load).splitlines())
        if problem := run_program(self, pager_command(), text):
            self.context.show_message(problem, "error")

    def _open_fetched(self, title: str, load: Awaitable[str]) -> None:
        from tui.screens.text import TextPage

        page = TextPage(title)

        async def show() -> None:
            page.show_text(await load)

        self.push_screen(page)
        self.run_worker(show(), group="text")

    def open_text(self, title: str, text: str) -> None:
        from tui.screens.text import TextPage

        self.push_screen(TextPage(title, text))

    @property
    def context(self) -> ConsoleContext:
        return cast("ConsoleContext", self)

    def do_locks(self) -> None:
        from tui.screens.locks import LocksPage

        self._switch_to(LocksPage)

    def do_audit(self) -> None:
        from tui.screens.audit import AuditPage

        self._switch_to(AuditPage)

    def do_teams(self) -> None:
        from tui.screens.teams import TeamsPage

        self._switch_to(TeamsPage)

    def do_inventory(self) -> None:
        from tui.screens.inventory import InventoryPage

        self._switch_to(InventoryPage)

    def do_verdicts(self) -> None:
        from tui.screens.inventory import VerdictsPage

        self._switch_to(VerdictsPage)

    def do_changes(self) -> None:
        from tui.screens.fetched import ChangesPage

        self._switch_to(ChangesPage)

    def open_comparison(self, rollout: str) -> None:
        from tui.screens.fetched import ComparisonPage

        self.push_screen(ComparisonPage(rollout))

    def open_preparation(self, rollout: str) -> None:
        from tui.screens.fetched import PreparationPage

        self.push_screen(PreparationPage(rollout))

    def open_forecast(self, rollout: str) -> None:
        from tui.screens.forecast import ForecastPage

        self.push_screen(ForecastPage(rollout))

    def do_help(self) -> None:
        if isinstance(self.screen, Page) and not isinstance(self.screen, HelpPage):
            self.push_screen(HelpPage(self.screen.screen_name))

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

    def open_node(self, rollout: str, node: str, *, shows_steps: bool = True) -> None:
        from tui.screens.node import NodePage

        self.push_screen(NodePage(rollout, node, shows_steps=shows_steps))


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
