"""Only the collections and roles that were approved run; the review and the forecast are of the same."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from rolloutd.control.client import api_path
from tests.support.daemon_environment import DaemonEnvironment, daemon_environment, fleet_labels, plan

PLAYBOOK = "- {hosts: all, gather_facts: false, roles: [greet]}\n"
TASKS = '- ansible.builtin.raw: echo "{greeting} {{{{ inventory_hostname }}}}" >> {{{{ log_file }}}}\n'


def submit(env: DaemonEnvironment) -> str:
    """Submit a plan whose source requires a role, as an archive of the source."""
    (env.directory / "tree/vendor").mkdir(parents=True)
    with tarfile.open(env.directory / "tree/vendor/greet.tar.gz", "w:gz") as archive:
        for name, text in (("meta", "{}\n"), ("tasks", TASKS.format(greeting="hello"))):
            member = tarfile.TarInfo(f"greet/{name}/main.yml")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    requirements = "roles: [{name: greet, src: vendor/greet.tar.gz}]\n"
    change = plan("greet", maintain={"playbook": "site.yml", "vars": {"log_file": str(env.log_file)}})
    return env.submit(change, {"site.yml": PLAYBOOK, "requirements.yml": requirements})


def test_only_approved_requirements_run(tmp_path: Path) -> None:
    with daemon_environment(tmp_path, fleet_labels(1, 1, 1)) as env:
        rollout = submit(env)
        shown = env.status(rollout)
        installed = shown["source"]["requirements"]
        review = env.client.get(api_path("rollouts", rollout, "review"))
        assert (
            f"requirements.yml: ansible-galaxy installs what it names; sha256 {installed}" in review["unseen"]
        )
        forecast = env.client.post(api_path("rollouts", rollout, "forecast"), {})
        assert (forecast["rollout"], [each["node"] for each in forecast["nodes"]]) == (rollout, ["n1"])
        assert env.status(rollout)["digest"] == shown["digest"]

        env.kill_daemon()
        (tasks,) = (tmp_path / "state" / "ansible").glob("*/requirements/roles/greet/tasks/main.yml")
        approved = tasks.read_text()
        tasks.write_text(TASKS.format(greeting="evil"))
        env.start_daemon()
        env.vote(rollout, "start", unseen=True)
        refused = f"approved was {installed[:12]}; submit the plan again"
        env.wait_until(lambda: refused in str(env.nodes(rollout)["n1"]["reason"]), "the run is refused")
        assert not env.log_file.exists()

        env.kill_daemon()
        tasks.write_text(approved)
        env.start_daemon()
        env.client.post(api_path("rollouts", rollout, "nodes", "n1", "retry"), {"reason": "restored"})
        env.vote(rollout, "proceed")
        env.wait_until(lambda: env.nodes(rollout)["n1"]["phase"] == "done", "it is done", 100.0)
        assert env.log_file.read_text() == "hello n1\n"
