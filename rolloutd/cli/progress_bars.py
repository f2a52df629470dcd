"""Progress bars of a rollout on a terminal: its pools, the whole, and the nodes in flight.

Only this module of the command line imports rich, which is slow to load.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from rolloutd.cli.follow import WatchUpdate, event_lines, show_updates
from rolloutd.cli.output import sanitize
from rolloutd.cli.status import format_remaining
from rolloutd.cli.why import format_reason
from rolloutd.texts.formats import format_percent

if TYPE_CHECKING:
    from rolloutd.control.rollouts.wire import InFlight, Rollout

REDRAWS_PER_S = 4
"""Smooth enough, and little traffic on a slow connection."""

MAX_POOLS = 20
"""Bars that fit on a terminal; of more pools the unfinished ones are shown."""

MAX_IN_FLIGHT = 12

_STYLES = {
    "paused": "bold red",
    "done": "bold green",
    "cancelled": "dim",
    "soaking": "cyan",
    "awaiting-approval": "yellow",
}


def draw_updates(updates: Iterator[WatchUpdate], console: Console | None = None) -> list[Rollout]:
    """Draw updates until all rollouts have ended; return their last state."""
    with Live(console=console or Console(), refresh_per_second=REDRAWS_PER_S) as live:

        def draw(update: WatchUpdate) -> None:
            for text in event_lines(update):
                live.console.print(Text(text, style="dim"))
            live.update(render_rollouts(update.rollouts))

        return show_updates(updates, draw)


def render_rollouts(rollouts: list[Rollout]) -> Group:
    return Group(*(part for rollout in rollouts for part in _render_rollout(rollout)))


def _render_rollout(rollout: Rollout) -> Iterator[Text | Progress]:
    state = rollout["state"]
    title = Text(sanitize(rollout["plan"]), style="bold")
    title.append(f"  {state}", style=_STYLES.get(state, "bold cyan"))
    if rollout["wave"]:
        title.append(f"  wave {rollout['wave']}")
    if remaining := format_remaining(rollout):
        title.append(f", {remaining}", style="dim")
    yield title
    yield _pool_bars(rollout)
    for node in rollout["in_flight"][:MAX_IN_FLIGHT]:
        yield Text(_in_flight_line(node), style="cyan")
    if rollout["reason"] is not None and state != "cancelled":
        yield Text(format_reason(rollout["reason"]), style="yellow")


def _pool_bars(rollout: Rollout) -> Progress:
    bars = Progress(
        TextColumn("  {task.description}"),
        BarColumn(bar_width=30, complete_style="cyan", finished_style="green"),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[note]}"),
        auto_refresh=False,
    )
    pools = rollout["pools"]
    if len(pools) > MAX_POOLS:
        pools = sorted(pools, key=lambda pool: pool["done"] + pool["skipped"] >= pool["total"])[:MAX_POOLS]
    for pool in pools:
        failed = f"[red]{pool['failed']} failed[/red]" if pool["failed"] else ""
        in_flight = f"[cyan]{pool['in_flight']} in flight[/cyan]" if pool["in_flight"] else ""
        note = " ".join(part for part in (failed, in_flight) if part)
        to_change = pool["total"] - pool["skipped"]
        bars.add_task(escape(sanitize(pool["pool"])), total=to_change, completed=pool["done"], note=note)
    total = rollout["total"] - rollout["skipped"]
    bars.add_task(
        "[bold]all[/bold]", total=total, completed=rollout["done"], note=format_percent(rollout["percent"])
    )
    return bars


def _in_flight_line(node: InFlight) -> str:
    parts = [
        node["node"],
        node["phase"],
        node["step"] or "",
        format_percent(node["percent"]),
        node["task"] or "",
    ]
    return sanitize("  " + "  ".join(part for part in parts if part))
