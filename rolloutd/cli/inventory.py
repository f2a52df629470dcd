"""Commands for the fleet's nodes: inventory, conflicts, what an admin accepts, cleaning, and shells."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from machines.model.timefmt import format_duration
from rolloutd.cli import exits
from rolloutd.cli.command_group import CommandGroup, Invocation, confirm
from rolloutd.cli.output import (
    AGE_UNITS,
    Columns,
    age_of,
    format_age,
    print_line,
    print_list,
    print_message,
    sanitize,
)
from rolloutd.control.client import api_path
from rolloutd.texts.formats import join_limited, pluralize

if TYPE_CHECKING:
    from rolloutd.control.fleet import wire_fleet
    from rolloutd.control.nodes.wire_nodes import LeftFile


REFRESH_WAIT_S = 10.0
"""Most sources answer in less; a person waits no longer for a list."""

REFRESH_POLL_S = 0.2
"""Pause between two questions whether the sources have answered."""

MAX_NAMES_SHOWN = 10
"""Nodes of a held answer that are named; --json has all."""


def register(commands: CommandGroup) -> None:
    summary = "list nodes, what each source reports, and conflicts"
    parser = commands.add_command("inventory", inventory, summary, is_list=True)
    what = "a node: show what each source reports about it"
    parser.argument("node", metavar="NODE", text=what, nargs="?")
    verbs = commands.add_verbs(parser)
    conflicts = verbs.add_command("conflicts", show_conflicts, "list the quarantined nodes")
    for each in (parser, conflicts):
        each.flag("--refresh", text="read the inventory sources again first").watch()
    conflicts.flag("--no-headers", text="print no headings")
    parser = verbs.add_command("accept", accept, "apply the held answer of a source")
    parser.argument("source", metavar="SOURCE", text="the source").reason()
    summary = "accept the identity, the new name or the removal that a node's sources report now"
    verbs.add_command("pin", pin, summary).node().reason()
    parser = commands.add_command("clean", clean, "remove from nodes what ended rollouts left there")
    parser.argument("subject", metavar="NODE | ROLLOUT", text="a node, or a rollout for all its nodes")
    parser.flag("--dry-run", text="only print what would be removed")
    parser.reason(required=False, when="without --dry-run").yes()
    parser = commands.add_command(
        "shell", shell, "open a shell on a node, as yourself; the audit has it"
    ).node()
    parser.flag("--show", text="only print the command that it runs")
    parser.reason(required=False, when="without --show").yes()


def inventory(call: Invocation) -> int:
    """List the known nodes and sources, or show one node."""
    args = call.args
    status = _refresh(call) if args.refresh else exits.OK
    if args.node is not None:
        return _show_node(call) or status
    answer: wire_fleet.Inventory = call.get(api_path("inventory"))
    if not call.print_data(answer, [node["node"] for node in answer["nodes"]]):
        call.print_items(NODE_COLUMNS, answer["nodes"])
        if not args.is_csv:
            print_line()
            print_list(SOURCE_COLUMNS, answer["sources"])
    for source in answer["sources"]:
        if source["error"]:
            last = format_age(source["refreshed_at"])
            print_message(f"{source['source']}: {source['error']} (last good {last} ago)")
    return status


def _refresh(call: Invocation) -> int:
    """Have the sources read again, and wait for the end of it; return an error if one did not answer."""
    begun = time.monotonic()
    call.client.post(api_path("inventory", "refresh"))
    while True:
        answer: wire_fleet.Inventory = call.get(api_path("inventory"), limit=1)
        sources = answer["sources"]
        # A held answer does not count as a source's last one.
        silent = [each for each in sources if each["held"] is None and not _is_since(each["age_s"], begun)]
        late = [each["source"] for each in silent if not _is_since(each["tried_age_s"], begun)]
        if not late:
            return exits.REFUSED if silent else exits.OK
        if time.monotonic() - begun > REFRESH_WAIT_S:
            print_message(f"{', '.join(late)}: no answer in {REFRESH_WAIT_S:.0f} s; its last one is shown")
            return exits.REFUSED
        time.sleep(REFRESH_POLL_S)


def _is_since(age_s: float | None, begun: float) -> bool:
    # By its age: the daemon's clock and ours may differ.
    return age_s is not None and age_s < time.monotonic() - begun


def accept(call: Invocation) -> int:
    source = call.args.source
    answer = call.client.post(api_path("inventory", "accept"), {"source": source, "reason": call.args.reason})
    return call.report(answer, f"{source}: its answer is in effect", source)


def pin(call: Invocation) -> int:
    node = call.args.node
    answer = call.client.post(api_path("inventory", node, "pin"), {"reason": call.args.reason})
    return call.report(answer, f"{node}: what its sources report is accepted", node)


def show_conflicts(call: Invocation) -> int:
    status = _refresh(call) if call.args.refresh else exits.OK
    answer: wire_fleet.Inventory = call.get(api_path("inventory"))
    nodes = [node for node in answer["nodes"] if node["conflicts"]]
    sources = [source for source in answer["sources"] if source["held"] or source["stale"]]
    if call.print_data({"nodes": nodes, "sources": sources}, [node["node"] for node in nodes]):
        return status
    rows = [{"node": node["node"], **each} for node in nodes for each in node["conflicts"]]
    if rows:
        print_list(CONFLICT_COLUMNS, rows)
    for source in sources:
        print_line(sanitize(f"{source['source']}: {_source_state(source)}"))
    if not rows and not sources:
        print_message("the sources agree, and none is held or stale")
    return status


def _show_node(call: Invocation) -> int:
    answer: wire_fleet.InventoryNodeDetail = call.get(api_path("inventory", call.args.node))
    node = answer["node"]
    if call.print_data(answer, [node["node"]]):
        return exits.OK
    print_line(sanitize(f"{node['node']}: {node['kind']}, {node['sight']}, pools {', '.join(node['pools'])}"))
    for each in node["conflicts"]:
        effect = "warning" if each["warning"] else "quarantined"
        print_line(sanitize(f"  {effect} for {format_age(each['since'])}: {each['text']}"))
    for key, value in answer["pinned"].items():
        print_line(sanitize(f"  pinned {key}: {value}"))
    print_list(REPORT_COLUMNS, answer["reports"])
    return exits.OK


def _source_state(source: wire_fleet.InventorySourceStatus) -> str:
    held = source["held"]
    if held is not None:
        removed = f"removes {len(held['removed'])} of {pluralize(held['known'], 'node')}"
        return f"held: an answer {removed}: {join_limited(held['removed'], MAX_NAMES_SHOWN)}"
    if source["stale"]:
        return "stale: no node of it starts"
    return "failing" if source["error"] else "fresh"


def _format_labels(item: wire_fleet.InventoryNode | wire_fleet.NodeReport) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(item["labels"].items()))


NODE_COLUMNS: Columns = {
    "NODE": "node",
    "KIND": "kind",
    "TEAM": "team",
    "POOLS": "pools",
    "SEEN": "sight",
    "AGE": age_of("seen_at"),
    "LABELS": _format_labels,
    "QUARANTINED": lambda node: [each["kind"] for each in node["conflicts"] if not each["warning"]],
}
SOURCE_COLUMNS: Columns = {
    "SOURCE": "source",
    "NODES": "nodes",
    "AGE": age_of("refreshed_at"),
    "STALE AFTER": lambda source: format_duration(source["stale_after_s"], AGE_UNITS),
    "STATE": _source_state,
}
CONFLICT_COLUMNS: Columns = {
    "NODE": "node",
    "QUARANTINED": lambda each: "no (warning)" if each["warning"] else "yes",
    "FOR": age_of("since"),
    "KIND": "kind",
    "CONFLICT": "text",
}
IDS = ("provider_id", "machine_id", "cluster_id", "host_key")
REPORT_COLUMNS: Columns = {
    "SOURCE": "source",
    "AGE": age_of("at"),
    "NAME": "name",
    "ADDRESS": "address",
    "LABELS": _format_labels,
    "IDS": lambda report: [f"{key}={report[key]}" for key in IDS if report[key]],
}
LEFT_COLUMNS: Columns = {
    "NODE": "node",
    "WHAT": "what",
    "PATH": "path",
    "RESULT": "result",
    "REASON": "reason",
}


def clean(call: Invocation) -> int:
    """Clean a node or the nodes of a rollout; exit 1 if one of them is not clean after that."""
    args = call.args
    if args.dry_run:
        return _print_left_files(call, _request_cleaning(call, dry_run=True))
    if args.reason is None:
        raise exits.Exit(exits.USAGE, "rolloutctl clean: no --reason; give one, or --dry-run")
    confirm(
        call,
        lambda: _summarize_left_files(_request_cleaning(call, dry_run=True)),
        f"Clean {args.subject}?",
        must_ask=True,
    )
    return _print_left_files(call, _request_cleaning(call, dry_run=False))


def _request_cleaning(call: Invocation, *, dry_run: bool) -> Sequence[LeftFile]:
    body = {"reason": call.args.reason or "dry run", "dry_run": dry_run}
    path = api_path("clean", call.args.subject)
    with contextlib.closing(call.client.stream(path, method="POST", body=body)) as lines:
        files = [each for line in lines for each in line["files"]]
    return sorted(files, key=lambda each: each["node"])


def _print_left_files(call: Invocation, files: Sequence[LeftFile]) -> int:
    if not call.print_data(files, [each["node"] for each in files]):
        if files:
            print_list(LEFT_COLUMNS, files)
        else:
            print_message(f"{call.args.subject}: nothing was left")
    is_clean = all(each["what"] != "node" for each in files)
    return exits.OK if is_clean else exits.REFUSED


def _summarize_left_files(files: Sequence[LeftFile]) -> str:
    removable = [each for each in files if each["result"] == "found"]
    nodes = {each["node"] for each in removable}
    return (
        f"{pluralize(len(removable), 'thing')} on {pluralize(len(nodes), 'node')} would be removed;"
        " --dry-run lists them"
    )


def shell(call: Invocation) -> int:
    """Show the command, record it in the audit, and run it as the caller; return its exit code."""
    args, path = call.args, api_path("nodes", call.args.node, "shell")
    if args.show:
        answer: wire_fleet.ShellCommand = call.get(path)
        if not call.print_data(answer, [answer["node"]]):
            print_line(sanitize(shlex.join(answer["command"])))
        return exits.OK
    if args.reason is None:
        raise exits.Exit(exits.USAGE, "rolloutctl shell: no --reason; give one, or --show")
    confirmed: list[wire_fleet.ShellCommand] = []

    def read_command() -> str:
        confirmed.append(call.get(path))
        return sanitize(shlex.join(confirmed[0]["command"]))

    confirm(call, read_command, "Run it?", must_ask=True)
    answer = call.client.post(path, {"reason": args.reason})
    if confirmed and answer != confirmed[0]:
        raise exits.Exit(exits.REFUSED, f"{args.node}: its command has changed; run this again")
    print_message(sanitize(shlex.join(answer["command"])))
    try:
        return subprocess.run(answer["command"], check=False).returncode
    except OSError as error:
        problem = f"{answer['command'][0]}: {error.strerror}; install it, or set shell in the settings"
        raise exits.Exit(exits.REFUSED, problem) from error
