"""`explain`: every field of both files."""

from __future__ import annotations

import json

import pytest

from rolloutd.cli.field_help import field_names
from tests.rolloutd.cli.samples import run


def test_each_field_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    names = list(field_names())
    assert {"plan.spec.guard", "plan.spec.gates.start.owner", "settings.pools", "settings.ssh.user"} <= set(
        names
    )
    without = []
    for name in names:
        code, out, _ = run(capsys, "explain", name, "--json")
        if code or not json.loads(out)["description"]:
            without.append(name)
    assert without == []


def test_field_shows_type_default_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "explain", "plan.spec.soak")[1]
    assert out.splitlines()[:3] == ["FIELD: plan.spec.soak <string>", "DEFAULT: 0s", "EXAMPLE: 1h30m"]
    out = run(capsys, "explain", "plan.spec.windows")[1]
    assert "FIELD: plan.spec.windows <[]object>" in out
    assert "  from <string>" in out
    assert "  owner <string> -required-" in run(capsys, "explain", "plan.metadata")[1]
    assert "max_unavailable" in run(capsys, "explain", "settings.pools")[1]
    assert "    owner <" in run(capsys, "explain", "plan.spec.gates", "--recursive")[1]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("plan.spec.verify[].http.tls", "plan.spec.verify.http.tls"),
        ("plan.spec.maintain[0].playbook", "plan.spec.maintain.playbook"),
        ("settings.teams.NAME.windows", "settings.teams.windows"),
        ("settings.pools.rack.max_unavailable", "settings.pools.max_unavailable"),
    ],
)
def test_path_is_read_as_documents_and_errors_write_it(
    capsys: pytest.CaptureFixture[str], path: str, field: str
) -> None:
    expected = run(capsys, "explain", field)
    assert expected[0] == 0
    assert run(capsys, "explain", path)[1].splitlines()[1:] == expected[1].splitlines()[1:]


def test_path_without_its_file_is_completed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "explain", "spec.guard")[2] == (
        "explain: 'spec' is unknown; begin with plan or settings, as in plan.spec.guard\n"
    )


def test_unknown_field_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "explain", "plan.spec.gard")
    assert (code, err) == (2, "explain plan.spec.gard: plan.spec has no field 'gard'; did you mean guard?\n")
    assert run(capsys, "explain", "playbook")[2] == (
        "explain: 'playbook' is unknown; begin with plan or settings\n"
    )
