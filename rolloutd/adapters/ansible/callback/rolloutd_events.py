"""Callback plugin that writes a playbook's events as JSON lines.

Ansible loads it in addition to the user's own plugins; it prints nothing.
ROLLOUTD_EVENTS names the file to write; without it the plugin is disabled.  It
does not import rolloutd, and writes no part of a result with no_log.

Fields of a line: `at` (epoch seconds), `kind`, `host`, `task`, `play`, `text`,
`seconds`, `done` and `todo` (tasks, for a percentage), and for `stats` the
counts per host.  Kinds: playbook, play, no-hosts, task, handler, retry,
include, ok, changed, skipped, unchecked, failed, ignored, unreachable, stats.

In check mode, a task that did not say what it would change is `unchecked`.
A task that would run in spite of check mode ends the run, unless it declares
that it changes nothing (`changed_when: false`).
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
import time
from pathlib import Path
from typing import Any

from ansible import context
from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
    name: rolloutd_events
    type: notification
    short_description: one JSON line per event for rolloutd
    description: Writes the events of a run to the file named in the environment variable ROLLOUTD_EVENTS.
    options: {}
"""

MAX_TEXT_LENGTH = 2000
"""Characters kept of a message: enough for a module's error, not for a program's output."""

MAX_FILE_BYTES = 32 * 1024 * 1024
"""Beyond this only REQUIRED_KINDS are written, so that an endless loop does not fill the disk."""

NO_LOG_TEXT = "the output is hidden by no_log"

FENCE_PLAY_NAME = "rolloutd fence"
"""The play that runs before the user's; only its failures are written, and it does not count as progress."""

REQUIRED_KINDS = frozenset({"failed", "unreachable", "stats", "no-hosts"})
"""Kinds that the result depends on; they are written even if the file is too large."""

SPACE_RETRY_S = 1.0
"""Pause before an event that the result depends on is tried again on a full disk."""

STOPPED_EXIT_STATUS = 2
"""Exit status of a run that this plugin ends: the same as for Ansible's own failures."""


class CallbackModule(CallbackBase):  # type: ignore[misc]  # ansible has no types
    """The plugin; Ansible calls its v2_ methods."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "notification"
    CALLBACK_NAME = "rolloutd_events"
    CALLBACK_NEEDS_ENABLED = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        path = os.environ.get("ROLLOUTD_EVENTS")
        self.disabled = not path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600) if path else -1
        self._size = 0
        self._unwritten = b""
        self._expected_tasks: set[str] = set()
        self._started_tasks: set[str] = set()
        self._finished_tasks: set[str] = set()
        self._included_count = 0
        self._play = ""
        self._task_started_at = time.monotonic()

    # -- plays and tasks ---------------------------------------------------

    def v2_playbook_on_start(self, playbook: Any) -> None:
        plays = [play for play in playbook.get_plays() if play.get_name() != FENCE_PLAY_NAME]
        for play in plays:
            self._expected_tasks |= _play_tasks(play)
        if plays:
            self._write("playbook", text=Path(playbook._file_name or "").name)

    def v2_playbook_on_play_start(self, play: Any) -> None:
        self._play = str(play.get_name())
        if self._play != FENCE_PLAY_NAME:
            self._write("play", text=self._play)

    def v2_playbook_on_vars_prompt(self, varname: str, *_: Any, **__: Any) -> None:
        """End the run: there is no terminal, and Ansible would continue with an empty answer."""
        self._write("prompt", text=str(varname))
        raise SystemExit(STOPPED_EXIT_STATUS)

    def v2_playbook_on_no_hosts_matched(self) -> None:
        self._write("no-hosts", text=self._play)

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        """Record the task; earlier tasks count as finished, however they ended."""
        self._start_task(task, "task")

    def v2_playbook_on_handler_task_start(self, task: Any) -> None:
        """Record the handler; it was not counted, because Ansible runs it only if it is notified."""
        self._start_task(task, "handler")

    def v2_playbook_on_include(self, included_file: Any) -> None:
        """Add the included file's tasks to the expected ones."""
        self._finished_tasks.add(included_file._task._uuid)
        self._included_count += _count_included_tasks(included_file)
        self._write("include", text=str(included_file._filename))

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Write the counts per host."""
        if self._play == FENCE_PLAY_NAME:
            return  # the counts after the user's playbook include these
        hosts = {str(host): dict(stats.summarize(host)) for host in sorted(stats.processed)}
        self._write("stats", stats=hosts)

    # -- results -----------------------------------------------------------

    def v2_runner_on_ok(self, result: Any) -> None:
        """Record the task; in check mode, a loop may have items that did not say what they would change."""
        if _is_unchecked(result.task, result.result):
            self._finish_task(result, "unchecked")
        self._finish_task(result, "changed" if result.is_changed() else "ok")

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """Record the failure; only the final counts show whether a rescue handled it."""
        self._finish_task(result, "ignored" if ignore_errors else "failed")

    def v2_runner_on_skipped(self, result: Any) -> None:
        is_unchecked = _is_unchecked(result.task, result.result, is_skipped=True)
        self._finish_task(result, "unchecked" if is_unchecked else "skipped")

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._finish_task(
            result, "ignored" if result.task_fields.get("ignore_unreachable") else "unreachable"
        )

    def v2_runner_retry(self, result: Any) -> None:
        self._write(
            "retry", host=str(result.host.get_name()), task=_result_task_name(result), text=_message(result)
        )

    # -- private -----------------------------------------------------------

    def _start_task(self, task: Any, kind: str) -> None:
        if self._play == FENCE_PLAY_NAME:
            return
        if _defies_check_mode(task):
            self._write("defies-check-mode", text=_task_name(task))
            raise SystemExit(STOPPED_EXIT_STATUS)
        self._finished_tasks |= self._started_tasks
        if task.action not in _META_ACTIONS:  # these have no result
            if task._uuid not in self._expected_tasks:
                self._expect_late(task)
            self._started_tasks.add(task._uuid)
        self._task_started_at = time.monotonic()
        ends = {"ends": True} if _may_end_play(task) else {}
        self._write(kind, task=_task_name(task), **ends)

    def _expect_late(self, task: Any) -> None:
        """Count a task that was unknown at the start: facts, an included task, a handler."""
        self._expected_tasks.add(task._uuid)
        facts = next((name for name in self._expected_tasks if name.startswith(_FACTS_PREFIX)), None)
        if task.action in _GATHER_FACTS_ACTIONS and facts:
            self._expected_tasks.discard(facts)
        else:
            self._included_count = max(0, self._included_count - 1)

    def _finish_task(self, result: Any, kind: str) -> None:
        if self._play == FENCE_PLAY_NAME and kind not in REQUIRED_KINDS:
            return
        self._finished_tasks.add(result.task._uuid)
        seconds = round(time.monotonic() - self._task_started_at, 3)
        host = str(result.host.get_name())
        where = {} if (on := _delegated_host(result)) is None else {"on": on}
        if kind == "changed" and (diff := _diff(result)):
            where["diff"] = diff
        self._write(
            kind, host=host, task=_result_task_name(result), text=_message(result), seconds=seconds, **where
        )

    def _write(self, kind: str, **fields: Any) -> None:
        if self._size > MAX_FILE_BYTES and kind not in REQUIRED_KINDS:
            return
        todo = len(self._expected_tasks) + self._included_count
        event = {
            "at": round(time.time(), 3),
            "kind": kind,
            "play": self._play[:MAX_TEXT_LENGTH],
            "done": min(len(self._finished_tasks), todo),
            "todo": todo,
            **{
                name: value[:MAX_TEXT_LENGTH] if isinstance(value, str) else value
                for name, value in fields.items()
            },
        }
        line = json.dumps(event, ensure_ascii=True).encode() + b"\n"
        self._size += len(line)
        self._unwritten += line
        while not self._flush() and kind in REQUIRED_KINDS:
            time.sleep(SPACE_RETRY_S)

    def _flush(self) -> bool:
        """Write what is not written yet; return whether the disk took all of it."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._fd, self._unwritten) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        return not self._unwritten


def _play_tasks(play: Any) -> set[str]:
    """Return the ids of the tasks that a play runs if none fails."""
    if not _matches_hosts(play):
        return set()
    found = {_FACTS_PREFIX + play._uuid} if play.gather_facts is None or play.gather_facts is True else set()
    for block in play.compile():
        found |= _block_tasks(block)
    return found


def _matches_hosts(play: Any) -> bool:
    """Return whether a play's pattern matches a host; a template counts as a match."""
    inventory = getattr(play.get_variable_manager(), "_inventory", None)
    patterns = play.hosts if isinstance(play.hosts, list) else [play.hosts]
    if inventory is None or any("{{" in str(pattern) for pattern in patterns):
        return True
    return bool(inventory.get_hosts(patterns))


def _block_tasks(block: Any) -> set[str]:
    found: set[str] = set()
    for entry in [*block.block, *block.always]:
        if hasattr(entry, "block"):
            found |= _block_tasks(entry)
        elif not entry.implicit and entry.action not in _META_ACTIONS and "never" not in entry.tags:
            found.add(entry._uuid)
    return found


_FACTS_PREFIX = "facts of "
_GATHER_FACTS_ACTIONS = frozenset(
    {"gather_facts", "ansible.builtin.gather_facts", "ansible.legacy.gather_facts"}
)
_META_ACTIONS = frozenset({"meta", "ansible.builtin.meta", "ansible.legacy.meta"})


def _may_end_play(task: Any) -> bool:
    """Return whether the task ends the play for the node on purpose, perhaps before any result."""
    return task.action in _META_ACTIONS and task.args.get("_raw_params") in {
        "end_host",
        "end_play",
        "end_batch",
    }


def _count_included_tasks(included_file: Any) -> int:
    """Count the tasks of an included file; a role's are counted as they begin."""
    if getattr(included_file, "_is_role", False):
        return 0
    tasks = included_file._task.get_loader().load_from_file(included_file._filename)
    return _count_tasks(tasks) if isinstance(tasks, list) else 0


def _count_tasks(tasks: list[Any]) -> int:
    total = 0
    for task in tasks:
        if isinstance(task, dict) and "block" in task:
            total += _count_tasks(task.get("block") or []) + _count_tasks(task.get("always") or [])
        else:
            total += 1
    return total


def _in_check_mode() -> bool:
    return bool(context.CLIARGS.get("check"))


def _defies_check_mode(task: Any) -> bool:
    """Return whether check mode would execute the task, which does not declare that it changes nothing."""
    return _in_check_mode() and task.check_mode is not True and task.changed_when != [False]


def _is_unchecked(task: Any, fields: Any, *, is_skipped: bool = False) -> bool:
    """Return whether check mode skipped a task, or an item of its loop, that no condition skipped.

    Ansible removes `skipped` from the result of a task; the items of a loop keep it.  A result that `no_log`
    hides does not say what skipped it: a task with a condition counts as skipped by that, but for commands.
    """
    if not _in_check_mode():
        return False
    if "censored" in fields:
        return is_skipped and (not task.when or task.action.rsplit(".", 1)[-1] in _COMMANDS)
    items = fields.get("results")
    each_item = [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    if not each_item:
        return is_skipped and not _CONDITION_KEYS & fields.keys()
    return any(bool(item.get("skipped")) and not _CONDITION_KEYS & item.keys() for item in each_item)


_COMMANDS = frozenset({"command", "shell", "raw", "script", "expect"})
"""Actions that check mode always skips."""

_CONDITION_KEYS = frozenset({"false_condition", "skip_reason", "skipped_reason"})
"""Keys of a result that a condition of the playbook skipped, not check mode."""


def _task_name(task: Any) -> str:
    return str(task.get_name()).strip()


def _result_task_name(result: Any) -> str:
    return _task_name(result.task)


def _delegated_host(result: Any) -> str | None:
    """Return the host that the task was delegated to, or None."""
    host = result.task_fields.get("delegate_to")
    return str(host) if host else None


def _message(result: Any) -> str:
    """Return a result's message, without its data and without anything under no_log."""
    fields = result.result
    if fields.get("_ansible_no_log") or "censored" in fields or result.task.no_log is True:
        return NO_LOG_TEXT
    items = [_result_text(item) for item in _failed_items(fields)]
    return "; ".join(dict.fromkeys(filter(None, items))) or _result_text(fields)


def _diff(result: Any) -> str:
    """Return the changed lines if the run made a diff (`diff: true`), without anything under no_log."""
    fields = result.result
    if _message(result) == NO_LOG_TEXT:
        return ""
    results = fields.get("results") if isinstance(fields.get("results"), list) else [fields]
    diffs: list[Any] = []
    for each in results:
        if isinstance(each, dict) and not (each.get("_ansible_no_log") or "censored" in each):
            found = each.get("diff") or []
            diffs += found if isinstance(found, list) else [found]
    return "\n".join(filter(None, map(_diff_text, diffs)))


def _diff_text(diff: Any) -> str:
    if not isinstance(diff, dict):
        return ""
    if diff.get("prepared"):
        return str(diff["prepared"]).strip()
    before, after = (str(diff.get(key) or "").splitlines() for key in ("before", "after"))
    old, new = (str(diff.get(f"{key}_header") or key) for key in ("before", "after"))
    return "\n".join(difflib.unified_diff(before, after, old, new, lineterm="", n=1))


def _failed_items(fields: Any) -> list[Any]:
    items = fields.get("results")
    if not isinstance(items, list):
        return []
    return [
        item for item in items if isinstance(item, dict) and (item.get("failed") or item.get("unreachable"))
    ]


def _result_text(fields: Any) -> str:
    if fields.get("_ansible_no_log") or "censored" in fields:
        return NO_LOG_TEXT
    message = str(fields.get("msg") or "").strip()
    if message.startswith(_UNINFORMATIVE_MESSAGES):
        status = fields.get("rc")
        message += f" ({status})" if isinstance(status, int) else ""
        for name in ("stderr", "module_stderr", "stdout", "module_stdout"):
            more = str(fields.get(name) or "").strip()
            if more and not _SSH_CLOSED_MESSAGE.fullmatch(more):
                return f"{message}: {more}"
    return message


_SSH_CLOSED_MESSAGE = re.compile(r"(Shared connection|Connection) to \S+ closed\.")
"""ssh's own last message; a raw command has one stream, so it would hide the command's output."""

_UNINFORMATIVE_MESSAGES = ("non-zero return code", "MODULE FAILURE", "Module result deserialization failed")
"""Messages without a cause: the program's output is appended to them."""
