"""Playbooks that no run could read are mistakes of the plan, at the place where it names them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rolloutd import planfile
from rolloutd.cli.main import main
from rolloutd.control.client import ApiError
from rolloutd.planfile.playbooks import MAX_PLAYBOOK_BYTES, playbook_diagnostics
from tests.rolloutd.control_environment import URL, control_environment

PLAN = """\
apiVersion: rolloutd/v1
kind: MaintenancePlan
metadata: {name: somaxconn, owner: infra}
spec:
  source: {path: tree}
  targets: "role=worker"
  maintain: {playbook: site.yml}
  verify: [{reachable: {}}]
"""


def _found(tmp_path: Path, text: bytes) -> list[str]:
    (tmp_path / "site.yml").write_bytes(text)
    plan = planfile.read(PLAN.encode(), "plan.yml")
    mistakes = playbook_diagnostics(plan, tmp_path)
    assert all((each.line, each.path) == (7, "spec.maintain.playbook") for each in mistakes)
    return [each.found for each in mistakes]


@pytest.mark.parametrize(
    "text",
    [
        "- hosts: all\n",
        "---\n# said\n- import_playbook: other.yml\n- hosts: all\n  tasks: [{debug: {msg: '{{ x }}'}}]\n",
        '[{"hosts": "all"}]',
        "$ANSIBLE_VAULT;1.1;AES256\n3132:\n  - [",
        "- hosts: all\n  vars:\n    secret: !vault |\n      $ANSIBLE_VAULT;1.1\n    raw: !unsafe '{{'\n",
        "- hosts: &all all\n- {hosts: *all, vars: {? a : b}}\n",
        f"- hosts: all\n{'#' * MAX_PLAYBOOK_BYTES}\n[",
    ],
)
def test_what_ansible_may_be_able_to_read_is_left_to_it(tmp_path: Path, text: str) -> None:
    assert _found(tmp_path, text.encode()) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"- hosts: all\n  tasks:\n  - name: a: b\n", "site.yml:3:12: mapping values are not allowed"),
        (b"- hosts: all\n\ttasks: []\n", "site.yml:2:1: "),
        (b"- hosts: {{ target }}\n", 'site.yml:1:11: braces stand as a key: quote it, "{{ name }}"'),
        (b"hosts: all\n", "site.yml:1:1: it is not a list of plays"),
        (b"just words\n", "site.yml:1:1: it is not a list of plays"),
        (b"# nothing\n", "site.yml:1:1: it is empty"),
        (b"- hosts: all\n---\n- hosts: all\n", "site.yml:3:1: a second document"),
        (b"- hosts: \xff\n", "site.yml:1:1: "),
    ],
)
def test_what_no_run_could_read_is_a_mistake(tmp_path: Path, text: bytes, found: str) -> None:
    (said,) = _found(tmp_path, text)
    assert said.startswith(found)


def test_dangling_link_is_no_playbook(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "site.yml").symlink_to("none.yml")
    (mistake,) = playbook_diagnostics(planfile.read(PLAN.encode(), "plan.yml"), tmp_path / "tree")
    assert "no such playbook" in mistake.message


async def test_a_submit_names_the_line_of_the_playbook(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        broken = {"site.yml": "- hosts: all\n  tasks: [\n", "undo.yml": "- hosts: all\n"}
        inside.sources.commit(URL, broken, ["main"])
        with pytest.raises(ApiError) as answer:
            await inside.submit()
        (mistake,) = answer.value.body["errors"]
        assert mistake["path"] == "spec.maintain.playbook"
        assert mistake["found"].startswith("site.yml:3:1: ")
        assert not inside.state.index.rollouts


def test_validate_looks_into_a_source_that_is_a_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.yml"
    plan.write_text(PLAN)
    assert main(["plan", "validate", str(plan), "--json"]) == 1
    (mistake,) = json.loads(capsys.readouterr().out)["errors"]
    assert (mistake["line"], mistake["path"]) == (5, "spec.source.path")
    (tmp_path / "tree").mkdir()
    assert main(["plan", "validate", str(plan), "--json"]) == 1
    (mistake,) = json.loads(capsys.readouterr().out)["errors"]
    assert (mistake["line"], mistake["found"]) == (7, "site.yml")
    (tmp_path / "tree" / "site.yml").write_text("- hosts: [\n")
    assert main(["plan", "validate", str(plan)]) == 1
    assert "site.yml:2:1: " in capsys.readouterr().out
    (tmp_path / "tree" / "site.yml").write_text("- hosts: all\n")
    assert main(["plan", "validate", str(plan)]) == 0
    (tmp_path / "tree" / "roles").symlink_to("/etc")
    assert main(["plan", "validate", str(plan)]) == 1
    assert "roles: links to '/etc', outside of the tree; replace it with a file" in capsys.readouterr().out


def test_mistakes_are_in_order_of_lines(tmp_path: Path) -> None:
    isolate = "  isolate: [{playbook: {file: a.yml, undo: b.yml}}]\n"
    plan = planfile.read(PLAN.replace("  maintain", f"{isolate}  maintain").encode(), "plan.yml")
    assert [each.found for each in playbook_diagnostics(plan, tmp_path)] == ["a.yml", "b.yml", "site.yml"]
