"""Progress and result of a run from its events.

A run succeeds only if its events show a finished task on the node or a `meta` task that may end it, no failed
or unreachable one, and exit 0: ansible-playbook exits 0 also if its plays match no host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from machines.model.rollout import FailureCode
from machines.model.timefmt import format_duration
from rolloutd.adapters.ansible.run_directory import RunEventLine, RunStatus
from rolloutd.ports import Failed, Ok, RunEvent, RunState, Unknown

MAX_RUNNING_PERCENT = 99.0
"""Limit while the run is not over: only its result shows 100."""

MAX_TEXT_LENGTH = 600
"""Limit of a sentence in characters; the output holds the rest."""

FINISHED_KINDS = frozenset({"ok", "changed", "skipped", "unchecked", "ignored"})
RESULT_KINDS = FINISHED_KINDS | {"failed", "unreachable"}
FAILURE_KINDS = frozenset({"failed", "unreachable"})

_PYTHON_NOT_FOUND = re.compile(
    r"interpreter .*not found|/python[\d.]*: (not found|No such file)|No such file or directory: .*python"
)


@dataclass(frozen=True, slots=True)
class Progress:
    """A run's events so far, folded."""

    node: str
    percent: float = 0.0
    task: str = ""
    finished_tasks: int = 0
    changed_tasks: int = 0
    prompted_variable: str = ""
    defying_task: str = ""
    may_end_early: bool = False
    failure_event: Mapping[str, Any] | None = None
    counts: Mapping[str, int] | None = None
    has_stats: bool = False

    def run_state(self, result: Ok | Failed | Unknown | None, began_at: float | None) -> RunState:
        return RunState(result, 100.0 if isinstance(result, Ok) else self.percent, self.task, began_at)

    def apply_event(self, event: Mapping[str, Any]) -> Progress:
        kind = event.get("kind")
        updated = replace(self, percent=max(self.percent, _percent(event)))
        if kind in {"task", "handler"}:
            may_end_early = self.may_end_early or bool(event.get("ends"))
            return replace(updated, task=str(event.get("task", "")), may_end_early=may_end_early)
        if kind == "prompt":
            return replace(updated, prompted_variable=str(event.get("text", "")))
        if kind == "defies-check-mode":
            return replace(updated, defying_task=str(event.get("text", "")))
        if kind == "stats":
            return replace(updated, has_stats=True, counts=(event.get("stats") or {}).get(self.node))
        if event.get("host") != self.node:
            return updated
        if kind in FINISHED_KINDS:
            changed = self.changed_tasks + (kind == "changed")
            return replace(updated, finished_tasks=self.finished_tasks + 1, changed_tasks=changed)
        return replace(updated, failure_event=event) if kind in FAILURE_KINDS else updated


def _percent(event: Mapping[str, Any]) -> float:
    done, todo = event.get("done"), event.get("todo")
    if not isinstance(done, int) or not isinstance(todo, int) or todo <= 0:
        return 0.0
    return min(MAX_RUNNING_PERCENT, round(100.0 * done / todo, 1))


def format_event(event: Mapping[str, Any]) -> str:
    """Return an event as a non-empty log line that does not repeat the task's name."""
    kind, text = str(event.get("kind", "")), str(event.get("text") or "")
    if kind == "stats":
        hosts = (event.get("stats") or {}).items()
        return (
            "; ".join(f"{host}: {_format_counts(counts)}" for host, counts in hosts) or "no host was reached"
        )
    if kind in RESULT_KINDS:
        return f"{kind}: {text}" if text else kind
    return text or str(event.get("task") or kind)


def to_run_event(line: RunEventLine) -> RunEvent:
    event = dict(line.event)
    at, kind = event.pop("at", 0.0), event.pop("kind", "")
    event.pop("text", None)
    return RunEvent(line.offset, float(at), str(kind), format_event(line.event), event)


def _format_counts(counts: Mapping[str, int]) -> str:
    # The recap that ansible-playbook prints says `failed` for what its statistics call `failures`.
    named = (("failed" if name == "failures" else name, number) for name, number in counts.items())
    return ", ".join(f"{number} {name}" for name, number in named if number) or "nothing done"


def evaluate_run(
    progress: Progress,
    status: RunStatus,
    playbook: str,
    timeout_s: float,
    output: str,
    tree: str = "",
    *,
    is_fenced: bool = False,
) -> Ok | Failed:
    """Return the result of a run that is over, with paths of files relative to the `tree`.

    `is_fenced`: the run's own first play has to reach the node before the user's first task.
    """
    text = _failure_text(progress, status, playbook, timeout_s, output)
    if text is None:
        tasks = "1 task" if progress.finished_tasks == 1 else f"{progress.finished_tasks} tasks"
        return Ok(f"{tasks} on {progress.node}, {progress.changed_tasks} changed", output)
    if tree:
        text = text.replace(f"{tree}/", "").replace(tree, "the source")
    if status.left:
        text += f"; {status.left} of its processes would not end"
    return Failed(text[:MAX_TEXT_LENGTH], output, _failure_code(progress, status, is_fenced=is_fenced))


def _failure_code(progress: Progress, status: RunStatus, *, is_fenced: bool) -> FailureCode:
    """Return what the failure is of; a run begins with the first task of the user's playbook."""
    if status.ended == "cancelled":
        return FailureCode.INTERFERENCE
    failure = progress.failure_event or {}
    if failure.get("kind") == "unreachable":
        # The fence had reached the node, so its first task may have changed it before the connection ended.
        has_begun = progress.finished_tasks or (is_fenced and progress.task)
        return FailureCode.LOST if has_begun else FailureCode.UNREACHABLE
    if not progress.task or (not progress.changed_tasks and _lacks_python(failure)):
        return FailureCode.NEVER_STARTED
    was_killed = progress.failure_event is None and status.ended == "exit" and status.code < 0
    return FailureCode.UNKNOWN if was_killed else FailureCode.FAILED


def _failure_text(
    progress: Progress, status: RunStatus, playbook: str, timeout_s: float, output: str
) -> str | None:
    node = progress.node
    during = f' during task "{progress.task}"' if progress.task else ""
    if status.ended == "limit":
        return (
            f"time limit of {format_duration(timeout_s)} passed{during or ' before the first task'} on {node}"
        )
    if status.ended == "cancelled":
        return f"the run of {playbook} on {node} was cancelled{during}"
    if progress.prompted_variable:
        return (
            f"{playbook} asks for {progress.prompted_variable} (vars_prompt), but the run on {node} cannot "
            "prompt: name it in the `vars` of the plan"
        )
    if progress.defying_task:
        return (
            f'check mode would execute task "{progress.defying_task}" on {node}: '
            "add `changed_when: false` to it if it changes nothing"
        )
    counts = progress.counts or {}
    if progress.failure_event is not None and (status.code != 0 or _has_failures(counts)):
        return _describe_failure(progress.failure_event, node)
    if status.code < 0:
        return f"ansible-playbook was ended by signal {-status.code}{during} on {node}"
    if status.code != 0:
        errors = _extract_errors(output) or f"exit status {status.code}{during}"
        return f"ansible-playbook could not run {playbook} on {node}: {errors}"
    if not progress.has_stats or _has_failures(counts):
        return f"ansible-playbook ended with 0, but its events do not show how {playbook} ended on {node}"
    if not progress.finished_tasks and not progress.may_end_early:
        return f"no play of this playbook runs on {node}"
    return None


def _has_failures(counts: Mapping[str, int]) -> bool:
    return bool(counts.get("failures") or counts.get("unreachable"))


def _lacks_python(failure: Mapping[str, Any]) -> bool:
    return bool(_PYTHON_NOT_FOUND.search(" ".join(str(failure.get("text", "")).split())))


def _describe_failure(event: Mapping[str, Any], node: str) -> str:
    message = " ".join(str(event.get("text", "")).split()) or "no message"
    if event.get("kind") == "unreachable":
        return f"{node} was unreachable: {message}"
    if _lacks_python(event):
        message += "; name a Python that exists there as ansible_python_interpreter in the inventory"
    where = f"{event['on']}, where {node} delegates it" if event.get("on") not in (None, node) else node
    return f'task "{event.get("task", "")}" failed on {where}: {message}'


def _extract_errors(output: str) -> str:
    """Return Ansible's error lines with their file and line."""
    at = max(output.rfind("\n[ERROR]"), output.rfind("\nERROR!"))
    if at < 0 and not output.startswith(("[ERROR]", "ERROR!")):
        return " ".join(output.split()[-60:])
    return " ".join(output[max(at, 0) :].split())
