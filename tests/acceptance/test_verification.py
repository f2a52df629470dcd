"""What judges a node after the change: infra's checks, the team's own, playbooks and URLs."""

from __future__ import annotations

import http.server
import os
import pwd
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rolloutd.control.client import api_path
from tests.support.daemon_environment import (
    CHANGE_PLAYBOOK,
    DaemonEnvironment,
    daemon_environment,
    find_processes,
    fleet_labels,
    plan,
)

pytestmark = pytest.mark.servers

VERIFY_PLAYBOOK = """\
- hosts: all
  gather_facts: false
  tasks:
    - name: verify begins
      ansible.builtin.raw: echo "{{ inventory_hostname }}" >> {{ log_file }}.verified
      changed_when: false
    - name: verify waits
      ansible.builtin.shell: while test -e {{ log_file }}.verify-hold; do sleep 0.1; done
      changed_when: false
    - name: service is up
      ansible.builtin.shell: test ! -e {{ log_file }}.sick || { echo 3 workers left >&2; exit 4; }
      changed_when: false
"""


@contextmanager
def health_page(directory: Path) -> Iterator[str]:
    """Serve the files of a directory on loopback."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(directory))

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://{{{{ node.address }}}}:{server.server_address[1]}/{{{{ node.name }}}}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def drain(directory: Path) -> dict[str, Any]:
    """Return an isolator that leaves a file while a node is out of service."""
    flag = f"{directory}/isolated-{{{{ node.name }}}}"
    return {"command": {"look": f"test -e {flag}", "do": f"touch {flag}", "undo": f"rm {flag}"}}


def submit(made: DaemonEnvironment, **spec: Any) -> str:
    variables = {"log_file": str(made.log_file)}
    stage: dict[str, Any] = {"playbook": "change.yml", "vars": variables}
    text = plan("verified", isolate=[drain(made.directory)], maintain=stage, **spec)
    return made.submit(text, {"change.yml": CHANGE_PLAYBOOK, "verify.yml": VERIFY_PLAYBOOK})


def wait_paused(made: DaemonEnvironment, rollout: str) -> dict[str, Any]:
    made.wait_until(lambda: made.status(rollout)["state"] == "paused", "the rollout pauses")
    return made.status(rollout)


def verified(made: DaemonEnvironment) -> list[str]:
    path = Path(f"{made.log_file}.verified")
    return path.read_text().split() if path.exists() else []


def test_failed_team_hook_keeps_node_isolated_and_names_team(tmp_path: Path) -> None:
    myself = pwd.getpwuid(os.geteuid()).pw_name
    order = tmp_path / "order"
    hook = {"ssh": {"run": f"echo team >> {order}; test -e {tmp_path}/team-is-content"}}
    teams = {
        "infra": {"members": [myself]},
        "t1": {"members": [myself], "verify": [hook]},
    }
    with daemon_environment(tmp_path, fleet_labels(2, 1, 1), teams=teams) as made:
        checks = [{"reachable": {"within": "60s"}}, {"ssh": {"run": f"echo infra >> {order}"}}]
        rollout = submit(made, verify=checks)
        made.vote(rollout, "start")
        status = wait_paused(made, rollout)
        assert "the check of team t1 has not passed" in status["reason"]["text"]
        assert (status["failed"], status["pending"], status["in_flight"]) == (1, 1, [])
        assert order.read_text().split() == ["infra", "team"]
        assert (tmp_path / "isolated-n1").exists(), "the node stays isolated"
        pool = next(pool for pool in status["pools"] if pool["pool"] == "team/t1")
        assert (pool["down"], pool["max_unavailable"]) == (1, 1), "its slot is held"

        (tmp_path / "team-is-content").touch()
        made.client.post(api_path("rollouts", rollout, "nodes", "n1", "retry"), {"reason": "repaired"})
        made.vote(rollout, "proceed")
        made.wait_for_gate(rollout, "continue")
        made.vote(rollout, "continue")
        made.wait_until(lambda: made.status(rollout)["state"] == "done", "the rollout ends")
        assert not (tmp_path / "isolated-n1").exists()


def test_playbook_and_url_judge_the_node_and_survive_a_kill(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "n1").write_text("ready\n")
    with health_page(pages) as url, daemon_environment(tmp_path, fleet_labels(1, 1, 1)) as made:
        hold = Path(f"{made.log_file}.verify-hold")
        hold.touch()
        checks = [
            {"playbook": {"file": "verify.yml"}},
            {"http": {"url": url, "body": "^ready", "in_service": True}},
        ]
        rollout = submit(made, verify=checks)
        made.vote(rollout, "start")
        made.wait_until(lambda: verified(made), "the playbook check runs")
        (sockets,) = made.shared_sockets()
        assert len(list(sockets.iterdir())) == 1, "the runs share one connection"
        made.kill_daemon()
        made.start_daemon()
        hold.unlink()
        made.wait_until(lambda: made.nodes(rollout)["n1"]["phase"] == "done", "the node is done")
        assert verified(made) == ["n1"], "the run of the check was found again"
        made.wait_until(lambda: made.shared_sockets() == [], "the connection of the attempt is ended")
        assert not sockets.exists()
        assert not find_processes(lambda command, _: os.fsencode(sockets) in command)
        made.wait_until(lambda: made.run_processes() == [], "no process is left")


def test_failed_task_of_playbook_check_is_the_failure(tmp_path: Path) -> None:
    with daemon_environment(tmp_path, fleet_labels(1, 1, 1)) as made:
        Path(f"{made.log_file}.sick").touch()
        rollout = submit(made, verify=[{"playbook": {"file": "verify.yml"}}])
        made.vote(rollout, "start")
        wait_paused(made, rollout)
        why = made.nodes(rollout)["n1"]["reason"]["text"]
        assert why.startswith('n1 failed in verify.0.playbook: task "service is up" failed on n1')
        assert "3 workers left" in why
        assert (tmp_path / "isolated-n1").exists()


BREAKING_PLAYBOOK = (
    CHANGE_PLAYBOOK
    + """\
    - name: break the service
      ansible.builtin.raw: touch {{ log_file }}.broken-{{ inventory_hostname }}
      when: inventory_hostname in breaks.split(",")
"""
)

REPAIR_PLAYBOOK = """\
- hosts: all
  gather_facts: false
  tasks:
    - name: repair the service
      ansible.builtin.raw: rm -f {{ log_file }}.broken-{{ inventory_hostname }}
"""


def submit_breaking(made: DaemonEnvironment, breaks: str, **check: Any) -> str:
    """Submit a change that breaks the service of some nodes, and a check of the service."""
    stage = {"playbook": "change.yml", "vars": {"log_file": str(made.log_file), "breaks": breaks}}
    service = {"ssh": {"run": f"test ! -e {made.log_file}.broken-{{{{ node.name }}}}", **check}}
    text = plan("breaking", isolate=[drain(made.directory)], maintain=stage, verify=[service])
    return made.submit(text, {"change.yml": BREAKING_PLAYBOOK, "repair.yml": REPAIR_PLAYBOOK})


def test_baseline_excuses_what_failed_before_and_nothing_else(tmp_path: Path) -> None:
    with daemon_environment(tmp_path, fleet_labels(2, 2, 1)) as made:
        Path(f"{made.log_file}.broken-n1").touch()
        rollout = submit_breaking(made, "n1,n2", baseline=True)
        made.vote(rollout, "start")
        wait_paused(made, rollout)
        nodes = made.nodes(rollout)
        assert (nodes["n1"]["phase"], nodes["n1"]["outcome"]) == ("done", "changed")
        assert nodes["n2"]["phase"] == "failed"
        assert nodes["n2"]["reason"]["text"].startswith("n2 failed in verify.0.ssh")
        steps = made.client.get(api_path("rollouts", rollout, "nodes", "n1"))["steps"]
        assert [s["state"] for s in steps if s["action"] == "check"] == ["failed", "failed"]
        assert steps[0]["step"] == "baseline.verify.0.ssh"


def test_repair_runs_once_before_the_node_is_failed(tmp_path: Path) -> None:
    with daemon_environment(tmp_path, fleet_labels(1, 1, 1)) as made:
        rollout = submit_breaking(made, "n1", repair="repair.yml")
        made.vote(rollout, "start")
        made.wait_until(lambda: made.nodes(rollout)["n1"]["phase"] == "done", "the node is done")
        steps = made.client.get(api_path("rollouts", rollout, "nodes", "n1"))["steps"]
        shown = [(s["step"], s["state"]) for s in steps if s["action"] in ("run", "check")]
        assert shown == [
            ("run.configure", "ok"),
            ("verify.0.ssh", "failed"),
            ("run.repair.verify.0.ssh", "ok"),
            ("verify.0.ssh", "ok"),
        ]
