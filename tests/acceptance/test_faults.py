"""What goes wrong in a working life: each a clear sentence, nothing lost, the daemon alive."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutd.control.client import ApiError
from tests.support.daemon_environment import (
    CHANGE_PLAYBOOK,
    WAIT_LIMIT_S,
    WARM,
    DaemonEnvironment,
    daemon_environment,
    fleet_labels,
    plan,
)
from tests.support.forked_process import CLI, DAEMON, run_forked

pytestmark = pytest.mark.servers


@contextmanager
def surviving_daemon(directory: Path) -> Iterator[DaemonEnvironment]:
    """Run two teams of two nodes each, and their daemon, which is alive at the end."""
    with daemon_environment(directory, fleet_labels(4, 2, 1), observe_within="3s") as made:
        yield made
        assert made.client.get("/v1/health")["version"]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[DaemonEnvironment]:
    """A daemon of the test's own."""
    with surviving_daemon(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonEnvironment]:
    """A daemon for the tests that need none of their own."""
    with surviving_daemon(tmp_path_factory.mktemp("idle")) as made:
        yield made


def test_changed_host_key_fails_node_with_hint(made: DaemonEnvironment) -> None:
    """The check meets another key than known_hosts has; the failure names the file."""
    made.pause_playbooks()
    rollout = begin(made, "hostkey")
    made.wait_until(lambda: any(s.node == "n1" for s in made.spans()), "n1's playbook runs")
    other = made.sshds["n2"].known_hosts.read_text().split()[1:]
    known = (made.directory / "known_hosts").read_text().splitlines()
    port = f":{made.sshds['n1'].port} "
    lines = [f"{line.split()[0]} {' '.join(other)}" if port in line else line for line in known]
    (made.directory / "known_hosts").write_text("\n".join(lines) + "\n")
    made.resume_playbooks()
    status = made.wait_until(lambda: paused(made, rollout), "the rollout pauses")
    assert "n1" in status["reason"]["text"]
    failure = made.client.get(f"/v1/rollouts/{rollout}/nodes/n1")["failure"]
    assert "host key" in failure["message"]
    assert "known_hosts" in failure["message"]


def test_a_node_that_stops_answering_in_the_middle_fails_alone(made: DaemonEnvironment) -> None:
    """Its sshd dies under the playbook; the node is failed, its slot kept, the reason says unreachable."""
    made.pause_playbooks()
    rollout = begin(made, "silent")
    made.wait_until(lambda: any(s.node == "n1" for s in made.spans()), "n1's playbook runs")
    made.sshds["n1"].stop()
    made.resume_playbooks()
    status = made.wait_until(lambda: paused(made, rollout), "the rollout pauses")
    assert status["failed"] == 1
    assert "n1" in status["reason"]["text"]
    failure = made.client.get(f"/v1/rollouts/{rollout}/nodes/n1")["failure"]
    assert failure["code"] == "lost"
    assert made.client.get("/v1/verdicts")["verdicts"] == []
    locks = {pool["pool"]: pool for pool in made.client.get("/v1/locks")["pools"]}
    # Its mate may be a holder too, for as long as nobody has looked at it again.
    assert "n1" in [holder["node"] for holder in locks["team/t1"]["holders"]]
    made.sshds["n1"].start(made.sshds["n1"].directory)
    made.client.post(f"/v1/rollouts/{rollout}/nodes/n1/retry", {"reason": "sshd is back"})
    made.vote(rollout, "proceed", reason="retried")
    made.wait_until(lambda: made.nodes(rollout)["n1"]["phase"] == "done", "n1 is done after the retry")


@pytest.mark.parametrize("warm", [WARM, pytest.param("off", marks=pytest.mark.long, id="plain")])
def test_lost_playbooks_reported_and_restored_by_resubmit(tmp_path: Path, warm: str) -> None:
    """As after a restore on another machine: the doctor knows, and the same plan brings them back."""
    with daemon_environment(tmp_path, fleet_labels(2, 1, 1), ansible={"warm": warm}) as made:
        change = plan("gone", maintain={"playbook": "change.yml", "vars": {"log_file": str(made.log_file)}})
        playbooks = {"change.yml": CHANGE_PLAYBOOK}
        rollout = made.submit(change, playbooks)
        made.vote(rollout, "start")
        made.wait_for_gate(rollout, "continue")
        said = doctor(made)
        assert "ok    playbooks: those of 1 live rollout are kept" in said
        started = {
            "auto": "1 started as forks and 0 as new processes; 1 fork server, .* MiB\n",
            "off": "1 as new processes; 0 fork servers, .*; none is forked: settings: ansible.warm is off",
        }
        assert re.search(f"ok    runs: 0 of at most .*{started[warm]}", said), said
        assert "ok    pipelining: sudo on n1 needs no terminal" in said
        shutil.rmtree(tmp_path / "state" / "trees")
        assert f"WRONG playbooks: those of {rollout} are missing in" in doctor(made)
        with pytest.raises(ApiError, match="no longer stored"):
            made.vote(rollout, "continue")
        made.vote(rollout, "continue", unseen=True)
        made.wait_until(lambda: paused(made, rollout), "the rollout pauses")
        message = made.client.get(f"/v1/rollouts/{rollout}/nodes/n2")["failure"]["message"]
        assert "no longer stored" in message
        assert "submit the same plan again" in message
        assert made.submit(change, playbooks) == rollout
        made.client.post(f"/v1/rollouts/{rollout}/nodes/n2/retry", {"reason": "they are back"})
        made.vote(rollout, "proceed", reason="retried")
        made.wait_until(lambda: made.status(rollout)["state"] == "done", "the rollout ends")


def test_bad_plan_is_explained_to_its_author(idle: DaemonEnvironment) -> None:
    """A missing playbook, one outside the source, a selector over nothing, a huge file, a bad upload."""
    for spec, line in (
        ({"maintain": {"playbook": "nowhere.yml"}}, "no such playbook"),
        ({"maintain": {"playbook": "../../etc/passwd"}}, ""),
        ({"targets": "role=nobody"}, "matches no node"),
    ):
        with pytest.raises(ApiError) as refused:
            idle.submit(plan("bad", **spec), {"change.yml": CHANGE_PLAYBOOK})
        assert refused.value.status == 422
        mistakes = refused.value.body["errors"]
        assert mistakes
        assert all(m["line"] >= 1 and m["found"] and m["allowed"] for m in mistakes)
        assert line in mistakes[0]["message"]
    with pytest.raises(ApiError) as refused:
        idle.client.post("/v1/plans/submit", {"file": "plan.yml", "text": "x: y\n" * 2_000_000})
    assert refused.value.status in (413, 422)
    with pytest.raises(ApiError) as refused:
        idle.client.upload("/v1/uploads", b"no tar at all")
    assert refused.value.status in (400, 409, 422)


def test_a_path_in_a_request_is_never_opened(idle: DaemonEnvironment, tmp_path: Path) -> None:
    """An upload's name that is a path, and a git source that is a local path, are refused."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "change.yml").write_text(CHANGE_PLAYBOOK)
    subprocess.run(["git", "init", "-q", str(secret)], check=True)
    body = {"file": "/etc/shadow", "text": yaml.safe_dump(plan("path")), "upload": str(secret)}
    with pytest.raises(ApiError) as refused:
        idle.client.post("/v1/plans/submit", body)
    assert refused.value.status < 500
    for url in (str(secret), f"file://{secret}"):
        text = yaml.safe_dump(plan("path", source={"git": url, "ref": "main"}))
        with pytest.raises(ApiError) as refused:
            idle.client.post("/v1/plans/submit", {"file": "plan.yml", "text": text})
        assert refused.value.status < 500


def test_what_does_not_parse_fails_its_node_with_ansibles_words(idle: DaemonEnvironment) -> None:
    """The playbook imports a file that Ansible cannot read: that is seen only by running it."""
    variables = {"log_file": str(idle.log_file)}
    spec = plan("unparsable", maintain={"playbook": "change.yml", "vars": variables})
    tree = {"change.yml": "- hosts: all\n  tasks: [import_tasks: more.yml]\n", "more.yml": "- [oops\n"}
    rollout = idle.submit(spec, tree)
    idle.vote(rollout, "start")
    idle.wait_until(lambda: paused(idle, rollout), "the rollout pauses")
    failure = idle.client.get(f"/v1/rollouts/{rollout}/nodes/n1")["failure"]
    assert "more.yml" in failure["message"]
    idle.client.post(f"/v1/rollouts/{rollout}/cancel", {"reason": "it will never parse"})


def test_an_inventory_that_fails_or_is_empty_changes_nothing(idle: DaemonEnvironment) -> None:
    """Its nodes stay as they were last known, and everybody can see that it fails."""
    hosts = idle.directory / "hosts.yml"
    good = hosts.read_text()
    for bad in ("all: {hosts: {}}", "all: [", ""):
        hosts.write_text(bad)
        idle.client.post("/v1/inventory/refresh")

        def failing() -> Any:
            return idle.client.get("/v1/inventory")["sources"][0]["error"]

        idle.wait_until(failing, "the source is known to fail")
        assert len(idle.client.get("/v1/inventory")["nodes"]) == 4
        hosts.write_text(good)
        idle.client.post("/v1/inventory/refresh")
        idle.wait_until(
            lambda: not idle.client.get("/v1/inventory")["sources"][0]["error"], "it is well again"
        )


def test_a_second_daemon_names_the_first_and_ends(idle: DaemonEnvironment) -> None:
    """Nothing changes for the first."""
    words = ["--config", str(idle.directory / "config.yaml")]
    second = run_forked(DAEMON, words, timeout_s=WAIT_LIMIT_S)
    assert second.returncode == 1
    assert idle.process is not None
    assert str(idle.process.pid) in second.stderr
    assert "Traceback" not in second.stderr


def test_a_client_that_goes_away_in_mid_stream_is_forgotten(idle: DaemonEnvironment) -> None:
    """Many streams are opened and dropped; the daemon answers as before."""
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as stream:
            stream.connect(str(idle.directory / "s"))
            stream.sendall(b"GET /v1/events?follow=true HTTP/1.1\r\nHost: x\r\n\r\n")
            stream.recv(1)
    assert idle.client.get("/v1/health")["version"]


def test_sigterm_leaves_run_to_next_daemon(made: DaemonEnvironment) -> None:
    """An orderly stop ends no run; the next daemon takes the result."""
    made.pause_playbooks()
    rollout = begin(made, "term")
    made.wait_until(lambda: made.spans(), "a playbook runs")
    assert made.process is not None
    process = made.process
    made.kill_daemon(signal.SIGTERM)
    assert process.returncode == 0
    assert made.run_processes(), "the run goes on"
    made.resume_playbooks()
    made.start_daemon()
    made.wait_until(lambda: made.nodes(rollout)["n1"]["phase"] == "done", "n1 is done")
    assert [span.node for span in made.spans()].count("n1") == 1


def test_a_socket_that_was_removed_is_made_again(idle: DaemonEnvironment) -> None:
    """The daemon notices by itself that nobody can reach it."""
    (idle.directory / "s").unlink()
    idle.wait_until(lambda: idle.client.get("/v1/health"), "the socket is there again")


def begin(made: DaemonEnvironment, name: str) -> str:
    """Submit a plan of one wave and open its start gate."""
    variables = {"log_file": str(made.log_file)}
    spec = plan(
        name,
        canary={"select": "canary=true"},
        maintain={"playbook": "change.yml", "vars": variables},
        verify=[{"reachable": {"within": "0s"}}],
    )
    rollout = made.submit(spec, {"change.yml": CHANGE_PLAYBOOK})
    made.vote(rollout, "start")
    return rollout


def paused(made: DaemonEnvironment, rollout: str) -> dict[str, Any] | None:
    """Return the status of a paused rollout."""
    status = made.status(rollout)
    return status if status["state"] == "paused" else None


def doctor(made: DaemonEnvironment) -> str:
    """Return what the doctor says."""
    words = ["doctor", "--config", str(made.directory / "config.yaml")]
    return run_forked(CLI, words, timeout_s=WAIT_LIMIT_S).stdout
