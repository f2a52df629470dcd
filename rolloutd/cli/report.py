"""A rollout as one HTML page, for people without a terminal, and the server of such pages.

The page loads nothing, runs no script, and says what happened in plain words.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from rolloutd.cli.follow import read_entries
from rolloutd.cli.output import format_local, print_message
from rolloutd.cli.queries import format_gate, format_remaining
from rolloutd.control.client import ApiError, Client, DaemonUnreachable, api_path
from rolloutd.control.response_text import describe_train
from rolloutd.texts import event_text
from rolloutd.texts.audit_names import with_current_names

if TYPE_CHECKING:
    from rolloutd.control.wire import Node, Rollout


MAX_BARS = 200
"""Nodes of the timeline: failed ones first; the table has all of them."""

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
"""Events that the page lists as decisions."""


def render_rollouts(client: Client, *, refresh_s: int) -> str:
    """Return the page with all rollouts."""
    page: str = _template("rollouts.html.j2").render(**client.get(api_path("status")), refresh_s=refresh_s)
    return page


def render_rollout(client: Client, name: str, *, refresh_s: int = 0) -> str:
    """Return the page of a rollout; it loads itself again every `refresh_s` unless that is 0."""
    rollout: Rollout = client.get(api_path("rollouts", name))
    path = api_path("rollouts", rollout["rollout"])
    nodes: list[Node] = client.get(f"{path}/nodes")["nodes"]
    entries = [with_current_names(each["entry"]) for each in read_entries(client, rollout=rollout["rollout"])]
    page: str = _template("report.html.j2").render(
        rollout=rollout,
        plan=client.get(f"{path}/plan"),
        nodes=nodes,
        words=[_describe_node(node) for node in nodes],
        failures=[each for each in entries if (each.get("fields") or {}).get("failure")],
        decisions=[each for each in entries if each["event"] in DECISIONS],
        timeline=Timeline.from_entries(entries, nodes),
        head=client.get(api_path("audit", "head")),
        remaining=format_remaining(rollout),
        train=describe_train(rollout),
        waiting=[format_gate(gate) for gate in rollout["gates"] if gate["state"] == "waiting"],
        phase_words=PHASE_WORDS,
        failed_while=FAILED_WHILE,
        refresh_s=refresh_s,
        describe=event_text.describe_entry,
        actor=event_text.actor_name,
    )
    return page


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


@functools.cache
def _template(name: str) -> Any:
    import jinja2  # rolloutctl's start-up counts

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["local"] = format_local
    environment.filters["local_epoch"] = _format_epoch
    return environment.get_template(name)


def _format_epoch(at: float) -> str:
    from machines.model.timefmt import format_rfc3339

    return format_local(format_rfc3339(at))


REFRESH_S = 10
"""Interval at which a page loads itself again."""

REQUEST_TIMEOUT_S = 10.0
"""Limit of a browser's request, so that a stalled one ends."""


def serve(client: Client, port: int) -> None:
    """Serve pages until interrupted: what the client may read, every browser on this machine may."""
    with ThreadingHTTPServer(("127.0.0.1", port), functools.partial(_PageHandler, client)) as server:
        print_message(f"http://127.0.0.1:{server.server_port}/ shows the rollouts; interrupt to end")
        server.serve_forever()


class _PageHandler(BaseHTTPRequestHandler):
    """Serves the pages; knows two paths and no method that changes anything."""

    timeout = REQUEST_TIMEOUT_S

    def __init__(self, client: Client, *arguments: Any) -> None:
        self._client = client
        super().__init__(*arguments)

    def do_GET(self) -> None:
        # Another name would be a web site that has its own name resolved to this machine.
        if not re.fullmatch(r"(127\.0\.0\.1|localhost)(:\d+)?", self.headers.get("Host", "")):
            self._send(HTTPStatus.FORBIDDEN, "use http://127.0.0.1 or http://localhost")
            return
        try:
            self._send(HTTPStatus.OK, self._render(unquote(self.path.partition("?")[0]).strip("/")))
        except ApiError as refused:
            self._send(HTTPStatus(refused.status), str(refused))
        except DaemonUnreachable as none:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, f"{none}; what was shown may be old")

    def _render(self, name: str) -> str:
        if name:
            return render_rollout(self._client, name, refresh_s=REFRESH_S)
        return render_rollouts(self._client, refresh_s=REFRESH_S)

    def _send(self, status: HTTPStatus, text: str) -> None:
        is_page = status is HTTPStatus.OK
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"text/{'html' if is_page else 'plain'}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        # The page shows output of nodes: it must stay on this screen, and may load and run nothing.
        self.send_header("Cache-Control", "no-store")
        self.send_header(
            "Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
        )
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class' name
        """Log nothing: the terminal is the user's."""
