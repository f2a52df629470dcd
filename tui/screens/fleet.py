"""All rollouts: how far each is, how it stands in one sentence, and what waits for us."""

from __future__ import annotations

from collections.abc import Callable

from rolloutd.control import wire
from tui import glance, lines, wording
from tui.lines import Line, fit
from tui.listing import Listing
from tui.page import Items, Page, fixed, gate_of, heading
from tui.question import Subject
from tui.values import RolloutState, instant

MOST_CLOSED = 50
"""Closed rollouts listed below those that live; the audit has all."""

LEAST_NAME, MOST_NAME = 12, 48
"""Cells of a rollout's name: as many as the longest has, within these bounds and a quarter of the width."""


class FleetPage(Page):
    """The first screen."""

    place = "fleet"

    def redraw(self) -> None:
        """List the rollouts anew."""
        model, now = self.console.model, self.console.now()
        items: list[tuple[str, Callable[[int], Line]]] = []
        listing = self.query_one("#body", Listing)
        rollouts = glance.ordered(model)
        is_spacious = len(rollouts) * 3 <= listing.size.height
        for each in rollouts:
            items += [
                (each.id, self._row(each, now)),
                ("", _sentence(*glance.sentence(model, each, now))),
            ]
            if is_spacious:
                items.append(("", fixed([])))
        if not items:
            items.append(("", fixed([(f"  {self._nothing()}", "dim")])))
            items.append(("", fixed([])))
        live = set(model.rollouts)
        closed = [each for each in model.closed if each["rollout"] not in live][:MOST_CLOSED]
        if closed:
            items.append(("", heading("CLOSED", str(len(closed)))))
            items += [(each["rollout"], _closed(each, now)) for each in closed]
        listing.show(Items(items))

    def subject(self) -> Subject:
        """Return the rollout under the cursor, and its gate that waits."""
        rollout = self.console.model.rollouts.get(self.query_one("#body", Listing).cursor_key)
        return Subject(rollout=rollout, gate=gate_of(self, rollout))

    def do_open(self) -> None:
        """Go into the rollout under the cursor."""
        chosen = self.query_one("#body", Listing).cursor_key
        if chosen:
            self.console.open_rollout(chosen)

    def do_nodes(self) -> None:
        """List the nodes of the rollout under the cursor."""
        chosen = self.query_one("#body", Listing).cursor_key
        if chosen:
            self.console.open_nodes(chosen)

    def _nothing(self) -> str:
        if not self.console.is_known:
            return "waiting for the daemon"
        return "no rollout is live: rolloutctl plan submit FILE opens one"

    def _row(self, rollout: RolloutState, now: float) -> Callable[[int], Line]:
        ids = list(self.console.model.rollouts)

        def draw(width: int) -> Line:
            glyph, role = glance.STATE_LOOKS.get(rollout.state, ("?", "warn"))
            wide = width >= 110
            name = fit(rollout.id, lines.column(ids, LEAST_NAME, min(MOST_NAME, width // 4)))
            state = _state(rollout, 18 if wide else 9)
            counts = rollout.counts
            done = fit(
                f"{counts['done']:,}/{counts['total'] - counts['skipped']:,}", 13 if wide else 9, right=True
            )
            rate = glance.rate(rollout, None, now)
            tail = (
                f" {wording.percent(rollout.percent)} {done}  "
                f"{fit(rollout.status['wave'] or '', 10 if wide else 6)} "
                f"{fit('' if rate is None else f'{rate:,.0f}/h', 8 if wide else 5, right=True)} "
                f"{fit(glance.eta(rollout, now), 5, right=True)} "
            )
            left: Line = [
                (f"{glyph} ", role),
                (name, "bold"),
                (" ", ""),
                (state, role),
                (" ", ""),
            ]
            room = max(6, width - lines.width_of(left) - len(tail))
            return [*left, *progress(rollout, room), (tail, "")]

        return draw


def progress(rollout: RolloutState, width: int) -> Line:
    """Return how far a rollout has come, as a bar."""
    counts = rollout.counts
    wanted = max(1, counts["total"] - counts["skipped"])
    parts = [
        (counts["done"] / wanted, "ok"),
        (counts["failed"] / wanted, "bad"),
        (len(rollout.in_flight) / wanted, "run"),
    ]
    return lines.bar(parts, width)


def _state(rollout: RolloutState, width: int) -> str:
    return fit("approval" if rollout.state == "awaiting-approval" and width < 17 else rollout.state, width)


def _sentence(text: str, lacking: str) -> Callable[[int], Line]:
    right: Line = [(f"  {lacking} ", "accent")] if lacking else []
    return lambda width: lines.beside([("  ", ""), (lines.clean(text), "dim")], right, width)


def _closed(each: wire.RolloutLine, now: float) -> Callable[[int], Line]:
    glyph, role = glance.STATE_LOOKS[each["state"]]

    def draw(width: int) -> Line:
        ended = wording.ago(instant(each["ended_at"]), now)
        return lines.beside(
            [
                (f"{glyph} ", role),
                (fit(each["rollout"], min(MOST_NAME, max(LEAST_NAME, width // 3))), ""),
                (f" {each['state']:<10}", "dim"),
                (f"{wording.percent(each['percent'])}  by {each['submitted_by']}", "dim"),
            ],
            [(f"{ended} ", "dim")],
            width,
        )

    return draw
