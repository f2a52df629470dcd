"""A rollout as one HTML page, for people without a terminal.

The page loads nothing, runs no script, and says what happened in plain words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machines.model.timefmt import format_rfc3339
from rolloutd.cli.follow import read_entries
from rolloutd.cli.output import format_local
from rolloutd.cli.status import format_gate, format_remaining
from rolloutd.control.client import Client, api_path
from rolloutd.control.fleet.version_table import NEXT_STEPS, Cell, version_table
from rolloutd.control.response_text import describe_train
from rolloutd.texts import event_text
from rolloutd.texts.audit_names import with_current_names

if TYPE_CHECKING:
    from rolloutd.control.fleet.wire_fleet import Change
    from rolloutd.control.nodes.wire_nodes import Node
    from rolloutd.control.rollouts.wire import Rollout


MAX_BARS = 200
"""Nodes of the timeline: failed ones first; the table has all of them."""

MAX_VERSION_COLUMNS = 12
"""Plans with a column in the table of nodes, the rollout's own first: a page has room for a dozen."""

MAX_NODES_OF_ALL_PLANS = 1_000
"""Nodes of a rollout up to which versions of all plans are shown: an answer has each node in each change."""

CHART_WIDTH = 1000.0
"""Width of the timeline in units of its drawing, which browsers scale to the page."""

PHASE_WORDS = {
    "pending": "waiting",
    "isolating": "being taken out of service",
    "maintaining": "being changed",
    "verifying": "being checked",
    "failed": "failed; a person must decide",
}
OUTCOME_WORDS = {
    "changed": "changed",
    "already-current": "had the change already",
    "skipped": "left out",
    "left": "no longer in the inventory",
    "rolled-back": "changed back",
}
FAILED_WHILE = {
    "pending": "before its change",
    "done": "after its change",
    **{phase: f"while {PHASE_WORDS[phase]}" for phase in ("isolating", "maintaining", "verifying", "failed")},
}

DECISIONS = frozenset(
    {
        "RolloutOpened",
        "GateOpened",
        *event_text.ROLLOUT_DECISIONS,
        "RolloutEnded",
        "NodeOrdered",
        "NodeAdvanced",
    }
)


def render_rollout(client: Client, name: str) -> str:
    rollout: Rollout = client.get(api_path("rollouts", name))
    path = api_path("rollouts", rollout["rollout"])
    nodes: list[Node] = client.get(f"{path}/nodes")["nodes"]
    entries = [with_current_names(each["entry"]) for each in read_entries(client, rollout=rollout["rollout"])]
    query = {} if len(nodes) <= MAX_NODES_OF_ALL_PLANS else {"plan": rollout["plan"]}
    table = version_table(client.get(api_path("changes"), query)["changes"])
    rows = {node["node"]: table.rows.get(node["node"], {}) for node in nodes}
    latest = _plans_with_cells(rollout["plan"], table.latest, rows.values())
    cells = [cell for row in rows.values() for plan, cell in row.items() if plan in latest]
    page: str = _template().render(
        rollout=rollout,
        plan=client.get(f"{path}/plan"),
        nodes=nodes,
        words=[_describe_node(node) for node in nodes],
        versions=rows,
        latest=latest,
        next_steps={
            state: text
            for state, text in NEXT_STEPS.items()
            if state != "done" and any(cell.state == state for cell in cells)
        },
        failures=[each for each in entries if (each.get("fields") or {}).get("failure")],
        decisions=[each for each in entries if each["event"] in DECISIONS],
        timeline=Timeline.from_entries(entries, nodes),
        head=client.get(api_path("audit", "head")),
        remaining=format_remaining(rollout),
        train=describe_train(rollout),
        waiting=[format_gate(gate) for gate in rollout["gates"] if gate["state"] == "waiting"],
        phase_words=PHASE_WORDS,
        failed_while=FAILED_WHILE,
        describe=event_text.describe_entry,
        actor=event_text.actor_name,
    )
    return page


def _plans_with_cells(
    own: str, latest: Mapping[str, Change], rows: Iterable[Mapping[str, Cell]]
) -> dict[str, Change]:
    """Return the latest change of each plan that came to one of the nodes, the rollout's own plan first."""
    plans = {plan for row in rows for plan in row}
    shown = sorted((plan for plan in latest if plan in plans), key=lambda plan: plan != own)
    return {plan: latest[plan] for plan in shown[:MAX_VERSION_COLUMNS]}


def _describe_node(node: Node) -> str:
    """Return a node's state in words that need no knowledge of rolloutd."""
    words = PHASE_WORDS.get(node["phase"]) or OUTCOME_WORDS.get(node["outcome"] or "", node["phase"])
    is_waiting = node["phase"] == "pending" and node["reason"] is not None
    return f"{words}: {node['reason']['text']}" if is_waiting and node["reason"] else words


@dataclass(frozen=True, slots=True)
class Bar:
    """One phase of a node on the timeline; `x` and `width` are in units of the drawing."""

    phase: str
    x: float
    width: float


@dataclass(slots=True)
class Timeline:
    """The phases of nodes over time; `hidden` nodes have no row."""

    began: float
    ended: float
    rows: dict[str, list[Bar]] = field(default_factory=dict)
    marks: list[tuple[float, str]] = field(default_factory=list)
    hidden: int = 0

    @classmethod
    def from_entries(cls, entries: Sequence[Mapping[str, Any]], nodes: Iterable[Node]) -> Timeline:
        """Return the timeline of a rollout's audit entries, oldest first."""
        times = [each["at"] for each in entries] or [0.0]
        found = cls(min(times), max(times))
        scale = CHART_WIDTH / max(1.0, found.ended - found.began)
        at_work: dict[str, tuple[str, float]] = {}
        for entry in entries:
            x = (entry["at"] - found.began) * scale
            if entry["event"] == "GateOpened":
                found.marks.append((x, event_text.gate_label(entry["fields"])))
            if entry["event"] == "PhaseMoved":
                found._move(at_work, entry["node"], entry["fields"]["target"], x)
        for node, (phase, since) in at_work.items():
            found._add_bar(node, phase, since, CHART_WIDTH)
        failed = {node["node"] for node in nodes if node["phase"] == "failed"}
        order = sorted(found.rows, key=lambda node: node not in failed)
        found.hidden = max(0, len(order) - MAX_BARS)
        found.rows = {node: found.rows[node] for node in order[:MAX_BARS]}
        return found

    def _move(self, at_work: dict[str, tuple[str, float]], node: str, phase: str, x: float) -> None:
        if (before := at_work.pop(node, None)) is not None:
            self._add_bar(node, *before, x)
        if phase not in ("pending", "done"):
            at_work[node] = (phase, x)

    def _add_bar(self, node: str, phase: str, x: float, end: float) -> None:
        # A phase of an instant is still seen.
        self.rows.setdefault(node, []).append(Bar(phase, round(x, 1), round(max(1.0, end - x), 1)))


def _template() -> Any:
    import jinja2  # rolloutctl's start-up counts

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["local"] = format_local
    environment.filters["local_epoch"] = lambda at: format_local(format_rfc3339(at))
    return environment.get_template("report.html.j2")
