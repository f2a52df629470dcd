"""One node of a rollout: its attempts, its steps, the holders of its slots, and its log.

The page fetches the steps again when an event has changed the node.  The log is a
stream of its own; the page keeps only the latest part of a very long one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partialmethod
from typing import Any

from textual.containers import Vertical
from textual.widget import Widget

from rolloutd.control.nodes import wire_nodes
from rolloutd.texts import event_text, formats
from tui.connection.streams import Lines, LogReader
from tui.formatting import formatting, lines
from tui.formatting.glyphs import log_line, node_glyph
from tui.formatting.lines import Line, fit, fit_name, justify
from tui.operations.confirm import Selection
from tui.screens import page
from tui.screens.text import SearchablePage
from tui.state.values import NodeState, parse_timestamp
from tui.widgets import summaries
from tui.widgets.virtual_list import Banner, VirtualList

MAX_LOG_LINES = 20_000
"""Lines kept, a few megabytes."""

MAX_NAMED_HOLDERS = 3

MIN_NAME_WIDTH = 12
"""Cells of the node's name before its state."""

MAX_REASON_LINES = 5
"""Lines for the reason why the node waits and what ends it, or for its failure."""

STEP_GLYPHS = {
    "ok": ("✓", "ok"),
    "failed": ("✗", "bad"),
    "intended": ("▸", "run"),
    "busy": ("◷", "warn"),
    "unknown": ("?", "warn"),
}


class NodePage(page.TwoPanes, page.RolloutScreen, SearchablePage):
    screen_name = "node"
    initial_focus = "#log"
    panes = ("log", "steps")
    filter_label = "show log lines that contain"
    DEFAULT_CSS = """
    NodePage #steps { height: 2fr; width: 100%; }
    NodePage #logs { height: 3fr; width: 100%; }
    NodePage.-wide #steps { width: 2fr; }
    NodePage.-wide #logs { width: 3fr; }
    NodePage #log { height: 1fr; }
    NodePage.-log-only #steps { display: none; }
    """

    def __init__(self, rollout: str, node: str, *, shows_steps: bool = True) -> None:
        super().__init__(rollout)
        self.set_class(not shows_steps, "-log-only")
        self.node_name = node
        self.detail: wire_nodes.NodeDetail | None = None
        self.log_lines: deque[dict[str, Any]] = deque(maxlen=MAX_LOG_LINES)
        self.is_following = True
        self.attempt: int | None = None
        self._log_reader: LogReader | None = None
        self._fetched_version: tuple[Any, ...] | None = None
        self._is_fetching = False

    @property
    def node(self) -> NodeState | None:
        return self.find_node(self.node_name)

    def compose_body(self) -> Iterator[Widget]:
        yield Banner(self._render_head, id="head", height=2)
        log = Vertical(Banner(self._render_log_head, id="loghead"), VirtualList(id="log"), id="logs")
        yield page.PaneContainer(VirtualList(id="steps"), log, id="body")

    def on_mount(self) -> None:
        self._open_log()

    def on_unmount(self) -> None:
        if self._log_reader is not None:
            self._log_reader.stop()

    def breadcrumb(self) -> str:
        return f"▸ {self.rollout_id} ▸ {self.node_name}"

    def selection(self) -> Selection:
        return Selection(rollout=self.rollout, node=self.node, node_name=self.node_name)

    def update_body(self) -> None:
        self._refresh_detail()
        self.query_one("#head", Banner).update_lines()
        self.query_one("#steps", VirtualList).set_rows(page.item_rows(self._step_items()))
        self._show_log()

    # -- requests

    def _refresh_detail(self) -> None:
        """Fetch the steps again if the node has changed since the last request, or the daemon was away."""
        node, rollout = self.node, self.rollout
        in_flight = None if rollout is None else rollout.in_flight.get(self.node_name)
        version = (
            None if node is None else (node.phase, node.attempt, node.since, node.isolated, node.outcome),
            None if in_flight is None else in_flight["step"],
            self.console.connection_count,
        )
        if version != self._fetched_version and not self._is_fetching:
            # Before the response: a change that comes meanwhile must be fetched after it.
            self._fetched_version, self._is_fetching = version, True
            self.run_worker(self._fetch_detail(), group="detail")

    async def _fetch_detail(self) -> None:
        response = await self.console.fetch_path("rollouts", self.rollout_id, "nodes", self.node_name)
        self._is_fetching = False
        if response.result is not None:
            before, self.detail = self.detail, response.result
            is_new_attempt = before is not None and before["attempt"] != response.result["attempt"]
            if is_new_attempt and self.attempt is None:
                self._open_log()
        elif response.unreachable is not None:
            self._fetched_version = None
        self.update_view()

    def _open_log(self) -> None:
        if self._log_reader is not None:
            self._log_reader.stop()
        self.log_lines.clear()
        path = ("rollouts", self.rollout_id, "nodes", self.node_name, "log")
        self._log_reader = LogReader(self.console.client, path, self.attempt, self._append_log_lines)
        self._log_reader.start()

    def _append_log_lines(self, new_lines: Lines) -> None:
        self.log_lines.extend(new_lines)
        self.console.request_frame()

    # -- actions

    def set_filter(self, text: str) -> None:
        self.filter_text = text
        self.update_view()

    def do_follow(self) -> None:
        self.is_following = not self.is_following
        self._show_log()
        message = "following the log" if self.is_following else "log stopped: press f to follow it again"
        self.console.show_message(message)

    def do_logs(self) -> None:
        """Show the log alone, or the steps too."""
        self.toggle_class("-log-only")
        self.query_one("#log").focus()

    def do_filter_log(self) -> None:
        self.do_find()

    @property
    def searched(self) -> VirtualList:
        return self.query_one("#log", VirtualList)

    def whole_text(self) -> tuple[str, str]:
        """Return the log that is kept here: of a very long one, its latest part."""
        attempt = self.attempt or (self.detail["attempt"] if self.detail is not None else 0)
        name = f"{self.rollout_id}-{self.node_name}-{attempt}.log"
        return name, "".join(f"{each['at']} {each['text']}\n" for each in self._shown_log_lines())

    def _go_to_match(self, direction: int, *, includes_cursor: bool = False) -> None:
        # The end of a log that grows would move the cursor away from the match.
        self.is_following = False
        super()._go_to_match(direction, includes_cursor=includes_cursor)

    def _change_attempt(self, delta: int) -> None:
        latest = self.detail["attempt"] if self.detail is not None else 0
        current = self.attempt or latest
        wanted = min(max(current + delta, 1), max(latest, 1))
        if wanted == current:
            self.console.show_message("no earlier attempt" if delta < 0 else "no later attempt")
            return
        self.attempt = None if wanted == latest else wanted
        self._open_log()
        self.update_view()

    do_attempt, do_attempt_later = partialmethod(_change_attempt, -1), partialmethod(_change_attempt, 1)

    def full_text(self) -> tuple[str, str] | None:
        steps = self.query_one("#steps", VirtualList)
        if not steps.has_focus or self.detail is None:
            return super().full_text()
        step = next((each for each in self.detail["steps"] if _step_key(each) == steps.cursor_key), None)
        if step is None:
            return super().full_text()
        started = formatting.format_datetime(parse_timestamp(step["began_at"]) or 0.0)
        title = f"{step['action']} {event_text.step_label(step['step'])}, {step['state']}, started {started}"
        output = (
            "output: hidden; only the node's team may read it" if step["output"] is None else step["output"]
        )
        return title, "\n\n".join(filter(None, [step["text"], output])) or "no output"

    # -- drawing

    def _render_head(self, width: int) -> Sequence[Line]:
        node = self.node
        if node is None:
            return [[(f" {self._node_absence_note()}", "dim")], []]
        glyph, role = node_glyph(node)
        state = f"{node.phase} ({node.outcome})" if node.outcome else node.phase
        state_spans: Line = [
            (f"  {state}", role),
            (f" {formatting.format_age(node.since, self.console.now())}", "dim"),
            ("  out of service" if node.isolated else "", "warn"),
        ]
        room = max(MIN_NAME_WIDTH, width - lines.line_width(state_spans) - 3)
        name = node.node if len(node.node) <= room else fit_name(node.node, room, pad=False)
        first: Line = [(f" {glyph} ", role), (name, "bold"), *state_spans]
        attempt = f"  attempt {node.attempt}" if node.attempt else ""
        team = f" team {node.team or '-'}"
        for right in (f"{team}  wave {node.wave}{attempt} ", f"{team}{attempt} ", f"{attempt} ", ""):
            if lines.line_width(first) + len(right) <= width:
                break
        first = justify(first, [(right, "dim")] if right else [], width)
        return [first, *([(" ", ""), *line] for line in self._describe_node(node, width - 2))]

    def _node_absence_note(self) -> str:
        if self.rollout is None:
            return self.absence_note()
        if self.rollout.nodes is None:
            return "loading"
        return f"{self.node_name} is not a node of {self.rollout_id}; the audit keeps its entries (4)"

    def _describe_node(self, node: NodeState, width: int) -> list[Line]:
        """Return what the node does, or why it does nothing: that must not be cut."""
        work = None if self.rollout is None else self.rollout.in_flight.get(node.node)
        if work is not None:
            step, percent = event_text.step_label(work["step"] or "") or "starting", work["percent"]
            share = "" if percent is None else f" {formats.format_percent(percent)}"
            share += f" by {runner}" if (runner := work.get("runner")) else ""
            return [[(step, "run"), (share, ""), (f"  {lines.sanitize(work['task'] or '')}", "dim")]]
        if node.failure:
            failure = None if self.detail is None else self.detail["failure"]
            text = node.failure if failure is None else event_text.failed_step(failure)
            return [[(line, "bad")] for line in lines.wrap_text(text, width, MAX_REASON_LINES)]
        reason = node.reason or (self.detail["reason"] if self.detail is not None else None)
        if node.phase in ("pending", "failed") and reason is not None:
            why = lines.wrap_text(reason["text"], width, MAX_REASON_LINES)
            remedy = f"ended by {reason['lifted_by']}" if reason["lifted_by"] else ""
            ends = lines.wrap_text(remedy, width, MAX_REASON_LINES) if remedy else []
            return [*([(text, "warn")] for text in why), *([(text, "dim")] for text in ends)]
        return [[("in pools " + ", ".join(node.pools), "dim")]]

    def _step_items(self) -> Iterator[page.Item]:
        detail = self.detail
        if detail is None:
            yield page.note_row("loading" if self.node is not None else self._node_absence_note())
            return
        yield from self._holder_items()
        for attempt in sorted({step["attempt"] for step in detail["steps"]}, reverse=True):
            yield page.heading(f"ATTEMPT {attempt}")
            for step in (each for each in detail["steps"] if each["attempt"] == attempt):
                yield _step_key(step), _step_row(step, self.console.now())
        if not detail["steps"]:
            yield page.note_row("no step has run on it yet")

    def _holder_items(self) -> Iterator[page.Item]:
        """Yield the holders of the pools' slots while the node is pending."""
        node, locks = self.node, self.console.model.locks
        if node is None or locks is None or node.phase != "pending":
            return
        pools = [(pool, summaries.confirmed_holders(pool)) for pool in locks["pools"]]
        pools = [(pool, holders) for pool, holders in pools if holders and pool["pool"] in node.pools]
        if pools:
            yield page.heading("ITS SLOTS")
        for pool, holders in pools:
            text = formats.join_limited([each["why"] for each in holders], MAX_NAMED_HOLDERS, "; ")
            slots = f"{len(holders)}/{pool['max_unavailable']} "
            line: Line = [(f"  {pool['pool']} ", "bold"), (slots, "warn"), (lines.sanitize(text), "dim")]
            yield f"slots:{pool['pool']}", page.static_line(line)

    def _show_log(self) -> None:
        log = self.query_one("#log", VirtualList)
        was_last = log.rows is None or log.cursor >= len(log.rows) - 1
        shown = self._shown_log_lines()
        log.set_rows(
            page.LazyRows(
                shown, lambda line: str(line["offset"]), lambda line, _width: self.mark(log_line(line))
            )
            if shown
            else page.item_rows([page.note_row(self._empty_log_text())])
        )
        self.query_one("#loghead", Banner).update_lines()
        if self.is_following and (was_last or not log.has_focus):
            log.action_jump(-1)

    def _shown_log_lines(self) -> list[dict[str, Any]]:
        wanted = self.filter_text
        return [each for each in self.log_lines if not wanted or formatting.matches(each["text"], wanted)]

    @property
    def _log_status(self) -> str:
        return self._log_reader.status if self._log_reader is not None else ""

    def _render_log_head(self, width: int) -> Sequence[Line]:
        which = f"attempt {self.attempt}" if self.attempt is not None else "latest attempt"
        return [page.heading("LOG", f"{which}  {self._log_status}")[1](width)]

    def _empty_log_text(self) -> str:
        if self.log_lines:
            return f"no line of {len(self.log_lines):,} contains “{self.filter_text}”"
        if self._log_status in ("reading", "live"):
            return "no line yet"
        return "no run yet" if self.node is not None and not self.node.attempt else "no output"


def _step_key(step: wire_nodes.Step) -> str:
    return f"{step['attempt']}/{step['step']}/{step['action']}/{step['number']}"


def _step_row(step: wire_nodes.Step, now: float) -> Callable[[int], Line]:
    started, ended = parse_timestamp(step["began_at"]) or 0.0, parse_timestamp(step["at"]) or 0.0
    glyph, role = STEP_GLYPHS.get(step["state"], ("?", "warn"))
    runs = step["state"] == "intended"
    repeat = f" (again, {step['number']})" if step["number"] > 1 else ""
    text = "" if runs else lines.sanitize(" ".join(step["text"].split()))
    left: Line = [
        (f"  {glyph} ", role),
        (fit(step["action"], 8) + " ", "dim"),
        (event_text.step_label(step["step"]) + repeat, "bold"),
        (f"  {text}", "bad" if role == "bad" else "dim"),
    ]
    clock = f" {formatting.format_clock((now if runs else ended) - started)} "
    right: Line = [(clock, "run" if runs else "dim"), (f"{formatting.format_time(started)} ", "dim")]
    return lambda width: justify(left, right, width)
