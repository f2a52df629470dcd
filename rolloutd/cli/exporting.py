"""Everything about one rollout in one archive, for an auditor or a change ticket.

It is made of what the API shows the person who asks, so it holds nothing that
they may not see.  Times in the archive are those of the rollout, not of the
export: the same rollout gives the same files.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rolloutd.cli import exits, moments
from rolloutd.cli.output import printable, say
from rolloutd.control import sentences
from rolloutd.control.client import Client, path_of

PAGE = 1000
"""Audit entries asked for at a time."""

README = """\
Everything that rolloutd shows of one rollout.

rollout.json    how it stands, its gates and every vote
plan.json       the plan in its canonical form, what was pinned, and the hashes: what people voted for
targets.json    every node, its wave, its outcome
nodes/NODE.json what was done to the node: every step of every attempt; `checks` are those made before and
                after its change
nodes/NODE.log  what its runs and checks said; another team's output is left out
audit.jsonl     the audit entries of this rollout, each with its hash
audit.json      the verdict on the whole chain at the time of the export, and its latest hash
timeline.txt    the same entries, one line each
"""


def export(client: Client, named: str, output: Path | None) -> int:
    """Write the archive; `-` is stdout."""
    rollout = client.get(path_of("rollouts", named))
    name = rollout["rollout"]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        at = int(moments.parse(rollout["submitted_at"]).timestamp())
        for path, text in _files(client, name, rollout):
            content = text.encode("utf-8", "replace")
            member = tarfile.TarInfo(f"{name}/{path}")
            member.size, member.mtime = len(content), at
            tar.addfile(member, io.BytesIO(content))
    if output is not None and str(output) == "-":
        sys.stdout.buffer.write(packed.getvalue())
        return exits.DONE
    place = output or Path(f"{name}.tar.gz")
    place.write_bytes(packed.getvalue())
    say(f"{place}: written")
    return exits.DONE


def _files(client: Client, name: str, rollout: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "README.txt", README
    yield "rollout.json", _json(rollout)
    yield "plan.json", _json(client.get(path_of("rollouts", name, "plan")))
    nodes = client.get(path_of("rollouts", name, "nodes"))["nodes"]
    yield "targets.json", _json(nodes)
    for node in nodes:
        detail = client.get(path_of("rollouts", name, "nodes", node["node"]))
        yield f"nodes/{node['node']}.json", _json({**detail, "checks": _checks(detail["steps"])})
        yield f"nodes/{node['node']}.log", "".join(_log(client, name, node))
    entries = list(_entries(client, name))
    yield "audit.jsonl", "".join(json.dumps(entry, sort_keys=True) + "\n" for entry in entries)
    yield "audit.json", _json(client.get(path_of("audit", "verify")))
    yield "timeline.txt", "".join(_line(entry["entry"]) + "\n" for entry in entries)


def _checks(steps: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the checks of all attempts, by whether the change had been made by then."""
    found: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
    changed = False
    for step in steps:
        changed = changed or step["action"] == "run"
        if step["action"] in ("check", "look"):
            found["after" if changed else "before"].append(step)
    return found


def _log(client: Client, name: str, node: dict[str, Any]) -> Iterator[str]:
    for attempt in range(1, node["attempt"] + 1):
        yield f"# attempt {attempt}\n"
        path = path_of("rollouts", name, "nodes", node["node"], "log")
        for line in client.stream(path, {"attempt": attempt}):
            yield f"{line['at']} {line['kind']} {line['text']}\n"


def _entries(client: Client, name: str) -> Iterator[dict[str, Any]]:
    after: int | None = 0
    while after is not None:
        page = client.get(path_of("audit"), {"rollout": name, "after": after, "limit": PAGE})
        yield from page["entries"]
        after = page["next"]


def _line(entry: dict[str, Any]) -> str:
    at = moments.local(entry["at"]) if isinstance(entry["at"], str) else _utc(entry["at"])
    return printable(f"{entry['seq']:>6}  {at}  {sentences.actor(entry):<10}  {sentences.of_entry(entry)}")


def _utc(at: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
