"""Commands for the next person on duty: the handover, and the comparison with canaries."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from machines.model.timefmt import format_duration, format_rfc3339
from rolloutd.cli.command_group import CommandGroup, Invocation, past_time_argument
from rolloutd.cli.output import (
    AGE_UNITS,
    Columns,
    colorize,
    format_age,
    format_local,
    parse_rfc3339,
    percent_of,
    print_line,
    print_list,
    sanitize,
)
from rolloutd.control import response_text
from rolloutd.control.client import api_path
from rolloutd.control.user_time import LastLook
from rolloutd.texts import event_text

if TYPE_CHECKING:
    from rolloutd.control.fleet.wire_fleet import Handover
    from rolloutd.control.nodes.wire_nodes import Comparison


ROLLOUT_COLUMNS: Columns = {
    "ROLLOUT": "rollout",
    "STATE": "state",
    "PROGRESS": percent_of("percent"),
    "SINCE THEN": response_text.describe_change,
    "WAITS FOR": response_text.describe_wait,
}
NODE_COLUMNS: Columns = {
    "NODE": "node",
    "WAVE": "wave",
    "PHASE": "phase",
    "TIME": lambda node: format_duration(node["seconds"], AGE_UNITS),
    "CHANGED TASKS": lambda node: "no log" if node["changed_tasks"] is None else len(node["changed_tasks"]),
    "UNLIKE THE CANARIES": response_text.describe_outlier,
}


def register(commands: CommandGroup) -> None:
    summary = "show what changed since your last handover, who decided, and what waits"
    since = "start: RFC 3339, or a duration before now, such as 8h (default: your last handover, else 8h)"
    parser = commands.add_command("handover", hand_over, summary)
    parser.argument("--since", metavar="TIME", text=since, type=past_time_argument)
    summary = "compare nodes with the canaries: times and changed tasks, outliers first"
    commands.add_command("compare", compare, summary).rollout().watch()


def hand_over(call: Invocation) -> None:
    """Print the handover; the next one begins where this one ends."""
    last_look = LastLook(getattr(call.args, "host", None) or str(call.client.path))
    since = call.args.since or format_rfc3339(last_look.read(time.time()))
    found: Handover = call.get(api_path("handover"), since=since)
    last_look.write(parse_rfc3339(found["until"]).timestamp())
    if call.print_data(found, [each["rollout"] for each in found["rollouts"]]):
        return
    print_line(f"since {format_local(found['since'])}, {format_age(found['since'])} ago")
    print_line()
    if found["rollouts"]:
        print_list(ROLLOUT_COLUMNS, found["rollouts"])
    else:
        print_line("no rollout is live, and none was closed since then")
    print_line()
    print_line(colorize("DECISIONS", "bold"))
    for decided in found["decisions"]:
        entry = decided["entry"]
        at, who = format_local(decided["at"]), event_text.actor_name(entry)
        rollout = f"{entry['rollout']} " if entry["rollout"] else ""
        print_line(sanitize(f"  {at}  {who}  {rollout}{event_text.describe_entry(entry)}"))
    if not found["decisions"]:
        print_line("  none")
    if found["omitted"]:
        print_line("  older ones are left out; rolloutctl audit lists all")


def compare(call: Invocation) -> None:
    """Print the nodes of now against the canaries."""
    found: Comparison = call.get(api_path("rollouts", call.args.rollout, "comparison"))
    nodes = [*found["nodes"], *found["canaries"]]
    if call.print_data(found, [each["node"] for each in nodes]):
        return
    print_line(response_text.describe_canaries(found))
    if nodes:
        print_line()
        print_list(NODE_COLUMNS, nodes)
    if found["omitted"]:
        print_line(f"{found['omitted']} more nodes are not compared")
