"""Pages of changes: nodes and plans with the version that each node has, and the changes of one plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial, partialmethod
from typing import Any

from rich.cells import cell_len
from textual.widget import Widget

from machines.model.node import natural_sort_key
from rolloutd.control.fleet import wire_fleet
from rolloutd.control.fleet.version_table import NEXT_STEPS, Cell, VersionTable, version_table
from rolloutd.texts import formats
from tui.formatting import lines
from tui.formatting.glyphs import CHANGE_GLYPHS
from tui.formatting.lines import UNCUT_WIDTH, Line, column, fit
from tui.screens.fetched import FetchedPage
from tui.screens.page import Item, heading, note_row, static_line
from tui.widgets.virtual_list import Banner, VirtualList

MIN_NAME_WIDTH, MAX_NAME_WIDTH = 6, 40

MIN_COLUMN_WIDTH = 7
"""Cells of a plan's column: a glyph, the beginning of a version, and a blank."""

MORE_WIDTH = 11
"""Cells for the number of plans without a column."""

MIN_WIDTH_OF_STEP = 132
"""Cells in which what to do about a cell stands on one line."""

FULL_GAP = " " * 8
"""Between the cells of a row in full, which the dialog then shows as lines."""

BY_URGENCY, BY_NAME = "most urgent first", "by name"

_URGENCY: Mapping[str, int] = {state: rank for rank, state in enumerate(NEXT_STEPS)}


class ChangesPage(FetchedPage):
    """The latest change of each plan, and the version that each node has."""

    screen_name = "changes"
    refresh_interval_s = 30.0
    """The matrix covers the whole fleet and all rollouts, so it is not fetched with each event."""

    def __init__(self) -> None:
        super().__init__("changes")
        self.order = BY_URGENCY
        self._turned: Any = None
        self._table = VersionTable()
        self._states: Mapping[wire_fleet.ChangeState, int] = {}
        self._names: list[str] = []
        self._name_width = 0
        self._widths: Sequence[int] = ()

    def compose_body(self) -> Iterator[Widget]:
        yield Banner(self._render_head, id="head")
        yield VirtualList(id="body")

    def update_body(self) -> None:
        super().update_body()
        self.query_one("#head", Banner).update_lines()

    def found_items(self, found: wire_fleet.Changes) -> Iterator[Item]:
        if self._turned is not found:
            self._turn(found)
        plans = self._table.latest
        if not plans:
            yield note_row("no rollout has been submitted")
            return
        yield heading("PLANS")
        name_width = lines.column_width(plans, MIN_NAME_WIDTH, MAX_NAME_WIDTH) + 2
        for plan, change in plans.items():
            yield f"plan:{plan}", partial(_plan_row, change, name_width)
        yield heading("NODES", f"{len(self._names):,}, {self.order}")
        for node in self._names:
            yield f"node:{node}", partial(self._node_row, node)

    def _turn(self, found: wire_fleet.Changes) -> None:
        """Turn the answer by node: once, because a large fleet takes a tenth of a second."""
        self._turned = found
        self._table = version_table(found["changes"])
        self._states = self._table.states()
        rows = self._table.rows
        self._names = sorted(rows, key=natural_sort_key)
        if self.order == BY_URGENCY:
            self._names.sort(key=lambda node: _urgency(rows[node]))
        self._name_width = lines.column_width(rows, MIN_NAME_WIDTH, MAX_NAME_WIDTH) + 2
        versions = {plan: {each["version"]} for plan, each in self._table.latest.items()}
        for row in rows.values():
            for plan, cell in row.items():
                versions[plan].add(cell.version)
        # With a glyph, a blank before the version, and one behind the column.
        self._widths = [
            max(cell_len(plan) + 1, lines.column_width(names, MIN_COLUMN_WIDTH, MAX_NAME_WIDTH) + 3)
            for plan, names in versions.items()
        ]

    def _render_head(self, width: int) -> Sequence[Line]:
        if not self._table.latest:
            return [[]]
        counts: Line = [(" ", "")]
        for state, number in self._states.items():
            glyph, role = CHANGE_GLYPHS[state]
            counts += [(glyph, role), (f" {number:,} {state}  ", "dim")]
        # The list has a column for the cursor's mark.
        name_width, widths = self._layout(width - 1)
        shown = list(zip(self._table.latest.items(), widths, strict=False))
        plans = "".join(fit(plan, size - 1) + " " for (plan, _), size in shown)
        versions = "".join(_version_heading(each["version"], size - 1) + " " for (_, each), size in shown)
        more = len(self._table.latest) - len(shown)
        # Always as many lines: the rows must not move with the cursor.
        height = 1 if width >= MIN_WIDTH_OF_STEP else 2
        step = [*lines.wrap_text(self._next_step(), width - 2, height), ""][:height]
        return [
            counts,
            *([(f" {each}", "")] for each in step),
            [(" " * (name_width + 1) + plans, "head"), (f"… {more} more" if more else "", "dim")],
            [(fit("  node", name_width + 1), "head"), (versions, "dim")],
        ]

    def _layout(self, width: int) -> tuple[int, Sequence[int]]:
        """Return the width of the names, and those of as many plans as fit, cut alike."""
        names, widths = min(self._name_width, max(MIN_NAME_WIDTH, width // 3)), list(self._widths)
        room = width - names - 1
        while widths and sum(widths) > room:
            widest = max(widths)
            if widest <= MIN_COLUMN_WIDTH:
                widths.pop()
                room = width - names - MORE_WIDTH
            else:
                widths[widths.index(widest)] = widest - 1
        return names, widths

    def _node_row(self, node: str, width: int) -> Line:
        row = self._table.rows[node]
        if width >= UNCUT_WIDTH:
            cells = (f"{plan}: {self._describe(plan, cell)}" for plan, cell in row.items())
            return [(FULL_GAP.join((node, *cells)), "")]
        names, widths = self._layout(width)
        line: Line = [(" ", ""), (column(node, names - 1, width), "bold")]
        for plan, size in zip(self._table.latest, widths, strict=False):
            line += _cell_spans(row.get(plan), size)
        return line

    def _describe(self, plan: str, cell: Cell) -> str:
        return cell.describe(self._table.latest[plan])

    def _next_step(self) -> str:
        """Return what to do about the most urgent cell of the row under the cursor."""
        kind, _, node = self.body.cursor_key.partition(":")
        row = self._table.rows.get(node, {}) if kind == "node" else {}
        if not row:
            return "Enter on a plan shows its groups, and on a node its steps"
        plan, cell = min(row.items(), key=lambda each: _URGENCY[each[1].state])
        step = NEXT_STEPS[cell.state].replace("ROLLOUT", cell.change["rollouts"][0]).replace("NODE", node)
        return f"{node}, {plan} {self._describe(plan, cell)}: {step}"

    def full_text(self) -> tuple[str, str] | None:
        found = super().full_text()
        if found is None or not self.body.cursor_key.startswith("node:"):
            return found
        row = self._table.rows[self.body.cursor_key.removeprefix("node:")]
        steps = dict.fromkeys(cell.state for cell in row.values() if cell.state != "done")
        return found[0], "\n".join((found[1], *(f"{state}: {NEXT_STEPS[state]}" for state in steps)))

    def do_sort(self) -> None:
        self._sort(BY_NAME if self.order == BY_URGENCY else BY_URGENCY)

    def _sort(self, order: str) -> None:
        self.order, self._turned = order, None
        self.update_view()
        self.body.show_cursor(at_top=True)

    do_sort_by_name = partialmethod(_sort, BY_NAME)

    def do_open(self) -> None:
        kind, _, name = self.body.cursor_key.partition(":")
        if kind == "plan":
            self.console.open_page("change", name)
        elif row := self._table.rows.get(name):
            cell = min(row.values(), key=lambda each: _URGENCY[each.state])
            self.console.open_page("node", cell.change["rollouts"][0], name)


def _urgency(row: Mapping[str, Cell]) -> int:
    return min((_URGENCY[cell.state] for cell in row.values()), default=len(_URGENCY))


def _version_heading(version: str, size: int) -> str:
    """Return a version above those of the cells, which stand behind a glyph if there is room."""
    return fit(f"  {version}" if cell_len(version) + 2 <= size else version, size)


def _cell_spans(cell: Cell | None, size: int) -> Line:
    """Return a cell: its state, and the version that the node has, without a blank where room is short."""
    if cell is None:
        return [(fit("-", size), "faint")]
    glyph, role = CHANGE_GLYPHS[cell.state]
    gap = " " if lines.line_width([(f"{glyph} {cell.version} ", "")]) <= size else ""
    return [
        (glyph, role),
        (fit(f"{gap}{cell.version}", size - 2) + " ", "" if cell.state == "done" else role),
    ]


def _plan_row(change: wire_fleet.Change, name_width: int, width: int) -> Line:
    line: Line = [("  ", ""), (column(change["plan"], name_width, width), "bold")]
    line.append((f"{formats.format_percent(change['percent']):>5}  ", ""))
    line.append((f"{change['version']}  ", "digest"))
    return line + _counts(change)


def _counts(change: wire_fleet.Change) -> Line:
    return [
        (f"{number:,} {state}  ", CHANGE_GLYPHS.get(state, ("", "dim"))[1])
        for state, number in change["counts"].items()
    ]


class ChangePage(FetchedPage):
    """The changes of one plan, the latest first: with their groups, and the nodes that need a person."""

    screen_name = "change"
    refresh_interval_s = ChangesPage.refresh_interval_s

    def __init__(self, plan: str) -> None:
        super().__init__("changes", plan=plan)
        self.plan = plan

    def breadcrumb(self) -> str:
        return f"▸ changes ▸ {self.plan}"

    def found_items(self, found: wire_fleet.Changes) -> Iterator[Item]:
        for change in found["changes"]:
            yield from _change_items(change)


def _change_items(change: wire_fleet.Change) -> Iterator[Item]:
    key = change["change"]
    yield heading(change["version"], formats.format_percent(change["percent"]))
    yield f"{key} counts", static_line([("  ", ""), *_counts(change)])
    yield f"{key} pin", static_line([("  pin ", "dim"), (change["pin"], "digest")])
    rollouts = f"  change {formats.short_hash(key)}, {', '.join(change['rollouts'])}"
    yield f"{key} rollouts", static_line([(rollouts, "dim")])
    for group in change["groups"]:
        done = f"{group['done']}/{group['total']}"
        figures: Line = [(f"{formats.format_percent(group['percent']):>5}  ", ""), (done, "dim")]
        yield f"{key} {group['group']}", partial(_change_row, group["group"], "bold", figures)
    for state, step in NEXT_STEPS.items():
        names = [node["node"] for node in change["nodes"] if node["state"] == state]
        if names and state not in ("done", "pending"):
            text = f"{formats.pluralize(len(names), 'node')}: {', '.join(names)}"
            yield f"{key} {state}", partial(_change_row, state, CHANGE_GLYPHS[state][1], [(text, "")])
            yield "", static_line([(f"    {step}", "dim")])


def _change_row(name: str, role: str, rest: Line, width: int) -> Line:
    return [("  ", ""), (column(name, 33, width), role), *rest]
