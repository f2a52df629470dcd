"""Changes to settings that keep the user's comments and every other byte."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from rolloutd.admin.init.settings_edit import APPEND, CannotEdit, Change, apply_changes

SETTINGS = """\
# The settings of site ams.
observe_only: true  # until December

ssh:
  # ask before you change this
  user: ops   # as in the old tool
teams:
  infra: {members: ["@ops"]}   # a group
  web:
    members:
    - alice
    # bob left in March
# end of teams
inventory:
  - ansible: {path: hosts.yml, labels: [team]}

pools:
"""


def changed(path: tuple[str, ...], value: Any) -> str:
    return apply_changes(SETTINGS, [Change(path, value, "why")])


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        (("observe_only",), False, "observe_only: false  # until December"),
        (("ssh", "key_file"), "id", "  key_file: id"),
        (("teams", "infra", "members", APPEND), "carol", '  infra: {members: ["@ops", carol]}   # a group'),
        (("teams", "web", "members", APPEND), "carol", "    - carol"),
        (("inventory", APPEND), {"netbox": {"url": "u"}}, "  - netbox: {url: u}"),
        (("inventory", "0", "ansible", "path"), "h.yml", "  - ansible: {path: h.yml, labels: [team]}"),
        (("pools", "rack"), {"max_unavailable": 1}, "pools: {rack: {max_unavailable: 1}}"),
        (("haproxy", "lb1"), {"socket": "/run/x"}, "  lb1: {socket: /run/x}"),
    ],
)  # fmt: skip
def test_change_touches_only_its_place(path: tuple[str, ...], value: Any, line: str) -> None:
    after = changed(path, value)
    assert line in after.splitlines()
    before_lines, after_lines = SETTINGS.splitlines(), after.splitlines()
    lost = [each for each in before_lines if each not in after_lines]
    assert len(lost) <= 1, "the line that changed, if one did"
    assert [each for each in after_lines if "#" in each and "# why" not in each] == [
        each.replace(lost[0], line) if lost else each for each in before_lines if "#" in each
    ]


def test_new_values_have_their_reason_above() -> None:
    lines = changed(("ssh", "key_file"), "id").splitlines()
    assert lines[lines.index("  key_file: id") - 1] == "  # why"


def test_same_value_changes_nothing() -> None:
    assert changed(("ssh", "user"), "ops") == SETTINGS
    assert changed(("teams", "web", "members", APPEND), "alice") == SETTINGS


@pytest.mark.parametrize(
    "text",
    [
        "base: &base {user: a}\nssh: *base\n",
        "ssh: [not, a, mapping]\n",
        "just a text\n",
    ],
)
def test_value_without_a_place_is_refused(text: str) -> None:
    """An alias would change the other place too."""
    with pytest.raises(CannotEdit):
        apply_changes(text, [Change(("ssh", "user"), "ops", "why")])


def test_block_scalars_and_documents_survive() -> None:
    text = "---\nnote: |\n  # not a comment\n  text\nssh:\n  user: >-\n    a\n\n# end\n"
    after = apply_changes(text, [Change(("ssh", "key_file"), "id", "why")])
    assert yaml.safe_load(after) == {
        "note": "# not a comment\ntext\n",
        "ssh": {"user": "a", "key_file": "id"},
    }
    assert "# end\n" in after
