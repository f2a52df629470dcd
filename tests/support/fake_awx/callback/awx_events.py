"""Events of a playbook as ansible-runner's display callback makes them, one JSON line each."""

from __future__ import annotations

import json
import os
import time
import uuid
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
    name: awx_events
    type: notification
    short_description: events as AWX has them
    description: Writes events to the file named in AWX_EVENTS.
    options: {}
"""

CENSORED = "the output has been hidden due to the fact that 'no_log: true' was specified for this result"


class CallbackModule(CallbackBase):  # type: ignore[misc]
    """The plugin."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "notification"
    CALLBACK_NAME = "awx_events"
    CALLBACK_NEEDS_ENABLED = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        path = os.environ.get("AWX_EVENTS")
        self.disabled = not path
        self._file = open(path, "ab", buffering=0) if path else None  # noqa: SIM115, PTH123
        self._common: dict[str, Any] = {}

    def v2_playbook_on_start(self, playbook: Any) -> None:
        self._common["playbook"] = os.path.basename(playbook._file_name)  # noqa: PTH119
        self._write("playbook_on_start")

    def v2_playbook_on_play_start(self, play: Any) -> None:
        self._common["play"] = play.get_name()
        for key in ("task", "task_action"):
            self._common.pop(key, None)
        self._write("playbook_on_play_start")

    def v2_playbook_on_no_hosts_matched(self) -> None:
        self._write("playbook_on_no_hosts_matched")

    def v2_playbook_on_no_hosts_remaining(self) -> None:
        self._write("playbook_on_no_hosts_remaining")

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        self._common |= {"task": task.get_name(), "task_action": task.action}
        self._write("playbook_on_task_start")

    def v2_playbook_on_handler_task_start(self, task: Any) -> None:
        self.v2_playbook_on_task_start(task, True)

    def v2_playbook_on_include(self, included_file: Any) -> None:
        self._write("playbook_on_include", included_file=str(included_file._filename))

    def v2_playbook_on_vars_prompt(self, varname: str, *_: Any, **__: Any) -> None:
        self._write("playbook_on_vars_prompt", varname=varname)

    def v2_playbook_on_stats(self, stats: Any) -> None:
        names = ("ok", "changed", "failures", "dark", "skipped", "processed", "rescued", "ignored")
        for key in ("play", "task", "task_action"):
            self._common.pop(key, None)
        data: dict[str, Any] = {name: dict(getattr(stats, name)) for name in names}
        self._write("playbook_on_stats", **data)

    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        self._write("runner_on_start", host=host.get_name())

    def v2_runner_on_ok(self, result: Any) -> None:
        self._write_result("runner_on_ok", result, changed=result.is_changed())

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        self._write_result("runner_on_failed", result, failed=not ignore_errors, ignore_errors=ignore_errors)

    def v2_runner_on_skipped(self, result: Any) -> None:
        self._write_result("runner_on_skipped", result)

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._write_result("runner_on_unreachable", result, failed=True)

    def v2_runner_retry(self, result: Any) -> None:
        self._write_result("runner_retry", result)

    def v2_runner_item_on_ok(self, result: Any) -> None:
        self._write_result("runner_item_on_ok", result, changed=result.is_changed())

    def v2_runner_item_on_failed(self, result: Any) -> None:
        self._write_result("runner_item_on_failed", result, failed=True)

    def v2_runner_item_on_skipped(self, result: Any) -> None:
        self._write_result("runner_item_on_skipped", result)

    def _write_result(
        self, event: str, result: Any, *, changed: bool = False, failed: bool = False, **data: Any
    ) -> None:
        fields = dict(result.result)
        if fields.get("_ansible_no_log") or result.task.no_log is True:
            fields = {"censored": CENSORED}
        fields.pop("invocation", None)
        if "runner_item" not in event:
            fields.pop("results", None)  # the items have events of their own
        fields = {name: value for name, value in fields.items() if not name.startswith("_ansible")}
        self._write(event, changed=changed, failed=failed, host=result.host.get_name(), res=fields, **data)

    def _write(self, event: str, *, changed: bool = False, failed: bool = False, **data: Any) -> None:
        assert self._file is not None
        line = {
            "event": event,
            "uuid": str(uuid.uuid4()),
            "created": time.time(),
            "changed": changed,
            "failed": failed,
            "event_data": {**self._common, **data},
        }
        self._file.write(json.dumps(line, default=str).encode() + b"\n")
