"""Slots and who has them, holds and freezes: what keeps nodes from starting, whoever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rolloutd.control import sentences, wire
from tui import glance, lines, wording
from tui.lines import Line, beside, fit
from tui.listing import Listing
from tui.page import Item, Items, Page, fixed, heading
from tui.question import Subject
from tui.values import instant

MOST_NAMED = 8
"""Nodes named in one line of those that are down for the same reason."""

UNSEEN = "   unseen: not looked at lately, as nothing was to start there"
"""What the word means, wherever it stands on the page."""


class LocksPage(Page):
    """Freezes first, then holds, then the pools that somebody takes slots of, then the others."""

    place = "locks"

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def on_mount(self) -> None:
        """Have the slots asked for."""
        self.console.want("locks")

    def subject(self) -> Subject:
        """Return the hold, the freeze or the node under the cursor."""
        locks = self.console.model.locks
        kind, _, name = self.query_one("#body", Listing).cursor_key.partition(":")
        if locks is None:
            return Subject()
        hold = next((each for each in locks["holds"] if kind == "hold" and _hold_key(each) == name), None)
        freezes = locks["freezes"]
        named = next((each for each in freezes if kind == "freeze" and each["id"] == name), None)
        node = hold["node"] if hold is not None else name.rpartition("/")[2] if kind == "node" else ""
        return Subject(hold=hold, freeze=named or (freezes[0] if freezes else None), node_name=node)

    def do_find(self) -> None:
        """Ask which pools are meant."""
        self.console.ask_text("show what contains", self.text, self._find)

    def do_open(self) -> None:
        """Go to the node that takes the slot."""
        kind, _, name = self.query_one("#body", Listing).cursor_key.partition(":")
        locks = self.console.model.locks
        if kind != "node" or locks is None:
            return
        pool, _, node = name.rpartition("/")
        for each in locks["pools"]:
            for holder in each["holders"] if each["pool"] == pool else ():
                if holder["node"] == node and holder["rollout"]:
                    self.console.open_node(holder["rollout"], node)
                    return

    def _find(self, text: str) -> None:
        self.text = text
        self.changed()

    def redraw(self) -> None:
        """List them anew."""
        locks = self.console.model.locks
        if locks is None:
            self.query_one("#body", Listing).show(Items([("", fixed([("  asking the daemon", "dim")]))]))
            return
        items = list(self._items(locks))
        wanted = self.text.lower()
        if wanted:
            items = [each for each in items if not each[0] or wanted in lines.plain(each[1](200)).lower()]
        self.query_one("#body", Listing).show(Items(items))

    def _items(self, locks: wire.Locks) -> Iterator[Item]:
        now = self.console.now()
        yield ("", heading("FREEZES", str(len(locks["freezes"]))))
        for freeze in locks["freezes"]:
            yield (f"freeze:{freeze['id']}", _freeze_row(freeze, now))
        if not locks["freezes"]:
            yield ("", fixed([("  nothing is frozen", "dim")]))
        yield ("", heading("HOLDS", str(len(locks["holds"]))))
        for hold in locks["holds"]:
            yield (f"hold:{_hold_key(hold)}", _hold_row(hold, now))
        if not locks["holds"]:
            yield ("", fixed([("  nobody holds a node", "dim")]))
        taken = [pool for pool in locks["pools"] if glance.surely_down(pool)]
        free = [pool for pool in locks["pools"] if not glance.surely_down(pool)]
        yield ("", heading("SLOTS TAKEN", f"in {len(taken)} of {wording.count(len(locks['pools']), 'pool')}"))
        for pool in taken:
            yield (f"pool:{pool['pool']}", _pool_row(pool))
            for holders in _alike(pool["holders"]):
                yield (f"node:{pool['pool']}/{holders[0]['node']}", _holder_row(holders, now))
        unseen = any(pool.get("unseen") for pool in locks["pools"])
        yield ("", heading("FREE", f"{len(free)}{UNSEEN if unseen else ''}"))
        for pool in free:
            yield (f"pool:{pool['pool']}", _pool_row(pool))


def _hold_key(hold: wire.Hold) -> str:
    return f"{hold['node']}/{hold['source']}/{hold['id']}"


def _until(until: str | None, now: float) -> str:
    at = instant(until)
    return "until lifted" if at is None else f"{wording.span(at - now)} left"


def _freeze_row(freeze: wire.Freeze, now: float) -> Callable[[int], Line]:
    def draw(width: int) -> Line:
        right: Line = [
            (f" {_until(freeze['until'], now)}, {wording.ago(instant(freeze['at']), now)} ", "dim")
        ]
        return beside(
            [
                ("  ‖ ", "bad"),
                (freeze["scope"], "bold"),
                (f" by {freeze['by']}: ", ""),
                (lines.clean(freeze["reason"]), ""),
            ],
            right,
            width,
        )

    return draw


def _hold_row(hold: wire.Hold, now: float) -> Callable[[int], Line]:
    def draw(width: int) -> Line:
        right: Line = [(f" {_until(hold['until'], now)}, {wording.ago(instant(hold['at']), now)} ", "dim")]
        who = f" {hold['source']}/{hold['id']} by {hold['by']}: "
        return beside(
            [("  ● ", "warn"), (hold["node"], "bold"), (who, "dim"), (lines.clean(hold["reason"]), "")],
            right,
            width,
        )

    return draw


def _pool_row(pool: wire.Lock) -> Callable[[int], Line]:
    down, unseen = len(glance.surely_down(pool)), pool.get("unseen", 0)
    over = down > pool["max_unavailable"]
    full = down >= pool["max_unavailable"] and down > 0
    role = "bad" if over else "warn" if full else "dim"
    said = "over budget" if over else "full" if full else ""
    slots: Sequence[tuple[str, str]] = [
        ("●" * min(down, 12), role),
        ("○" * max(0, min(pool["max_unavailable"], 12) - down), "dim"),
    ]
    return fixed(
        [
            ("  ", ""),
            (fit(pool["pool"], 26), ""),
            (fit(f"{down}/{pool['max_unavailable']}", 5, right=True), role),
            (" down of ", "dim"),
            (fit(wording.count(pool["members"], "node"), 12), "dim"),
            *slots,
            (f"  {said}" if said else "", role),
            (f"  {unseen} unseen" if unseen else "", "dim"),
        ]
    )


def _alike(holders: Sequence[wire.Holder]) -> list[list[wire.Holder]]:
    """Gather those that are down for one reason, since nobody knows when or cares: one line for all."""
    found: dict[str, list[wire.Holder]] = {}
    for each in holders:
        alone = each["since"] is not None and not each.get("unseen")
        found.setdefault(each["node"] if alone else f" {_why(each)}", []).append(each)
    return list(found.values())


def _why(holder: wire.Holder) -> str:
    """Return why a node is down, without its name; of one that nobody has looked at lately, without when."""
    why = holder["why"].removeprefix(holder["node"]).strip()
    return f"unseen: {sentences.last_look(why)}" if holder.get("unseen") else why


def _holder_row(holders: Sequence[wire.Holder], now: float) -> Callable[[int], Line]:
    holder = holders[0]
    names = ", ".join(each["node"] for each in holders[:MOST_NAMED]) + (
        " …" if len(holders) > MOST_NAMED else ""
    )
    why = _why(holder)
    most = 20 if len(holders) == 1 else 0
    return lambda width: beside(
        [
            ("      ", ""),
            (f"{fit(names, max(most, width // 3))} " if most else f"{names}: ", "bold"),
            (lines.clean(why), ""),
        ],
        [(f" {wording.ago(instant(holder['since']), now)} ", "dim")],
        width,
    )
