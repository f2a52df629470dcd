"""Commands for plan files: validate, preview, submit, schema; and verdicts, which refuse a submit.

`validate` and `schema` need no daemon.  The others send the file's text, and upload
the directory of `source.path`: the daemon opens no path that a client names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from machines.model.timefmt import format_duration
from rolloutd.cli import example_plans, exits
from rolloutd.cli.command_group import CommandGroup, Invocation, without_none
from rolloutd.cli.configuration import print_impact, print_plan_differences, read_impact
from rolloutd.cli.forecast_figures import format_instants, format_range, format_train
from rolloutd.cli.output import (
    FORMATS,
    UNNAMED_FORMATS,
    Columns,
    print_line,
    print_list,
    print_message,
    sanitize,
)
from rolloutd.cli.status import print_traffic_probes
from rolloutd.cli.watch import watch_until_closed
from rolloutd.control.client import ApiError, DaemonUnreachable, api_path
from rolloutd.control.response_text import describe_bottleneck
from rolloutd.errors import Diagnostic
from rolloutd.texts.formats import format_size, pluralize

if TYPE_CHECKING:
    from rolloutd.control.plans import wire_plans


STDIN = "-"

DIAGNOSTIC_FIELDS = tuple(field.name for field in fields(Diagnostic))
"""Known keys of a diagnostic; a newer daemon may send more."""

MAX_FILE_BYTES = 16 * 1024 * 1024
"""Bytes read of a file: more than a plan may have, so that the plan reader reports the limit."""


def register(commands: CommandGroup) -> None:
    group = commands.add_group("plan", "validate, preview and submit plan files")
    for name, handler, summary in (
        ("validate", validate, "list every mistake in a plan file, without a daemon"),
        ("preview", preview, "show what a plan would do, and which nodes cannot start"),
        ("submit", submit, "open a rollout, which waits at its start gate"),
    ):
        # A list of mistakes has no names.
        formats = UNNAMED_FORMATS if name == "validate" else FORMATS
        parser = group.add_command(name, handler, summary, formats=formats)
        parser.argument("file", metavar="FILE", text="the plan file; - is stdin")
        if name == "preview":
            parser.flag("--impact", text="list what check mode would change on each node")
            parser.flag("--diff", text="list which values would change for which nodes")
    parser.flag("--again", text="open a new rollout of this plan, and cancel the live one")
    parser.flag(
        "--supersede", text="replace the live rollout of the same plan name; its completed nodes stay done"
    )
    verdict = "submit although this content failed before; needs the owner's and an admin's vote"
    for name, metavar, text in (
        ("--force-stage", "STAGE", "run this prepare stage also on nodes where it is done"),
        ("--node", "NODE", "with --force-stage: only on this node (all nodes)"),
        ("--override-verdict", "VERDICT", verdict),
    ):
        parser.argument(name, metavar=metavar, text=text, action="append", default=[])
    parser.reason(required=False, when="with --override-verdict")
    parser.add_argument(
        "--watch",
        action="store_true",
        dest="then_watch",
        help="then watch the rollout until it ends: exit 0 done, 1 cancelled",
    )
    example_plans.register(group)
    summary = "print the JSON Schema of plan files, without a daemon"
    parser = group.add_command("schema", schema, summary, formats=())
    parser.argument("file", metavar="FILE", text="file to write (stdout)", nargs="?")
    summary = "list contents that failed and are not submitted again, or clear one"
    parser = commands.add_command("verdicts", verdicts, summary, is_list=True)
    parser = commands.add_verbs(parser).add_command("clear", clear_verdict, "allow a content again")
    parser.argument("verdict", metavar="VERDICT", text="id of the verdict to clear").reason()


def format_diagnostic(diagnostic: Mapping[str, Any]) -> str:
    """Return a diagnostic as one line that editors can jump to."""
    return str(Diagnostic(**{name: diagnostic[name] for name in DIAGNOSTIC_FIELDS}))


def validate(call: Invocation) -> int:
    """Check a plan file without a daemon; one that answers also says whether it takes too long."""
    name, text = _read_plan(call.args.file)
    diagnostics = _find_diagnostics(name, text, _source_base(call.args.file))
    warnings = [] if diagnostics else _duration_warnings(call, name, text)
    if not call.print_data({"valid": not diagnostics, "errors": diagnostics, "warnings": warnings}, ()):
        for mistake in diagnostics:
            print_line(sanitize(format_diagnostic(mistake)))
        for warning in warnings:
            print_message(f"warning: {sanitize(warning)}")
        print_message(
            f"{name}: {pluralize(len(diagnostics), 'mistake')}" if diagnostics else f"{name}: valid"
        )
    return exits.REFUSED if diagnostics else exits.OK


def _duration_warnings(call: Invocation, name: str, text: bytes) -> list[str]:
    """Return what a daemon that answers warns of; without one the plan is checked as far as the file goes."""
    try:
        call.client.get(api_path("whoami"))  # without a daemon the source is not packed
        body = _body_of_plan(call, call.args.file, name, text, announce=False)
        answer = call.client.post(api_path("plans", "preview"), body)
    except (ApiError, DaemonUnreachable, exits.Exit):
        return []
    found = answer["forecast"]
    return [found["warning"]] if found is not None and found["warning"] is not None else []


def schema(call: Invocation) -> None:
    from rolloutd import planfile

    text = json.dumps(planfile.schema(), indent=2)
    if call.args.file is None:
        print_line(text)
    else:
        Path(call.args.file).write_text(text + "\n", encoding="utf-8")
        print_message(f"{call.args.file}: written")


def preview(call: Invocation) -> None:
    body = request_body(call, call.args.file)
    answer = post_plan(call, "preview", body)
    nodes, path = [target["node"] for target in answer["targets"]], api_path("plans", "impact")
    impact = read_impact(call, path, body, nodes) if call.args.impact else None
    found = post_plan(call, "diff", body) if call.args.diff else None
    whole = {**answer, **without_none(impact=impact, diff=found and found["groups"])}
    if call.print_data(whole, nodes):
        return
    print_preview(answer)
    if found is not None:
        print_line()
        print_plan_differences(found)
    if impact is not None:
        print_line()
        print_impact(impact, {})


def submit(call: Invocation) -> int:
    """Open a rollout, or print the one that this plan has; with --watch, watch it."""
    args = call.args
    if args.override_verdict and args.reason is None:
        raise exits.Exit(exits.USAGE, "rolloutctl plan submit: --override-verdict needs --reason; give one")
    if args.node and not args.force_stage:
        raise exits.Exit(exits.USAGE, "rolloutctl plan submit: --node needs --force-stage; give one")
    body = request_body(call, call.args.file) | {"again": args.again, "supersede": args.supersede}
    if args.force_stage:
        body |= {"force_stages": args.force_stage, "force_nodes": args.node}
    if args.override_verdict:
        body |= {"override_verdicts": args.override_verdict, "reason": args.reason}
    answer = post_plan(call, "submit", body)
    if not call.print_data(answer, [answer["rollout"]]):
        print_line(answer["rollout"])
    if answer["existing"]:
        print_message(f"{answer['rollout']}: exists already ({answer['state']}); --again opens a new one")
    else:
        rollout = answer["rollout"]
        for cancelled in answer.get("superseded", ()):  # an older daemon names none
            print_message(f"{cancelled}: cancelled, superseded by {rollout}; nodes in flight finish")
        print_message(f"{rollout} is {answer['state']}, digest {answer['digest']}")
        print_message(f"next: rolloutctl review {rollout}, and rolloutctl why {rollout} for who must approve")
    return watch_until_closed(call, [answer["rollout"]]) if args.then_watch else exits.OK


def _read_plan(file: str) -> tuple[str, bytes]:
    if file == STDIN:
        return "(stdin)", sys.stdin.buffer.read(MAX_FILE_BYTES)
    with Path(file).open("rb") as opened:
        return file, opened.read(MAX_FILE_BYTES)


def _find_diagnostics(name: str, text: bytes, directory: Path | None) -> list[dict[str, Any]]:
    from rolloutd import planfile
    from rolloutd.errors import InvalidFile, Refused
    from rolloutd.files.source_archive import EXCLUDED_NAMES, require_links_inside
    from rolloutd.planfile.playbooks import playbook_diagnostics
    from rolloutd.planfile.prepare_source import resolve_prepare

    try:
        plan = planfile.read(text, name)
    except InvalidFile as invalid:
        return [asdict(mistake) for mistake in invalid.diagnostics]
    if directory is None or "path" not in plan.source:
        return []
    tree = directory / plan.source["path"]
    mistakes = playbook_diagnostics(plan, tree)
    try:
        if not mistakes:
            require_links_inside(tree, EXCLUDED_NAMES)
    except Refused as refused:
        allowed = "links that stay in the directory"
        path = ("spec", "source", "path")
        mistakes = (plan.diagnostic(path, found=str(tree), allowed=allowed, message=refused.text),)
    try:
        if not mistakes:
            resolve_prepare(plan, tree)
    except InvalidFile as invalid:
        mistakes = invalid.diagnostics
    return [asdict(mistake) for mistake in mistakes]


def _source_base(file: str) -> Path | None:
    """Return the directory of `source.path`; None for a plan from stdin."""
    return None if file == STDIN else Path(file).parent


def request_body(call: Invocation, file: str) -> dict[str, Any]:
    """Return the request for a plan; mistakes end the command before it sends anything."""
    name, text = _read_plan(file)
    diagnostics = _find_diagnostics(name, text, _source_base(file))
    if diagnostics:
        raise _diagnostics_exit(call, name, diagnostics)
    return _body_of_plan(call, file, name, text)


def _body_of_plan(
    call: Invocation, file: str, name: str, text: bytes, *, announce: bool = True
) -> dict[str, Any]:
    """Return the request for a plan without mistakes; uploads its source."""
    from rolloutd import planfile

    source = planfile.read(text, name).source
    upload = None
    if "path" in source:
        upload = _upload(call, (_source_base(file) or Path()) / source["path"], announce=announce)
    return without_none(file=name, text=text.decode(), upload=upload)


def post_plan(call: Invocation, action: str, body: Mapping[str, Any]) -> Any:
    """Send the plan; the daemon may find mistakes that depend on its settings and nodes."""
    try:
        return call.client.post(api_path("plans", action), body)
    except ApiError as error:
        diagnostics = error.body.get("errors")
        if not diagnostics:
            raise
        raise _diagnostics_exit(call, body["file"], diagnostics) from error


def _diagnostics_exit(call: Invocation, name: str, diagnostics: Sequence[Mapping[str, Any]]) -> exits.Exit:
    """Print the mistakes as JSON if asked for, and return the command's end with them as text."""
    call.print_data({"valid": False, "errors": diagnostics}, ())
    text = "\n".join(format_diagnostic(mistake) for mistake in diagnostics)
    return exits.Exit(exits.REFUSED, f"{text}\n{name}: {pluralize(len(diagnostics), 'mistake')}")


def _upload(call: Invocation, directory: Path, *, announce: bool) -> str:
    from rolloutd.files.source_archive import pack_tree

    archive = pack_tree(directory)
    if announce:
        print_message(f"packed {directory}: {pluralize(len(archive), 'byte')}")
    answer: dict[str, str] = call.client.upload(api_path("uploads"), archive)
    return answer["upload"]


def print_preview(answer: wire_plans.Preview) -> None:
    for columns, key in PREVIEW_LISTS:
        if answer[key] or key not in {"prepare", "values"}:
            print_list(columns, answer[key])
            print_line()
    print_traffic_probes(answer)
    print_line(f"nodes that may join without a vote: {answer['free_joiners']}")
    if answer["forecast"] is not None:
        _print_duration(answer["forecast"])
    print_line(f"source {sanitize(answer['source']['text'])}")
    print_line(f"digest {answer['digest']}")
    for train in answer["trains"]:
        print_line(sanitize(_format_train(train)))
    for warning in answer["warnings"]:
        print_message(f"warning: {warning}")


def _print_duration(found: wire_plans.PlanDuration) -> None:
    print_line(f"takes {format_range(found['work_s'])}; ends {format_instants(found['ends_at'])}")
    if found["bottleneck"] is not None:
        print_line(sanitize(f"bottleneck: {describe_bottleneck(found['bottleneck'])}"))
    if found["train"] is not None:
        print_line(format_train(found["train"]))
    if found["warning"] is not None:
        print_message(f"warning: {sanitize(found['warning'])}")


def _format_train(train: wire_plans.PreviewTrain) -> str:
    nodes, other = pluralize(train["nodes_shared"], "node"), train["rollout"]
    if train["problem"] is not None:
        return f"{nodes} shared with {other}, which cannot be in one train: {train['problem']}"
    outages = pluralize(train["nodes_shared"], "outage")
    if train["joins"]:
        return f"train with {other}: {nodes} shared, {outages} to save"
    how = "`train: true` in both plans, or rolloutctl train add,"
    return f"{nodes} shared with {other}; {how} saves up to {outages}"


def _format_stage_size(stage: wire_plans.PreviewStage) -> str:
    size = stage["bytes"]
    return "after the build" if size is None else format_size(size) if size else ""


def _format_voters(gate: wire_plans.PreviewGate) -> str:
    voters = gate["answerable_by"]
    owner = [f"owner: {', '.join(voters['owner'])}"] if voters["owner"] else []
    teams = [f"{team}: {', '.join(names) or 'no voters'}" for team, names in sorted(voters["teams"].items())]
    return "; ".join(owner + teams)


def _format_requirement(gate: wire_plans.PreviewGate) -> str:
    needs = gate["needs"]
    parts = [f"{needs['owner']} of the owner"] if needs["owner"] else []
    parts += [f"{needs['each_team']} of each team"] if needs["each_team"] else []
    parts += ["four eyes"] if needs["four_eyes"] else []
    return ", ".join(parts) or "no votes"


TARGET_COLUMNS: Columns = {
    "NODE": "node",
    "TEAM": "team",
    "WAVE": "wave",
    "POOLS": "pools",
    "CANNOT START": lambda target: target["cannot_start"] and target["cannot_start"]["text"],
}
WAVE_COLUMNS: Columns = {
    "WAVE": "wave",
    "NODES": lambda wave: len(wave["nodes"]),
    "AT ONCE": "max_parallel",
    "SOAK": lambda wave: format_duration(wave["soak_s"]),
    "GATE AFTER": "gate",
}
POOL_COLUMNS: Columns = {
    "POOL": "pool",
    "TARGETS": "targets",
    "MEMBERS": "members",
    "BUDGET": "max_unavailable",
}
STAGE_COLUMNS: Columns = {
    "PREPARE": "stage",
    "KIND": "kind",
    "NODES": "nodes",
    "BYTES": _format_stage_size,
    "AT THE RATE": lambda stage: "" if stage["seconds"] is None else format_duration(stage["seconds"]),
}
VALUE_COLUMNS: Columns = {"NODE": "node", "STAGE": "stage", "VALUE OF": "name", "IS": "value"}
GATE_COLUMNS: Columns = {"GATE": "gate", "NEEDS": _format_requirement, "WHO MAY ANSWER": _format_voters}
PREVIEW_LISTS: tuple[
    tuple[Columns, Literal["targets", "waves", "pools", "prepare", "values", "gates"]], ...
] = (
    (TARGET_COLUMNS, "targets"),
    (WAVE_COLUMNS, "waves"),
    (POOL_COLUMNS, "pools"),
    (STAGE_COLUMNS, "prepare"),
    (VALUE_COLUMNS, "values"),
    (GATE_COLUMNS, "gates"),
)
VERDICT_COLUMNS: Columns = {
    "ID": "id",
    "CLASS": "class",
    "NODE": "node",
    "AT": "at",
    "EVIDENCE": "{step}: {text}".format_map,
}


def verdicts(call: Invocation) -> int:
    found = call.get(api_path("verdicts"))["verdicts"]
    if call.print_data(found, [each["id"] for each in found]):
        return exits.OK
    if not found:
        print_message("there are no verdicts")
    else:
        call.print_items(VERDICT_COLUMNS, found)
    return exits.OK


def clear_verdict(call: Invocation) -> int:
    verdict = call.args.verdict
    answer = call.client.post(api_path("verdicts", verdict, "clear"), {"reason": call.args.reason})
    return call.report(answer, f"{verdict}: cleared; its content may be submitted again", verdict)
