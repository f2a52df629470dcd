"""Freezes, holds, and the slots of every pool with their holders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rolloutd.control.fleet import wire_fleet
from rolloutd.texts import formats
from tui.formatting import formatting, lines
from tui.formatting.lines import Line, Span, column, fit, fit_name, justify
from tui.operations.confirm import Selection
from tui.screens.page import Item, Page, heading, note_row
from tui.state.values import parse_timestamp
from tui.widgets import summaries

MAX_NAMED_NODES = 8

MAX_SLOT_MARKS = 12

UNOBSERVED_NOTE = "   unobserved: not observed lately, as no node there was due to start"


class LocksPage(Page):
    """Freezes, holds, the pools with used slots, then the other pools."""

    screen_name = "locks"

    def on_mount(self) -> None:
        self.console.request_fetch("locks")

    def selection(self) -> Selection:
        locks = self.console.model.locks
        if locks is None:
            return Selection()
        kind, _, name = self.body.cursor_key.partition(":")
        hold = next((each for each in locks["holds"] if kind == "hold" and _hold_key(each) == name), None)
        freezes = locks["freezes"]
        selected = next((each for each in freezes if kind == "freeze" and each["id"] == name), None)
        node = hold["node"] if hold is not None else name.rpartition("/")[2] if kind == "node" else ""
        return Selection(hold=hold, freeze=selected, node_name=node)

    def do_open(self) -> None:
        """Open the node that holds the slot, or the pool's nodes in the most urgent rollout that has any."""
        kind, _, name = self.body.cursor_key.partition(":")
        model = self.console.model
        pool, _, node = name.rpartition("/")
        pools = () if model.locks is None else model.locks["pools"]
        holders = [holder for each in pools if each["pool"] == pool for holder in each["holders"]]
        rollout = next((each["rollout"] for each in holders if each["node"] == node), None)
        if kind == "node" and rollout:
            self.console.open_page("node", rollout, node)
        elif kind == "pool" and (found := [x for x in summaries.sort_by_urgency(model) if name in x.pools]):
            self.console.open_page("nodes", found[0].id, pool=name)
        else:
            self.console.show_message("open: no rollout has this row; w shows it in full")

    def build_items(self) -> Iterator[Item]:
        locks = self.console.model.locks
        if locks is None:
            yield note_row("loading")
        else:
            yield from self._lock_items(locks)

    def _lock_items(self, locks: wire_fleet.Locks) -> Iterator[Item]:
        now = self.console.now()
        yield heading("FREEZES", str(len(locks["freezes"])))
        for freeze in locks["freezes"]:
            row = _lock_row(("‖", "bad"), freeze["scope"], f"by {freeze['by']}", freeze, now)
            yield f"freeze:{freeze['id']}", row
        if not locks["freezes"]:
            yield note_row("no freeze")
        yield heading("HOLDS", str(len(locks["holds"])))
        for hold in locks["holds"]:
            who = f"{hold['source']}/{hold['id']} by {hold['by']}"
            yield f"hold:{_hold_key(hold)}", _lock_row(("●", "warn"), hold["node"], who, hold, now)
        if not locks["holds"]:
            yield note_row("no hold")
        used = [pool for pool in locks["pools"] if summaries.confirmed_holders(pool)]
        free = [pool for pool in locks["pools"] if not summaries.confirmed_holders(pool)]
        pools = formats.pluralize(len(locks["pools"]), "pool")
        yield heading("SLOTS TAKEN", f"in {len(used)} of {pools}")
        for pool in used:
            yield _pool_row(pool)
            for holders in _group_holders(pool["holders"]):
                # Of several nodes no operation could tell which one it is for.
                kind = "node" if len(holders) == 1 else "nodes"
                yield f"{kind}:{pool['pool']}/{holders[0]['node']}", _holder_row(holders, now)
        has_unobserved = any(pool["unobserved"] for pool in locks["pools"])
        yield heading("FREE", f"{len(free)}{UNOBSERVED_NOTE if has_unobserved else ''}")
        for pool in free:
            yield _pool_row(pool)


def _hold_key(hold: wire_fleet.Hold) -> str:
    return f"{hold['node']}/{hold['source']}/{hold['id']}"


def _lock_row(
    mark: Span, name: str, who: str, lock: wire_fleet.Freeze | wire_fleet.Hold, now: float
) -> Callable[[int], Line]:
    until, age = parse_timestamp(lock["until"]), formatting.format_age(parse_timestamp(lock["at"]), now)
    rest = "until lifted"
    if until is not None:
        rest = f"{formatting.format_duration(until - now)} left" if until > now else "expired"
    right: Line = [(f" {rest}, {age} ", "dim")]
    text = lines.sanitize(f" {who}: {lock['reason']}")

    def draw(width: int) -> Line:
        room = width - lines.line_width(right) - len("  ● ")
        short = name if len(name) + len(text) <= room else fit_name(name, lines.MAX_WORD_WIDTH, pad=False)
        return justify([("  ", ""), mark, (" ", ""), (short, "bold"), (text, "")], right, width)

    return draw


def _pool_row(pool: wire_fleet.PoolSlots) -> Item:
    down, budget, unobserved = (
        len(summaries.confirmed_holders(pool)),
        pool["max_unavailable"],
        pool["unobserved"],
    )
    role, note = "dim", ""
    if down > budget:
        role, note = "bad", "over budget"
    elif 0 < down == budget:
        role, note = "warn", "full"
    counts: Line = [
        (fit(f"{down}/{budget}", 5, align_right=True), role),
        (" down of ", "dim"),
        (fit(formats.pluralize(pool["members"], "node"), 12), "dim"),
        ("●" * min(down, MAX_SLOT_MARKS), role),
        ("○" * max(0, min(budget, MAX_SLOT_MARKS) - down), "dim"),
    ]
    right: Line = [(f"{note} ", role)] if note else []
    right += [(f" {unobserved} unobserved ", "dim")] if unobserved else []
    # On a narrow screen the marks are cut: they only repeat the figure.
    return f"pool:{pool['pool']}", lambda width: justify(
        [("  ", ""), (column(pool["pool"], 26, width), ""), *counts], right, width
    )


def _group_holders(holders: Sequence[wire_fleet.SlotHolder]) -> list[list[wire_fleet.SlotHolder]]:
    """Return the holders, those in groups that are in the same state and whose state has no start."""
    groups: dict[str, list[wire_fleet.SlotHolder]] = {}
    for each in holders:
        is_single = each["since"] is not None and not each["unobserved"]
        groups.setdefault(each["node"] if is_single else f" {each['state']}", []).append(each)
    return list(groups.values())


def _holder_row(holders: Sequence[wire_fleet.SlotHolder], now: float) -> Callable[[int], Line]:
    holder = holders[0]
    state = lines.sanitize(f"unobserved: {holder['state']}" if holder["unobserved"] else holder["state"])
    age = formatting.format_age(parse_timestamp(holder["since"]), now)

    def draw(width: int) -> Line:
        names = formatting.join_first([each["node"] for each in holders], MAX_NAMED_NODES)
        if len(names) + len(state) + len(age) + len("         ") > width:
            short = [fit_name(each["node"], lines.MAX_WORD_WIDTH, pad=False) for each in holders]
            names = formatting.join_first(short, MAX_NAMED_NODES)
        # Of several nodes the state comes first: their names may not fit.
        shown: Line = [(names, "bold"), (state, "")]
        first, second = shown if len(holders) == 1 else reversed(shown)
        return justify([("      ", ""), first, ("  ", ""), second], [(f" {age} ", "dim")], width)

    return draw
