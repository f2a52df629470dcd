"""One rollout, now or at a past moment: waves, nodes in flight, reasons for waiting, and pools."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial, partialmethod
from typing import Any

from textual.geometry import Size
from textual.widget import Widget

from rolloutd.control import response_text
from rolloutd.control.client import api_path
from rolloutd.control.rollouts import wire
from rolloutd.texts import event_text, formats
from tui.formatting import formatting, lines
from tui.formatting.glyphs import PHASE_GLYPHS, log_line
from tui.formatting.lines import Line, column, fit_name, justify
from tui.operations.confirm import Selection
from tui.screens.fleet import progress_line, wave_line
from tui.screens.moment import moment_items, parse_moment
from tui.screens.page import (
    MAX_VOTES_SHOWN,
    Item,
    PaneContainer,
    RolloutScreen,
    TwoPanes,
    find_pending_gate,
    gate_lines,
    heading,
    item_rows,
    note_row,
    static_line,
    vote_lines,
)
from tui.screens.pools import TimelineRows, strip_rows, timeline_columns
from tui.state import values
from tui.state.history import FLEET_HISTORY_EVENTS, ROLLOUT_HISTORY_EVENTS, History
from tui.widgets import summaries, timeline
from tui.widgets.summaries import POOL_ORDERS, WaitingGroup
from tui.widgets.timeline import BarCache, TimelineView, TimeScale
from tui.widgets.virtual_list import Banner, RowSource, VirtualList

MAX_NAMED_NODES = 6
"""Nodes named on a line of nodes with the same reason."""

MIN_IN_FLIGHT = 6
"""Nodes in flight on the smallest screen, those that started first."""

MIN_GROUP_WIDTH, MIN_NAMES_WIDTH, MAX_REASON_LINES = 30, 12, 2

MAX_GROUPS = 40
"""Reasons listed; in a fleet of five hundred pools most are alike, and the nodes page has all."""

MIN_NAME_WIDTH, MAX_NAME_WIDTH = 12, 32

MAX_TAIL_LINES = 10
"""Log lines of the first failed node."""

MAX_FAILURE_LINES = 4
"""Lines for the message of the first failed node."""

MIN_TAIL_LINES, ROWS_BELOW_TAIL = 2, 8

AUDIT_PAGE_SIZE = 1_000

POOL_ORDER_INTERVAL_S = 5.0
"""Between two sorts of the pools: in between only a failure or an excess moves a row."""

MAX_URGENT_RANK = 1

ROLLBACK_STEP = "run.rollback"
"""The step of a node in flight whose tasks undo the change."""

LATE_FACTOR = 1.5
"""A node in flight is late after so many times the usual duration."""


class RolloutPage(TwoPanes, RolloutScreen):
    screen_name = "rollout"
    panes = ("now", "pools")
    DEFAULT_CSS = """
    RolloutPage #now { height: 1fr; width: 1fr; }
    RolloutPage #pools { height: 1fr; width: 1fr; }
    """

    def __init__(self, rollout: str) -> None:
        super().__init__(rollout)
        self._log_tail: list[dict[str, Any]] = []
        self._log_tail_of: tuple[str, int] | None = None
        self.pool_order = next(iter(POOL_ORDERS))
        self._sorted_pools: tuple[tuple[object, ...], list[str]] = ((), [])
        self.timeline = TimelineView()
        self._wants_timeline: bool | None = None
        self._scale: TimeScale | None = None
        self._bars = BarCache()
        self._is_loading = False

    def compose_body(self) -> Iterator[Widget]:
        yield Banner(self._render_head, id="head", height=3)
        yield PaneContainer(VirtualList(id="now", pin_cursor_to_top=True), VirtualList(id="pools"), id="body")

    def selection(self) -> Selection:
        kind, _, name = self._cursor_key().partition(":")
        # Below a pool, a node's key names the pool too.
        name = name.rpartition("/")[2] if kind == "node" else ""
        gate = find_pending_gate(self, self.rollout)
        return Selection(rollout=self.rollout, gate=gate, node=self.find_node(name), node_name=name)

    def _cursor_key(self) -> str:
        """Return what is under the cursor of the pane that has the focus."""
        pools = self.query_one("#pools", VirtualList)
        # The screen's focus, not the widget's: that one follows an event later, and a key may come first.
        return (pools if self.focused is pools else self.query_one("#now", VirtualList)).cursor_key

    def update_body(self) -> None:
        self.query_one("#head", Banner).update_lines()
        rollout, pools = self.rollout, self.query_one("#pools", VirtualList)
        items = [note_row(self.absence_note())] if rollout is None else list(self._items(rollout))
        self.query_one("#now", VirtualList).set_rows(item_rows(items))
        pools.set_rows(item_rows([]) if rollout is None else self._pool_rows(rollout, pools))
        if rollout is not None:
            pools.limit_height(fill=self.has_class("-wide"))

    def do_open(self) -> None:
        kind, _, name = self._cursor_key().partition(":")
        match kind:
            case "node":
                self.console.open_page("node", self.rollout_id, name.rpartition("/")[2])
            case "reason":
                self.console.open_page("nodes", self.rollout_id, reason=name)
            case "gate":
                self.console.switch_page("gates", name)
            case "pool":
                self.console.open_page("nodes", self.rollout_id, pool=name)
            case _:
                self._open("nodes")

    def _open(self, page: str) -> None:
        self.console.open_page(page, self.rollout_id)

    do_nodes, do_compare = partialmethod(_open, "nodes"), partialmethod(_open, "comparison")
    do_preparation, do_forecast = partialmethod(_open, "preparation"), partialmethod(_open, "forecast")

    def do_find(self) -> None:
        """Filter on the page that lists all nodes."""
        self.console.open_page("nodes", self.rollout_id)
        # Now, not later: the keys typed after `/` are the filter, and no actions of the page of nodes.
        self.console.action_perform("find")

    def do_sort(self) -> None:
        orders = list(POOL_ORDERS)
        self.pool_order = orders[(orders.index(self.pool_order) + 1) % len(orders)]
        self.update_view()
        self.query_one("#pools", VirtualList).show_cursor(at_top=True)

    # -- the pools, and their past

    def do_timeline(self) -> None:
        self._wants_timeline = not self._shows_timeline
        self.timeline.moment = None
        self.update_view()

    def do_now(self) -> None:
        self.timeline.moment = None
        self.update_view()

    def do_moment(self) -> None:
        self.console.prompt_text("show the rollout at (03:44, 10m ago; empty is now)", "", self._set_moment)

    def _set_moment(self, text: str) -> None:
        now = self.console.now()
        moment = parse_moment(text, now)
        if text.strip() and (moment is None or moment > now):
            self.console.show_message(f"{text}: not a past time; enter 03:44 or 10m ago", "warning")
            return
        self._wants_timeline, self.timeline.moment = True, moment
        self.update_view()

    @property
    def _shows_timeline(self) -> bool:
        return self.has_class("-wide") if self._wants_timeline is None else self._wants_timeline

    def _move_moment(self, columns: int) -> None:
        self._wants_timeline = True
        if self._scale is not None:
            self.timeline.move(columns, self._scale)
        self.update_view()

    def _zoom(self, by: int) -> None:
        if self._scale is not None:
            self.timeline.zoom(by, self._scale)
            self.update_view()

    do_earlier, do_later = partialmethod(_move_moment, -1), partialmethod(_move_moment, 1)
    do_zoom_in, do_zoom_out = partialmethod(_zoom, -1), partialmethod(_zoom, 1)

    def _pool_rows(self, rollout: values.RolloutState, pane: VirtualList) -> RowSource:
        pools, model = self._pools_in_order(rollout), self.console.model
        self._scale = None
        if not self._shows_timeline or rollout.nodes is None or model.last_received_seq < 0:
            return strip_rows(pools, self.pool_order, nodes_known=rollout.nodes is not None)
        history, plan = model.history(rollout.id), model.plans.get(rollout.id)
        scale = self.timeline.scale(
            timeline_columns(pools, pane.scrollable_content_region.width - 1),
            *_duration(rollout, history, self.console.now()),
        )
        self._scale = scale
        self._load_history(history, scale.start)
        soaks = summaries.soak_intervals(self.console.node_summary(rollout), plan)
        moment = self.timeline.moment
        marks = timeline.decision_marks(history, soaks, scale, moment)
        starts = timeline.start_marks(history, timeline.parse_windows(plan), scale, moment)
        rows = TimelineRows(history, scale, moment, marks, starts, self._bars)
        return rows.rows(pools, self.pool_order, pane.size.height)

    def _pools_in_order(self, rollout: values.RolloutState) -> list[values.PoolState]:
        """Return the pools in the chosen order, which changes at intervals so that rows can be read."""
        pools, rank = rollout.pools, summaries.pool_rank
        urgent = [name for name, pool in pools.items() if rank(pool) <= MAX_URGENT_RANK]
        period = self.console.now() // POOL_ORDER_INTERVAL_S
        key = (self.pool_order, period, len(pools), urgent)
        if key != self._sorted_pools[0]:
            in_order = sorted(pools.values(), key=POOL_ORDERS[self.pool_order])
            self._sorted_pools = (key, [pool.pool for pool in in_order])
        return [pools[name] for name in self._sorted_pools[1] if name in pools]

    def _load_history(self, history: History, start: float) -> None:
        wanted = start if self.timeline.moment is None else min(start, self.timeline.moment)
        is_loaded = history.has_decisions and (history.loaded_from <= wanted or history.is_full)
        if not is_loaded and not self._is_loading and not self.console.is_stale:
            self._is_loading = True
            self.run_worker(self._fetch_history(history), group="history")

    async def _fetch_history(self, history: History) -> None:
        """Load the decisions, then one page of transitions; the next update loads the next page."""
        before, rollout = history.first_seq, self.rollout_id
        fetch = partial(self.console.fetch_path, "audit", before=before)
        if not history.has_decisions:
            of_rollout = [await fetch(kind=kind, rollout=rollout) for kind in ROLLOUT_HISTORY_EVENTS]
            pages = [*of_rollout, *[await fetch(kind=kind) for kind in FLEET_HISTORY_EVENTS]]
            found = [page.result["entries"] for page in pages if page.result is not None]
            if len(found) == len(pages):
                history.add_decisions(each["entry"] for entries in found for each in entries)
        page = await fetch(kind="PhaseMoved", rollout=rollout, limit=AUDIT_PAGE_SIZE)
        # Reset also after an error, or the past would never load.
        self._is_loading = False
        if page.result is not None:
            entries = [each["entry"] for each in page.result["entries"]]
            history.add_earlier(entries, is_complete=page.result["next"] is None)
            self.update_view()

    # -- the log of the first failure

    def _request_log_tail(self, node: values.NodeState) -> None:
        wanted = (node.node, node.attempt)
        if wanted != self._log_tail_of:
            self._log_tail_of, self._log_tail = wanted, []
            self.run_worker(self._fetch_log_tail(*wanted), group="log-tail", exclusive=True)

    async def _fetch_log_tail(self, node: str, attempt: int) -> None:
        path = api_path("rollouts", self.rollout_id, "nodes", node, "log")
        stream = partial(self.console.request_client.stream, path, {"attempt": attempt})
        response = await self.console.call_daemon(lambda: list(deque(stream(), maxlen=MAX_TAIL_LINES)))
        if response.result is not None:
            self._log_tail = response.result
        elif response.unreachable is not None:
            self._log_tail_of = None
        self.update_view()

    # -- the head

    def _render_head(self, width: int) -> Sequence[Line]:
        rollout, now, model = self.rollout, self.console.now(), self.console.model
        if rollout is None:
            return [[], [], []]
        glyph, role = summaries.state_glyph(rollout.state, rollout.status["skipped"])
        sentence, missing_votes = summaries.describe_status_with_state(model, rollout, now)
        sentence = lines.shorten(sentence, 2 * width - 12)
        head: list[Line] = [
            [(f"   {text}", "") if number else (f" {glyph} {text}", role)]
            for number, text in enumerate(lines.wrap_text(sentence, width - 4, 2))
        ]
        head[-1] = justify(head[-1], [(f"  {missing_votes} ", "accent")] if missing_votes else [], width)
        summary, status = self.console.node_summary(rollout), rollout.status
        segments = summaries.wave_segments(rollout, summary, model.plans.get(rollout.id), now)
        owner = f" plan {status['plan']} of {status['owner']}, by {status['submitted_by']}, "
        source = f"{status['source']['text']} "
        digest: Line = [("digest ", "dim"), (formats.short_hash(status["digest"]) + " ", "digest")]
        return [
            *head,
            progress_line(rollout, summaries.completion_rate(rollout, summary, now), width),
            *self._preparation_lines(rollout, width),
            wave_line(segments),
            justify([(owner + source, "dim")], digest, width),
        ]

    def _preparation_lines(self, rollout: values.RolloutState, width: int) -> Iterator[Line]:
        """Yield the bar of the nodes that are prepared, if the plan has prepare stages."""
        prepared = rollout.status["prepared"]
        if prepared is not None:
            share = prepared["done"] / prepared["total"] if prepared["total"] else 1.0
            percent = formats.format_percent(100.0 * share)
            numbers = f" {percent:>5}  {prepared['done']:,} of {prepared['total']:,} prepared"
            bar = lines.progress_bar([(share, "ok")], max(8, width - len(numbers) - 3))
            yield [(" ", ""), *bar, (numbers, "")]

    # -- the pane of what happens now

    def _items(self, rollout: values.RolloutState) -> Iterator[Item]:
        moment, model = self.timeline.moment, self.console.model
        if moment is None:
            return self._current_items(rollout)
        return moment_items(model.history(rollout.id), rollout, moment, self.console.now())

    def _current_items(self, rollout: values.RolloutState) -> Iterator[Item]:
        pane = self.query_one("#now", VirtualList).size
        # A failure stands above its gate: a user reads what failed before approving it.
        yield from self._failed_items(rollout, pane)
        pending = find_pending_gate(self, rollout)
        if pending is not None:
            for number, line in enumerate(gate_lines(self, pending, max(20, pane.width - 2))):
                yield "" if number else f"gate:{pending.key}", static_line(line)
        in_flight = sorted(rollout.in_flight.values(), key=_started_at)
        if train := response_text.describe_train(rollout.status):
            yield note_row(train)
        yield heading("IN FLIGHT", str(len(in_flight)))
        # Leave a third of the pane for the reasons why the other nodes wait.
        shown = in_flight[: max(MIN_IN_FLIGHT, pane.height * 2 // 3)]
        width = lines.column_width((each["node"] for each in shown), MIN_NAME_WIDTH, MAX_NAME_WIDTH)
        for each in shown:
            row = in_flight_row(each, rollout.status["expected_s"], self.console.now(), width)
            yield f"node:{each['node']}", row
        if len(shown) < len(in_flight):
            yield note_row(f" and {len(in_flight) - len(shown)} more: n shows all nodes")
        if not in_flight:
            yield note_row("nothing")
        if not rollout.is_closed:
            yield from self._waiting_items(rollout)
        for gate in rollout.status["gates"]:
            if gate["state"] == "open" and gate["votes"]:
                yield heading("APPROVED", event_text.gate_label(gate))
                for number, line in enumerate(vote_lines(gate, MAX_VOTES_SHOWN)):
                    yield f"vote:{gate['gate']}:{gate['wave']}:{number}", static_line(line)

    def _failed_items(self, rollout: values.RolloutState, pane: Size) -> Iterator[Item]:
        failed = self.console.node_summary(rollout).failed
        if not failed:
            return
        self._request_log_tail(failed[0])
        width = lines.column_width((node.node for node in failed), MIN_NAME_WIDTH, MAX_NAME_WIDTH)
        yield heading("FAILED", f"{len(failed)}: r retry, S skip, b roll back")
        for number, node in enumerate(failed):
            if number:
                yield f"node:{node.node}", _failed_row(node, width)
            else:
                name_width = min(width, max(MIN_NAME_WIDTH, pane.width // 3))
                failure = _failure_lines(node, name_width, max(20, pane.width - 2))
                for row, text in enumerate(failure):
                    yield "" if row else f"node:{node.node}", static_line(text)
                # On a small screen the gate and the nodes in flight must stay visible below.
                for line in self._log_tail[-max(MIN_TAIL_LINES, pane.height - ROWS_BELOW_TAIL) :]:
                    yield "", static_line([("   ", ""), *log_line(line)])

    def _waiting_items(self, rollout: values.RolloutState) -> Iterator[Item]:
        if rollout.nodes is None:
            yield heading("WAITING")
            yield note_row("loading")
            return
        summary, reason = self.console.node_summary(rollout), rollout.status["reason"]
        width = self.query_one("#now", VirtualList).size.width - 2
        groups, ready = summary.waiting_groups, summary.ready
        if not groups and not ready:
            return
        yield heading("WAITING", str(sum(len(group.nodes) for group in groups) + len(ready)))
        if ready:
            names = formatting.join_first(ready, MAX_NAMED_NODES)
            text: Line = [(f"{len(ready):>5} ", "bold"), ("next  ", "run"), (names, "")]
            # Of several nodes no operation could tell which one it is for.
            yield f"node:{ready[0]}" if len(ready) == 1 else "ready", static_line(text)
        for group in groups[:MAX_GROUPS]:
            why = group.text
            # The head has the sentence already; but "running" alone is no reason to wait.
            if reason is not None and values.reason_key(reason) == group.key and rollout.state != "running":
                why = f"as the whole rollout is {rollout.state.replace('-', ' ')}"
            yield from _group_items(group, why, max(MIN_GROUP_WIDTH, width))
        if len(groups) > MAX_GROUPS:
            yield note_row(f"    and {len(groups) - MAX_GROUPS} more reasons: n shows all nodes")


def _duration(rollout: values.RolloutState, history: History, now: float) -> tuple[float, float]:
    """Return when a rollout's start gate opened, and its end or the present."""
    began, end = values.parse_timestamp(rollout.status["submitted_at"]) or now, now
    for entry in history.decisions:
        if entry["event"] == "GateOpened" and entry["fields"]["gate"] == "start":
            began = entry["at"]
        elif entry["event"] in ("RolloutEnded", "RolloutCancelled") and rollout.is_closed:
            end = entry["at"]
    latest = (values.parse_timestamp(each["since"]) or 0.0 for each in rollout.in_flight.values())
    return began, max(began, end, *latest)


def _started_at(work: wire.InFlight) -> str:
    # A daemon from before an upgrade does not send when it admitted the node.
    return work.get("admitted_at") or work["since"]


def in_flight_row(
    work: wire.InFlight, expected_s: float, now: float, name_width: int
) -> Callable[[int], Line]:
    """Return a function that draws phase, step, task, and the time against the usual time."""
    glyph, role = PHASE_GLYPHS.get(work["phase"], ("?", "warn"))
    took = max(0.0, now - (values.parse_timestamp(_started_at(work)) or now))
    times: Line = [
        (f" {formatting.format_clock(took)}", "warn" if took > expected_s * LATE_FACTOR else ""),
        (f" of ~{formatting.format_clock(expected_s)} ", "dim"),
    ]
    task = lines.sanitize(work["task"] or "") or event_text.step_label(work["step"] or "") or "…"
    if work["task"] and work["step"] == ROLLBACK_STEP:
        task = f"rollback: {task}"
    if runner := work.get("runner"):
        task = f"{runner}: {task}"

    def draw(width: int) -> Line:
        left: Line = [
            (f" {glyph} ", role),
            (column(work["node"], name_width + 1, width), "bold"),
            (f"{work['phase']:<12}", role),
        ]
        if work["percent"] is not None:
            if width >= 76:
                gauge_width = 10 if width >= 100 else 6
                left += lines.progress_bar([(work["percent"] / 100, role)], gauge_width)
            left.append((f" {formats.format_percent(work['percent']):>5} ", ""))
        return justify([*left, (task, "")], times, width)

    return draw


def _failed_row(node: values.NodeState, name_width: int) -> Callable[[int], Line]:
    return lambda width: [
        (" ✗ ", "bad"),
        (column(node.node, name_width + 1, width), "bold"),
        (lines.shorten(lines.sanitize(_failure_text(node)), width - name_width - 4), "bad"),
    ]


def _failure_text(node: values.NodeState) -> str:
    return (node.failure or "it failed") + (f" (attempt {node.attempt})" if node.attempt > 1 else "")


def _failure_lines(node: values.NodeState, name_width: int, width: int) -> Iterator[Line]:
    """Yield the failure of the first failed node in full: its cause is at the end of its message."""
    indent = name_width + 4
    text = lines.shorten(_failure_text(node), width - indent)
    name: Line = [(" ✗ ", "bad"), (fit_name(node.node, name_width) + " ", "bold")]
    for line in lines.wrap_text(text, max(20, width - indent), MAX_FAILURE_LINES):
        yield [*name, (line, "bad")]
        name = [(" " * indent, "")]


def _group_items(group: WaitingGroup, text: str, width: int) -> Iterator[Item]:
    """Yield a reason in full with the nodes that wait for it: neither says much without the other."""
    count, room = f"{len(group.nodes):>5} ", width - 6
    names = lines.shorten(formatting.join_first(group.nodes, MAX_NAMED_NODES), room)
    *above, last = lines.wrap_text(lines.shorten(text, MAX_REASON_LINES * (room - 4)), room, MAX_REASON_LINES)
    rows: list[Line] = [[(line, "")] for line in above]
    if len(last) + 2 + min(len(names), MIN_NAMES_WIDTH) <= room:
        rows.append([(last, ""), (f"  {names}", "dim")])
    else:
        rows += [[(last, "")], [(names, "dim")]]
    for number, row in enumerate(rows):
        key = "" if number else f"reason:{group.key}"
        yield key, static_line([(" " * 6 if number else count, "bold"), *row])
