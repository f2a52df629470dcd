"""Where one can go in the console: each screen is imported when somebody first goes there."""

from __future__ import annotations

from collections.abc import Callable

from textual.app import App

from tui.page import Page
from tui.reading import Reading


class Ways(App[None]):
    """An app that goes from screen to screen; the fleet is always below."""

    def do_back(self) -> None:
        """Go back to where we came from."""
        if len(self.screen_stack) > 1:
            self.pop_screen()

    def do_fleet(self) -> None:
        """Show all rollouts."""
        while len(self.screen_stack) > 1:
            self.pop_screen()

    def do_gates(self) -> None:
        """Show what waits for a decision."""
        self.open_gate("")

    def do_whole(self) -> None:
        """Show the whole of the line under the cursor."""
        whole = self.screen.whole() if isinstance(self.screen, Page) else None
        if whole is not None:
            self.push_screen(Reading(*whole))

    def do_locks(self) -> None:
        """Show slots, holds and freezes."""
        from tui.screens.locks import LocksPage

        self._go(LocksPage)

    def do_audit(self) -> None:
        """Show who did what."""
        from tui.screens.audit import AuditPage

        self._go(AuditPage)

    def do_teams(self) -> None:
        """Show teams and limits."""
        from tui.screens.teams import TeamsPage

        self._go(TeamsPage)

    def do_help(self) -> None:
        """Show all keys."""
        from tui.screens.help import HelpPage

        if not isinstance(self.screen, HelpPage):
            self.push_screen(HelpPage())

    def _go(self, page: Callable[..., Page], *what: str) -> None:
        if type(self.screen) is page:
            return
        while len(self.screen_stack) > 1:
            self.pop_screen()
        self.push_screen(page(*what))

    def open_rollout(self, rollout: str) -> None:
        """Show a rollout."""
        from tui.screens.rollout import RolloutPage

        self.push_screen(RolloutPage(rollout))

    def open_gate(self, key: str) -> None:
        """Show what waits for a decision, and of that the gate with this key."""
        from tui.screens.gates import GatesPage

        self._go(GatesPage, key)

    def open_nodes(self, rollout: str, *, pool: str = "", reason: str = "") -> None:
        """Show nodes of a rollout."""
        from tui.screens.nodes import NodesPage

        self.push_screen(NodesPage(rollout, pool=pool, reason=reason))

    def open_node(self, rollout: str, node: str) -> None:
        """Show one node."""
        from tui.screens.node import NodePage

        self.push_screen(NodePage(rollout, node))
