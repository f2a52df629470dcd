"""What waits for a decision, and all that is decided: content, differences, canaries, checks, votes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from textual.containers import Container
from textual.widget import Widget

from rolloutd.control import sentences
from tui import glance, lines, rights, wording
from tui.glance import Waiting
from tui.lines import Line, fit
from tui.listing import Listing
from tui.page import Item, Items, Page, fixed, gate_lines, heading
from tui.phases import look, strip
from tui.question import Subject
from tui.screens.rollout import WIDE
from tui.values import NodeState, instant

MOST_DIFFERENCES = 200
"""Differences listed; a plan with more is another plan."""

MOST_NODES = 200
"""Canaries and failed nodes listed."""

MOST_FAILURES = 1_000
"""Failures that are read and listed at a proceed gate: as many as one vote may name."""

FailedAt = tuple[str, int, float | None]
"""A node, its attempt, and since when it is failed: what tells a failure from the node's earlier ones."""

LEAST_LIST = 2
"""Lines of the list of gates when there are few: the content below is what is to be read."""


class GatesPage(Page):
    """Gates that wait, those that wait for us first; below the content under decision."""

    place = "gates"
    DEFAULT_CSS = """
    GatesPage > #body { layout: vertical; }
    GatesPage #list { height: 1fr; }
    GatesPage #content { height: 3fr; }
    GatesPage.-wide > #body { layout: horizontal; }
    GatesPage.-wide #list { width: 2fr; height: 100%; }
    GatesPage.-wide #content { width: 3fr; height: 100%; }
    """

    def __init__(self, first: str = "") -> None:
        super().__init__()
        self._chosen = first
        self.shown: dict[str, tuple[str, ...]] = {}
        self._asked: dict[str, tuple[str, ...]] = {}
        self._failures_of: dict[str, dict[FailedAt, str]] = {}

    def body(self) -> Iterator[Widget]:
        """Yield the gates and what is decided at the chosen one."""
        yield Container(Listing(id="list"), Listing(id="content"), id="body")

    def on_mount(self) -> None:
        """Begin at the gate that is asked for."""
        self.query_one("#list", Listing).cursor_key = self._chosen

    def on_resize(self) -> None:
        """Stand the halves side by side where there is room."""
        self.set_class(self.size.width >= WIDE, "-wide")

    def chosen(self) -> Waiting | None:
        """Return the gate under the cursor."""
        key = self.query_one("#list", Listing).cursor_key
        return next((each for each in glance.waiting(self.console.model) if each.key == key), None)

    def subject(self) -> Subject:
        """Return the gate under the cursor and the failures that are shown with it."""
        chosen = self.chosen()
        if chosen is None:
            return Subject()
        return Subject(rollout=chosen.rollout, gate=chosen, shown=self.shown.get(chosen.rollout.id))

    def redraw(self) -> None:
        """List the gates, and the content of the chosen one."""
        items: list[Item] = []
        listing = self.query_one("#list", Listing)
        width = max(20, listing.size.width - 2)
        waiting = glance.waiting(self.console.model)
        for each in waiting:
            for number, line in enumerate(gate_lines(self, each, width)):
                items.append((each.key if number == 0 else "", fixed(line)))
        if not waiting:
            items.append(("", fixed([("  no gate waits", "dim")])))
        listing.show(Items(items))
        listing.take(all_there_is=self.has_class("-wide"), least=LEAST_LIST)
        chosen = self.chosen()
        content = [] if chosen is None else list(self._content(chosen))
        self.query_one("#content", Listing).show(Items(content))

    def do_open(self) -> None:
        """Go to the node under the cursor in the content, else to the rollout of the chosen gate."""
        chosen, content = self.chosen(), self.query_one("#content", Listing)
        if chosen is None:
            return
        kind, _, name = content.cursor_key.partition(":")
        if content.has_focus and kind == "node":
            self.console.open_node(chosen.rollout.id, name)
        else:
            self.console.open_rollout(chosen.rollout.id)

    def do_next_pane(self) -> None:
        """Give the keys to the other half."""
        self.query_one("#content" if self.query_one("#list").has_focus else "#list").focus()

    # -- what is decided

    def _content(self, waiting: Waiting) -> Iterator[Item]:
        rollout = waiting.rollout
        model = self.console.model
        self._want(waiting)
        plan = model.plans.get(rollout.id)
        yield from self._votes(waiting)
        if waiting.gate["gate"] == "proceed":
            yield from self._failures(waiting)
        if waiting.gate["gate"] == "continue":
            yield from self._canaries(waiting)
        if plan is None:
            yield row("", [("  asking the daemon for the plan", "dim")])
            return
        yield from self._digest(plan)
        yield from self._changes(waiting, plan)
        yield from self._targets(waiting)
        yield from self._checks(waiting, plan)

    def _want(self, waiting: Waiting) -> None:
        """Have asked for what is decided: the nodes, the plan, the plan before it, the failures."""
        rollout = waiting.rollout
        earlier = glance.approved_before(self.console.model.closed, rollout.status)
        is_proceed = waiting.gate["gate"] == "proceed"
        failing = self.console.survey(rollout).failed if is_proceed else ()
        wanted = (earlier["rollout"] if earlier else "", *(f"{each.node}#{each.attempt}" for each in failing))
        if self._asked.get(rollout.id) == wanted:
            return
        self._asked[rollout.id] = wanted
        self.console.look_at(rollout.id)
        if earlier is not None and earlier["rollout"] not in self.console.model.plans:
            self.console.want("plan", earlier["rollout"])
        if failing:
            self.run_worker(self._ask_failures(rollout.id, failing[:MOST_FAILURES]), group="failures")

    async def _ask_failures(self, rollout: str, nodes: Sequence[NodeState]) -> None:
        """Ask for the failures that were not asked for before: there may be hundreds, coming one by one."""
        known = self._failures_of.get(rollout, {})
        new = [node for node in nodes if _time_of(node) not in known]
        told = await asyncio.gather(*(self.console.ask_node(rollout, node.node) for node in new))
        failures = [
            (_time_of(node), said.answer["failure"])
            for node, said in zip(new, told, strict=True)
            if said.answer is not None
        ]
        known = known | {key: failure["id"] for key, failure in failures if failure is not None}
        now = [key for key in map(_time_of, nodes) if key in known]
        self._failures_of[rollout] = {key: known[key] for key in now}
        self.shown[rollout] = tuple(known[key] for key in now)
        self.changed()

    def _votes(self, waiting: Waiting) -> Iterator[Item]:
        gate, status = waiting.gate, waiting.rollout.status
        yield ("", heading("VOTES", sentences.gate_name(gate)))
        owner = gate["needs"]["owner"]
        if owner["want"]:
            yield row(
                "owner",
                _need(
                    f"owner {status['owner']}",
                    owner["have"],
                    owner["want"],
                    rights.who_is(self.console.model, status["owner"]),
                ),
            )
        for need in gate["needs"]["teams"]:
            yield row(
                f"team:{need['team']}",
                _need(
                    need["team"], need["have"], need["want"], rights.who_is(self.console.model, need["team"])
                ),
            )
        for vote in gate["votes"]:
            glyph, role = ("✓", "ok") if vote["yes"] else ("✗", "bad")
            if not vote["counts"]:
                role = "dim"
            gone = " (taken back)" if vote["withdrawn"] else "" if vote["counts"] else " (does not count)"
            at = wording.hour(instant(vote["at"]) or 0.0)
            yield row(
                f"vote:{vote['id']}",
                [
                    (f"  {glyph} ", role),
                    (f"{vote['by']} for {', '.join(vote['teams'])}{gone}: ", ""),
                    (lines.clean(vote["reason"]), "dim"),
                    (f"  {at}", "dim"),
                ],
            )

    def _failures(self, waiting: Waiting) -> Iterator[Item]:
        failed = self.console.survey(waiting.rollout).failed
        known = not failed or waiting.rollout.id in self.shown
        yield (
            "",
            heading("WHAT HAS FAILED", f"{len(failed)}: {_covered(failed) if known else 'reading them'}"),
        )
        for node in failed[:MOST_FAILURES]:
            yield row(f"node:{node.node}", _node_line(node, node.failure))

    def _canaries(self, waiting: Waiting) -> Iterator[Item]:
        nodes = [each for each in (waiting.rollout.nodes or {}).values() if each.wave == waiting.gate["wave"]]
        done = sum(each.phase == "done" for each in nodes)
        yield ("", heading(f"RESULTS OF WAVE {waiting.gate['wave']}", f"{done} of {len(nodes)} done"))
        yield ("", lambda width: [("  ", ""), *strip(nodes, width - 4)])
        for node in nodes[:MOST_NODES]:
            yield row(f"node:{node.node}", _node_line(node, node.outcome or node.failure or node.phase))

    def _digest(self, plan: Mapping[str, Any]) -> Iterator[Item]:
        yield ("", heading("DIGEST"))
        hashes = plan["hashes"]
        yield row("digest", [("  whole   ", "dim"), (plan["digest"], "digest")])
        parts = "   ".join(f"{name} {wording.short(hashes[name])}" for name in ("change", "scope", "policy"))
        yield row("parts", [("  parts   ", "dim"), (parts, "")])
        source = plan["source"]
        yield row(
            "source",
            [("  source  ", "dim"), (f"{source.get('kind', '')} {wording.short(source.get('pin', ''))}", "")],
        )

    def _changes(self, waiting: Waiting, plan: Mapping[str, Any]) -> Iterator[Item]:
        model = self.console.model
        earlier = glance.approved_before(model.closed, waiting.rollout.status)
        before = model.plans.get(earlier["rollout"]) if earlier is not None else None
        if earlier is not None and before is None:
            yield row("", [("  asking for the plan before", "dim")])
            return
        changes = glance.differences(before, plan)
        note = (
            "nothing of this plan was approved before"
            if earlier is None
            else f"to {earlier['rollout']}, carried out last"
        )
        yield ("", heading("THE PLAN" if before is None else "DIFFERENCES", note))
        if not changes:
            yield row("", [("  none: the same content again", "ok")])
        for path, old, new in changes[:MOST_DIFFERENCES]:
            short = path.removeprefix("spec.")
            line: Line = [("  ", ""), (f"{short}: ", "dim")]
            if before is not None:
                line += [(lines.clean(old), "bad"), (" → ", "dim")]
            yield row(f"path:{path}", [*line, (lines.clean(new), "ok" if before is not None else "")])

    def _targets(self, waiting: Waiting) -> Iterator[Item]:
        rollout = waiting.rollout
        yield ("", heading("TARGETS", wording.count(rollout.counts["total"], "node")))
        for pool in rollout.pools.values():
            slots = f"{pool.max_unavailable} at a time"
            yield row(
                f"pool:{pool.pool}",
                [
                    ("  ", ""),
                    (fit(pool.pool, 24), ""),
                    (f"{wording.count(pool.total, 'node'):<12}", ""),
                    (slots, "dim"),
                ],
            )

    def _checks(self, waiting: Waiting, plan: Mapping[str, Any]) -> Iterator[Item]:
        yield ("", heading("CHECKS", "each node must pass these before it serves again"))
        for number, check in enumerate(plan["content"]["spec"].get("verify") or ()):
            yield row(f"check:{number}", [("  ", ""), (lines.clean(_told(check)), "")])
        settings = self.console.model.settings
        counted = {} if settings is None else {each["team"]: each["checks"] for each in settings["teams"]}
        for team in sorted({node.team or "" for node in (waiting.rollout.nodes or {}).values()}):
            if counted.get(team):
                yield row(
                    f"checks:{team}",
                    [("  ", ""), (f"team {team}: {wording.count(counted[team], 'check')} of its own", "dim")],
                )
        for number, looked in enumerate(waiting.rollout.status["looked_at"]):
            yield row(f"looked:{number}", [("  looked at before: ", ""), (lines.clean(looked), "")])
        for missing in waiting.rollout.status["not_looked_at"]:
            yield row(f"not:{missing}", [("  not looked at: ", "warn"), (missing, "warn")])


def row(key: str, line: Line) -> Item:
    """Return a row that is the same in every width; the cursor can go everywhere."""
    return (key or lines.plain(line), fixed(line))


def _time_of(node: NodeState) -> FailedAt:
    return node.node, node.attempt, node.since


def _covered(failed: Sequence[NodeState]) -> str:
    if not failed:
        return "no node is failed now; a yes covers what was tried again"
    more = "" if len(failed) <= MOST_FAILURES else f" {MOST_FAILURES:,}, the others need another"
    return f"a yes covers these{more}"


def _need(name: str, have: int, want: int, who: str) -> Line:
    enough = have >= want
    mark: Line = [("  ✓ " if enough else "  ○ ", "ok" if enough else "accent")]
    return [
        *mark,
        (fit(name, 22), "" if enough else "bold"),
        (f"{have} of {want}  ", "ok" if enough else "accent"),
        (who, "dim"),
    ]


def _node_line(node: NodeState, text: str) -> Line:
    glyph, role = look(node)
    return [
        (f"  {glyph} ", role),
        (fit(node.node, 16), "bold"),
        (fit(node.team or "", 12), "dim"),
        (lines.clean(text), role),
    ]


def _told(check: Mapping[str, Any]) -> str:
    """Return a check as the plan has it, on one line."""
    return "; ".join(
        f"{kind}: "
        + ", ".join(
            f"{key} {wording.value(key, value)}"
            for key, value in params.items()
            if value not in (None, "", [], {})
        )
        for kind, params in check.items()
        if isinstance(params, Mapping)
    )
