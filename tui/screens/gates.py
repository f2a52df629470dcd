"""The pending gates, and what a vote decides: votes, failures, digest, differences, targets, checks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from textual.containers import Container
from textual.widget import Widget

from rolloutd.control import event_text
from tui.formatting import formatting, lines
from tui.formatting.glyphs import node_glyph, node_strip
from tui.formatting.lines import Line, fit
from tui.operations.confirm import Selection
from tui.screens.page import Item, ItemRows, TwoPanes, gate_lines, heading, note_row, static_line
from tui.state import permissions
from tui.state.values import NodeState, parse_timestamp
from tui.widgets import summaries
from tui.widgets.summaries import PendingGate
from tui.widgets.virtual_list import VirtualList

MAX_DIFFERENCES = 200
"""A plan with more differences is another plan."""

MAX_NODES = 200
"""Canaries listed."""

MAX_FAILURES = 1_000
"""Failures fetched and listed at a proceed gate: as many as one vote may name."""

FailureKey = tuple[str, int, float | None]
"""A node, its attempt and the time of the failure: a node that fails again has another key."""

MIN_LIST_LINES = 2
"""Lines of the list of gates at least; the content below gets the rest."""


class GatesPage(TwoPanes):
    """The pending gates, and below them the content of the selected one."""

    screen_name = "gates"
    panes = ("list", "content")
    DEFAULT_CSS = """
    GatesPage #list { height: 1fr; width: 2fr; }
    GatesPage #content { height: 3fr; width: 3fr; }
    """

    def __init__(self, initial_gate: str = "") -> None:
        super().__init__()
        self._initial_gate = initial_gate
        self.shown_failures: dict[str, tuple[str, ...]] = {}
        self._fetched: dict[str, tuple[str, ...]] = {}
        self._failure_ids: dict[str, dict[FailureKey, str]] = {}

    def compose_body(self) -> Iterator[Widget]:
        yield Container(VirtualList(id="list"), VirtualList(id="content"), id="body")

    def on_mount(self) -> None:
        self.query_one("#list", VirtualList).cursor_key = self._initial_gate

    def selected_gate(self) -> PendingGate | None:
        key = self.query_one("#list", VirtualList).cursor_key
        return next((each for each in summaries.pending_gates(self.console.model) if each.key == key), None)

    def selection(self) -> Selection:
        selected = self.selected_gate()
        if selected is None:
            return Selection()
        shown = self.shown_failures.get(selected.rollout.id)
        return Selection(rollout=selected.rollout, gate=selected, shown_failures=shown)

    def update_body(self) -> None:
        gate_list = self.query_one("#list", VirtualList)
        width = max(20, gate_list.size.width - 2)
        items: list[Item] = [
            ("" if number else each.key, static_line(line))
            for each in summaries.pending_gates(self.console.model)
            for number, line in enumerate(gate_lines(self, each, width))
        ]
        gate_list.set_rows(ItemRows(items or [note_row("no gate waits")]))
        gate_list.limit_height(fill=self.has_class("-wide"), min_rows=MIN_LIST_LINES)
        selected = self.selected_gate()
        content = [] if selected is None else list(self._content_items(selected))
        self.query_one("#content", VirtualList).set_rows(ItemRows(content))

    def do_open(self) -> None:
        selected, content = self.selected_gate(), self.query_one("#content", VirtualList)
        if selected is None:
            return
        kind, _, name = content.cursor_key.partition(":")
        if content.has_focus and kind == "node":
            self.console.open_node(selected.rollout.id, name)
        else:
            self.console.open_rollout(selected.rollout.id)

    # -- the content

    def _content_items(self, pending: PendingGate) -> Iterator[Item]:
        self._request_content(pending)
        plan = self.console.model.plans.get(pending.rollout.id)
        yield from self._vote_items(pending)
        if pending.gate["gate"] == "proceed":
            yield from self._failure_items(pending)
        if pending.gate["gate"] == "start":
            yield from self._pilot_items(pending)
        if pending.gate["gate"] == "continue":
            yield from self._canary_items(pending)
        if plan is None:
            yield note_row("loading the plan")
            return
        yield from self._digest_items(plan)
        yield from self._change_items(pending, plan)
        yield from self._target_items(pending)
        yield from self._check_items(pending, plan)

    def _request_content(self, pending: PendingGate) -> None:
        """Fetch the nodes, the plan, the previous plan and the failures, once for each set of failures."""
        rollout, model = pending.rollout, self.console.model
        earlier = summaries.previous_rollout(model.closed_rollouts, rollout.status)
        is_proceed = pending.gate["gate"] == "proceed"
        failing = self.console.node_summary(rollout).failed if is_proceed else ()
        wanted = (earlier["rollout"] if earlier else "", *(f"{each.node}#{each.attempt}" for each in failing))
        if self._fetched.get(rollout.id) == wanted:
            return
        self._fetched[rollout.id] = wanted
        self.console.track_nodes(rollout.id)
        if earlier is not None and earlier["rollout"] not in model.plans:
            self.console.request_fetch("plan", earlier["rollout"])
        if failing:
            self.run_worker(self._fetch_failures(rollout.id, failing[:MAX_FAILURES]), group="failures")

    async def _fetch_failures(self, rollout: str, nodes: Sequence[NodeState]) -> None:
        """Fetch the failures that are not known yet: hundreds may come one after the other."""
        known = self._failure_ids.get(rollout, {})
        new = [node for node in nodes if _failure_key(node) not in known]
        responses = await asyncio.gather(*(self.console.fetch_node(rollout, node.node) for node in new))
        failures = [
            (_failure_key(node), response.result["failure"])
            for node, response in zip(new, responses, strict=True)
            if response.result is not None
        ]
        known = known | {key: failure["id"] for key, failure in failures if failure is not None}
        current = [key for key in map(_failure_key, nodes) if key in known]
        self._failure_ids[rollout] = {key: known[key] for key in current}
        self.shown_failures[rollout] = tuple(known[key] for key in current)
        self.update_view()

    def _vote_items(self, pending: PendingGate) -> Iterator[Item]:
        gate, owner = pending.gate, pending.rollout.status["owner"]
        yield heading("VOTES", event_text.gate_label(gate))
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
                    (fit(label, 22), "" if enough else "bold"),
                    (f"{count['have']} of {count['want']}  ", "ok" if enough else "accent"),
                    (members, "dim"),
                ],
            )
        for vote in gate["votes"]:
            glyph, role = ("✓", "ok") if vote["yes"] else ("✗", "bad")
            note = " (withdrawn)" if vote["withdrawn"] else "" if vote["counts"] else " (does not count)"
            at = formatting.format_time(parse_timestamp(vote["at"]) or 0.0)
            yield fixed_row(
                f"vote:{vote['id']}",
                [
                    (f"  {glyph} ", role if vote["counts"] else "dim"),
                    (f"{vote['by']} for {', '.join(vote['teams'])}{note}: ", ""),
                    (f"{lines.sanitize(vote['reason'])}  {at}", "dim"),
                ],
            )

    def _failure_items(self, pending: PendingGate) -> Iterator[Item]:
        failed = self.console.node_summary(pending.rollout).failed
        note = "no node is failed now; an approval covers the failures that were retried"
        if failed and pending.rollout.id not in self.shown_failures:
            note = "loading"
        elif failed:
            rest = f"the first {MAX_FAILURES:,}; the others need another vote"
            note = f"an approval covers {rest if len(failed) > MAX_FAILURES else 'these'}"
        yield heading("FAILURES", f"{len(failed)}: {note}")
        for node in failed[:MAX_FAILURES]:
            yield fixed_row(f"node:{node.node}", _node_line(node, node.failure))

    def _pilot_items(self, pending: PendingGate) -> Iterator[Item]:
        evidence, waived = pending.gate["evidence"], pending.gate["waived"]
        if waived is not None:
            yield heading("PILOT", "waived")
            yield fixed_row("waived", [(f"  {lines.sanitize(waived)}", "warn")])
        if evidence is None:
            return
        attempts = formatting.pluralize(evidence["attempts"], "attempt")
        yield heading("PILOT", f"{evidence['node']} of {evidence['team']}: {evidence['outcome']}, {attempts}")
        summary = evidence["reason"] or f"outcome {evidence['outcome']}"
        yield fixed_row(f"node:{evidence['node']}", [(f"  {lines.sanitize(summary)}", "bold")])
        for number, step in enumerate(evidence["steps"]):
            is_ok = step["state"] == "ok"
            yield fixed_row(
                f"pilot-step:{number}",
                [
                    ("  ✓ " if is_ok else "  ✗ ", "ok" if is_ok else "bad"),
                    (fit(event_text.step_label(step["step"]), 28), ""),
                    (f"{formatting.format_duration(step['seconds']):>8}  ", "dim"),
                    (lines.sanitize(step["text"]), "dim"),
                ],
            )
        for number, change in enumerate(evidence["changes"]):
            changed = f"  changed: {lines.sanitize(change['task'])}"
            yield fixed_row(f"pilot-change:{number}", [(changed, "")])
            for line_number, line in enumerate((change["diff"] or "").splitlines()):
                role = {"+": "ok", "-": "bad"}.get(line[:1], "dim")
                key = f"pilot-diff:{number}:{line_number}"
                yield fixed_row(key, [(f"    {lines.sanitize(line)}", role)])
        for log in evidence["logs"]:
            length = formatting.pluralize(log["lines"], "line")
            label = f"  log of {event_text.step_label(log['step'])}: {length}, on the node's page"
            yield fixed_row(f"pilot-log:{log['attempt']}:{log['step']}", [(label, "dim")])

    def _canary_items(self, pending: PendingGate) -> Iterator[Item]:
        nodes = [each for each in (pending.rollout.nodes or {}).values() if each.wave == pending.gate["wave"]]
        done = sum(each.phase == "done" for each in nodes)
        yield heading(f"RESULTS OF WAVE {pending.gate['wave']}", f"{done} of {len(nodes)} done")
        yield "", lambda width: [("  ", ""), *node_strip(nodes, width - 4)]
        for node in nodes[:MAX_NODES]:
            yield fixed_row(f"node:{node.node}", _node_line(node, node.outcome or node.failure or node.phase))

    def _digest_items(self, plan: Mapping[str, Any]) -> Iterator[Item]:
        hashes, source = plan["hashes"], plan["source"]
        parts = (f"{name} {formatting.short_digest(hashes[name])}" for name in ("change", "scope", "policy"))
        yield heading("DIGEST")
        yield fixed_row("digest", [("  whole   ", "dim"), (plan["digest"], "digest")])
        yield fixed_row("parts", [("  parts   ", "dim"), ("   ".join(parts), "")])
        yield fixed_row("source", [("  source  ", "dim"), (source["text"], "")])

    def _change_items(self, pending: PendingGate, plan: Mapping[str, Any]) -> Iterator[Item]:
        model = self.console.model
        earlier = summaries.previous_rollout(model.closed_rollouts, pending.rollout.status)
        before = model.plans.get(earlier["rollout"]) if earlier is not None else None
        if earlier is None:
            yield heading("THE PLAN", "no earlier rollout of this plan")
        elif before is None:
            yield note_row("loading the previous plan")
            return
        else:
            yield heading("DIFFERENCES", f"to {earlier['rollout']}, the previous rollout")
        changes = summaries.diff_plans(before, plan)
        if not changes:
            yield note_row("none: the same content as before")
        for path, old, new in changes[:MAX_DIFFERENCES]:
            line: Line = [(f"  {path.removeprefix('spec.')}: ", "dim")]
            if before is not None:
                line += [(lines.sanitize(old), "bad"), (" → ", "dim")]
            role = "ok" if before is not None else ""
            yield fixed_row(f"path:{path}", [*line, (lines.sanitize(new), role)])

    def _target_items(self, pending: PendingGate) -> Iterator[Item]:
        rollout = pending.rollout
        yield heading("TARGETS", formatting.pluralize(rollout.counts["total"], "node"))
        for pool in rollout.pools.values():
            nodes = f"{formatting.pluralize(pool.total, 'node'):<12}"
            line: Line = [("  ", ""), (fit(pool.pool, 24), ""), (nodes, "")]
            yield fixed_row(f"pool:{pool.pool}", [*line, (f"{pool.max_unavailable} at a time", "dim")])

    def _check_items(self, pending: PendingGate, plan: Mapping[str, Any]) -> Iterator[Item]:
        rollout, settings = pending.rollout, self.console.model.settings
        yield heading("CHECKS", "each node must pass these before it serves again")
        for number, check in enumerate(plan["content"]["spec"].get("verify") or ()):
            yield fixed_row(f"check:{number}", [("  ", ""), (lines.sanitize(_check_text(check)), "")])
        counts = {} if settings is None else {each["team"]: each["checks"] for each in settings["teams"]}
        for team in sorted({node.team or "" for node in (rollout.nodes or {}).values()}):
            if counts.get(team):
                own = f"  team {team}: {formatting.pluralize(counts[team], 'check')} of its own"
                yield fixed_row(f"checks:{team}", [(own, "dim")])
        for number, probe in enumerate(rollout.status["traffic_probes"]):
            yield fixed_row(f"probe:{number}", [("  traffic probe: ", ""), (lines.sanitize(probe), "")])
        for missing in rollout.status["not_probed"]:
            yield fixed_row(f"not-probed:{missing}", [(f"  not probed: {lines.sanitize(missing)}", "warn")])
        for nodes in rollout.status["not_isolated"]:
            yield fixed_row(f"not-isolated:{nodes}", [(f"  not isolated: {lines.sanitize(nodes)}", "warn")])


def fixed_row(key: str, line: Line) -> Item:
    return key, static_line(line)


def _failure_key(node: NodeState) -> FailureKey:
    return node.node, node.attempt, node.since


def _node_line(node: NodeState, text: str) -> Line:
    glyph, role = node_glyph(node)
    return [
        (f"  {glyph} ", role),
        (fit(node.node, 16), "bold"),
        (fit(node.team or "", 12), "dim"),
        (lines.sanitize(text), role),
    ]


def _check_text(check: Mapping[str, Any]) -> str:
    """Return a check of the plan on one line: `reachable: within 30s`."""
    texts = []
    for kind, params in check.items():
        if isinstance(params, Mapping):
            given = {key: value for key, value in params.items() if value not in (None, "", [], {})}
            values = (f"{key} {formatting.format_plan_value(key, value)}" for key, value in given.items())
            texts.append(f"{kind}: {', '.join(values)}")
    return "; ".join(texts)
