"""What rolloutctl does with files and without a daemon: plans and the audit's database."""

from __future__ import annotations

import io
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from rolloutd.admin.__main__ import main as admin
from rolloutd.audit import audit_chain
from rolloutd.cli.example_plans import example_names
from rolloutd.cli.main import main
from rolloutd.cli.plans import _print_duration, format_diagnostic
from tests.rolloutd.canned_daemon import serve_canned

PLAN = """\
apiVersion: rolloutd/v1
kind: MaintenancePlan
metadata: {name: somaxconn, owner: infra}
spec:
  source: {path: ./tree}
  targets: "role=worker"
  maintain: {playbook: sysctl.yml}
  verify: [{reachable: {}}]
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "sysctl.yml").write_text("- hosts: all\n")
    (tmp_path / "plan.yml").write_text(PLAN)
    return tmp_path / "plan.yml"


def test_each_example_is_valid_and_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "new"]) == 0
    listed = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == example_names()
    for name in listed:
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert main(["plan", "new", "--like", name]) == 0
        assert main(["plan", "validate", "plan.yml"]) == 0, capsys.readouterr()
        Path("plan.yml").write_text("mine")
        Path("hosts.yml").unlink(missing_ok=True)
        assert main(["plan", "new", "--like", name]) == 1
        assert "it exists, and nothing was written" in capsys.readouterr().err
        assert (Path("plan.yml").read_text(), Path("hosts.yml").exists()) == ("mine", False)
    with pytest.raises(SystemExit) as refused:
        main(["plan", "new", "--like", "rebot"])
    assert (refused.value.code, "did you mean 'reboot'?" in capsys.readouterr().err) == (2, True)


def test_daemon_warns_of_a_plan_that_takes_too_long(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    warning = "duration: it takes 45d, longer than a month"
    with serve_canned(tmp_path / "s") as daemon:
        daemon.answer("GET", "whoami", {})
        daemon.answer("POST", "uploads", {"upload": "abc"}, 201)
        daemon.answer("POST", "plans/preview", {"forecast": {"warning": warning}})
        words = ["--socket", str(daemon.socket), "plan", "validate", str(plan)]
        assert main(words) == 0
        assert capsys.readouterr().err.splitlines() == [f"warning: {warning}", f"{plan}: valid"]
        assert main([*words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"valid": True, "errors": [], "warnings": [warning]}
        daemon.answer("POST", "plans/preview", {"error": "no", "code": "not-allowed"}, 403)
        assert main(words) == 0
        assert capsys.readouterr().err.splitlines() == [f"{plan}: valid"]


def test_preview_prints_how_long_the_plan_takes(capsys: pytest.CaptureFixture[str]) -> None:
    duration: Any = {
        "ends_at": {"p50": None, "p90": None},
        "work_s": {"p50": 241_200.0, "p90": 288_000.0},
        "bottleneck": {"kind": "pool", "name": "team/payments", "saves_s": 118_800.0},
        "train": {"name": "week", "outages_saved": 12, "downtime_saved_s": 7200.0},
        "assumptions": [],
        "warning": "duration: it is long",
    }
    _print_duration(duration)
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "takes 2d19h to 3d8h; ends never, as it is",
        "bottleneck: pool team/payments; with one more there it ends 1d9h earlier",
        "train week saves 12 outages and 2h of downtime from now on",
    ]
    assert printed.err.splitlines() == ["warning: duration: it is long"]
    _print_duration({**duration, "work_s": {"p50": None, "p90": None}, "warning": None})
    assert capsys.readouterr().out.splitlines()[0] == "takes for ever, as it is; ends never, as it is"


def test_a_valid_plan(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "validate", str(plan), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"valid": True, "errors": [], "warnings": []}


def test_every_mistake_has_its_place(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan.write_text(PLAN.replace("targets:", "target:").replace("playbook:", "playbok:"))
    assert main(["plan", "validate", str(plan), "--json"]) == 1
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert {6, 7} <= {error["line"] for error in errors}
    assert set(errors[0]) == {"file", "line", "column", "path", "found", "allowed", "message"}
    assert main(["plan", "validate", str(plan)]) == 1
    assert f"{plan}:6:" in capsys.readouterr().out


def test_a_plan_from_stdin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe nonsense: [")))
    assert main(["plan", "validate", "-"]) == 1
    assert "(stdin):1:" in capsys.readouterr().out


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "validate", str(tmp_path / "none.yml")]) == 1
    assert capsys.readouterr().err == (
        f"{tmp_path / 'none.yml'}: no such file or directory; check the path and its permissions\n"
    )


def test_the_schema_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert "spec" in schema["properties"]
    assert main(["plan", "schema", str(tmp_path / "schema.json")]) == 0
    assert json.loads((tmp_path / "schema.json").read_text()) == schema


@pytest.mark.parametrize("order", ["preview", "submit"])
def test_daemon_diagnostics_printed_once(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], order: str
) -> None:
    mistake = {
        "file": "plan.yml",
        "line": 3,
        "column": 28,
        "path": "metadata.owner",
        "found": "nobody",
        "allowed": "a team of the settings: infra",
        "message": "the owner is not a team of the settings",
    }
    told = format_diagnostic(mistake)
    with serve_canned(tmp_path / "s") as daemon:
        daemon.answer("POST", "uploads", {"upload": "abc"}, 201)
        refusal = {"error": told, "code": "invalid-plan", "errors": [mistake]}
        daemon.answer("POST", f"plans/{order}", refusal, 422)
        words = ["--socket", str(daemon.socket), "plan", order, str(plan)]
        assert main(words) == 1
        assert capsys.readouterr().err.splitlines()[1:] == [told, f"{plan}: 1 mistake"]
        assert main([*words, "--json"]) == 1
        assert json.loads(capsys.readouterr().out) == {"valid": False, "errors": [mistake]}


def test_submit_uploads_what_the_plan_names(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_canned(tmp_path / "s") as daemon:
        daemon.answer("POST", "uploads", {"upload": "abc"}, 201)
        submission = {"rollout": "r2", "digest": "d", "state": "awaiting-approval", "existing": False}
        submission |= {"superseded": ["r1"]}
        daemon.answer("POST", "plans/submit", submission, 201)
        assert main(["--socket", str(daemon.socket), "plan", "submit", str(plan), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == submission
        (_, _, _, archive), (_, _, _, body) = daemon.requests
        assert main(["--socket", str(daemon.socket), "plan", "submit", str(plan), "--again"]) == 0
        cancelled = "r1: cancelled, superseded by r2; nodes in flight finish"
        assert cancelled in capsys.readouterr().err.splitlines()
    assert archive.startswith(b"\x1f\x8b")
    assert body == {
        "file": str(plan),
        "text": PLAN,
        "upload": "abc",
        "again": False,
        "supersede": False,
    }


def test_an_invalid_plan_is_not_sent(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan.write_text(PLAN.replace("verify", "verfy"))
    with serve_canned(tmp_path / "s") as daemon:
        assert main(["--socket", str(daemon.socket), "plan", "submit", str(plan)]) == 1
        assert daemon.requests == []
    assert "verify" in capsys.readouterr().err


def test_a_source_that_is_not_there(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan.write_text(PLAN.replace("./tree", "./forest"))
    assert main(["--socket", str(tmp_path / "s"), "plan", "preview", str(plan)]) == 1
    assert "forest is not a directory" in capsys.readouterr().err


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "audit.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE audit (seq INTEGER PRIMARY KEY, entry TEXT, hash TEXT)")
        previous = audit_chain.GENESIS_HASH
        for seq in range(1, 4):
            text = audit_chain.canonical_json({"event": "Noted", "seq": seq})
            previous = audit_chain.hash_entry(previous, text)
            connection.execute("INSERT INTO audit VALUES (?, ?, ?)", (seq, text, previous))
    connection.close()
    return path


def test_an_audit_is_verified_without_a_daemon(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "verify", "--database", str(database), "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["ok"], verdict["entries"]) == (True, 3)
    assert main(["audit", "verify", "--database", str(database), "--head", verdict["head"]]) == 0
    assert main(["audit", "verify", "--database", str(database), "--head", "e" * 64]) == 1


def test_anchor_of_a_copied_database_compared(
    database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert admin(["chain", "--file", str(database), "--entry", "2", "--entry", "9"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["entries"], list(found["hashes"])) == (True, 3, ["2"])
    anchor = tmp_path / "anchor"
    command = ["audit", "verify", "--database", str(database), "--anchor", str(anchor)]
    anchor.write_text(f"2026-01-01T00:00:00Z 2 {found['hashes']['2']}\n")
    assert main(command) == 0
    anchor.write_text(f"2026-01-01T00:00:00Z 2 {'e' * 64}\n")
    assert main(command) == 1
    assert "entry 2, anchored at 2026-01-01T00:00:00Z, has another hash" in capsys.readouterr().out


def test_an_altered_audit_is_told(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE audit SET entry = replace(entry, 'Noted', 'Moved') WHERE seq = 2")
    connection.close()
    assert main(["audit", "verify", "--database", str(database)]) == 1
    assert "NOT INTACT" in capsys.readouterr().out


def test_a_database_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "verify", "--database", str(tmp_path / "none.db")]) == 1
    assert "no such database" in capsys.readouterr().err


def test_a_file_that_is_no_database_has_no_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.db").write_text("these are notes, and no database")
    assert main(["audit", "verify", "--database", str(tmp_path / "notes.db")]) == 1
    said = capsys.readouterr().out
    assert "NOT INTACT" in said
    assert "head" not in said
