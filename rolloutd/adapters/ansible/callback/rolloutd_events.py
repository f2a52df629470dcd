"""Writes what a playbook does as one JSON line per event, for rolloutd to read.

Ansible loads this file as a callback plugin beside the user's own; it prints
nothing.  The file to write is named in ROLLOUTD_EVENTS; without it the plugin
is silent.  It uses the public callback interface only, knows nothing of
rolloutd, and writes nothing of a result that is marked no_log.

Fields of a line: `at` (epoch seconds), `kind`, `host`, `task`, `play`, `text`,
`seconds`, `done` and `todo` (tasks, for a percentage), and for `stats` the
counts per host.  Kinds: playbook, play, no-hosts, task, handler, retry,
include, ok, changed, skipped, failed, ignored, unreachable, stats.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
    name: rolloutd_events
    type: notification
    short_description: one JSON line per event for rolloutd
    description: Writes the events of a run to the file named in the environment variable ROLLOUTD_EVENTS.
    options: {}
"""

TEXT_LIMIT = 2000
"""Characters of a message that are kept: a module's own words, not a program's output."""

FILE_LIMIT_BYTES = 32 * 1024 * 1024
"""Beyond this only failures and the final counts are written: a loop without end fills no disk."""

NO_LOG = "the output is hidden by no_log"

FENCE_PLAY = "rolloutd fence"
"""The name of the play that goes before the user's: of it only trouble is told, and it is no progress."""

NEEDED = frozenset({"failed", "unreachable", "stats", "no-hosts"})
"""The kinds that a verdict needs, written whatever the size of the file."""

PROMPTED = 2
"""The exit status of a run that would have had to ask: that of Ansible's own failures."""


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
        self._expected: set[str] = set()
        self._seen: set[str] = set()
        self._done: set[str] = set()
        self._current = ""
        self._included = 0
        self._play = ""
        self._began = time.monotonic()

    # -- the way through the playbook --------------------------------------

    def v2_playbook_on_start(self, playbook: Any) -> None:
        """Count what will run."""
        plays = [play for play in playbook.get_plays() if play.get_name() != FENCE_PLAY]
        for play in plays:
            self._expected |= _tasks_of(play)
        if plays:
            self._write("playbook", text=Path(playbook._file_name or "").name)

    def v2_playbook_on_play_start(self, play: Any) -> None:
        """Note the play."""
        self._play = str(play.get_name())
        if self._play != FENCE_PLAY:
            self._write("play", text=self._play)

    def v2_playbook_on_vars_prompt(self, varname: str, *_: Any, **__: Any) -> None:
        """End the run where Ansible would go on with an empty answer: there is nobody to ask."""
        self._write("prompt", text=str(varname))
        raise SystemExit(PROMPTED)

    def v2_playbook_on_no_hosts_matched(self) -> None:
        """Note that the play runs nowhere."""
        self._write("no-hosts", text=self._play)

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        """Note the task; those before it are behind us, however they ended."""
        self._begin(task, "task")

    def v2_playbook_on_handler_task_start(self, task: Any) -> None:
        """Note the handler; nobody could count it before it was notified."""
        self._begin(task, "handler")

    def v2_playbook_on_include(self, included_file: Any) -> None:
        """Add what an include brings to what is to do, as far as its file says it."""
        self._done.add(included_file._task._uuid)
        self._included += _count_file(included_file)
        self._write("include", text=str(included_file._filename))

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Write the counts per host."""
        if self._play == FENCE_PLAY:
            return  # told again, with all that follows, after the user's playbook
        hosts = {str(host): dict(stats.summarize(host)) for host in sorted(stats.processed)}
        self._write("stats", stats=hosts)

    # -- results -----------------------------------------------------------

    def v2_runner_on_ok(self, result: Any) -> None:
        """Note a task that did what it should."""
        self._end(result, "changed" if result.is_changed() else "ok")

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """Note a task that failed; whether a rescue follows is told by the counts at the end."""
        self._end(result, "ignored" if ignore_errors else "failed")

    def v2_runner_on_skipped(self, result: Any) -> None:
        """Note a task that had nothing to do here."""
        self._end(result, "skipped")

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """Note that the host did not answer."""
        self._end(result, "ignored" if result.task_fields.get("ignore_unreachable") else "unreachable")

    def v2_runner_retry(self, result: Any) -> None:
        """Note one more try of a task with `until`."""
        self._write("retry", host=str(result.host.get_name()), task=_name(result), text=_message(result))

    # -- private -----------------------------------------------------------

    def _begin(self, task: Any, kind: str) -> None:
        if self._play == FENCE_PLAY:
            return
        self._done |= self._seen
        self._current = task._uuid
        if self._current not in self._expected:
            self._expect_late(task)
        self._seen.add(self._current)
        self._began = time.monotonic()
        self._write(kind, task=_plain_name(task))

    def _expect_late(self, task: Any) -> None:
        """Count a task that nobody could name before: facts, an included one, a handler."""
        self._expected.add(task._uuid)
        facts = next((name for name in self._expected if name.startswith(_FACTS)), None)
        if task.action in _GATHER and facts:
            self._expected.discard(facts)
        else:
            self._included = max(0, self._included - 1)

    def _end(self, result: Any, kind: str) -> None:
        if self._play == FENCE_PLAY and kind not in NEEDED:
            return
        self._done.add(result.task._uuid)
        seconds = round(time.monotonic() - self._began, 3)
        host = str(result.host.get_name())
        where = {} if (on := _delegated(result)) is None else {"on": on}
        self._write(kind, host=host, task=_name(result), text=_message(result), seconds=seconds, **where)

    def _write(self, kind: str, **fields: Any) -> None:
        if self._size > FILE_LIMIT_BYTES and kind not in NEEDED:
            return
        todo = len(self._expected) + self._included
        event = {
            "at": round(time.time(), 3),
            "kind": kind,
            "play": self._play[:TEXT_LIMIT],
            "done": min(len(self._done), todo),
            "todo": todo,
            **{
                name: value[:TEXT_LIMIT] if isinstance(value, str) else value
                for name, value in fields.items()
            },
        }
        line = json.dumps(event, ensure_ascii=True).encode() + b"\n"
        self._size += len(line)
        os.write(self._fd, line)


def _tasks_of(play: Any) -> set[str]:
    """Return the ids of the tasks that will run in a play, were nothing to fail."""
    if not _runs_somewhere(play):
        return set()
    found = {_FACTS + play._uuid} if play.gather_facts is None or play.gather_facts is True else set()
    for block in play.compile():
        found |= _tasks_in(block)
    return found


def _runs_somewhere(play: Any) -> bool:
    """Say whether a play's hosts match any; one that only the run itself can resolve may."""
    inventory = getattr(play.get_variable_manager(), "_inventory", None)
    patterns = play.hosts if isinstance(play.hosts, list) else [play.hosts]
    if inventory is None or any("{{" in str(pattern) for pattern in patterns):
        return True
    return bool(inventory.get_hosts(patterns))


def _tasks_in(block: Any) -> set[str]:
    found: set[str] = set()
    for entry in [*block.block, *block.always]:
        if hasattr(entry, "block"):
            found |= _tasks_in(entry)
        elif not entry.implicit and entry.action not in _META and "never" not in entry.tags:
            found.add(entry._uuid)
    return found


_FACTS = "facts of "
_GATHER = frozenset({"gather_facts", "ansible.builtin.gather_facts", "ansible.legacy.gather_facts"})
_META = frozenset({"meta", "ansible.builtin.meta", "ansible.legacy.meta"})


def _count_file(included_file: Any) -> int:
    """Count the tasks of an included file; a role's are counted as they begin."""
    if getattr(included_file, "_is_role", False):
        return 0
    tasks = included_file._task.get_loader().load_from_file(included_file._filename)
    return _count(tasks) if isinstance(tasks, list) else 0


def _count(tasks: list[Any]) -> int:
    total = 0
    for task in tasks:
        if isinstance(task, dict) and "block" in task:
            total += _count(task.get("block") or []) + _count(task.get("always") or [])
        else:
            total += 1
    return total


def _plain_name(task: Any) -> str:
    return str(task.get_name()).strip()


def _name(result: Any) -> str:
    return _plain_name(result.task)


def _delegated(result: Any) -> str | None:
    """Return the host that the task was handed to, where it was."""
    host = result.task_fields.get("delegate_to")
    return str(host) if host else None


def _message(result: Any) -> str:
    """Return a result's own words: never its data, never anything under no_log."""
    fields = result.result
    if fields.get("_ansible_no_log") or "censored" in fields or result.task.no_log is True:
        return NO_LOG
    items = [_words(item) for item in _failed_items(fields)]
    return "; ".join(dict.fromkeys(filter(None, items))) or _words(fields)


def _failed_items(fields: Any) -> list[Any]:
    items = fields.get("results")
    if not isinstance(items, list):
        return []
    return [
        item for item in items if isinstance(item, dict) and (item.get("failed") or item.get("unreachable"))
    ]


def _words(fields: Any) -> str:
    if fields.get("_ansible_no_log") or "censored" in fields:
        return NO_LOG
    message = str(fields.get("msg") or "").strip()
    if message.startswith(_EMPTY_WORDS):
        status = fields.get("rc")
        message += f" ({status})" if isinstance(status, int) else ""
        for name in ("stderr", "module_stderr", "stdout", "module_stdout"):
            more = str(fields.get(name) or "").strip()
            if more and not _TTY_END.fullmatch(more):
                return f"{message}: {more}"
    return message


_TTY_END = re.compile(r"(Shared connection|Connection) to \S+ closed\.")
"""What ssh says itself at the end of a raw command, whose own words are on the terminal's one stream."""

_EMPTY_WORDS = ("non-zero return code", "MODULE FAILURE", "Module result deserialization failed")
"""Messages that say nothing by themselves: the program's own last words follow them."""
