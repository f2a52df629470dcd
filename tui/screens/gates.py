"""The gates, and what a vote decides: change, targets, checks, what is not probed, digest, plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial, partialmethod
from typing import Any

from textual.widget import Widget

from rolloutd.control import review_text
from rolloutd.control.nodes import wire_nodes
from rolloutd.control.plans import wire_plans
from rolloutd.control.review_text import ReviewSection
from rolloutd.texts import event_text, formats
from tui.formatting import lines
from tui.formatting.glyphs import node_glyph, node_strip
from tui.formatting.lines import Line, column, fit_name
from tui.operations.confirm import Selection
from tui.screens import page
from tui.state import permissions
from tui.state.values import NodeState
from tui.widgets import summaries
from tui.widgets.summaries import PendingGate
from tui.widgets.virtual_list import VirtualList

MAX_TEXT_LINES = 40
"""Lines shown of one playbook or of all differences; the key for the full line shows the rest."""

MAX_NODES = 200

FAILURES_RETRY_S = 5.0
"""Between two requests for the failures while the daemon does not answer them."""

MIN_LIST_LINES = 2
"""Lines of the list of gates at least; the content below gets the rest."""


class GatesPage(page.TwoPanes):
    """The pending gates, the open ones with their votes, and below them the content of the selected one."""

    screen_name = "gates"
    filter_label = ""
    panes = ("list", "content")
    DEFAULT_CSS = """
    GatesPage #list { height: 1fr; width: 100%; }
    GatesPage #content { height: 3fr; width: 100%; }
    GatesPage.-wide #list { width: 2fr; }
    GatesPage.-wide #content { width: 3fr; }
    """

    def __init__(self, initial_gate: str = "") -> None:
        super().__init__()
        self._initial_gate = initial_gate
        self._fetched: dict[str, tuple[object, ...]] = {}
        self._review_connection: dict[str, int] = {}
        self._failures: dict[str, wire_nodes.Failures] = {}
        self._unread: dict[str, str] = {}
        self._loading: set[str] = set()
        self._change_items: tuple[wire_plans.Review | None, list[page.Item]] = (None, [])

    def compose_body(self) -> Iterator[Widget]:
        yield page.PaneContainer(
            VirtualList(id="list"), VirtualList(id="content", pin_cursor_to_top=True), id="body"
        )

    def on_mount(self) -> None:
        self.query_one("#list", VirtualList).cursor_key = self._initial_gate

    def selected_gate(self) -> PendingGate | None:
        key = self.query_one("#list", VirtualList).cursor_key
        return next((each for each in self._all_gates() if each.key == key), None)

    def _all_gates(self) -> list[PendingGate]:
        model = self.console.model
        return [*summaries.pending_gates(model), *summaries.decided_gates(model)]

    def selection(self) -> Selection:
        selected = self.selected_gate()
        if selected is None:
            return Selection()
        listed = self._failures.get(selected.rollout.id)
        shown = None if listed is None else tuple(each["id"] for each in listed["failures"])
        # An open gate is listed for its votes, and takes no more; nothing may rest on one in doubt.
        gate = None if selected.gate["state"] in ("open", "in-doubt") else selected
        return Selection(rollout=selected.rollout, gate=gate, shown_failures=shown)

    def object_under_cursor(self) -> tuple[str, Any] | None:
        selected = self.selected_gate()
        return None if selected is None else (event_text.gate_label(selected.gate), dict(selected.gate))

    def full_text(self) -> tuple[str, str] | None:
        """Return the whole playbook or all differences if the cursor is on their lines."""
        selected, content = self.selected_gate(), self.query_one("#content", VirtualList)
        review = None if selected is None else self.console.model.reviews.get(selected.rollout.id)
        if not content.has_focus or review is None:
            return super().full_text()
        texts = (each for each in review_text.change_sections(review) if each.is_text)
        text = next((each for each in texts if content.cursor_key.startswith(_section_key(each))), None)
        if text is None:
            return super().full_text()
        return f"{text.title} {text.note}", "\n".join(line.text for line in text.lines)

    def update_body(self) -> None:
        gate_list = self.query_one("#list", VirtualList)
        width = max(20, gate_list.size.width - 2)
        items: list[page.Item] = []
        for each in self._all_gates():
            items += [
                ("" if number else each.key, page.static_line(line))
                for number, line in enumerate(page.gate_lines(self, each, width))
            ]
        if not summaries.pending_gates(self.console.model):
            items.insert(0, page.note_row("no gate waits"))
        gate_list.set_rows(page.item_rows(items))
        gate_list.limit_height(fill=self.has_class("-wide"), min_rows=MIN_LIST_LINES)
        selected = self.selected_gate()
        content = [] if selected is None else list(self._content_items(selected))
        self.query_one("#content", VirtualList).set_rows(page.item_rows(content))

    def do_open(self) -> None:
        selected, content = self.selected_gate(), self.query_one("#content", VirtualList)
        if selected is None:
            return
        kind, _, name = content.cursor_key.partition(":")
        if content.has_focus and kind == "node":
            self.console.open_page("node", selected.rollout.id, name)
        else:
            self.console.open_page("rollout", selected.rollout.id)

    def _open(self, page: str) -> None:
        if (selected := self.selected_gate()) is not None:
            self.console.open_page(page, selected.rollout.id)

    do_compare, do_forecast = partialmethod(_open, "comparison"), partialmethod(_open, "forecast")

    # -- the content

    def _content_items(self, pending: PendingGate) -> Iterator[page.Item]:
        self._request_content(pending)
        model, gate = self.console.model, pending.gate["gate"]
        plan, review = model.plans.get(pending.rollout.id), model.reviews.get(pending.rollout.id)
        if gate == "proceed":
            yield from self._failure_items(pending)
        if gate == "start":
            yield from self._pilot_items(pending)
        if gate == "continue":
            yield from self._canary_items(pending)
        if review is None:
            yield page.note_row("loading the change")
        else:
            yield from self._cached_change_items(review)
        yield from _section_items(review_text.scope_sections(pending.rollout.status, review, [pending.gate]))
        if plan is not None:
            yield from _digest_items(plan)
        if review is not None:
            yield from _section_items([review_text.plan_section(review)])
        yield from self._vote_items(pending)

    def _cached_change_items(self, review: wire_plans.Review) -> list[page.Item]:
        """Return the rows of a review, made once: a source of a thousand files has tens of thousands."""
        if self._change_items[0] is not review:
            self._change_items = (review, list(_section_items(review_text.change_sections(review))))
        return self._change_items[1]

    def _request_content(self, pending: PendingGate) -> None:
        """Fetch the nodes, the review and the failures, once for each set of failures."""
        rollout = pending.rollout
        connection = self.console.connection_count
        if self._review_connection.get(rollout.id) != connection:
            self._review_connection[rollout.id] = connection
            self.console.request_fetch("review", rollout.id)
            self.console.track_nodes(rollout.id)
        if pending.gate["gate"] != "proceed":
            return
        failing = self.console.node_summary(rollout).failed
        votes = tuple((each["id"], each["withdrawn"]) for each in pending.gate["votes"])
        wanted = (connection, votes, *((each.node, each.attempt, each.since) for each in failing))
        # One request at a time: of two, the older response could come last.
        if self._fetched.get(rollout.id) != wanted and rollout.id not in self._loading:
            self._fetched[rollout.id] = wanted
            self._loading.add(rollout.id)
            self.run_worker(self._fetch_failures(rollout.id), group="failures")

    async def _fetch_failures(self, rollout: str) -> None:
        response = await self.console.fetch_path("rollouts", rollout, "failures")
        self._loading.discard(rollout)
        if response.result is not None:
            self._failures[rollout] = response.result
            self._unread.pop(rollout, None)
        else:
            # An older list may lack failures that the user believes to see: without a list there is no vote.
            self._failures.pop(rollout, None)
            self._unread[rollout] = str(response.error or response.unreachable)
            self.set_timer(FAILURES_RETRY_S, partial(self._fetched.pop, rollout, None))
        self.update_view()

    def _vote_items(self, pending: PendingGate) -> Iterator[page.Item]:
        gate, owner = pending.gate, pending.rollout.status["owner"]
        yield page.heading("VOTES", event_text.gate_label(gate))
        needs = [(f"owner {owner}", owner, gate["needs"]["owner"])] if gate["needs"]["owner"]["want"] else []
        needs += [
            (need["team"], need["team"], {"want": need["want"], "have": need["have"]})
            for need in gate["needs"]["teams"]
        ]
        for label, team, count in needs:
            members = permissions.team_with_members(self.console.model, team)
            enough = count["have"] >= count["want"]
            yield fixed_row(
                f"need:{label}",
                [
                    ("  ✓ " if enough else "  ○ ", "ok" if enough else "accent"),
                    (fit_name(label, 21) + " ", "" if enough else "bold"),
                    (f"{count['have']} of {count['want']}  ", "ok" if enough else "accent"),
                    (members, "dim"),
                ],
            )
        for number, line in enumerate(page.vote_lines(gate, len(gate["votes"]))):
            yield fixed_row(f"vote:{number}", line)

    def _failure_items(self, pending: PendingGate) -> Iterator[page.Item]:
        rollout = pending.rollout
        listed, unread = self._failures.get(rollout.id), self._unread.get(rollout.id)
        if listed is None:
            yield page.heading(
                "FAILURES", "loading" if unread is None else "not read: no approval is possible"
            )
            if unread is not None:
                yield page.note_row(lines.sanitize(unread))
            return
        total = len(listed["failures"]) + listed["omitted"]
        covers = "these" if not listed["omitted"] else "the first of them; the others need another vote"
        yield page.heading("FAILURES", f"{total:,}: an approval covers {covers}")
        name_width = lines.column_width(each["node"] for each in listed["failures"])
        for each in listed["failures"]:
            node, text = (rollout.nodes or {}).get(each["node"]), event_text.failed_step(each)
            if node is not None:
                note = "" if node.phase == "failed" else f"{node.phase} again; "
                yield f"node:{each['node']}", partial(_node_line, node, f"{note}{text}", name_width)
            else:
                unknown = f"  {each['node']}: {lines.sanitize(text)}"
                yield fixed_row(f"node:{each['node']}", [(unknown, "bad")])

    def _pilot_items(self, pending: PendingGate) -> Iterator[page.Item]:
        evidence, waived = pending.gate["evidence"], pending.gate["waived"]
        if waived is not None:
            yield page.heading("PILOT", "waived")
            yield fixed_row("waived", [(f"  {lines.sanitize(waived)}", "warn")])
        if evidence is not None:
            title, (_, outcome), *details = _section_items([review_text.pilot_section(evidence)])
            yield from (title, (f"node:{evidence['node']}", outcome), *details)
            if evidence["logs"]:
                yield page.note_row("the node's page has the logs; Enter on the outcome opens it")

    def _canary_items(self, pending: PendingGate) -> Iterator[page.Item]:
        nodes = [each for each in (pending.rollout.nodes or {}).values() if each.wave == pending.gate["wave"]]
        done = sum(each.phase == "done" for each in nodes)
        yield page.heading(f"RESULTS OF WAVE {pending.gate['wave']}", f"{done} of {len(nodes)} done")
        yield "", lambda width: [("  ", ""), *node_strip(nodes, width - 4)]
        name_width = lines.column_width(node.node for node in nodes[:MAX_NODES])
        for node in nodes[:MAX_NODES]:
            text = node.outcome or node.failure or node.phase
            yield f"node:{node.node}", partial(_node_line, node, text, name_width)


def fixed_row(key: str, line: Line) -> page.Item:
    return key, page.static_line(line)


def _node_line(node: NodeState, text: str, name_width: int, width: int) -> Line:
    glyph, role = node_glyph(node)
    return [
        (f"  {glyph} ", role),
        (column(node.node, name_width + 1, width), "bold"),
        (column(node.team or "", 12, width), "dim"),
        (lines.shorten(lines.sanitize(text), width - name_width - 20), role),
    ]


# -- the review ---------------------------------------------------------------

REVIEW_ROLES = {"added": "ok", "removed": "bad", "context": "dim", "warning": "warn", "strong": "bold"}


def _section_items(sections: Iterable[ReviewSection]) -> Iterator[page.Item]:
    """Yield each section; of a text the first lines, `w` on one of them shows the whole text."""
    for section in sections:
        key = _section_key(section)
        yield page.heading(section.title, lines.sanitize(section.note))
        limit = MAX_TEXT_LINES if section.is_text else len(section.lines)
        for number, each in enumerate(section.lines[:limit]):
            line: Line = [(f"  {lines.sanitize(each.label)}", "dim")]
            line.append((lines.sanitize(each.text), REVIEW_ROLES.get(each.kind, "")))
            yield fixed_row(f"{key}{number}", line)
        if len(section.lines) > limit:
            rest = formats.pluralize(len(section.lines) - limit, "more line")
            yield fixed_row(f"{key}rest", [(f"  {rest}: w shows all", "dim")])
        if not section.lines and section.otherwise:
            yield page.note_row(lines.sanitize(section.otherwise))


def _section_key(section: ReviewSection) -> str:
    return f"{section.title}:{section.note}:"


def _digest_items(plan: Mapping[str, Any]) -> Iterator[page.Item]:
    hashes, source = plan["hashes"], plan["source"]
    parts = (f"{name} {formats.short_hash(hashes[name])}" for name in ("change", "scope", "policy"))
    yield page.heading("DIGEST")
    yield fixed_row("digest", [("  whole   ", "dim"), (plan["digest"], "digest")])
    yield fixed_row("parts", [("  parts   ", "dim"), ("   ".join(parts), "")])
    yield fixed_row("source", [("  source  ", "dim"), (lines.sanitize(source["text"]), "")])
