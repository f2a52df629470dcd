"""What a run's events say: how far it is, and, once it is over, how it went.

Events and a status in, values out; it reads no file and starts nothing.  A run
is done only if its events show a task finished on the node, none failed or
unreachable there, and exit 0: ansible-playbook exits 0 also when its plays
match no host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rolloutd.adapters.ansible.rundir import Status
from rolloutd.ports import Failed, Ok

LAST_PERCENT = 99.0
"""What a run shows at most while it runs: 100 is said by its outcome alone."""

TEXT_LIMIT = 600
"""Characters of a sentence for people; the output holds the rest."""

FINISHED = frozenset({"ok", "changed", "skipped", "ignored"})
RESULTS = FINISHED | {"failed", "unreachable"}
TROUBLE = frozenset({"failed", "unreachable"})

_NO_PYTHON = re.compile(
    r"interpreter .*not found|/python[\d.]*: (not found|No such file)|No such file or directory: .*python"
)


@dataclass(frozen=True, slots=True)
class Progress:
    """A run's events so far, folded."""

    node: str
    percent: float = 0.0
    task: str = ""
    finished: int = 0
    changed: int = 0
    asked: str = ""
    trouble: Mapping[str, Any] | None = None
    counts: Mapping[str, int] | None = None
    ended: bool = False

    def after(self, event: Mapping[str, Any]) -> Progress:
        """Return the progress with one more event."""
        kind = event.get("kind")
        moved = replace(self, percent=max(self.percent, _percent(event)))
        if kind in {"task", "handler"}:
            return replace(moved, task=str(event.get("task", "")))
        if kind == "prompt":
            return replace(moved, asked=str(event.get("text", "")))
        if kind == "stats":
            return replace(moved, ended=True, counts=(event.get("stats") or {}).get(self.node))
        if event.get("host") != self.node:
            return moved
        if kind in FINISHED:
            changed = self.changed + (kind == "changed")
            return replace(moved, finished=self.finished + 1, changed=changed)
        return replace(moved, trouble=event) if kind in TROUBLE else moved


def _percent(event: Mapping[str, Any]) -> float:
    done, todo = event.get("done"), event.get("todo")
    if not isinstance(done, int) or not isinstance(todo, int) or todo <= 0:
        return 0.0
    return min(LAST_PERCENT, round(100.0 * done / todo, 1))


def told(event: Mapping[str, Any]) -> str:
    """Return an event as a line of a log, which is never empty and never says the task's name again."""
    kind, text = str(event.get("kind", "")), str(event.get("text") or "")
    if kind == "stats":
        hosts = (event.get("stats") or {}).items()
        return "; ".join(f"{host}: {_counted(counts)}" for host, counts in hosts) or "no host was reached"
    if kind in RESULTS:
        return f"{kind}: {text}" if text else kind
    return text or str(event.get("task") or kind)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items() if number) or "nothing done"


def verdict(
    progress: Progress, status: Status, playbook: str, limit_s: float, output: str, tree: str = ""
) -> Ok | Failed:
    """Judge a run that is over; the sentence names what failed, where, and what Ansible said.

    Files of the `tree` are called as the plan's author calls them.
    """
    text = _complaint(progress, status, playbook, limit_s, output)
    if text is None:
        tasks = "1 task" if progress.finished == 1 else f"{progress.finished} tasks"
        return Ok(f"{tasks} on {progress.node}, {progress.changed} changed", output)
    if tree:
        text = text.replace(f"{tree}/", "").replace(tree, "the source")
    if status.left:
        text += f"; {status.left} of its processes would not end"
    return Failed(text[:TEXT_LIMIT], output)


def _complaint(progress: Progress, status: Status, playbook: str, limit_s: float, output: str) -> str | None:
    node = progress.node
    during = f' during task "{progress.task}"' if progress.task else ""
    if status.ended == "limit":
        return f"time limit of {duration(limit_s)} passed{during or ' before the first task'} on {node}"
    if status.ended == "cancelled":
        return f"the run of {playbook} on {node} was cancelled{during}"
    if progress.asked:
        asks = f"{playbook} asks for {progress.asked} (vars_prompt), and a run on {node} has nobody to ask"
        return f"{asks}: name it in the `vars` of the plan"
    counts = progress.counts or {}
    if progress.trouble is not None and (status.code != 0 or _in_trouble(counts)):
        return _sentence(progress.trouble, node)
    if status.code < 0:
        return f"ansible-playbook was ended by signal {-status.code}{during} on {node}"
    if status.code != 0:
        said = _errors(output) or f"exit status {status.code}{during}"
        return f"ansible-playbook could not run {playbook} on {node}: {said}"
    if not progress.ended or _in_trouble(counts):
        return f"ansible-playbook ended with 0, but its events do not show how {playbook} ended on {node}"
    if not progress.finished:
        return f"no play of this playbook runs on {node}"
    return None


def _in_trouble(counts: Mapping[str, int]) -> bool:
    return bool(counts.get("failures") or counts.get("unreachable"))


def _sentence(event: Mapping[str, Any], node: str) -> str:
    message = " ".join(str(event.get("text", "")).split()) or "no message"
    if event.get("kind") == "unreachable":
        return f"{node} was unreachable: {message}"
    if _NO_PYTHON.search(message):
        message += "; name a Python that exists there as ansible_python_interpreter in the inventory"
    on = f"{event['on']}, where {node} delegates it" if event.get("on") not in (None, node) else node
    return f'task "{event.get("task", "")}" failed on {on}: {message}'


def _errors(output: str) -> str:
    """Return Ansible's own error lines, with the file and line that it names."""
    at = max(output.rfind("\n[ERROR]"), output.rfind("\nERROR!"))
    if at < 0 and not output.startswith(("[ERROR]", "ERROR!")):
        return " ".join(output.split()[-60:])
    return " ".join(output[max(at, 0) :].split())


def duration(seconds: float) -> str:
    """Return a duration as plan files write it: 30m, 1h30m, 2.5s."""
    whole = int(seconds)
    if whole != seconds or whole == 0:
        return f"{seconds:g}s"
    parts = [(whole // 3600, "h"), (whole % 3600 // 60, "m"), (whole % 60, "s")]
    return "".join(f"{count}{unit}" for count, unit in parts if count)
