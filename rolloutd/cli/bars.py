"""The picture of a rollout on a terminal: one bar per pool, the whole, and what is in flight.

It draws views and decides nothing.  Only this module of the command line knows
a library of pictures.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from rolloutd.cli import moments
from rolloutd.cli.lines import event_lines
from rolloutd.cli.output import percentage, printable
from rolloutd.cli.reading import reason_sentence
from rolloutd.cli.views import View

if TYPE_CHECKING:
    from rolloutd.control.wire import InFlight, Rollout

REDRAWS_PER_S = 4
"""Enough to look alive, little enough for a slow line."""

MOST_POOLS = 20
"""Bars that fit on a terminal; of more pools those that still have something to do are shown."""

MOST_IN_FLIGHT = 12
"""Nodes in flight that are shown by name."""

_STYLES = {
    "paused": "bold red",
    "done": "bold green",
    "cancelled": "dim",
    "soaking": "cyan",
    "awaiting-approval": "yellow",
}


def show(seen: Iterator[View], console: Console | None = None) -> list[Rollout]:
    """Draw views until all rollouts have ended; return the last one."""
    console = console or Console()
    last: list[Rollout] = []
    with Live(console=console, refresh_per_second=REDRAWS_PER_S) as live:
        for view in seen:
            for text in event_lines(view):
                live.console.print(Text(text, style="dim"))
            last = view.rollouts
            live.update(picture(last))
            if view.over:
                break
    return last


def picture(rollouts: list[Rollout]) -> Group:
    """Return what is drawn of some rollouts."""
    return Group(*(part for rollout in rollouts for part in _of_rollout(rollout)))


def _of_rollout(rollout: Rollout) -> Iterator[Text | Progress]:
    state = rollout["state"]
    title = Text(printable(rollout["plan"]), style="bold")
    title.append(f"  {state}", style=_STYLES.get(state, "bold cyan"))
    if rollout["wave"]:
        title.append(f"  wave {rollout['wave']}")
    if rollout["eta"]:
        title.append(f"  ends about {moments.ahead(rollout['eta'])}", style="dim")
    yield title
    yield _bars(rollout)
    for node in rollout["in_flight"][:MOST_IN_FLIGHT]:
        yield Text(_in_flight_line(node), style="cyan")
    if rollout["reason"] is not None and state not in ("done", "cancelled"):
        yield Text(reason_sentence(rollout["reason"]), style="yellow")


def _bars(rollout: Rollout) -> Progress:
    bars = Progress(
        TextColumn("  {task.description}"),
        BarColumn(bar_width=30, complete_style="cyan", finished_style="green"),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[note]}"),
        auto_refresh=False,
    )
    pools = rollout["pools"]
    if len(pools) > MOST_POOLS:
        pools = sorted(pools, key=lambda pool: pool["done"] >= pool["total"])[:MOST_POOLS]
    for pool in pools:
        failed = f"[red]{pool['failed']} failed[/red]" if pool["failed"] else ""
        flying = f"[cyan]{pool['in_flight']} in flight[/cyan]" if pool["in_flight"] else ""
        note = " ".join(part for part in (failed, flying) if part)
        bars.add_task(escape(printable(pool["pool"])), total=pool["total"], completed=pool["done"], note=note)
    whole = rollout["total"] - rollout["skipped"]
    bars.add_task(
        "[bold]all[/bold]", total=whole, completed=rollout["done"], note=percentage(rollout["percent"])
    )
    return bars


def _in_flight_line(node: InFlight) -> str:
    parts = [node["node"], node["phase"], node["step"] or "", percentage(node["percent"]), node["task"] or ""]
    return printable("  " + "  ".join(part for part in parts if part))
