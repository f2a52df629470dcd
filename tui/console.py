"""The console as its pages use it: what the daemon reported, requests, messages, and pages to open.

It knows no page: the console must start quickly, so a page's module is imported by name, on its first visit.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from textual.app import App

from rolloutd.control.client import Client, api_path
from tui.connection.streams import REQUEST_TIMEOUT_S, Disconnected, RequestRunner, Response
from tui.formatting import formatting
from tui.formatting.lines import Line, fit, sanitize, wrap_text
from tui.operations.dialog import Prompt
from tui.state.fetch_queue import COST_FACTOR, Fetch, FetchQueue, KeyPriority
from tui.state.model import Model
from tui.state.values import RolloutState
from tui.widgets import summaries
from tui.widgets.summaries import NodeSummary

FRAME_INTERVAL_S = 0.06
"""Between two frames: short enough to feel immediate, and more frames than a user can read."""

MAX_FREEZES = 2
"""The locks screen shows all freezes."""

MAX_DISCONNECT_LINES = 2

MESSAGE_TIMEOUT_S = 8.0

MAX_MESSAGE_LINES = 3

MESSAGE_ROLES = {"information": "accent", "warning": "mine", "error": "alert"}

PAGES = {
    "gates": ("gates", "GatesPage"),
    "locks": ("locks", "LocksPage"),
    "audit": ("audit", "AuditPage"),
    "teams": ("teams", "TeamsPage"),
    "inventory": ("inventory", "InventoryPage"),
    "verdicts": ("inventory", "VerdictsPage"),
    "changes": ("changes", "ChangesPage"),
    "change": ("changes", "ChangePage"),
    "comparison": ("fetched", "ComparisonPage"),
    "preparation": ("fetched", "PreparationPage"),
    "handover": ("fetched", "HandoverPage"),
    "forecast": ("forecast", "ForecastPage"),
    "rollout": ("rollout", "RolloutPage"),
    "nodes": ("nodes", "NodesPage"),
    "node": ("node", "NodePage"),
    "text": ("text", "TextPage"),
    "help": ("help", "HelpPage"),
}
"""The module and the class of each page but the fleet's, which is always there."""


class ConsoleApp(App[None]):
    """State, requests and pages of the console; only coroutines wait for the daemon."""

    def __init__(self, client: Client, now: Callable[[], float], reach: str) -> None:
        super().__init__()
        self.client = client
        self.reach = reach
        self.model = Model()
        self.disconnected: Disconnected | None = None
        self.has_connected = False
        self.connection_count = 0
        """How often the console connected: a page fetches again what it fetched before."""
        self.request_client = Client(client.path, REQUEST_TIMEOUT_S)
        self._clock = now
        self._request_runner: RequestRunner | None = None
        self._frame_requested = asyncio.Event()
        self._messages: list[tuple[str, str, float]] = []
        self._node_summaries: dict[str, tuple[int, float, NodeSummary]] = {}
        self._keys = KeyPriority()
        self._drawn_at, self._needs_drawing = 0.0, False
        self._fetch_queue = FetchQueue(
            self.model, self.request_client, self.call_daemon, now, self._keys.delay
        )

    @property
    def is_stale(self) -> bool:
        """Whether the daemon is away and pages show its last state."""
        return self.disconnected is not None and self.has_connected

    def now(self) -> float:
        """Return the time to draw: while the daemon is away, clocks stop at its last message."""
        return self.disconnected.since if self.disconnected and self.has_connected else self._clock()

    def redraw_screen(self) -> None:
        raise NotImplementedError

    def action_perform(self, names: str) -> None:
        """Run the first of the named actions that there is."""
        raise NotImplementedError

    def request_frame(self) -> None:
        self._needs_drawing = True
        self._frame_requested.set()

    # -- the frame of every page

    def status_line(self, width: int) -> Line:
        """Return the right end of the top line."""
        me, status_at = self.model.current_user, self.model.status_at
        where = f"{self.reach} " if self.reach else ""
        who = "" if me is None else f"{me['user']}{' (admin)' if me['admin'] and width >= 110 else ''} "
        if self.disconnected is not None:
            return [("✗ offline ", "alert"), (" ", ""), (where + who, "dim")]
        if not self.has_connected:
            return [("○ connecting ", "warn")]
        seq = f"{self.model.seq:,} " if width >= 100 else ""
        age = "" if status_at is None else f"age {formatting.format_duration(self.now() - status_at)} "
        return [("● live ", "live"), (seq, "dim"), (f"{age} {where}{who}", "dim")]

    def alerts(self, width: int) -> Sequence[Line]:
        locks, health, lost = self.model.locks, self.model.health, self.disconnected
        texts: list[tuple[str, str]] = []
        if lost is not None:
            since, age = formatting.format_time(lost.since), formatting.format_age(lost.since, self._clock())
            stale = f"stale: state of {since}, {age}; " if self.has_connected else ""
            sentence = f"{stale}{lost.reason}; reconnecting"
            for number, text in enumerate(wrap_text(sentence, width - 4, MAX_DISCONNECT_LINES)):
                texts.append((f" {' ' if number else '✗'} {text}", "alert"))
        texts += [
            (f" ‖ frozen: {freeze['scope']}, by {freeze['by']}: {freeze['reason']}", "mine")
            for freeze in (locks["freezes"][:MAX_FREEZES] if locks is not None else ())
        ]
        if self.model.daemon_error:
            texts.append((f" ! {self.model.daemon_error}", "alert"))
        if health is not None and health["observe_only"]:
            texts.append((" ○ observe only: the daemon decides and explains, and changes nothing", "mine"))
        return [[(fit(sanitize(text), width), role)] for text, role in texts]

    # -- requests

    def request_fetch(self, resource: str, rollout: str = "") -> None:
        self.model.request_fetch(resource, rollout)
        self._run_due_fetches()

    def track_nodes(self, rollout: str) -> None:
        self.model.track_nodes(rollout)
        self._run_due_fetches()

    def _run_due_fetches(self) -> None:
        if self.disconnected is None and self.has_connected:
            for fetch in self._fetch_queue.due_fetches():
                self.run_worker(self._run_fetch(fetch), group="requests")

    async def _run_fetch(self, fetch: Fetch) -> None:
        pause = await fetch()
        # Requests that wait for this pause are sent at its end, not only with the next frame or tick.
        self.set_timer(pause, self._run_due_fetches)
        if self._keys.delay() or time.monotonic() - self._drawn_at >= FRAME_INTERVAL_S:
            # At once, also after a key: the response may be what the key asked for.
            self.redraw_screen()
        else:
            self.request_frame()

    def node_summary(self, rollout: RolloutState) -> NodeSummary:
        """Return a rollout's summary; in a large fleet it may be some frames old."""
        cached = self._node_summaries.get(rollout.id)
        began = time.monotonic()
        if cached is not None and (cached[0] == rollout.version or began < cached[1] or self._keys.delay()):
            return cached[2]
        summary = summaries.summarize_nodes((rollout.nodes or {}).values(), self.now())
        took = time.monotonic() - began
        self._node_summaries[rollout.id] = (rollout.version, began + took * COST_FACTOR, summary)
        return summary

    async def call_daemon(self, call: Callable[[], Any]) -> Response[Any]:
        assert self._request_runner is not None
        return await self._request_runner.run(call)

    async def fetch_path(self, *parts: str, **query: Any) -> Response[Any]:
        return await self.call_daemon(lambda: self.request_client.get(api_path(*parts), query))

    # -- messages

    def show_message(
        self, text: str, severity: str = "information", *, timeout_s: float = MESSAGE_TIMEOUT_S
    ) -> None:
        # One message at a time keeps the page readable; only an error stays with the message after it.
        kept = [each for each in self._messages if each[1] == "error" and severity != "error"]
        self._messages = [*kept[-1:], (text, severity, time.monotonic() + timeout_s)]
        self.redraw_screen()

    def message_lines(self, width: int) -> Sequence[Line]:
        """Return the messages of the last seconds."""
        now = time.monotonic()
        self._messages = [each for each in self._messages if each[2] > now]
        return [
            [(fit(f" {line}", width), MESSAGE_ROLES[severity])]
            for text, severity, _ in self._messages
            for line in wrap_text(text, width - 2, MAX_MESSAGE_LINES)
        ]

    def prompt_text(
        self, label: str, text: str, on_submit: Callable[[str], None], *, is_live: bool = False
    ) -> None:
        """Ask for a line of text; a live prompt submits every change, and the text of before on Escape."""

        def submit(answer: str | None) -> None:
            if answer is not None or is_live:
                on_submit(text if answer is None else answer)

        self.push_screen(Prompt(label, text, on_submit if is_live else None), submit)

    # -- pages

    def open_page(self, name: str, *args: Any, **options: Any) -> Any:
        page = page_class(name)(*args, **options)
        self.push_screen(page)
        return page

    def switch_page(self, name: str, *args: Any) -> None:
        """Open a page above the fleet alone, unless it is open."""
        if type(self.screen) is not page_class(name):
            self.close_pages()
            self.open_page(name, *args)

    def close_pages(self) -> None:
        while len(self.screen_stack) > 1:
            self.pop_screen()


def page_class(name: str) -> Any:
    module, page = PAGES[name]
    return getattr(importlib.import_module(f"tui.screens.{module}"), page)


def import_pages() -> None:
    """Import the modules of all pages: an upgrade of the package must not replace them under a console."""
    for name in PAGES:
        page_class(name)
