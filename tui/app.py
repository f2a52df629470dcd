"""The console as a Textual app: messages in, frames out, operations sent.

One worker applies the messages of the connection to the model and draws the
current page, at most once per frame however many events arrive.  A timer sends
the requests that the model wants.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.filter import LineFilter
from textual.screen import Screen

from rolloutd.control.client import Client, api_path
from rolloutd.control.user_state import UserState
from rolloutd.control.user_time import LastLook
from tui.connection.event_stream import (
    REQUEST_TIMEOUT_S,
    Connected,
    Disconnected,
    EventListener,
    MessageQueue,
    RequestRunner,
    Response,
)
from tui.connection.log_stream import LogReader, OnLines
from tui.formatting import formatting, theme
from tui.formatting.ascii_filter import AsciiFilter
from tui.formatting.lines import Line, fit, wrap_text
from tui.operations import actions
from tui.operations.dialog import Modal, Prompt
from tui.screens.console_context import ConsoleContext
from tui.screens.deciding import DecidingApp
from tui.screens.fleet import FleetPage
from tui.screens.navigation import PaletteProvider, import_pages
from tui.screens.page import Page, RolloutScreen
from tui.state.fetch_queue import COST_FACTOR, Fetch, FetchQueue, KeyPriority
from tui.state.model import Model
from tui.state.values import RolloutState
from tui.widgets import summaries
from tui.widgets.summaries import NodeSummary

FRAME_INTERVAL_S = 0.06
"""Between two frames: short enough to feel immediate, and more frames than a user can read."""

TICK_INTERVAL_S = 0.25
"""Between two checks for due requests and for clocks that have moved."""

COLLECT_INTERVAL_S, MAX_COLLECT_INTERVAL_S = 30.0, 120.0
"""Between two full garbage collections, where the user pauses and where not."""

KEY_PAUSE_S = 1.0
"""Without a key for so long, another one is unlikely within the next frame."""

IMPORT_DELAY_S = 3.0
"""The first screen has been drawn by then."""

HINT_TIMEOUT_S = 20.0

MESSAGE_TIMEOUT_S = 8.0

MAX_MESSAGE_LINES = 3

MESSAGE_ROLES = {"information": "accent", "warning": "mine", "error": "alert"}

AWAY_S = 1_800.0
"""Without a key for so long, the user was away: the handover begins at the last key."""


class Console(DecidingApp):
    TITLE = "rolloutd"
    ENABLE_COMMAND_PALETTE = True
    COMMANDS: ClassVar[set[Any]] = {PaletteProvider}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(key, f"perform('{' '.join(names)}')", show=False)
        for key, names in actions.names_by_key().items()
    ]

    def __init__(
        self,
        client: Client,
        *,
        now: Callable[[], float] = time.time,
        theme_name: str | None = None,
        ascii_only: bool = False,
        still: bool = False,
        reach: str = "",
        hint: str = "",
    ) -> None:
        super().__init__()
        self.client = client
        self._clock = now
        self.reach = reach
        self.hint = hint
        self.model = Model()
        self.disconnected: Disconnected | None = None
        self.has_connected = False
        self.connection_count = 0
        self.request_client = Client(client.path, REQUEST_TIMEOUT_S)
        self._stream_messages = MessageQueue()
        self._event_listener = EventListener(client, self._stream_messages, now)
        self._request_runner: RequestRunner | None = None
        self._frame_requested = asyncio.Event()
        self._messages: list[tuple[str, str, float]] = []
        self._last_look = LastLook(reach or str(client.path))
        self._looked_at = self._last_key_at = 0.0
        self._node_summaries: dict[str, tuple[int, float, NodeSummary]] = {}
        self._ascii_filter = AsciiFilter(enabled=ascii_only)
        self._keys = KeyPriority()
        self._drawn_at, self._needs_drawing = 0.0, False
        self._collected_at = time.monotonic()
        self._fetch_queue = FetchQueue(
            self.model, self.request_client, self.call_daemon, now, self._keys.delay
        )
        for each in theme.THEMES:
            self.register_theme(each)
        self._preferences = UserState("console")
        self.theme = theme.choose_theme(theme_name or self._preferences.read().get("theme"))
        if still:
            self.animation_level = "none"

    # -- start, frames and end

    def get_line_filters(self) -> Sequence[LineFilter]:
        filters = super().get_line_filters()
        return [*filters, self._ascii_filter] if self._ascii_filter.enabled else filters

    def get_default_screen(self) -> Screen[Any]:
        return FleetPage()

    def on_mount(self) -> None:
        loop = asyncio.get_running_loop()
        self._request_runner = RequestRunner()

        def request_frame() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._frame_requested.set)

        self._stream_messages.on_message = request_frame
        self._event_listener.start()
        self._last_key_at = self._clock()
        self._looked_at = self._last_look.read(self._last_key_at)
        self.run_worker(self._draw_frames(), group="frames")
        self.set_interval(TICK_INTERVAL_S, self._tick)
        # In a thread: the imports take a loaded machine a second, and keys must be answered.
        self.set_timer(IMPORT_DELAY_S, partial(self.run_worker, import_pages, thread=True))
        if self.hint:
            self.show_message(self.hint, timeout_s=HINT_TIMEOUT_S)

    def on_unmount(self) -> None:
        self._event_listener.stop()
        self._last_look.write(self._last_key_at)

    async def _draw_frames(self) -> None:
        while True:
            await self._frame_requested.wait()
            await asyncio.sleep(self._keys.delay())
            # Cleared first: a message that comes while this frame is drawn asks for the next one.
            self._frame_requested.clear()
            if not self.screen_stack:
                return  # the console ends: its screens close before its workers
            self._drain_messages()
            await asyncio.sleep(FRAME_INTERVAL_S)

    def _drain_messages(self) -> None:
        """Apply what the connection brought, and draw what that changes.

        An entry only wakes the model, so most pages wait for the response to draw.
        """
        if isinstance(self.screen, Page) and self.screen.shows_entries:
            self._needs_drawing = True
        lines: list[Mapping[str, Any]] = []
        for message in self._stream_messages.take_all():
            match message:
                case Connected():
                    self._handle_connected(message)
                    self._needs_drawing = True
                case Disconnected():
                    self.disconnected = message
                    self._needs_drawing = True
                case _:
                    lines.append(message)
        if lines:
            self.model.apply_stream_lines(lines)
        for removed in self._node_summaries.keys() - self.model.rollouts.keys():
            del self._node_summaries[removed]
        self._run_due_fetches()
        if self._needs_drawing:
            self.redraw_screen()

    def _handle_connected(self, connected: Connected) -> None:
        if connected.is_new_history:
            self.model.reset()
            self._node_summaries.clear()
            self.show_message(
                "the daemon has another history than before: everything was loaded again", "warning"
            )
        elif self.disconnected is not None and self.has_connected:
            self.show_message(
                f"reconnected after {formatting.format_duration(connected.at - self.disconnected.since)}"
            )
        self.disconnected = None
        self.has_connected = True
        self.connection_count += 1
        model = self.model
        model.current_user, model.settings, model.health = (
            connected.initial_state[name] for name in ("whoami", "settings", "health")
        )
        model.apply_status(connected.initial_state["status"], connected.at)
        if connected.is_new_history:
            # The pages that are open tracked their rollouts in the model from before.
            for screen in self.screen_stack:
                if isinstance(screen, RolloutScreen):
                    model.track_nodes(screen.rollout_id)
        model.request_fetch("locks")
        model.request_fetch("closed")
        if self.connection_count > 1:
            model.mark_stale()

    @property
    def is_stale(self) -> bool:
        return self.disconnected is not None and self.has_connected

    def now(self) -> float:
        """Return the time to draw: while the daemon is away, clocks stop at its last message."""
        if self.disconnected is not None and self.has_connected:
            return self.disconnected.since
        return self._clock()

    def _tick(self) -> None:
        if self.disconnected is None and self.has_connected:
            self.model.refresh(self._clock())
        self._run_due_fetches()
        # After a key, the page draws itself; drawing it twice would delay the next key.
        if not self._keys.delay():
            self.redraw_screen()
        self._collect_garbage()

    def _collect_garbage(self) -> None:
        """Collect all garbage between two keys: that takes as long as a frame."""
        age, pause = time.monotonic() - self._collected_at, self._keys.since_key()
        if (age > COLLECT_INTERVAL_S and pause > KEY_PAUSE_S) or age > MAX_COLLECT_INTERVAL_S:
            gc.collect()
            self._collected_at = time.monotonic()

    def redraw_screen(self) -> None:
        self._drawn_at, self._needs_drawing = time.monotonic(), False
        for screen in reversed(self.screen_stack):
            if isinstance(screen, Page):
                screen.update_view()
                return

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
            self._needs_drawing = True
            self._frame_requested.set()

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

    async def fetch_log_tail(
        self, rollout: str, node: str, attempt: int, count: int
    ) -> Response[list[dict[str, Any]]]:
        path = api_path("rollouts", rollout, "nodes", node, "log")
        stream = partial(self.request_client.stream, path, {"attempt": attempt})
        return await self.call_daemon(lambda: list(deque(stream(), maxlen=count)))

    def open_log(self, rollout: str, node: str, attempt: int | None, on_lines: OnLines) -> LogReader:
        loop = asyncio.get_running_loop()
        path = ("rollouts", rollout, "nodes", node, "log")
        return LogReader(self.client, path, attempt, on_lines, loop.call_soon_threadsafe)

    # -- actions

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Key):
            now = self._clock()
            if now - self._last_key_at > AWAY_S:
                self._looked_at = self._last_key_at
            self._last_key_at = now
            # Before Textual handles the key, so that a frame in between already waits for its answer.
            self._keys.key_pressed()
        await super().on_event(event)

    def on_key(self, event: events.Key) -> None:
        # Textual sends a key to the list that has the focus when it comes.  A dialog that an earlier key
        # opens meanwhile would lose it: an input stops the keys that it takes, so this one is new to it.
        if isinstance(self.screen, Modal):
            self.screen.take_key(event)

    def action_perform(self, names: str) -> None:
        """Run the first of the named actions that the page has: after a confirmation, or by its `do_NAME`."""
        for name in names.split():
            action = actions.ACTIONS_BY_NAME[name]
            if action.operation is not None:
                self.start_operation(action)
                return
            for owner in (self.screen, self):
                method = getattr(owner, f"do_{name}", None)
                if method is not None:
                    method()
                    return
        first = actions.ACTIONS_BY_NAME[names.split()[0]]
        where = ", ".join(sorted(first.screens))
        self.show_message(f"{first.title}: not on this page{f'; it works on {where}' if where else ''}")

    def show_message(
        self, text: str, severity: str = "information", *, timeout_s: float = MESSAGE_TIMEOUT_S
    ) -> None:
        # One message at a time keeps the page readable; only an error stays with the message after it.
        kept = [each for each in self._messages if each[1] == "error" and severity != "error"]
        self._messages = [*kept[-1:], (text, severity, time.monotonic() + timeout_s)]
        self.redraw_screen()

    def message_lines(self, width: int) -> Sequence[Line]:
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
        def submit(answer: str | None) -> None:
            if answer is not None or is_live:
                on_submit(text if answer is None else answer)

        self.push_screen(Prompt(label, text, on_submit if is_live else None), submit)

    def do_handover(self) -> None:
        """Show what happened since the user last looked; the next handover begins now."""
        from tui.screens.fetched import HandoverPage

        since = datetime.fromtimestamp(self._looked_at, UTC).isoformat()
        self._looked_at = self._clock()
        self._last_look.write(self._looked_at)
        self.push_screen(HandoverPage(since))

    def do_palette(self) -> None:
        self.action_command_palette()

    def do_theme(self) -> None:
        self.theme = theme.DARK if self.theme == theme.LIGHT else theme.LIGHT
        self._preferences.update({"theme": "light" if self.theme == theme.LIGHT else "dark"})
        # Textual redraws what it styles itself; the lines here have colours of their own.
        self.refresh(layout=True)
        self.screen.refresh(recompose=False)
        for widget in self.screen.query("*"):
            widget.refresh()

    def do_quit(self) -> None:
        self.exit()

    # -- the frame of every page

    def status_line(self, width: int) -> Line:
        model, has_connected = self.model, self.has_connected
        return summaries.status_line(
            model, self.disconnected, width, self.now(), has_connected=has_connected, reach=self.reach
        )

    def alerts(self, width: int) -> Sequence[Line]:
        model, has_connected = self.model, self.has_connected
        return summaries.alerts(model, self.disconnected, width, self._clock(), has_connected=has_connected)


_IMPLEMENTS_CONSOLE_CONTEXT: type[ConsoleContext] = Console
"""Checked by mypy: the app implements what pages use."""
