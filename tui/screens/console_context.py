"""What pages may use of the console; the app implements it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rolloutd.control.client import Client
from tui.connection.event_stream import Response
from tui.connection.log_stream import LogReader, OnLines
from tui.formatting.lines import Line
from tui.state.model import Model
from tui.state.values import RolloutState
from tui.widgets.summaries import NodeSummary


class ConsoleContext(Protocol):
    """State, requests and navigation; only coroutines wait for the daemon."""

    # -- state

    @property
    def model(self) -> Model: ...

    @property
    def client(self) -> Client: ...

    @property
    def has_connected(self) -> bool: ...

    @property
    def is_stale(self) -> bool:
        """Whether the daemon is away and pages show its last state."""
        ...

    @property
    def connection_count(self) -> int:
        """How often the console connected: a page fetches again what it fetched before."""
        ...

    def now(self) -> float:
        """Return the time to draw, in epoch seconds."""
        ...

    def node_summary(self, rollout: RolloutState) -> NodeSummary: ...

    def status_line(self, width: int) -> Line: ...

    def alerts(self, width: int) -> Sequence[Line]: ...

    # -- requests

    def request_fetch(self, resource: str, rollout: str = "") -> None: ...

    def track_nodes(self, rollout: str) -> None: ...

    async def fetch_path(self, *parts: str, **query: Any) -> Response[Any]: ...

    async def fetch_log_tail(
        self, rollout: str, node: str, attempt: int, count: int
    ) -> Response[list[dict[str, Any]]]: ...

    def open_log(self, rollout: str, node: str, attempt: int | None, on_lines: OnLines) -> LogReader: ...

    # -- navigation

    def action_perform(self, names: str) -> None:
        """Run the first of the named actions that the page has."""
        ...

    def show_message(self, text: str, severity: Any = "information") -> None: ...

    def message_lines(self, width: int) -> Sequence[Line]:
        """Return the messages of the last seconds."""
        ...

    def prompt_text(
        self, label: str, text: str, on_submit: Callable[[str], None], *, is_live: bool = False
    ) -> None:
        """Ask for a line of text; a live prompt submits every change, and the text of before on Escape."""
        ...

    def open_rollout(self, rollout: str) -> None: ...

    def open_comparison(self, rollout: str) -> None: ...

    def open_forecast(self, rollout: str) -> None: ...

    def open_gate(self, key: str) -> None: ...

    def open_nodes(self, rollout: str, *, pool: str = "", reason: str = "") -> None: ...

    def open_preparation(self, rollout: str) -> None: ...

    def open_node(self, rollout: str, node: str, *, shows_steps: bool = True) -> None: ...
