"""Commands for preparation: its stages, manifests, which need no daemon, and what nodes carry."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machines.model.timefmt import format_duration
from rolloutd.cli import exits
from rolloutd.cli.command_group import CommandGroup, Invocation
from rolloutd.cli.output import Columns, age_of, print_line, print_list, print_message, sanitize, short_of
from rolloutd.control.client import ApiError, api_path
from rolloutd.files.artifact_files import compare_file, file_digest, mismatch_text
from rolloutd.texts.formats import format_size, pluralize

if TYPE_CHECKING:
    from rolloutd.control.nodes.wire_nodes import ArtifactReport, NodeCheckpoints, Preparations

MANIFEST = "artifacts.yml"

REPORT_COLUMNS: Columns = {
    "SITE": "site",
    "ARTIFACT": "name",
    "SHA256": short_of("found"),
    "STATE": lambda each: (
        "as the manifest" if each["found"] == each["expected"] else "differs" if each["found"] else "missing"
    ),
    "NODES": lambda each: len(each["nodes"]),
}
PREPARE_COLUMNS: Columns = {
    "NODE": "node",
    "STAGE": lambda each: f"{each['stage']} (forced)" if each["forced"] else each["stage"],
    "STATE": "state",
    "SENT": lambda each: format_size(each["bytes"]) if each["bytes"] else "",
    "TIME": lambda each: format_duration(each["seconds"]) if each["attempt"] else "",
    "CONTENT": short_of("content"),
    "TEXT": "text",
}
CHECKPOINT_COLUMNS: Columns = {
    "NODE": "node",
    "PLAN": "plan",
    "STAGE": "stage",
    "CONTENT": short_of("content"),
    "AGE": age_of("at"),
    "ROLLOUT": "rollout",
    "ARTIFACTS": lambda each: ", ".join(f"{a['name']} {a['version']}" for a in each["artifacts"]),
}

MAX_NODES_NAMED = 10
"""Nodes of a difference that are named; --json has all."""

_VERSION = re.compile(r"(?P<name>.+?)[-_]v?(?P<version>[0-9][A-Za-z0-9.+~]*)(?:[-_].*)?", re.ASCII)
_EXTENSIONS = re.compile(r"(?:\.(?:tar|gz|xz|bz2|zst|tgz|zip|deb|rpm|whl|bundle|bin))+$")
_ARCHIVE = re.compile(r".*\.(?:tar(?:\.[a-z0-9]+)?|tgz|zip)")
_PACKAGE = re.compile(r".*\.(?:deb|rpm)")


def register(commands: CommandGroup) -> None:
    group = commands.add_group("artifacts", "write and verify manifests of artifacts, and compare nodes")
    parser = group.add_command("manifest", manifest, "write the manifest of a directory's files")
    parser.argument("directory", metavar="DIR", text=f"the directory; writes DIR/{MANIFEST}", type=Path)
    parser = group.add_command("verify", verify, "compare the files of a manifest with it")
    parser.usage = (
        "rolloutctl artifacts verify [--json] FILE\n       rolloutctl artifacts verify [--json] DIR"
    )
    file = f"the manifest, or its directory ({MANIFEST})"
    parser.argument("file", metavar="FILE | DIR", text=file, type=Path)
    summary = "compare the artifacts of a rollout's nodes with its manifest"
    parser = group.add_command("report", report, summary).rollout()
    parser.argument("--by", metavar="LABEL", text="label whose values are the sites (site)", default="site")
    summary = "show the prepare stages of a rollout on each node"
    parser = commands.add_command("prepare", prepare, summary).rollout()
    parser.argument("--node", metavar="NODE", text="only this node")
    parser = commands.add_command("checkpoints", checkpoints, "show the prepare stages that nodes remember")
    parser.usage = "rolloutctl checkpoints [--json] ROLLOUT\n       rolloutctl checkpoints [--json] NODE"
    parser.argument("what", metavar="ROLLOUT | NODE", text="a rollout, or a node")


def manifest(call: Invocation) -> int:
    """Write a manifest; what the present one says of a file, but for size and digest, is kept."""
    from rolloutd.planfile.manifest import format_manifest

    directory: Path = call.args.directory
    if not directory.is_dir():
        raise exits.Exit(exits.REFUSED, f"{directory}: not a directory; name that of the artifacts")
    file = directory / MANIFEST
    known = {record["path"]: record for record in _read(file)} if file.exists() else {}
    records = [_record(directory, path, known.get(str(path), {})) for path in _files(directory)]
    if not records:
        raise exits.Exit(exits.REFUSED, f"{directory}: no files; build the artifacts first")
    records += [record for record in known.values() if not record["path"]]
    file.write_text(format_manifest(records))
    names = [str(record["name"]) for record in records]
    return call.report(records, f"{file}: {pluralize(len(records), 'artifact')}", *names)


def verify(call: Invocation) -> int:
    """Compare the files with their manifest; a URL alone is not fetched."""
    file: Path = call.args.file / MANIFEST if call.args.file.is_dir() else call.args.file
    records = [record for record in _read(file) if record["path"]]
    results = [_result(file.parent, record) for record in records]
    wrong = [result for result in results if not result["valid"]]
    answer = {"valid": not wrong, "artifacts": results}
    is_printed = call.print_data(answer, [result["name"] for result in results])
    for result in () if is_printed else wrong:
        print_line(sanitize(result["text"]))
    checked = pluralize(len(results), "artifact")
    print_message(f"{file}: {len(wrong)} of {checked} differ" if wrong else f"{file}: {checked}, all valid")
    return exits.REFUSED if wrong else exits.OK


def report(call: Invocation) -> int:
    """Print which digests the nodes of each site carry; exit 1 if one differs from the manifest."""
    answer: ArtifactReport = call.get(api_path("rollouts", call.args.rollout, "artifacts"), by=call.args.by)
    wrong = [each for each in answer["artifacts"] if each["found"] != each["expected"]]
    is_printed = call.print_data(answer, [each["name"] for each in answer["artifacts"]])
    if answer["artifacts"] and not is_printed:
        print_list(REPORT_COLUMNS, answer["artifacts"])
    if not answer["artifacts"]:
        print_message(f"{answer['rollout']}: no artifacts; its plan has none, or its build has not ended")
    for each in wrong:
        carried = f"carry {each['found']}" if each["found"] else "do not carry it"
        nodes = ", ".join(each["nodes"][:MAX_NODES_NAMED])
        print_message(
            sanitize(f"{each['name']}: {nodes} {carried}, the manifest has {each['expected']}; prepare again")
        )
    if answer["unreadable"]:
        print_message(
            sanitize(f"not read: {', '.join(answer['unreadable'][:MAX_NODES_NAMED])}; see checkpoints NODE")
        )
    return exits.REFUSED if wrong or answer["unreadable"] else exits.OK


def prepare(call: Invocation) -> None:
    """Print how far each stage is on each node."""
    answer: Preparations = call.get(api_path("rollouts", call.args.rollout, "prepare"))
    node, rollout = call.args.node, answer["rollout"]
    found = [each for each in answer["preparations"] if node in (None, each["node"])]
    if node is not None and not found and answer["preparations"]:
        raise exits.Exit(exits.REFUSED, f"{node}: no such node; list them with rolloutctl nodes {rollout}")
    if call.print_data(found, [each["node"] for each in found]):
        return
    if found:
        print_list(PREPARE_COLUMNS, found)
    else:
        print_message(f"{rollout}: its plan has no prepare stages")


def checkpoints(call: Invocation) -> None:
    """Print the checkpoints of a node, or those of a rollout's plan on its nodes."""
    try:
        answer = call.get(api_path("rollouts", call.args.what, "checkpoints"))
        nodes: list[NodeCheckpoints] = answer["nodes"]
    except ApiError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        answer = _node_checkpoints(call)
        nodes = [answer]
    if call.print_data(answer, [node["node"] for node in nodes]):
        return
    rows = ({"node": node["node"], **each} for node in nodes for each in node["checkpoints"])
    print_list(CHECKPOINT_COLUMNS, rows)
    for node in nodes:
        if node["text"]:
            print_message(sanitize(f"{node['node']}: {node['text']}"))


def _node_checkpoints(call: Invocation) -> NodeCheckpoints:
    try:
        answer: NodeCheckpoints = call.get(api_path("nodes", call.args.what, "checkpoints"))
    except ApiError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        problem = "no such node or rollout; see rolloutctl inventory and rolloutctl rollouts"
        raise exits.Exit(exits.REFUSED, f"{call.args.what}: {problem}") from error
    return answer


def _read(file: Path) -> list[dict[str, Any]]:
    from rolloutd.planfile.manifest import read_manifest

    return read_manifest(file.read_bytes(), str(file))


def _files(directory: Path) -> Iterator[Path]:
    """Yield the files of a directory, relative to it; hidden ones and the manifest are no artifacts."""
    for path in sorted(directory.rglob("*")):
        inner = path.relative_to(directory)
        if path.is_file() and str(inner) != MANIFEST and not any(p.startswith(".") for p in inner.parts):
            yield inner


def _record(directory: Path, path: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    stem = _EXTENSIONS.sub("", path.name)
    match = _VERSION.fullmatch(stem)
    file = directory / path
    digest = file_digest(file)
    is_archive, is_package = _ARCHIVE.fullmatch(path.name), _PACKAGE.fullmatch(path.name)
    guessed = {
        "name": match["name"] if match else stem,
        "version": match["version"] if match else digest[:12],
        "kind": "archive" if is_archive else "package" if is_package else "file",
        "path": str(path),
    }
    return {**guessed, **known, "sha256": digest, "size": file.stat().st_size}


def _result(directory: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    name, version, path, wanted = (str(record[key]) for key in ("name", "version", "path", "sha256"))
    mismatch = compare_file(directory / path, record["size"], wanted)
    result = {"name": name, "version": version, "path": path, "expected": wanted}
    if mismatch is None:
        return {**result, "valid": True, "found": wanted, "text": ""}
    text = f"{name} {version}: {path} {mismatch.problem}; build it again"
    if mismatch.found:
        problem = f"{path} {mismatch.problem}"
        text = mismatch_text(f"{name} {version}", problem, mismatch.found, wanted, "build it again")
    return {**result, "valid": False, "found": mismatch.found, "text": text}
