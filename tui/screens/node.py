"""One node of a rollout: its attempts and steps, why it waits, what holds its slots, and its log.

The steps are asked for, and again when something has happened to the node.  The
log is a stream of its own, followed from where it stood when the daemon was
away; only the latest part of a very long one is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from textual.containers import Container, Vertical
from textual.widget import Widget

from rolloutd.control import sentences, wire
from tui import glance, lines, wording
from tui.lines import Line, beside, fit
from tui.listing import Banner, Listing
from tui.logs import LogReader
from tui.page import Item, Items, Page, fixed, heading
from tui.phases import look
from tui.question import Subject
from tui.screens.rollout import WIDE
from tui.values import NodeState, RolloutState, instant

KEPT_LINES = 20_000
"""Lines of a log that are kept: more than anybody scrolls, some megabytes."""

NARROWEST = 60
"""Cells from which the head has room for more than how the node stands."""

MOST_HOLDERS = 3
"""Nodes named that have a pool's slots: more nobody reads in one line."""

STEP_LOOKS = {
    "ok": ("✓", "ok"),
    "failed": ("✗", "bad"),
    "intended": ("▸", "run"),
    "busy": ("◷", "warn"),
    "unknown": ("?", "warn"),
}


class NodePage(Page):
    """The screen of one node."""

    place = "node"
    begins_at = "#log"
    DEFAULT_CSS = """
    NodePage > #body { layout: vertical; }
    NodePage #steps { height: 2fr; }
    NodePage #logs { height: 3fr; }
    NodePage #log { height: 1fr; }
    NodePage.-wide > #body { layout: horizontal; }
    NodePage.-wide #steps { width: 2fr; height: 100%; }
    NodePage.-wide #logs { width: 3fr; height: 100%; }
    """

    def __init__(self, rollout: str, node: str) -> None:
        super().__init__()
        self.rollout_id = rollout
        self.name_of_node = node
        self.detail: wire.NodeDetail | None = None
        self.log_lines: deque[dict[str, Any]] = deque(maxlen=KEPT_LINES)
        self.follows = True
        self.text = ""
        self.attempt: int | None = None
        self._reader: LogReader | None = None
        self._asked_at: tuple[Any, ...] | None = None
        self._is_asking = False

    # -- what it knows

    @property
    def rollout(self) -> RolloutState | None:
        """The rollout, once it is known."""
        return self.console.model.rollouts.get(self.rollout_id)

    @property
    def node(self) -> NodeState | None:
        """The node, once it is known."""
        rollout = self.rollout
        return None if rollout is None else (rollout.nodes or {}).get(self.name_of_node)

    def body(self) -> Iterator[Widget]:
        """Yield the head, the steps and the log."""
        yield Banner(self._head, id="head", lines=2)
        log = Vertical(Banner(self._log_head, id="loghead"), Listing(id="log"), id="logs")
        yield Container(Listing(id="steps"), log, id="body")

    def on_mount(self) -> None:
        """Have the node and its log asked for."""
        self.console.look_at(self.rollout_id)
        self._read_log()

    def on_unmount(self) -> None:
        """Leave the log."""
        if self._reader is not None:
            self._reader.stop()

    def on_resize(self) -> None:
        """Stand the halves side by side where there is room."""
        self.set_class(self.size.width >= WIDE, "-wide")

    def crumbs(self) -> str:
        """Return where this is."""
        return f"▸ {self.rollout_id} ▸ {self.name_of_node}"

    def subject(self) -> Subject:
        """Return the node."""
        return Subject(rollout=self.rollout, node=self.node, node_name=self.name_of_node)

    def redraw(self) -> None:
        """Draw everything anew; ask for the steps again where the node has moved."""
        self._ask()
        self.query_one("#head", Banner).again()
        self.query_one("#steps", Listing).show(Items(list(self._steps())))
        self._show_log()

    # -- questions

    def _ask(self) -> None:
        """Ask for the steps when the node is not where it was at the last question."""
        node, rollout = self.node, self.rollout
        work = None if rollout is None else rollout.in_flight.get(self.name_of_node)
        version = (
            None if node is None else (node.phase, node.attempt, node.since, node.isolated, node.outcome),
            None if work is None else work.step,
            self.console.connections,
        )
        if version != self._asked_at and not self._is_asking:
            self._asked_at, self._is_asking = version, True
            self.run_worker(self._ask_detail(), group="detail")

    async def _ask_detail(self) -> None:
        said = await self.console.ask_node(self.rollout_id, self.name_of_node)
        self._is_asking = False
        if said.answer is not None:
            before = self.detail
            self.detail = said.answer
            if before is not None and before["attempt"] != self.detail["attempt"] and self.attempt is None:
                self._read_log()
        elif said.silent is not None:
            self._asked_at = None
        self.changed()

    def _read_log(self) -> None:
        if self._reader is not None:
            self._reader.stop()
        self.log_lines.clear()
        self._reader = self.console.read_log(self.rollout_id, self.name_of_node, self.attempt, self._log_told)
        self._reader.start()

    def _log_told(self, told: Sequence[dict[str, Any]]) -> None:
        self.log_lines.extend(told)
        self.changed()

    # -- moves

    def do_follow(self) -> None:
        """Follow the log's end, or no longer."""
        self.follows = not self.follows
        self._show_log()
        self.console.say("following the log" if self.follows else "the log stands still: f follows it again")

    def do_next_pane(self) -> None:
        """Give the keys to the other half."""
        self.query_one("#steps" if self.query_one("#log").has_focus else "#log").focus()

    def do_find(self) -> None:
        """Ask which lines are meant."""
        self.console.ask_text("show log lines that contain", self.text, self._find)

    def do_copy(self) -> None:
        """Copy the log as it is shown."""
        shown = [each for each in self.log_lines if self._matches(each)]
        self.app.copy_to_clipboard("\n".join(f"{each['at']} {each['text']}" for each in shown))
        self.console.say(f"copied {wording.count(len(shown), 'line')} to the terminal's clipboard")

    def do_attempt(self) -> None:
        """Show the log of the attempt before."""
        self._turn(-1)

    def do_attempt_later(self) -> None:
        """Show the log of the attempt after."""
        self._turn(1)

    def _turn(self, by: int) -> None:
        latest = self.detail["attempt"] if self.detail is not None else 0
        now = self.attempt or latest
        wanted = min(max(now + by, 1), max(latest, 1))
        if wanted == now:
            self.console.say("there is no attempt before" if by < 0 else "that is the latest attempt")
            return
        self.attempt = None if wanted == latest else wanted
        self._read_log()
        self.changed()

    def _find(self, text: str) -> None:
        self.text = text
        self._show_log()

    def whole(self) -> tuple[str, str] | None:
        """Return a step with its output, or a line of the log."""
        key = self.query_one("#steps", Listing).cursor_key
        if not self.query_one("#steps").has_focus or self.detail is None:
            return super().whole()
        step = next((each for each in self.detail["steps"] if _step_key(each) == key), None)
        if step is None:
            return None
        began = wording.day_and_hour(instant(step["began_at"]) or 0.0)
        title = f"{step['action']} {sentences.step_name(step['step'])}, {step['state']}, begun {began}"
        output = "its output is its team's" if step["output"] is None else step["output"]
        return title, "\n\n".join(part for part in (step["text"], output) if part) or "it said nothing"

    # -- drawing

    def _head(self, width: int) -> Sequence[Line]:
        node = self.node
        if node is None:
            return [[(" asking the daemon", "dim")], []]
        glyph, role = look(node)
        now = self.console.now()
        state = f"{node.phase} ({node.outcome})" if node.outcome else node.phase
        isolated: Line = [("  out of service", "warn")] if node.isolated else []
        first: Line = [
            (f" {glyph} ", role),
            (node.node, "bold"),
            (f"  {state}", role),
            (f" {wording.ago(node.since, now)}", "dim"),
            *isolated,
        ]
        again = f"  attempt {node.attempt}" if node.attempt else ""
        right: Line = [(f" team {node.team or '-'}  wave {node.wave}{again} ", "dim")]
        return [beside(first, right if width >= NARROWEST else [], width), [(" ", ""), *self._standing(node)]]

    def _standing(self, node: NodeState) -> Line:
        rollout = self.rollout
        work = None if rollout is None else rollout.in_flight.get(node.node)
        if work is not None:
            share = f" {work.percent:.0f} %" if work.percent is not None else ""
            return [
                (sentences.step_name(work.step) or "at work", "run"),
                (share, ""),
                (f"  {lines.clean(work.task)}", "dim"),
            ]
        if node.failure:
            return [(lines.clean(node.failure), "bad")]
        reason = node.reason or (self.detail["reason"] if self.detail is not None else None)
        if node.phase in ("pending", "failed") and reason is not None:
            lifted = lines.clean(reason["lifted_by"] or "")
            return [
                (lines.clean(reason["text"]), "warn"),
                (f"  (lifted by {lifted})" if lifted else "", "dim"),
            ]
        return [("in pools " + ", ".join(node.pools), "dim")]

    def _steps(self) -> Iterator[Item]:
        detail = self.detail
        if detail is None:
            yield ("", fixed([("  asking the daemon", "dim")]))
            return
        if detail["failure"] is not None:
            failure = detail["failure"]
            yield ("", heading("FAILED", f"attempt {failure['attempt']}"))
            width = max(20, self.query_one("#steps").size.width - 6)
            for text in lines.wrapped(
                f"{sentences.step_name(failure['step'])}: {failure['message']}", width, 4
            ):
                yield ("", fixed([("  ", ""), (text, "bad")]))
        yield from self._holders()
        for attempt in sorted({step["attempt"] for step in detail["steps"]}, reverse=True):
            yield ("", heading(f"ATTEMPT {attempt}"))
            for step in (each for each in detail["steps"] if each["attempt"] == attempt):
                yield (_step_key(step), _step_row(step, self.console.now()))
        if not detail["steps"]:
            yield ("", fixed([("  nothing was done to it yet", "dim")]))

    def _holders(self) -> Iterator[Item]:
        """Yield who has the slots of its pools while it waits."""
        node, locks = self.node, self.console.model.locks
        if node is None or locks is None or node.phase != "pending":
            return
        pools = [pool for pool in locks["pools"] if pool["pool"] in node.pools and glance.surely_down(pool)]
        if pools:
            yield ("", heading("ITS SLOTS"))
        for pool in pools:
            sure = glance.surely_down(pool)
            held = wording.some([each["why"] for each in sure], MOST_HOLDERS, "; ")
            slots = f"{len(sure)}/{pool['max_unavailable']} "
            yield (
                "",
                fixed(
                    [("  ", ""), (f"{pool['pool']} ", "bold"), (slots, "warn"), (lines.clean(held), "dim")]
                ),
            )

    def _show_log(self) -> None:
        listing = self.query_one("#log", Listing)
        shown = [each for each in self.log_lines if self._matches(each)]
        was_last = listing.rows is None or listing.cursor >= len(listing.rows) - 1
        listing.show(LogRows(shown, self._why_empty()))
        self.query_one("#loghead", Banner).again()
        if self.follows and (was_last or not listing.has_focus):
            listing.action_jump(-1)

    def _log_head(self, width: int) -> Sequence[Line]:
        which = f"attempt {self.attempt}" if self.attempt is not None else "latest attempt"
        end = self._reader.standing if self._reader is not None else ""
        note = f"{which}{f', containing “{self.text}”' if self.text else ''}  {end}"
        return [heading("LOG", note)(width)]

    def _why_empty(self) -> str:
        """Return why there is no line of the log."""
        standing = self._reader.standing if self._reader is not None else ""
        if self.log_lines:
            return f"no line of {len(self.log_lines):,} contains “{self.text}”"
        if standing in ("reading", "live"):
            return "nothing yet"
        return (
            "nothing has run on it" if self.node is not None and not self.node.attempt else "it said nothing"
        )

    def _matches(self, line: dict[str, Any]) -> bool:
        return not self.text or self.text.lower() in line["text"].lower()


class LogRows:
    """A line per line of the log, drawn when it is seen; tasks stand out as headings."""

    def __init__(self, told: Sequence[dict[str, Any]], empty: str) -> None:
        self._told = told
        self._empty = empty

    def __len__(self) -> int:
        return max(1, len(self._told))

    def key(self, row: int) -> str:
        """Return the number of the line."""
        return str(self._told[row]["offset"]) if self._told else ""

    def draw(self, row: int, width: int) -> Sequence[Line]:
        """Return the line."""
        if not self._told:
            return ([(f"  {self._empty}", "dim")],)
        told = self._told[row]
        at = instant(told["at"]) or 0.0
        role = _LOG_ROLES.get(told["kind"], "")
        text = lines.clean(told["text"])
        if told["kind"] in ("task", "play"):
            return ([(wording.hour(at), "dim"), (f" {text}", "title")],)
        return ([(wording.hour(at), "dim"), (f"   {text}", role)],)


_LOG_ROLES = {
    "ok": "ok",
    "changed": "warn",
    "failed": "bad",
    "unreachable": "bad",
    "skipped": "dim",
    "begun": "run",
    "unknown": "bad",
    "stats": "dim",
    "busy": "warn",
}


def _step_key(step: wire.Step) -> str:
    return f"{step['attempt']}/{step['step']}/{step['action']}/{step['number']}"


def _step_row(step: wire.Step, now: float) -> Callable[[int], Line]:
    began, ended = instant(step["began_at"]) or 0.0, instant(step["at"]) or 0.0
    glyph, role = STEP_LOOKS.get(step["state"], ("?", "warn"))
    runs = step["state"] == "intended"
    took = (now if runs else ended) - began

    def draw(width: int) -> Line:
        again = f" (again, {step['number']})" if step["number"] > 1 else ""
        text = "" if runs else lines.clean(" ".join(step["text"].split()))
        left: Line = [
            (f"  {glyph} ", role),
            (fit(step["action"], 6), "dim"),
            (sentences.step_name(step["step"]) + again, "bold"),
            (f"  {text}", "bad" if role == "bad" else "dim"),
        ]
        return beside(
            left,
            [(f" {wording.clock(took)} ", "run" if runs else "dim"), (f"{wording.hour(began)} ", "dim")],
            width,
        )

    return draw
