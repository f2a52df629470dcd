"""The console as a Textual app: messages in, frames out, operations sent.

One worker applies the messages of the connection to the model and draws the
current page, at most once per frame however many events arrive.  A timer sends
the requests that the model wants.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.filter import LineFilter
from textual.screen import Screen

from rolloutd.control.client import Client
from rolloutd.control.user_state import UserState
from rolloutd.control.user_time import LastLook
from tui.connection.streams import Connected, Disconnected, EventListener, MessageQueue, RequestRunner
from tui.console import FRAME_INTERVAL_S, ConsoleApp, import_pages
from tui.formatting import formatting, theme
from tui.formatting.ascii_filter import AsciiFilter
from tui.formatting.documents import describe_node, to_yaml
from tui.formatting.lines import sanitize
from tui.operations import actions
from tui.operations.confirm import Selection
from tui.operations.dialog import Modal
from tui.operations.programs import has_terminal, pager_command, run_program
from tui.screens.deciding import start_operation
from tui.screens.fleet import FleetPage
from tui.screens.help import PaletteProvider
from tui.screens.page import TABS, Page, RolloutScreen

TICK_INTERVAL_S = 0.25
"""Between two checks for due requests and for clocks that have moved."""

COLLECT_INTERVAL_S, MAX_COLLECT_INTERVAL_S = 30.0, 120.0
"""Between two full garbage collections, where the user pauses and where not."""

KEY_PAUSE_S = 1.0
"""Without a key for so long, another one is unlikely within the next frame."""

IMPORT_DELAY_S = 3.0
"""The first screen has been drawn by then."""

HINT_TIMEOUT_S = 20.0

AWAY_S = 1_800.0
"""Without a key for so long, the user was away: the handover begins at the last key."""


class Console(ConsoleApp):
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
        super().__init__(client, now, reach)
        self.hint = hint
        self._stream_messages = MessageQueue()
        self._event_listener = EventListener(client, self._stream_messages, now)
        self._last_look = LastLook(reach or str(client.path))
        self._looked_at = self._last_key_at = 0.0
        self._ascii_filter = AsciiFilter(enabled=ascii_only)
        self._collected_at = time.monotonic()
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

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._frame_requested.set)

        self._stream_messages.on_message = wake
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

        An entry only wakes the model, so most pages wait for the status to draw.
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
            self.model.apply_stream_lines(lines, self._clock())
            self._needs_drawing |= any("status" in each for each in lines)
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
        """Run the first of the named actions that there is: an operation, a `do_NAME`, or a page."""
        for name in names.split():
            action = actions.ACTIONS_BY_NAME[name]
            if action.operation is not None:
                start_operation(self, action)
                return
            method = getattr(self.screen, f"do_{name}", None) or getattr(self, f"do_{name}", None)
            if method is None and name in (*TABS, "changes"):
                method = partial(self.switch_page, name)
            if method is not None:
                method()
                return
        first = actions.ACTIONS_BY_NAME[names.split()[0]]
        where = ", ".join(sorted(first.screens))
        self.show_message(f"{first.title}: not on this page{f'; it works on {where}' if where else ''}")

    def do_handover(self) -> None:
        """Show what happened since the user last looked; the next handover begins now."""
        since = datetime.fromtimestamp(self._looked_at, UTC).isoformat()
        self._looked_at = self._clock()
        self._last_look.write(self._looked_at)
        self.open_page("handover", since)

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

    # -- pages

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

    def do_whole(self) -> None:
        full_text = self.screen.full_text() if isinstance(self.screen, Page) else None
        if full_text is not None:
            self.open_page("text", *full_text)

    def do_yaml(self) -> None:
        shown = self.screen.object_under_cursor() if isinstance(self.screen, Page) else None
        if shown is None:
            self.show_message("YAML: nothing is under the cursor")
            return
        title, value = shown
        if isinstance(value, tuple):
            self._open_fetched(f"{title} YAML", self._fetch_yaml(*value))
        else:
            self.open_page("text", f"{title} YAML", to_yaml(value))

    async def _fetch_yaml(self, *path: str) -> str:
        response = await self.fetch_path(*path)
        return str(response.error or response.unreachable or to_yaml(response.result))

    def do_logs(self) -> None:
        if (node := self._node_under_cursor("logs")) is not None:
            self.open_page("node", *node, shows_steps=False)

    def do_describe(self) -> None:
        if (node := self._node_under_cursor("describe")) is not None:
            self._open_fetched(f"{node[1]} description", self._fetch_description(*node))

    async def _fetch_description(self, rollout: str, node: str) -> str:
        detail = await self.fetch_path("rollouts", rollout, "nodes", node)
        configuration = await self.fetch_path("nodes", node, "configuration")
        if detail.result is None:
            return str(detail.error or detail.unreachable)
        return describe_node(rollout, detail.result, configuration.result)

    def _node_under_cursor(self, action: str) -> tuple[str, str] | None:
        """Return the rollout and the name of the selected node, or say that there is none."""
        selection = self.screen.selection() if isinstance(self.screen, Page) else Selection()
        name, locks = selection.node_name, self.model.locks
        pools = () if locks is None else locks["pools"]
        holders = (each for pool in pools for each in pool["holders"] if each["node"] == name)
        rollouts = [selection.rollout.id] if selection.rollout is not None else []
        rollouts += [each["rollout"] for each in holders if each["rollout"]]
        if name and rollouts:
            return rollouts[0], name
        where = f"{name} is in no live rollout" if name else "no node is selected"
        self.show_message(f"{action}: {where}")
        return None

    def do_plan(self) -> None:
        """Show the plan in the user's pager, or on a page where no program can take the terminal."""
        rollout = self.screen.selection().rollout if isinstance(self.screen, Page) else None
        if rollout is None:
            self.show_message("plan: no rollout is selected")
            return
        load = self._fetch_yaml("rollouts", rollout.id, "plan")
        if has_terminal(self) and pager_command():
            self.run_worker(self._page_through(load), group="pager", exclusive=True)
        else:
            self._open_fetched(f"{rollout.id} plan", load)

    async def _page_through(self, load: Awaitable[str]) -> None:
        text = "\n".join(sanitize(line) for line in (await load).splitlines())
        if problem := run_program(self, pager_command(), text):
            self.show_message(problem, "error")

    def _open_fetched(self, title: str, load: Awaitable[str]) -> None:
        page = self.open_page("text", title)

        async def show() -> None:
            page.show_text(await load)

        self.run_worker(show(), group="text")

    def do_fleet(self) -> None:
        self.close_pages()

    def do_help(self) -> None:
        if isinstance(self.screen, Page) and self.screen.screen_name != "help":
            self.open_page("help", self.screen.screen_name)
