"""Events and a status in, a verdict out: every sentence that a run can end with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from machines.model.rollout import FailureCode
from rolloutd.adapters.ansible.environment import CALLBACK_DIR
from rolloutd.adapters.ansible.progress import Progress, evaluate_run, format_event
from rolloutd.adapters.ansible.run_directory import RunStatus
from rolloutd.ports import Failed, Ok

EXITED = RunStatus("exit", 0, 0.0, 1.0, 0)


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"at": 1.0, "kind": kind, "host": "n0", "task": "t", **fields}


def stats(**counts: int) -> dict[str, Any]:
    return {"kind": "stats", "stats": {"n0": {"ok": 1, "failures": 0, "unreachable": 0, **counts}}}


def folded(*events: dict[str, Any]) -> Progress:
    progress = Progress("n0")
    for one in events:
        progress = progress.apply_event(one)
    return progress


def judged(progress: Progress, status: RunStatus = EXITED, output: str = "") -> Ok | Failed:
    return evaluate_run(progress, status, "p.yml", 1800.0, output)


def exited(code: int, left: int = 0) -> RunStatus:
    return RunStatus("exit", code, 0.0, 1.0, left)


def test_log_lines_not_empty_or_duplicated() -> None:
    assert format_event({"kind": "task", "task": "Make the directory"}) == "Make the directory"
    assert format_event(event("changed", text="")) == "changed"
    assert format_event(event("ok", text="All assertions passed")) == "ok: All assertions passed"
    assert format_event(stats(changed=2)) == "n0: 1 ok, 2 changed"
    assert format_event(stats(failures=1)) == "n0: 1 ok, 1 failed"
    assert format_event({"kind": "stats", "stats": {}}) == "no host was reached"
    assert format_event({"kind": "play", "text": ""}) == "play"


def test_done_needs_a_finished_task_the_counts_and_exit_0() -> None:
    assert isinstance(judged(folded(event("ok"), stats())), Ok)
    assert isinstance(judged(folded(event("ok"))), Failed)
    assert isinstance(judged(folded(stats())), Failed)
    assert isinstance(judged(folded(event("ok"), stats()), exited(1)), Failed)
    assert isinstance(judged(folded(event("ok", host="n1"), stats())), Failed)


def test_play_that_ends_before_its_first_task_is_done() -> None:
    ended_early = folded({"kind": "task", "task": "meta", "ends": True}, {"kind": "stats", "stats": {}})
    assert judged(ended_early) == Ok("0 tasks on n0, 0 changed", "")


def test_what_is_rescued_or_ignored_is_no_failure() -> None:
    assert isinstance(judged(folded(event("failed"), event("ok"), stats(rescued=1))), Ok)
    assert isinstance(judged(folded(event("ignored"), stats(ignored=1))), Ok)


def test_failures_count_even_with_exit_0() -> None:
    assert isinstance(judged(folded(event("ok"), event("failed"), stats(failures=1))), Failed)
    assert isinstance(judged(folded(event("ok"), event("unreachable"), stats(unreachable=1))), Failed)


@pytest.mark.parametrize(
    ("progress", "status", "output", "text"),
    [
        (
            folded(event("failed", task="install package", text="no\n such"), stats(failures=1)),
            exited(2),
            "",
            'task "install package" failed on n0: no such',
        ),
        (
            folded(event("unreachable", text="timed out"), stats(unreachable=1)),
            exited(4),
            "",
            "n0 was unreachable: timed out",
        ),
        (folded({"kind": "stats", "stats": {}}), exited(0), "", "no play of this playbook runs on n0"),
        (
            folded(event("task", task="reboot")),
            RunStatus("limit", -15, 0.0, 1800.0, 0),
            "",
            'time limit of 30m passed during task "reboot" on n0',
        ),
        (
            folded(),
            RunStatus("limit", -9, 0.0, 1800.0, 2),
            "",
            "time limit of 30m passed before the first task on n0; 2 of its processes would not end",
        ),
        (
            folded(event("task", task="reboot")),
            RunStatus("cancelled", 0, 0.0, 5.0, 0),
            "",
            'the run of p.yml on n0 was cancelled during task "reboot"',
        ),
        (
            folded(event("task", task="reboot")),
            exited(-9),
            "",
            'ansible-playbook was ended by signal 9 during task "reboot" on n0',
        ),
        (
            folded(),
            exited(4),
            "hello\n[ERROR]: did not find expected key\nOrigin: /t/p.yml:5:3\n",
            (
                "ansible-playbook could not run p.yml on n0: "
                "[ERROR]: did not find expected key Origin: /t/p.yml:5:3"
            ),
        ),
        (
            folded(event("failed", text="/bin/sh: 1: /opt/python3: not found"), stats(failures=1)),
            exited(2),
            "",
            (
                'task "t" failed on n0: /bin/sh: 1: /opt/python3: not found; '
                "name a Python that exists there as ansible_python_interpreter in the inventory"
            ),
        ),
    ],
)
def test_the_sentences(progress: Progress, status: RunStatus, output: str, text: str) -> None:
    result = judged(progress, status, output)
    assert isinstance(result, Failed)
    assert result.text == text


def test_percent_never_falls_and_never_says_100() -> None:
    progress, seen = Progress("n0"), []
    for done, todo in ((0, 4), (2, 4), (2, 8), (8, 8), (0, 0)):
        progress = progress.apply_event({"kind": "task", "task": "t", "done": done, "todo": todo})
        seen.append(progress.percent)
    assert seen == [0.0, 50.0, 50.0, 99.0, 99.0]


def test_files_are_called_as_the_plans_author_calls_them() -> None:
    tree = "/s/trees/git-abc"
    said = f"[ERROR]: the role 'x' was not found in {tree}/roles:{tree} Origin: {tree}/p.yml:3"
    judgement = evaluate_run(folded(), exited(1), "p.yml", 60.0, said, tree)
    assert isinstance(judgement, Failed)
    assert judgement.text.endswith("was not found in roles:the source Origin: p.yml:3")


def test_a_failure_on_a_delegated_host_names_it() -> None:
    judgement = judged(
        folded(event("failed", task="drain", text="no", on="lb1"), stats(failures=1)), exited(2)
    )
    assert judgement.text == 'task "drain" failed on lb1, where n0 delegates it: no'


def test_one_task_is_one_task() -> None:
    assert judged(folded(event("ok"), stats())).text == "1 task on n0, 0 changed"


def test_a_run_that_would_have_to_ask_says_for_what() -> None:
    judgement = judged(folded({"kind": "prompt", "text": "release"}), exited(2))
    assert isinstance(judgement, Failed)
    assert judgement.text.startswith("p.yml asks for release (vars_prompt), but the run on n0 cannot prompt")


def test_ansible_itself_tells_of_prompts_and_of_delegated_hosts(tmp_path: Path) -> None:
    """Played by the real one, with nothing but our plugin."""
    (tmp_path / "hosts").write_text("n0 ansible_connection=local\nlb1 ansible_connection=local\n")
    task = "{name: drain, ansible.builtin.fail: {msg: busy}, delegate_to: lb1}"
    play = f"- {{hosts: n0, gather_facts: false, vars_prompt: [{{name: release}}], tasks: [{task}]}}\n"
    (tmp_path / "p.yml").write_text(play)
    asked = played(tmp_path)
    assert asked.prompted_variable == "release"
    assert asked.failure_event is None
    told = played(tmp_path, "-e", "release=5")
    assert told.prompted_variable == ""
    assert told.failure_event is not None
    assert told.failure_event["on"] == "lb1"


def played(directory: Path, *options: str) -> Progress:
    """Return what the events of a real run add up to."""
    events = directory / "events"
    events.unlink(missing_ok=True)
    places = {"ROLLOUTD_EVENTS": str(events), "ANSIBLE_CALLBACK_PLUGINS": str(CALLBACK_DIR)}
    subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", "hosts", "p.yml", *options],
        cwd=directory,
        env={**os.environ, **places, "ANSIBLE_CALLBACKS_ENABLED": "rolloutd_events"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    return folded(*map(json.loads, events.read_text().splitlines()))


UNREACHABLE = event("unreachable", text="no route")
NO_PYTHON = "The module interpreter '/opt/none' was not found."
TASK = event("task")


@pytest.mark.parametrize(
    ("events", "status", "code"),
    [
        ((UNREACHABLE,), exited(4), FailureCode.UNREACHABLE),
        ((TASK, UNREACHABLE), exited(4), FailureCode.UNREACHABLE),
        ((TASK, event("ok"), UNREACHABLE), exited(4), FailureCode.LOST),
        ((TASK, event("failed", text=NO_PYTHON)), exited(2), FailureCode.NEVER_STARTED),
        ((TASK, event("ok"), event("failed", text=NO_PYTHON)), exited(2), FailureCode.NEVER_STARTED),
        ((TASK, event("changed"), event("failed", text=NO_PYTHON)), exited(2), FailureCode.FAILED),
        ((TASK, event("failed", text="no")), exited(2), FailureCode.FAILED),
        ((event("failed", text="a newer run was here"),), exited(2), FailureCode.NEVER_STARTED),
        ((), exited(1), FailureCode.NEVER_STARTED),
        ((TASK, event("ok")), exited(-9), FailureCode.UNKNOWN),
        ((TASK,), RunStatus("limit", -15, 0.0, 1.0, 0), FailureCode.FAILED),
        ((TASK,), RunStatus("cancelled", -15, 0.0, 1.0, 0), FailureCode.INTERFERENCE),
    ],
)
def test_failure_has_the_code_of_its_cause(
    events: tuple[dict[str, Any], ...], status: RunStatus, code: FailureCode
) -> None:
    result = judged(folded(*events), status)
    assert isinstance(result, Failed)
    assert result.code is code


@pytest.mark.parametrize(
    ("events", "code"), [((TASK, UNREACHABLE), FailureCode.LOST), ((UNREACHABLE,), FailureCode.UNREACHABLE)]
)
def test_node_lost_after_fence_may_have_a_part(events: tuple[dict[str, Any], ...], code: FailureCode) -> None:
    result = evaluate_run(folded(*events), exited(4), "p.yml", 1800.0, "", is_fenced=True)
    assert isinstance(result, Failed)
    assert result.code is code
