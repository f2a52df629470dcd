"""What every screen has: a line on top, alerts where there are any, and the line of keys.

A page shows the model and never changes it.  It is told when something has
changed, at most once per frame, and draws what it shows of that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import cast

from textual.app import ComposeResult
from textual.css.query import NoMatches
from textual.screen import Screen
from textual.widget import Widget

from rolloutd.control import sentences
from tui import actions, glance, rights, wording
from tui.actions import Action
from tui.desk import Desk
from tui.glance import Waiting
from tui.lines import Line, beside, plain, width_of, wrapped
from tui.listing import Banner, Listing
from tui.question import Subject
from tui.values import RolloutState

NARROW = 110
"""Cells below which the tabs give way to where we are."""

WHOLE = 4_000
"""Cells in which no line is cut: more than any reason, failure or line of a log has."""

_GAP = re.compile(r" {8,}")

TABS = ("fleet", "gates", "locks", "audit", "teams")


Item = tuple[str, Callable[[int], Line]]
"""A row: what tells it from every other one, empty where the cursor cannot be, and how to draw it."""


class Items:
    """Rows that are few enough to be listed."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def key(self, row: int) -> str:
        """Return what tells the row from every other one."""
        return self._items[row][0]

    def draw(self, row: int, width: int) -> Sequence[Line]:
        """Return the row's line."""
        return (self._items[row][1](width),)


def fixed(line: Line) -> Callable[[int], Line]:
    """Return how to draw a line that is the same in every width."""
    return lambda _width: line


def heading(text: str, note: str = "") -> Callable[[int], Line]:
    """Return how to draw a heading: its text, and a rule to the right edge."""

    def draw(width: int) -> Line:
        line: Line = [(f" {text} ", "head")]
        if note:
            line.append((f"{note} ", "dim"))
        return [*line, ("─" * max(0, width - width_of(line)), "faint")]

    return draw


class Page(Screen[None]):
    """A screen of the console: one list of items, where a page does not say otherwise.

    Textual calls a handler in each class that has it, a page's own first: none calls its base's.
    """

    DEFAULT_CSS = """
    Page { layout: vertical; background: $background; }
    Page > #top { dock: top; background: $panel; }
    Page > #keys { dock: bottom; background: $panel; }
    Page > #body { height: 1fr; }
    """
    place = ""
    begins_at = "Listing"
    """What has the keys at first, as a selector."""
    _is_laid_out = False

    @property
    def console(self) -> Desk:
        """The app, as pages know it."""
        return cast("Desk", self.app)

    def compose(self) -> ComposeResult:
        """Frame the body."""
        yield Banner(self._top, id="top")
        yield Banner(self._alerts, id="alerts", lines=0)
        yield from self.body()
        yield Banner(self._keys, id="keys")

    def body(self) -> Iterator[Widget]:
        """Yield what stands between the lines of the frame."""
        yield Listing(id="body")

    def items(self) -> Iterator[Item]:
        """Yield the rows of a page that is one list."""
        yield from ()

    def redraw(self) -> None:
        """Show what is different in the body."""
        self.query_one("#body", Listing).show(Items(list(self.items())))

    def subject(self) -> Subject:
        """Return what the cursor is on."""
        return Subject()

    def crumbs(self) -> str:
        """Return where this is, below its tab."""
        return ""

    def whole(self) -> tuple[str, str] | None:
        """Return the title and the text of what a line says that may be longer than the screen."""
        listing = self.focused
        if not isinstance(listing, Listing) or listing.rows is None or not listing.cursor_key:
            return None
        said = " ".join(plain(line) for line in listing.rows.draw(listing.cursor, WHOLE))
        return "the whole line", "\n".join(part.strip() for part in _GAP.split(said) if part.strip())

    # -- what it is told

    def on_mount(self) -> None:
        """Draw for the first time."""
        self.query(self.begins_at).first().focus()
        self._is_laid_out = True
        self.changed()

    def on_screen_resume(self) -> None:
        """Draw what happened meanwhile."""
        self.changed()

    def changed(self) -> None:
        """Draw what is different."""
        if not self._is_laid_out or not self.size.width:
            return
        # An answer may come while the page is being taken down: then there is nothing left to draw it on.
        with suppress(NoMatches):
            self.redraw()
            for name in ("top", "alerts", "keys"):
                self.query_one(f"#{name}", Banner).again()

    def on_listing_moved(self, message: Listing.Moved) -> None:
        """What can be done depends on where the cursor is."""
        self.changed()

    def on_listing_opened(self, message: Listing.Opened) -> None:
        """A click that opens is the key that opens."""
        self.console.act("open")

    def on_resize(self) -> None:
        """Draw for the new size."""
        self.call_after_refresh(self.changed)

    # -- the frame

    def _top(self, width: int) -> Sequence[Line]:
        model = self.console.model
        mine = glance.mine(model)
        crumbs = self.crumbs()
        if crumbs and width < NARROW:
            badge: Line = [(" ", ""), (f" {mine} for you ", "mine")] if mine else []
            return [
                beside(
                    [(" fleet ", "tab"), (f" {crumbs}", "bold"), *badge], self.console.standing(width), width
                )
            ]
        line: Line = []
        for number, name in enumerate(TABS, start=1):
            here = name == self.place or (name == "fleet" and self.place in ("rollout", "nodes", "node"))
            line.append((f" {number} {name} ", "tab" if here else "dim"))
            if name == "gates" and mine:
                line.append((f" {mine} for you ", "mine"))
        if crumbs:
            line.append((f"  {crumbs}", "bold"))
        return [beside(line, self.console.standing(width), width)]

    def _alerts(self, width: int) -> Sequence[Line]:
        lines = self.console.alerts(width)
        self.query_one("#alerts").display = bool(lines)
        return lines

    def _keys(self, width: int) -> Sequence[Line]:
        subject = self.subject()
        here = sorted((each for each in actions.ACTIONS if self.place in each.places), key=_rank)
        shown = [self._key(each, subject) for each in here]
        line: Line = [(" ", "")]
        for each in [part for part in shown if part]:
            if width_of(line) + width_of(each) > width - 8:
                break
            line += each
        ends: Line = [("?", "key"), (" keys ", "dim")]
        return [beside(line, ends, width)]

    def _key(self, action: Action, subject: Subject) -> Line:
        if action.name == "help":
            return []
        if action.deed is not None:
            if action.deed.lacks(subject):
                return []
            model = self.console.model
            if model.me is not None and not action.deed.may(model, subject).may:
                return [
                    (action.shown_key, "faint"),
                    (f" {action.title}", "faint"),
                    (" (not yours)  ", "faint"),
                ]
        return [(action.shown_key, "key"), (f" {action.title}  ", "dim")]


def _rank(action: Action) -> int:
    """Return where a key stands on the key line: what can be decided here must not be cut off at its end."""
    if action.name in ("open", "back"):
        return 0
    return 1 if action.deed is not None else 2


def gate_of(page: Page, rollout: RolloutState | None) -> Waiting | None:
    """Return the gate of a rollout that waits, one that waits for us before others."""
    if rollout is None:
        return None
    here = [each for each in glance.waiting(page.console.model) if each.rollout.id == rollout.id]
    return here[0] if here else None


def _wants(waiting: Waiting) -> str:
    if waiting.gate["state"] == "rejected":
        return waiting.gate["missing"] or "somebody said no"
    return f"votes missing: {glance.missing(waiting)}"


def gate_lines(page: Page, waiting: Waiting, width: int) -> list[Line]:
    """Return a gate that waits: what it is, what is missing and whose turn it is."""
    model, gate = page.console.model, waiting.gate
    for_me: Line = [(" yours ", "mine")] if waiting.for_me else []
    head: Line = [
        ("◆ " if gate["state"] == "waiting" else "✗ ", "accent" if gate["state"] == "waiting" else "bad"),
        (sentences.gate_name(gate), "bold"),
        (f" of {waiting.rollout.id} ", ""),
        *for_me,
    ]
    lines = [beside(head, [(wording.short(waiting.rollout.status["digest"]), "digest"), (" ", "")], width)]
    lines += [[("  ", ""), (text, "dim")] for text in wrapped(_wants(waiting), width - 4, 2)]
    if not waiting.for_me:
        verdict = rights.voting(model, waiting.rollout, gate)
        if not verdict.may:
            lines.append([("  ", ""), (verdict.why, "faint")])
    return lines
