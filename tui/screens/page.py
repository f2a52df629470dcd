"""The frame of every page: top line, alerts, body and key line.

A page draws the model and never changes it.  The app calls `update_view` at most
once per frame.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from textual.app import ComposeResult
from textual.containers import Container
from textual.css.query import NoMatches
from textual.screen import Screen
from textual.widget import Widget

from rolloutd.control.rollouts import wire
from rolloutd.texts import event_text, formats
from tui.console import ConsoleApp
from tui.formatting import formatting
from tui.formatting.lines import (
    UNCUT_WIDTH,
    Line,
    fit_name,
    justify,
    line_text,
    line_width,
    sanitize,
    wrap_text,
)
from tui.operations import actions
from tui.operations.actions import Action
from tui.operations.confirm import Selection
from tui.state import permissions
from tui.state.values import NodeState, RolloutState, parse_timestamp
from tui.widgets import summaries
from tui.widgets.summaries import PendingGate
from tui.widgets.virtual_list import Banner, BlankWidget, LineWidget, VirtualList

WIDE_LAYOUT_WIDTH = 132
"""Cells from which the two panes of a page stand side by side."""

MIN_ID_WIDTH = 12
"""Cells of a rollout's id after its gate."""

MAX_VOTES_SHOWN = 3
"""Votes shown with their gate; the gate's own page lists all."""

GATE_GLYPHS = {
    "open": ("✓", "ok"),
    "waiting": ("◆", "accent"),
    "rejected": ("✗", "bad"),
    "in-doubt": ("?", "bad"),
}

_COLUMN_GAP = re.compile(r" {8,}")

TABS = ("fleet", "gates", "locks", "audit", "teams", "inventory", "verdicts")
"""The pages of the digits, each the name of its action too."""

Item = tuple[str, Callable[[int], Line]]
"""A row: its unique key, empty where the cursor cannot be, and a function that draws it."""

T = TypeVar("T")


class LazyRows(Generic[T]):
    """A row for each of many values, drawn when it is visible."""

    def __init__(
        self, values: Sequence[T], key_of: Callable[[T], str], draw_value: Callable[[T, int], Line]
    ) -> None:
        self._values = values
        self._key_of = key_of
        self._draw_value = draw_value

    def __len__(self) -> int:
        return len(self._values)

    def key(self, row: int) -> str:
        return self._key_of(self._values[row])

    def draw(self, row: int, width: int) -> Line:
        return self._draw_value(self._values[row], width)


def item_rows(items: Iterable[Item]) -> LazyRows[Item]:
    """Return rows that are few enough to be built in advance."""
    return LazyRows(list(items), lambda item: item[0], lambda item, width: item[1](width))


def static_line(line: Line) -> Callable[[int], Line]:
    """Return a function that draws the same line in every width."""
    return lambda _width: line


def note_row(text: str) -> Item:
    """Return a dim row without a cursor."""
    return "", static_line([(f"  {text}", "dim")])


@dataclass(frozen=True, slots=True)
class _Heading:
    """Draws the line above a section."""

    text: str
    note: str

    def __call__(self, width: int) -> Line:
        line: Line = [(f" {self.text} ", "head"), (f"{self.note} " if self.note else "", "dim")]
        return [*line, ("─" * max(0, width - line_width(line)), "faint")]


def heading(text: str, note: str = "") -> Item:
    return "", _Heading(text, note)


def filter_items(items: Iterable[Item], wanted: str) -> list[Item]:
    """Return the headings, and the rows that match together with the rows below them that have no key."""
    blocks: list[list[Item]] = []
    for item in items:
        key, draw = item
        if key or isinstance(draw, _Heading) or not blocks or isinstance(blocks[-1][-1][1], _Heading):
            blocks.append([item])
        else:
            blocks[-1].append(item)
    texts = (" ".join(line_text(draw(UNCUT_WIDTH)) for _, draw in block) for block in blocks)
    shown = zip(blocks, texts, strict=True)
    return [
        item for block, text in shown if not block[0][0] or formatting.matches(text, wanted) for item in block
    ]


class Page(BlankWidget, Screen[None]):
    """A page whose body is one list, unless a subclass composes another.

    Textual calls the handlers of all base classes itself, the subclass's first, so
    no handler calls `super`.
    """

    DEFAULT_CSS = """
    Page { layout: vertical; background: $background; }
    Page > #top { background: $panel; }
    Page > #keys { background: $panel; }
    Page > #body { height: 1fr; }
    """
    screen_name = ""
    initial_focus = "VirtualList"
    filter_label = "show rows that contain"
    """Empty on a page without a filter."""
    shows_entries = False
    """Whether an entry of the stream changes the page before the daemon has responded to it."""
    _is_laid_out = False

    def __init__(self) -> None:
        super().__init__()
        self.filter_text = ""
        self._first_key = self._keys_shown = 0

    @property
    def console(self) -> ConsoleApp:
        return cast("ConsoleApp", self.app)

    @property
    def body(self) -> VirtualList:
        return self.query_one("#body", VirtualList)

    def compose(self) -> ComposeResult:
        yield Banner(self._render_top, id="top")
        yield Banner(self._render_alerts, id="alerts", height=0)
        yield from self.compose_body()
        yield Banner(self._render_keys, id="keys")

    def compose_body(self) -> Iterator[Widget]:
        yield VirtualList(id="body")

    def build_items(self) -> Iterator[Item]:
        """Yield the rows of a page whose body is one list."""
        yield from ()

    def update_body(self) -> None:
        items = self.build_items()
        self.body.set_rows(item_rows(filter_items(items, self.filter_text) if self.filter_text else items))

    def selection(self) -> Selection:
        """Return what the next operation applies to."""
        return Selection()

    def object_under_cursor(self) -> tuple[str, Any] | None:
        """Return a title and a value, or the parts of the path from which the value is fetched."""
        match self.selection():
            case Selection(hold=dict() as hold):
                return f"hold of {hold['node']}", hold
            case Selection(freeze=dict() as freeze):
                return f"freeze of {freeze['scope']}", freeze
            case Selection(rollout=RolloutState() as rollout, node_name=str(node)) if node:
                return node, ("rollouts", rollout.id, "nodes", node)
            case Selection(node_name=str(node)) if node:
                return node, ("inventory", node)
            case Selection(rollout=RolloutState() as rollout):
                return rollout.id, ("rollouts", rollout.id)
        return None

    def do_copy(self) -> None:
        """Copy the name of what is under the cursor."""
        selection = self.selection()
        name = selection.node_name or (selection.rollout.id if selection.rollout is not None else "")
        if name:
            self.app.copy_to_clipboard(name)
        self.console.show_message(
            f"copied {name} to the terminal's clipboard" if name else "copy: nothing here has a name"
        )

    def breadcrumb(self) -> str:
        return ""

    def full_text(self) -> tuple[str, str] | None:
        """Return the title and the uncut text of the row under the cursor."""
        focused = self.focused
        if not isinstance(focused, VirtualList) or focused.rows is None or not focused.cursor_key:
            return None
        text = line_text(focused.rows.draw(focused.cursor, UNCUT_WIDTH))
        return "full line", "\n".join(part.strip() for part in _COLUMN_GAP.split(text) if part.strip())

    def do_find(self) -> None:
        if self.filter_label:
            prompt = f"{self.filter_label} (! excludes)"
            self.console.prompt_text(prompt, self.filter_text, self.set_filter, is_live=True)
        else:
            self.console.show_message("find: this page has no filter")

    def set_filter(self, text: str) -> None:
        self.filter_text = text
        self.update_view()
        # The cursor's row may be far away now, and the next key moves from there.
        self.body.show_cursor(at_top=bool(text))

    # -- updates

    def on_mount(self) -> None:
        self.query(self.initial_focus).first().focus()
        self._is_laid_out = True
        self.update_view()

    def on_screen_resume(self) -> None:
        self.update_view()

    def update_view(self) -> None:
        # Textual sends the first resize before the widgets of the page are mounted.
        if not self._is_laid_out or not self.size.width:
            return
        if self.console.is_stale != self.has_class("-stale"):
            self.set_class(self.console.is_stale, "-stale")
            for widget in self.query(LineWidget):
                widget.refresh()
        # A response may arrive while Textual removes the page and its widgets.
        with suppress(NoMatches):
            self.update_body()
            for name in ("top", "alerts", "keys"):
                self.query_one(f"#{name}", Banner).update_lines()

    def on_virtual_list_cursor_moved(self) -> None:
        # The key line depends on what the cursor is on.
        self.update_view()

    def on_virtual_list_row_opened(self) -> None:
        self.console.action_perform("open")

    def on_resize(self) -> None:
        # The widgets get their new sizes only with the next layout.
        self.call_after_refresh(self.update_view)

    # -- the frame

    def _render_top(self, width: int) -> Sequence[Line]:
        pending = summaries.pending_gates(self.console.model)
        my_gates = sum(each.needs_my_vote for each in pending)
        crumbs, status = self.breadcrumb(), self.console.status_line(width)
        badge: Line = [(f" {my_gates} for you ", "mine")] if my_gates else []
        # A text or a node keeps the page of the digits that it was opened from.
        below = (each.screen_name for each in reversed(self.app.screen_stack) if isinstance(each, Page))
        current = next((name for name in below if name in TABS), "fleet")
        # A filter hides rows: it must be visible on every page.
        filtered: Line = [(f" /{sanitize(self.filter_text)} ", "tab")] if self.filter_text else []
        place: Line = [(f" {crumbs} " if crumbs else "", "bold"), *filtered]
        # With the names of all pages, with their digits, or with the current page alone, as the width allows.
        shown: tuple[Callable[[int, str], str], ...] = (
            lambda number, name: f" {number} {name} ",
            lambda number, name: f" {number} {name} " if name == current else f" {number}",
            lambda _number, name: f" {name} " if name == current else "",
        )
        for text_of in shown:
            tabs: Line = []
            for number, name in enumerate(TABS, start=1):
                tabs.append((text_of(number, name), f"{'tab' if name == current else 'dim'}@{name}"))
                tabs += badge if name == "gates" else []
            if line_width([*tabs, *place, *status]) < width:
                break
        return [justify([*tabs, *place], status, width)]

    def _render_alerts(self, width: int) -> Sequence[Line]:
        lines = self.console.alerts(width)
        self.query_one("#alerts").display = bool(lines)
        return lines

    def _render_keys(self, width: int) -> Sequence[Line]:
        """Return the messages, and the keys that work here; a click on a key performs its action.

        Not Textual's footer: it mounts a widget for each key again when one changes, which takes 60 ms.
        """
        selection = self.selection()
        shown = [each for each in sorted(actions.ACTIONS, key=_key_rank) if self.screen_name in each.screens]
        keys = [self._render_key(each, selection) for each in shown if each.name != "help"]
        # A user who may only read needs the other keys first.
        keys = sorted(filter(None, keys), key=lambda key: key[0][1].startswith("faint"))
        self._first_key %= len(keys) or 1
        more: Line = [("… ", "dim@more_keys")]
        help_keys: Line = [("?", "key@help"), (" keys ", "dim@help")]
        room = width - line_width([*more, *help_keys]) - 1
        line: Line = [(" ", "")]
        for number, key in enumerate(keys[self._first_key :], start=1):
            if line_width([*line, *key]) > room:
                break
            line += key
            self._keys_shown = number
        cut = more if self._first_key or self._keys_shown < len(keys) else []
        # Above the key line, where a message covers nothing: a toast would hide what the page says.
        messages = self.console.message_lines(width)
        return [*messages, justify(line, [*cut, *help_keys], width)]

    def do_more_keys(self) -> None:
        """Show the keys after those of the key line, or the first ones again."""
        self._first_key += self._keys_shown
        self.update_view()

    def _render_key(self, action: Action, selection: Selection) -> Line:
        operation, model, name = action.operation, self.console.model, action.name
        if operation is not None and operation.unavailable_reason(selection):
            return []
        if (
            operation is not None
            and model.current_user is not None
            and not operation.permission(model, selection).is_allowed
        ):
            return [(f"{action.key_label} {action.title} (not permitted)  ", f"faint@{name}")]
        title = "show all" if name == "back" and self.filter_text else action.title
        return [(action.key_label, f"key@{name}"), (f" {title}  ", f"dim@{name}")]


def _key_rank(action: Action) -> int:
    # The key line is cut at its end: operations must come before the other keys.
    if action.name in ("open", "back"):
        return 0
    return 1 if action.operation is not None else 2


def vote_lines(gate: wire.Gate, limit: int) -> list[Line]:
    """Return the latest votes of a gate, one per line: who, for which team, when, why."""
    shown = gate["votes"][-limit:]
    rest = len(gate["votes"]) - len(shown)
    lines: list[Line] = [[(f"  and {rest} earlier votes", "dim")]] if rest else []
    for vote in shown:
        glyph, role = ("✓", "ok") if vote["yes"] else ("✗", "bad")
        note = " (withdrawn)" if vote["withdrawn"] else "" if vote["counts"] else " (does not count)"
        at = formatting.format_time(parse_timestamp(vote["at"]) or 0.0)
        lines.append(
            [
                (f"  {glyph} ", role if vote["counts"] else "dim"),
                (f"{vote['by']} for {', '.join(vote['teams'])}{note} at {at}: ", ""),
                (sanitize(vote["reason"]), "dim"),
            ]
        )
    return lines


class RolloutScreen(Page):
    """A page about one rollout; it keeps the rollout's nodes in the model."""

    def __init__(self, rollout: str) -> None:
        super().__init__()
        self.rollout_id = rollout

    @property
    def rollout(self) -> RolloutState | None:
        return self.console.model.rollouts.get(self.rollout_id)

    def on_mount(self) -> None:
        self.console.track_nodes(self.rollout_id)

    def breadcrumb(self) -> str:
        return f"▸ {self.rollout_id}"

    def absence_note(self) -> str:
        """Return why the page shows no rollout."""
        if self.rollout_id in self.console.model.missing_rollouts:
            return f"{self.rollout_id} was deleted; the audit keeps its entries (4)"
        return "waiting for the daemon"

    def find_node(self, name: str) -> NodeState | None:
        rollout = self.rollout
        return (rollout.nodes or {}).get(name) if rollout is not None else None


class PaneContainer(BlankWidget, Container):
    """The panes of a page."""


class TwoPanes(Page):
    DEFAULT_CSS = """
    TwoPanes > #body { layout: vertical; }
    TwoPanes.-wide > #body { layout: horizontal; }
    TwoPanes.-wide > #body > * { height: 100%; }
    TwoPanes.-wide > #body > :first-child { margin-right: 1; }
    """
    panes = ("", "")
    """The ids of the lists that take the focus in turn."""

    def on_resize(self) -> None:
        self.set_class(self.size.width >= WIDE_LAYOUT_WIDTH, "-wide")

    def do_next_pane(self) -> None:
        first, second = self.panes
        self.query_one(f"#{second if self.query_one(f'#{first}').has_focus else first}").focus()


def find_pending_gate(page: Page, rollout: RolloutState | None) -> PendingGate | None:
    """Return a pending gate of the rollout, preferably one that needs the user's vote."""
    pending = [] if rollout is None else summaries.pending_gates(page.console.model)
    return next((each for each in pending if rollout is not None and each.rollout.id == rollout.id), None)


def gate_lines(page: Page, pending: PendingGate, width: int) -> list[Line]:
    """Return a gate: its name, its missing votes, those it has, and who may vote."""
    gate = pending.gate
    mark, role = GATE_GLYPHS[gate["state"]]
    glyph: Line = [(f"{mark} ", role)]
    badge: Line = [(" yours ", "mine")] if pending.needs_my_vote else []
    label = event_text.gate_label(gate)
    digest = formats.short_hash(pending.rollout.status["digest"])
    room = width - line_width([(label, ""), (digest, ""), *badge]) - len("◆  of     ")
    rollout = fit_name(pending.rollout.id, max(MIN_ID_WIDTH, room), pad=False)
    title: Line = [(label, "bold"), (f" of {rollout} ", "")]
    if gate["state"] == "open":
        missing = "open"
    elif gate["state"] in ("rejected", "in-doubt"):
        missing = f"{gate['state'].replace('-', ' ')}: {gate['missing']}"
    else:
        missing = f"votes missing: {summaries.missing_votes(pending)}"
    lines = [justify([*glyph, *title, *badge], [(f" {digest} ", "digest")], width)]
    lines += [[("  ", ""), (text, "dim")] for text in wrap_text(missing, width - 4, 2)]
    if (prepared := gate["prepared"]) is not None:
        total = formats.pluralize(prepared["total"], "node")
        lines.append([("  ", ""), (f"{prepared['done']:,} of the {total} after it prepared", "dim")])
    lines += vote_lines(gate, MAX_VOTES_SHOWN)
    if not pending.needs_my_vote and gate["state"] != "open":
        permission = permissions.vote_permission(page.console.model, pending.rollout, gate)
        if not permission.is_allowed:
            lines.append([("  ", ""), (permission.reason, "faint")])
    return lines
