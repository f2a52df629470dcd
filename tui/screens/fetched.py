"""Pages of one resource that is fetched for them: comparison with the canaries, preparation, handover."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from rolloutd.control import response_text
from rolloutd.control.audit import wire_audit
from rolloutd.control.fleet import wire_fleet
from rolloutd.control.nodes import wire_nodes
from rolloutd.texts import event_text, formats
from tui.formatting import formatting, lines
from tui.formatting.glyphs import PHASE_GLYPHS
from tui.formatting.lines import Line, column, fit, shorten
from tui.operations.confirm import Selection
from tui.screens.page import TABS, Item, Page, heading, note_row, static_line
from tui.state.values import parse_timestamp
from tui.widgets import summaries


class FetchedPage(Page):
    """A page of one resource, which the page fetches itself: the model does not keep it."""

    refresh_interval_s: float | None = None
    """Between two fetches; without it the page stays as it is while the user reads."""

    def __init__(self, *path: str, **query: str) -> None:
        super().__init__()
        self._path, self._query = path, query
        self._found: Any = None
        self._error = ""

    def on_mount(self) -> None:
        self._start_fetch()
        if self.refresh_interval_s is not None:
            self.set_interval(self.refresh_interval_s, self._start_fetch)

    def _start_fetch(self) -> None:
        # While the daemon is away the last response stays; without one, the error is shown.
        if self._found is None or not self.console.is_stale:
            self.run_worker(self._fetch(), group="page", exclusive=True)

    async def _fetch(self) -> None:
        response = await self.console.fetch_path(*self._path, **self._query)
        self._found = response.result or self._found
        self._error = str(response.error or response.unreachable or "")
        self.update_view()

    def breadcrumb(self) -> str:
        return "" if self.screen_name in TABS else f"▸ {self.screen_name}"

    def build_items(self) -> Iterator[Item]:
        if self._found is None:
            yield note_row(lines.sanitize(self._error) or "loading")
        else:
            yield from self.found_items(self._found)

    def found_items(self, found: Any) -> Iterator[Item]:
        raise NotImplementedError


class RolloutResourcePage(FetchedPage):
    """A page of one resource of a rollout; the keys of its rows begin with the name of a node."""

    resource = ""

    def __init__(self, rollout: str) -> None:
        super().__init__("rollouts", rollout, self.resource)
        self.rollout_id = rollout

    def breadcrumb(self) -> str:
        return f"▸ {self.rollout_id} ▸ {self.screen_name}"

    def do_open(self) -> None:
        if node := self.body.cursor_key.partition(":")[0]:
            self.console.open_page("node", self.rollout_id, node)


class ComparisonPage(RolloutResourcePage):
    """The nodes of a rollout against its canaries: times and changed tasks, outliers first."""

    screen_name = resource = "comparison"
    refresh_interval_s = 5.0
    """The times of nodes in flight grow."""

    def found_items(self, found: wire_nodes.Comparison) -> Iterator[Item]:
        outliers = sum(bool(response_text.describe_outlier(each)) for each in found["nodes"])
        count = formats.pluralize(outliers, "outlier") if found["canaries"] else ""
        yield heading("IN FLIGHT AND CHANGED", count)
        names = _name_width([*found["nodes"], *found["canaries"]])
        for each in found["nodes"]:
            yield _node_row(each, names)
        if not found["nodes"]:
            yield note_row("no other node is in flight or changed")
        is_empty = not found["canaries"]
        yield heading("CANARIES", "" if is_empty else response_text.describe_canaries(found))
        if is_empty:
            yield note_row(response_text.describe_canaries(found))
        for each in found["canaries"]:
            yield _node_row(each, names)
        if found["omitted"]:
            yield note_row(f"{formats.pluralize(found['omitted'], 'more node')} not compared")


def _name_width(rows: Sequence[wire_nodes.ComparedNode] | Sequence[wire_nodes.Preparation]) -> int:
    return lines.column_width(each["node"] for each in rows) + 2


def _node_row(node: wire_nodes.ComparedNode, name_width: int) -> Item:
    glyph, role = PHASE_GLYPHS.get(node["phase"], ("?", "warn"))
    outlier = response_text.describe_outlier(node)
    tasks = node["changed_tasks"]
    changed = "no log" if tasks is None else f"{len(tasks)} changed"
    rest: Line = [
        (f"{formatting.format_clock(node['seconds']):>8}  ", "warn" if node["time"] != "usual" else ""),
        (fit(changed, 12), "dim"),
        (lines.sanitize(outlier), "warn"),
    ]
    mark: Line = [(f" {'!' if outlier else ' '} ", "warn"), (f"{glyph} ", role)]
    return node["node"], lambda width: [*mark, (column(node["node"], name_width, width), "bold"), *rest]


MIN_WIDTH_OF_TEXT = 110
"""Cells of a row that has a stage's failure after its figures; below it stands in a row of its own."""

PREPARATION_ROLES = {
    "failed": "bad",
    "disturbed": "bad",
    "running": "run",
    "waiting": "pending",
    "done": "ok",
    "skipped": "dim",
}
"""Roles of the states, the most urgent state first."""


class PreparationPage(RolloutResourcePage):
    """The prepare stages of a rollout on each of its nodes; those that failed come first."""

    screen_name, resource = "preparation", "prepare"
    refresh_interval_s = 2.0
    """A stage of a large artifact takes minutes."""

    def selection(self) -> Selection:
        rollout = self.console.model.rollouts.get(self.rollout_id)
        return Selection(rollout=rollout, node_name=self.body.cursor_key.partition(":")[0])

    def found_items(self, found: wire_nodes.Preparations) -> Iterator[Item]:
        states = list(PREPARATION_ROLES)
        rows = sorted(found["preparations"], key=lambda each: states.index(each["state"]))
        counts = Counter(each["state"] for each in rows)
        yield heading("PREPARATION", ", ".join(f"{number} {state}" for state, number in counts.items()))
        names = _name_width(rows)
        is_wide = self.body.size.width >= MIN_WIDTH_OF_TEXT
        for each in rows:
            text: Line = [(lines.sanitize(each["text"]), "bad" if _needs_people(each) else "dim")]
            after = text if is_wide or not _needs_people(each) else []
            yield f"{each['node']}:{each['stage']}", partial(_preparation_line, each, names, after)
            if not after and each["text"]:
                yield "", static_line([("      ", ""), *text])
        if not rows:
            yield note_row("the plan has no prepare stages")


def _needs_people(each: wire_nodes.Preparation) -> bool:
    return PREPARATION_ROLES[each["state"]] == "bad"


def _preparation_line(each: wire_nodes.Preparation, name_width: int, text: Line, width: int) -> Line:
    role = PREPARATION_ROLES[each["state"]]
    took = formatting.format_clock(each["seconds"]) if each["attempt"] else ""
    again = f"attempt {each['attempt']}" if each["attempt"] > 1 else ""
    return [
        ("  ", ""),
        (column(each["node"], name_width, width), "bold"),
        (column(f"{each['stage']}{' (forced)' if each['forced'] else ''}", 20, width), ""),
        (fit(each["state"], 11), role),
        (f"{took:>7}  {again}  ", "dim"),
        *text,
    ]


class HandoverPage(FetchedPage):
    """What changed since the user last looked, who decided, and what waits."""

    screen_name = "handover"

    def __init__(self, since: str) -> None:
        super().__init__("handover", since=since)

    def found_items(self, found: wire_fleet.Handover) -> Iterator[Item]:
        since = parse_timestamp(found["since"]) or 0.0
        age = formatting.format_age(since, self.console.now())
        waiting = [each for each in found["rollouts"] if response_text.describe_wait(each)]
        yield heading("WAITS", "nothing" if not waiting else str(len(waiting)))
        for each in waiting:
            yield _rollout_row(f"wait:{each['rollout']}", each, response_text.describe_wait(each))
        yield heading("CHANGED", f"since {formatting.format_datetime(since)}, {age}")
        for each in found["rollouts"]:
            yield _rollout_row(f"change:{each['rollout']}", each, response_text.describe_change(each))
        if not found["rollouts"]:
            yield note_row("no rollout is live, and none was closed since then")
        yield heading("DECISIONS", str(len(found["decisions"])) if found["decisions"] else "none")
        for decided in reversed(found["decisions"]):
            yield _decision_row(decided)
        if found["omitted"]:
            yield note_row("older ones are left out; 4 shows the audit")

    def do_open(self) -> None:
        _, _, rollout = self.body.cursor_key.partition(":")
        if rollout:
            self.console.open_page("rollout", rollout)


def _rollout_row(key: str, each: wire_fleet.HandoverRollout, text: str) -> Item:
    skipped = each["reason"] is not None and each["reason"]["code"] == "done-with-exceptions"
    glyph, role = summaries.state_glyph(each["state"], int(skipped))
    percent = formats.format_percent(each["percent"])

    def draw(width: int) -> Line:
        name = column(each["rollout"], lines.MAX_COLUMN_WIDTH, width)
        line: Line = [(f"  {glyph} ", role), (name, "bold"), (f"{percent:>5}  ", "dim")]
        return [*line, (shorten(lines.sanitize(text), width - lines.line_width(line)), "")]

    return key, draw


def _decision_row(decided: wire_audit.AuditEntry) -> Item:
    entry = decided["entry"]
    at = formatting.format_time(parse_timestamp(decided["at"]) or 0.0)
    what, role = lines.sanitize(event_text.describe_entry(entry)), formatting.entry_role(entry)

    def draw(width: int) -> Line:
        line: Line = [(f"  {at}  ", "dim"), (column(event_text.actor_name(entry), 12, width), "bold")]
        return [*line, (shorten(what, width - lines.line_width(line)), role)]

    return f"entry:{entry['rollout'] or ''}", draw
