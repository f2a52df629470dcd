"""One rollout: its waves, what is in flight, why the rest waits, and every pool with its nodes.

Two halves, one above the other or side by side as the terminal allows: what
happens now, and the pools.  Pools are drawn only where they are seen, so that
five hundred of them scroll like five.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from textual.containers import Container
from textual.widget import Widget

from rolloutd.control import sentences
from tui import glance, lines, wording
from tui.glance import Leg
from tui.lines import Line, beside, fit
from tui.listing import Banner, Listing
from tui.page import Item, Items, Page, fixed, gate_lines, gate_of, heading
from tui.phases import LOOKS, legend, strip
from tui.question import Subject
from tui.screens.fleet import progress
from tui.values import NodeState, PoolState, RolloutState, Work

WIDE = 132
"""Cells from which the two halves stand side by side."""

MOST_NAMED = 6
"""Nodes named in one line of those that wait for one reason."""

LEAST_IN_FLIGHT = 6
"""Nodes in flight that are listed on the smallest screen; the longest at work come first."""

MOST_GROUPS = 40
"""Reasons listed; in a fleet of five hundred pools most of them are alike, and the nodes screen has all."""

POOL_NAME = 24

LEAST_NAME, MOST_NAME = 12, 32
"""Cells of a node's name: as many as the longest that is listed has, within these bounds."""


class RolloutPage(Page):
    """The screen of one rollout."""

    place = "rollout"
    DEFAULT_CSS = """
    RolloutPage > #body { layout: vertical; }
    RolloutPage #now { height: 1fr; }
    RolloutPage #pools { height: 1fr; }
    RolloutPage.-wide > #body { layout: horizontal; }
    RolloutPage.-wide #now { width: 1fr; height: 100%; }
    RolloutPage.-wide #pools { width: 1fr; height: 100%; }
    """

    def __init__(self, rollout: str) -> None:
        super().__init__()
        self.rollout_id = rollout

    @property
    def rollout(self) -> RolloutState | None:
        """The rollout, once it is known."""
        return self.console.model.rollouts.get(self.rollout_id)

    def body(self) -> Iterator[Widget]:
        """Yield the head and the two halves."""
        yield Banner(self._head, id="head", lines=3)
        yield Container(Listing(id="now", rests_on_top=True), Listing(id="pools"), id="body")

    def on_mount(self) -> None:
        """Have the nodes asked for."""
        self.console.look_at(self.rollout_id)

    def on_resize(self) -> None:
        """Stand the halves side by side where there is room."""
        self.set_class(self.size.width >= WIDE, "-wide")

    def crumbs(self) -> str:
        """Return the rollout's id."""
        return f"▸ {self.rollout_id}"

    def subject(self) -> Subject:
        """Return the rollout, its gate that waits, and the node under the cursor."""
        rollout = self.rollout
        name = self._chosen_node()
        node = (rollout.nodes or {}).get(name) if rollout is not None else None
        return Subject(rollout=rollout, gate=gate_of(self, rollout), node=node, node_name=name)

    def redraw(self) -> None:
        """Draw the head and both halves anew."""
        self.query_one("#head", Banner).again()
        rollout = self.rollout
        if rollout is None:
            self.query_one("#now", Listing).show(Items([("", fixed([("  waiting for the daemon", "dim")]))]))
            return
        self.query_one("#now", Listing).show(Items(list(self._now(rollout))))
        pools = self.query_one("#pools", Listing)
        pools.show(PoolRows(rollout))
        pools.take(all_there_is=self.has_class("-wide"))

    # -- moves

    def do_open(self) -> None:
        """Go to the node, the nodes that wait, or the pool under the cursor."""
        if self.query_one("#pools").has_focus:
            key = self.query_one("#pools", Listing).cursor_key
            self.console.open_nodes(self.rollout_id, pool=key.removeprefix("pool:"))
            return
        key = self.query_one("#now", Listing).cursor_key
        kind, _, name = key.partition(":")
        match kind:
            case "node":
                self.console.open_node(self.rollout_id, name)
            case "why":
                self.console.open_nodes(self.rollout_id, reason=name)
            case "gate":
                self.console.open_gate(name)
            case _:
                self.console.open_nodes(self.rollout_id)

    def do_nodes(self) -> None:
        """Show all nodes."""
        self.console.open_nodes(self.rollout_id)

    def do_next_pane(self) -> None:
        """Give the keys to the other half."""
        other = "#now" if self.query_one("#pools").has_focus else "#pools"
        self.query_one(other).focus()

    def _chosen_node(self) -> str:
        key = self.query_one("#now", Listing).cursor_key
        return key.removeprefix("node:") if key.startswith("node:") else ""

    # -- the head

    def _head(self, width: int) -> Sequence[Line]:
        rollout, now = self.rollout, self.console.now()
        if rollout is None:
            return [[], [], []]
        glyph, role = glance.STATE_LOOKS.get(rollout.state, ("?", "warn"))
        seen = self.console.survey(rollout)
        status, counts = rollout.status, rollout.counts
        said, lacking = glance.sentence(self.console.model, rollout, now)
        stands = rollout.state.replace("-", " ")
        texts = lines.wrapped(said if said.startswith(stands) else f"{stands}: {said}", width - 4, 2)
        sentence: list[Line] = [
            [(f" {glyph} " if number == 0 else "   ", role), (text, role if number == 0 else "")]
            for number, text in enumerate(texts)
        ]
        rate = glance.rate(rollout, seen, now)
        wanted = counts["total"] - counts["skipped"]
        numbers = (
            f" {wording.percent(rollout.percent)}  {counts['done']:,} of {wanted:,} done"
            + (f", {counts['failed']:,} failed" if counts["failed"] else "")
            + (f", {counts['skipped']:,} skipped" if counts["skipped"] else "")
            + f", {len(rollout.in_flight)} in flight, {counts['pending']:,} pending"
        )
        right = "".join([f"{rate:,.0f}/h " if rate is not None else "", _eta(rollout, now)])
        far: Line = [
            (" ", ""),
            *progress(rollout, max(8, width - len(numbers) - len(right) - 3)),
            (numbers, ""),
        ]
        owner = f"plan {status['plan']} of {status['owner']}, by {status['submitted_by']} "
        digest: Line = [("digest ", "dim"), (wording.short(status["digest"]), "digest"), (" ", "")]
        legs = glance.legs(rollout, seen, self.console.model.plans.get(rollout.id), now)
        sentence[-1] = beside(sentence[-1], [(f"  {lacking} ", "accent")] if lacking else [], width)
        return [
            *sentence,
            beside(far, [(right, "dim")], width),
            timeline(legs),
            beside([(f" {owner}", "dim")], digest, width),
        ]

    # -- what happens now

    def _now(self, rollout: RolloutState) -> Iterator[Item]:
        waiting = gate_of(self, rollout)
        if waiting is not None:
            for number, line in enumerate(
                gate_lines(self, waiting, max(20, self.query_one("#now").size.width - 2))
            ):
                yield (f"gate:{waiting.key}" if number == 0 else "", fixed(line))
        failed = self.console.survey(rollout).failed
        if failed:
            width = lines.column((node.node for node in failed), LEAST_NAME, MOST_NAME)
            yield ("", heading("FAILED", str(len(failed))))
            for node in failed:
                yield (f"node:{node.node}", _failed_row(node, width))
        yield ("", heading("IN FLIGHT", f"{len(rollout.in_flight)}"))
        now = self.console.now()
        works = sorted(rollout.in_flight.values(), key=lambda each: each.began or each.since)
        shown = works[: self._most_in_flight()]
        width = lines.column((work.node for work in shown), LEAST_NAME, MOST_NAME)
        for work in shown:
            yield (f"node:{work.node}", work_row(work, rollout.status["expected_s"], now, width))
        if len(shown) < len(works):
            yield ("", fixed([(f"   and {len(works) - len(shown)} later ones: n shows all nodes", "dim")]))
        if not works:
            yield ("", fixed([("  nothing", "dim")]))
        if not rollout.is_closed:
            yield from self._waits(rollout)

    def _most_in_flight(self) -> int:
        """Return how many nodes in flight leave room for why the others wait."""
        return max(LEAST_IN_FLIGHT, self.query_one("#now").size.height * 2 // 3)

    def _waits(self, rollout: RolloutState) -> Iterator[Item]:
        if rollout.nodes is None:
            yield ("", heading("WAITING"))
            yield ("", fixed([("  asking the daemon", "dim")]))
            return
        seen = self.console.survey(rollout)
        groups, ready = seen.groups, seen.ready
        number = sum(len(group.nodes) for group in groups) + len(ready)
        if not number:
            return
        yield ("", heading("WAITING", str(number)))
        if ready:
            names = ", ".join(ready[:MOST_NAMED]) + (" …" if len(ready) > MOST_NAMED else "")
            yield (f"node:{ready[0]}", fixed([(f"{len(ready):>5} ", "bold"), ("next  ", "run"), (names, "")]))
        for group in groups[:MOST_GROUPS]:
            names = ", ".join(group.nodes[:MOST_NAMED]) + (" …" if len(group.nodes) > MOST_NAMED else "")
            reason = rollout.status["reason"]
            same = reason is not None and reason["text"] == group.text
            text = f"as the whole rollout is {rollout.state.replace('-', ' ')}" if same else group.text
            yield (f"why:{group.text}", _group_row(len(group.nodes), text, names))
        if len(groups) > MOST_GROUPS:
            yield (
                "",
                fixed([(f"      and {len(groups) - MOST_GROUPS} more reasons: n shows all nodes", "dim")]),
            )


class PoolRows:
    """A line per pool, drawn when it is seen; the first line says what the glyphs mean."""

    def __init__(self, rollout: RolloutState) -> None:
        self._pools = list(rollout.pools.values())
        self._known = rollout.nodes is not None

    def __len__(self) -> int:
        return len(self._pools) + 2

    def key(self, row: int) -> str:
        """Return the pool's name."""
        return "" if row < 2 else f"pool:{self._pools[row - 2].pool}"

    def draw(self, row: int, width: int) -> Sequence[Line]:
        """Return a heading or a pool."""
        if row == 0:
            return (heading("POOLS", str(len(self._pools)))(width),)
        if row == 1:
            return ([(" ", ""), *legend(width - 1)],)
        return (pool_line(self._pools[row - 2], width, nodes_known=self._known),)


def pool_line(pool: PoolState, width: int, *, nodes_known: bool) -> Line:
    """Return a pool: its strip, its slots in use, and how far it is."""
    name = fit(pool.pool, min(POOL_NAME, max(10, width // 4)))
    taken = pool.in_flight + pool.failed
    slots = f"{taken}/{pool.max_unavailable}"
    tail = f" {pool.done:,}/{pool.total:,} "
    room = width - lines.width_of([(name, "")]) - len(slots) - len(tail) - 4
    cells = strip(pool.nodes, room) if nodes_known else [("·" * min(room, pool.total), "faint")]
    failed: Line = [(" ✗", "bad")] if pool.failed else [("  ", "")]
    role = "warn" if taken >= pool.max_unavailable else "" if taken else "dim"
    right: Line = [
        *failed,
        (fit(slots, 5, right=True), role),
        (fit(tail, 10, right=True), "ok" if pool.done == pool.total else ""),
    ]
    return beside([(name, ""), (" ", ""), *cells], right, width)


def timeline(legs: Sequence[Leg]) -> Line:
    """Return the waves in a row: done, soaking, waiting at a gate, to come."""
    line: Line = [(" ", "")]
    for number, leg in enumerate(legs):
        if number:
            line.append((" ─ ", "faint"))
        over = leg.total > 0 and leg.done == leg.total
        role = "bad" if leg.failed else "ok" if over else "bold" if leg.is_current else "dim"
        mark = "✗ " if leg.failed else "✓ " if over else "▸ " if leg.is_current else ""
        line.append((f"{mark}{leg.wave} {leg.done}/{leg.total}", role))
        if leg.soak_left is not None:
            line.append((f" ─ ◷ soaks {wording.clock(leg.soak_left)}", "run"))
        elif leg.soak_s:
            line.append((f" ─ soak {wording.span(leg.soak_s)}", "dim"))
        if leg.gate is not None:
            line += [(" ─ ", "faint"), _gate_mark(leg.gate["state"], leg.gate["gate"])]
    return line


def _gate_mark(state: str, name: str) -> tuple[str, str]:
    glyph, role = {"open": ("✓", "ok"), "waiting": ("◆", "accent"), "rejected": ("✗", "bad")}.get(
        state, ("○", "dim")
    )
    return (f"{glyph} {name}", role)


def work_row(work: Work, usual_s: float, now: float, named: int) -> Callable[[int], Line]:
    """Return how to draw a node in flight: phase, step, task, and its time against the usual."""

    def draw(width: int) -> Line:
        glyph, role = LOOKS.get(work.phase, ("?", "warn"))
        took = max(0.0, now - (work.began or work.since))
        late = took > usual_s * 1.5
        wide = width >= 76
        times: Line = [
            (wording.clock(took), "warn" if late else ""),
            (f" of ~{wording.clock(usual_s)} ", "dim"),
        ]
        step = sentences.step_name(work.step) or "…"
        share = f"{work.percent:>3.0f} % " if work.percent is not None else ""
        gauge = (
            lines.bar([((work.percent or 0.0) / 100, role)], 10 if width >= 100 else 6)
            if wide and work.percent is not None
            else []
        )
        left: Line = [
            (f" {glyph} ", role),
            (fit(work.node, min(named, max(LEAST_NAME, width // 4))), "bold"),
            (f" {work.phase:<12}", role),
            *gauge,
            (f" {share}" if share else "", ""),
            (lines.clean(work.task) or step, ""),
        ]
        return beside(left, times, width)

    return draw


def _failed_row(node: NodeState, named: int) -> Callable[[int], Line]:
    again = f" (attempt {node.attempt})" if node.attempt > 1 else ""
    text = f" {lines.clean(node.failure or 'it failed')}{again}"
    return lambda width: [
        (" ✗ ", "bad"),
        (fit(node.node, min(named, max(LEAST_NAME, width // 3))), "bold"),
        (text, "bad"),
    ]


def _group_row(number: int, text: str, names: str) -> Callable[[int], Line]:
    return fixed([(f"{number:>5} ", "bold"), (lines.clean(text), ""), (f"  {names}", "dim")])


def _eta(rollout: RolloutState, now: float) -> str:
    eta = glance.eta(rollout, now)
    return f"~{eta} left " if eta else ""
