"""Events of an AWX job as the events of a run, in the order of their counters.

AWX stores events in batches that overtake each other, and may lose some.  So they are read up to the first
gap; a gap counts as lost only when the job has been over for some time.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from rolloutd.adapters.ansible.progress import Progress, format_event
from rolloutd.adapters.awx.http import PAGE_SIZE, AwxClient, Query
from rolloutd.ports import JSON, RunEvent

MAX_TEXT_LENGTH = 2000
"""Characters kept of a message, as of a run on this machine."""

MAX_OUTPUT_LENGTH = 20_000
"""Characters kept of the end of the output: enough for Ansible's own error messages."""

MAX_PAGES = 50
"""Pages of one reading, 10,000 events: the next one continues; a server may always name a next page."""

MAX_WAITING = 5000
"""Events kept behind a gap, at most 30 KB each; with more, the gap counts as lost."""

NO_LOG_TEXT = "the output is hidden by no_log"

_RESULTS = {
    "runner_on_ok": "ok",
    "runner_on_failed": "failed",
    "runner_on_skipped": "skipped",
    "runner_on_unreachable": "unreachable",
    "runner_retry": "retry",
    "runner_item_on_failed": "retry",
}
_FAILURES = frozenset({"failed", "ignored", "retry"})
_PLAYBOOK = {
    "playbook_on_start": "playbook",
    "playbook_on_play_start": "play",
    "playbook_on_task_start": "task",
    "playbook_on_handler_task_start": "handler",
    "playbook_on_include": "include",
    "playbook_on_no_hosts_matched": "no-hosts",
    "playbook_on_vars_prompt": "prompt",
    "playbook_on_stats": "stats",
}
_CONDITION_KEYS = frozenset({"false_condition", "skip_reason", "skipped_reason"})
"""Keys of a result that a condition of the playbook skipped, not check mode."""

_COMMANDS = frozenset({"command", "shell", "raw", "script", "expect"})
"""Actions that check mode always skips."""

_OUTPUTS = ("stderr", "module_stderr", "stdout", "module_stdout")
"""Where the reason of a failure is: with a terminal, ssh has one stream, so it may be in the last one."""

_SSH_CLOSED = re.compile(r"(Shared connection|Connection) to \S+ closed\.")
"""ssh's own last message, which is no reason."""

_SHELL_SIGNALS, _LAST_SIGNAL = 128, 64
"""A shell's exit status for a program that a signal ended is 128 and its number."""


@dataclass(slots=True)
class EventFold:
    """A job's events so far: what they say of the run, and where the next ones begin."""

    progress: Progress
    expected_tasks: int
    check_only: bool
    next_counter: int = 1
    lost: int = 0
    output: str = ""
    started: int = 0
    _waiting: dict[int, tuple[str, dict[str, JSON] | None]] = field(default_factory=dict)

    async def read_new(self, client: AwxClient, job: int) -> bool:
        """Read what AWX has stored since; return whether anything is new."""
        before = self.next_counter
        async for event in _read_from(client, job, self.next_counter):
            counter = event["counter"]
            if counter >= self.next_counter and counter not in self._waiting:
                # A job that begins twice has each counter twice; the first one counts.
                output = str(event.get("stdout") or "")[-MAX_OUTPUT_LENGTH:]
                self._waiting[counter] = output, to_event(event, check_only=self.check_only)
        while self.next_counter in self._waiting:
            self._apply(*self._waiting.pop(self.next_counter))
        if len(self._waiting) > MAX_WAITING:
            self.accept_gaps()
        return self.next_counter != before

    def accept_gaps(self) -> None:
        """Count what is missing as lost, and apply what came after it."""
        for counter in sorted(self._waiting):
            self.lost += counter - self.next_counter
            self.next_counter = counter
            self._apply(*self._waiting.pop(counter))

    @property
    def has_gap(self) -> bool:
        return bool(self._waiting)

    def _apply(self, output: str, run_event: dict[str, JSON] | None) -> None:
        self.next_counter += 1
        self.output = f"{self.output}{output}\n"[-MAX_OUTPUT_LENGTH:]
        if run_event is None:
            return
        if run_event["kind"] in ("task", "handler"):
            self.started += 1
            done = self.started - 1
            run_event |= {"done": done, "todo": max(self.expected_tasks, self.started)}
        self.progress = self.progress.apply_event(run_event)


async def read_events(
    client: AwxClient, job: int, after: int, *, check_only: bool, is_over: bool
) -> AsyncIterator[RunEvent]:
    """Yield a job's events after a counter, up to the first gap while the job is not over."""
    expected = after + 1
    async for event in _read_from(client, job, expected):
        counter = event["counter"]
        if counter < expected:
            continue
        if counter > expected and not is_over:
            return
        expected = counter + 1
        if (run_event := to_event(event, check_only=check_only)) is not None:
            at, kind = run_event.pop("at"), run_event.pop("kind")
            text = format_event({"kind": kind, **run_event})
            run_event.pop("text", None)
            yield RunEvent(counter, at, kind, text, run_event)


async def _read_from(client: AwxClient, job: int, first: int) -> AsyncIterator[Mapping[str, JSON]]:
    for _ in range(MAX_PAGES):
        query: Query = {"order_by": "counter", "counter__gte": first, "page_size": PAGE_SIZE}
        answer = await client.get(f"jobs/{job}/job_events/", {**query, "no_truncate": 1})
        events = [each for each in answer["results"] if isinstance(each.get("counter"), int)]
        for event in events:
            yield event
        if not answer.get("next") or not events or events[-1]["counter"] < first:
            return
        first = events[-1]["counter"] + 1


def to_event(event: Mapping[str, JSON], *, check_only: bool) -> dict[str, JSON] | None:
    """Return an event of AWX as one of ansible/callback/rolloutd_events.py; None if it has none."""
    name = str(event.get("event"))
    fields = event.get("event_data") or {}
    common = {
        "at": instant(event.get("created")) or 0.0,
        "play": str(fields.get("play") or "")[:MAX_TEXT_LENGTH],
        "task": str(fields.get("task") or "")[:MAX_TEXT_LENGTH],
    }
    if name in _PLAYBOOK:
        return {**common, "kind": _PLAYBOOK[name], **_playbook_fields(name, fields)}
    given = fields.get("res")
    result: Mapping[str, JSON] = given if isinstance(given, dict) else {}
    is_skipped = name in ("runner_on_skipped", "runner_item_on_skipped")
    if check_only and is_skipped and _is_unchecked(fields, result):
        kind = "unchecked"
    elif name in _RESULTS:
        kind = _RESULTS[name]
    else:
        return None
    if kind == "ok" and event.get("changed"):
        kind = "changed"
    if kind in ("failed", "unreachable") and fields.get("ignore_errors"):
        kind = "ignored"
    host = str(fields.get("host") or "")
    text = _result_text(result, has_failed=kind in _FAILURES)[:MAX_TEXT_LENGTH]
    signal = _ending_signal(result) if kind == "failed" else None
    ended = {} if signal is None else {"signal": signal}
    return {**common, "kind": kind, "host": host, "text": text, **ended}


def _playbook_fields(name: str, fields: Mapping[str, JSON]) -> dict[str, JSON]:
    match name:
        case "playbook_on_start":
            return {"text": str(fields.get("playbook") or "")}
        case "playbook_on_play_start" | "playbook_on_no_hosts_matched":
            return {"text": str(fields.get("play") or "")}
        case "playbook_on_include":
            return {"text": str(fields.get("included_file") or "")}
        case "playbook_on_vars_prompt":
            return {"text": str(fields.get("varname") or "")}
        case "playbook_on_stats":
            return {"stats": _stats(fields)}
    return {}


def _stats(fields: Mapping[str, JSON]) -> dict[str, dict[str, int]]:
    """Return the counts by host, as Ansible names them."""
    names = {"dark": "unreachable"}
    counts: dict[str, dict[str, int]] = {str(host): {} for host in fields.get("processed") or {}}
    for name in ("ok", "changed", "failures", "dark", "skipped", "rescued", "ignored"):
        for host, number in (fields.get(name) or {}).items():
            counts.setdefault(str(host), {})[names.get(name, name)] = int(number)
    return counts


def _is_unchecked(fields: Mapping[str, JSON], result: Mapping[str, JSON]) -> bool:
    """Return whether check mode skipped a task, or an item of its loop, that no condition skipped.

    Ansible removes `skipped` from the result of a task.  A result that `no_log` hides does not say what
    skipped it: it counts as skipped by a condition, but for commands.  Items of a loop have their own events.
    """
    if "censored" in result:
        return str(fields.get("task_action")).rsplit(".", 1)[-1] in _COMMANDS
    return not result.get("results") and not _CONDITION_KEYS & result.keys()


def _result_text(result: Mapping[str, JSON], *, has_failed: bool) -> str:
    if "censored" in result:
        return NO_LOG_TEXT
    message = str(result.get("msg") or "").strip()
    if not has_failed:
        return message
    outputs = (str(result.get(name) or "").strip() for name in _OUTPUTS)
    output = next(
        (text for text in outputs if text and text not in message and not _SSH_CLOSED.fullmatch(text)), ""
    )
    return f"{message}: {output}" if message and output else message or output


def _ending_signal(result: Mapping[str, JSON]) -> int | None:
    """Return the signal that ended a module, or its ssh, before the module could return a result."""
    status = result.get("rc")
    if "module_stdout" not in result or not isinstance(status, int):
        return None  # Ansible quotes the output of a module that returned no result, and of no other one
    if status < 0:
        return -status
    return status - _SHELL_SIGNALS if _SHELL_SIGNALS < status <= _SHELL_SIGNALS + _LAST_SIGNAL else None


def instant(text: JSON) -> float | None:
    """Return an instant of AWX as epoch seconds."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None
