"""Lists: their order, width, colour, CSV, and what jq makes of their JSON."""

from __future__ import annotations

import csv
import io
import sys
from datetime import UTC, datetime, timedelta

import pytest

from rolloutd.cli.output import OutputStyle, print_csv, print_table, set_style
from tests.rolloutd.canned_daemon import CannedDaemon
from tests.rolloutd.cli.samples import run

LONG = "pool team/payments is full: n5 is maintaining in somaxconn since ten minutes and more"


def node(name: str, reason: str | None = None, percent: float | None = None) -> dict[str, object]:
    """Return a node as the daemon answers it."""
    why = None if reason is None else {"code": "pool-full", "text": reason, "since": None, "lifted_by": None}
    return {
        "node": name,
        "team": "payments",
        "pools": ["team/payments"],
        "phase": "pending",
        "wave": "fleet",
        "outcome": None,
        "attempt": 0,
        "isolated": False,
        "since": None,
        "step": None,
        "percent": percent,
        "reason": why,
        "admitted_at": None,
        "minutes": {"slot": 0.0, "prepare": 0.0},
    }


@pytest.fixture(autouse=True)
def _usual_style() -> None:
    set_style(OutputStyle())


def columns_of(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines()]


def test_rows_are_sorted_by_a_column(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [node("n10", "b"), node("n9"), node("n1", "a"), node("9" * 5000)]
    daemon.answer("GET", "rollouts/r/nodes", {"nodes": nodes})
    code, out, _ = run(capsys, "nodes", "r", "--sort-by", "node", "--no-headers")
    assert (code, columns_of(out)[1:]) == (0, ["n1", "n9", "n10"])
    # Empty cells are last, also by a column that only -o wide shows.
    out = run(capsys, "nodes", "r", "--sort-by", "REASON", "--no-headers")[1]
    assert columns_of(out)[:2] == ["n1", "n10"]
    assert run(capsys, "nodes", "r", "--sort-by", "isolated")[0] == 0


def test_durations_are_sorted_by_their_length(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    now = datetime.now(UTC)
    ages = {"n1": 65, "n2": 28, "n3": 7_300, "n4": 49}
    nodes = [
        {**node(name), "since": (now - timedelta(seconds=age)).isoformat()} for name, age in ages.items()
    ]
    daemon.answer("GET", "rollouts/r/nodes", {"nodes": [*nodes, node("n5")]})
    out = run(capsys, "nodes", "r", "--sort-by", "since", "--no-headers")[1]
    assert columns_of(out) == ["n2", "n4", "n1", "n3", "n5"]


def test_list_of_nothing_says_so_outside_of_the_data(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer("GET", "rollouts/r/nodes", {"nodes": []})
    assert run(capsys, "nodes", "r", "--pool", "nosuch") == (0, "", "rolloutctl nodes: nothing to list\n")
    assert run(capsys, "nodes", "r", "-o", "csv")[2] == ""


def test_repeated_selectors_must_all_match(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer("GET", "rollouts/r/nodes", {"nodes": []})
    run(capsys, "nodes", "r", "-l", "team in (a,b)", "-l", "!canary")
    assert daemon.requests[-1][2] == {"selector": "team in (a,b),!canary"}


@pytest.mark.parametrize("words", [["-o", "json"], ["--json"]])
def test_jq_reads_the_json_in_any_order(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    daemon.answer("GET", "rollouts/r/nodes", {"nodes": [node("n1")]})
    assert run(capsys, "nodes", "r", "--jq", ".[].node", *words)[1] == "n1\n"
    assert run(capsys, "nodes", "r", *words, "--jq", ".[].node")[1] == "n1\n"


@pytest.mark.parametrize("form", ["yaml", "name", "wide", "csv"])
def test_jq_with_another_format_is_refused(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    daemon.answer("GET", "rollouts/r/nodes", {"nodes": [node("n1")]})
    for words in (["--jq", ".", "-o", form], ["-o", form, "--jq", "."]):
        code, out, err = run(capsys, "nodes", "r", *words)
        assert (code, out, err) == (
            2,
            "",
            f"rolloutctl nodes: --jq reads the JSON; leave out -o {form}, or --jq\n",
        )


@pytest.mark.parametrize(
    "form", ["jsonpath={.items[*].node}", "jsonpath={range .items[*]}{'x'}{end}", "go-template={{.}}"]
)
def test_template_of_kubectl_names_jq(capsys: pytest.CaptureFixture[str], form: str) -> None:
    code, _, err = run(capsys, "nodes", "r", "-o", form)
    name, remedy = form.partition("=")[0], "use --jq PROGRAM, such as --jq '.[].node'"
    assert (code, err.splitlines()[0]) == (2, f"rolloutctl nodes: -o {name} is unknown; {remedy}")


@pytest.mark.parametrize(
    ("environment", "is_terminal", "is_colored"),
    [
        ({"CLICOLOR": "0"}, True, False),
        ({"CLICOLOR": "1"}, True, True),
        ({"CLICOLOR_FORCE": "1"}, False, True),
        ({"CLICOLOR_FORCE": "0"}, False, False),
        ({"CLICOLOR_FORCE": "1", "NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
    ],
)
def test_color_follows_the_usual_variables(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    *,
    is_terminal: bool,
    is_colored: bool,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    for name in ("NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    print_table(("STATE", "X"), [("failed", "")])
    assert ("\x1b[31mfailed" in capsys.readouterr().out) is is_colored


def test_cut_names_still_differ(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "48")
    names = [f"compute-rack-042-unit-17-n{number}.prod.example.net" for number in (1, 2)]
    print_table(("NODE", "REASON"), [(name, LONG) for name in names])
    out = capsys.readouterr().out
    assert "-17-n1" in out
    assert "-17-n2" in out


def test_unknown_column_is_an_error_with_the_nearest(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer("GET", "rollouts/r/nodes", {"nodes": []})
    code, _, err = run(capsys, "nodes", "r", "--sort-by", "phas")
    assert (code, err) == (2, "rolloutctl nodes --sort-by: no column 'phas'; did you mean PHASE?\n")


def test_filters_are_sent_to_the_daemon(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer("GET", "rollouts/r/nodes", {"nodes": []})
    run(
        capsys,
        *["nodes", "r", "-l", "team=a,rack!=b", "--phase", "failed", "--phase", "done", "--pool", "rack/r1"],
    )
    assert daemon.requests[-1][2] == {
        "selector": "team=a,rack!=b",
        "phase": "failed,done",
        "pool": "rack/r1",
    }


def test_csv_has_all_columns_and_no_formula(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer("GET", "rollouts/r/nodes", {"nodes": [node("=cmd()", 'a "quoted", reason\nof two lines')]})
    code, out, _ = run(capsys, "nodes", "r", "-o", "csv")
    (row,) = csv.DictReader(io.StringIO(out))
    assert (code, row["NODE"], row["REASON"]) == (0, "'=cmd()", 'a "quoted", reason of two lines')
    assert row["POOLS"] == "team/payments"
    assert run(capsys, "nodes", "r", "-o", "csv", "--no-headers")[1] == out.split("\n", 1)[1]


def test_jq_prints_texts_plainly_and_the_rest_as_json(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer("GET", "rollouts/r/nodes", {"nodes": [node("n1", "a"), node("n2")]})
    assert run(capsys, "nodes", "r", "--jq", ".[].node")[1] == "n1\nn2\n"
    assert run(capsys, "nodes", "r", "--jq", "map(.reason.code)")[1] == '["pool-full", null]\n'
    code, out, err = run(capsys, "nodes", "r", "--jq", ".[0].node.x")
    assert (code, out) == (2, "")
    assert err.startswith("--jq: Cannot index string")
    assert err.endswith("look at the output of --json\n")


def test_table_fits_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for width in (30, 60, 80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        print_table(("NODE", "PHASE", "REASON"), [("n" * 60, "pending", LONG), ("n2", "failed", "")])
        out = capsys.readouterr().out
        lines = out.splitlines()
        assert max(map(len, [line.replace("\x1b[31m", "").replace("\x1b[0m", "") for line in lines])) <= max(
            width, 46
        )
        assert "".join(LONG.split()) in "".join(
            line[line.rindex("   ") :] for line in lines if "   " in line
        ).replace(" ", "")


def test_table_outside_of_a_terminal_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("NODE", "REASON"), [("n" * 100, LONG * 3)])
    assert f"{'n' * 100}   {LONG * 3}" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("color", "is_colored"), [("always", True), ("never", False), ("auto", False)])
def test_color_is_as_chosen(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], color: str, is_colored: bool
) -> None:
    daemon.answer("GET", "rollouts/r/nodes", {"nodes": [{**node("n1"), "phase": "failed"}]})
    for words in (["nodes", "r", "--color", color], ["--color", color, "nodes", "r"]):
        assert ("\x1b[31mfailed" in run(capsys, *words)[1]) is is_colored


def test_conflicts_are_listed_without_headings(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    conflict = {"kind": "name", "text": "two names", "warning": False, "since": "2026-11-20T18:35:00.000Z"}
    nodes = [{"node": name, "conflicts": [conflict]} for name in ("n1", "n2")]
    source = {"source": "hosts", "held": None, "stale": True}
    daemon.answer("GET", "inventory", {"nodes": nodes, "sources": [source]})
    out = run(capsys, "inventory", "conflicts", "--no-headers")[1]
    assert [line.split()[0] for line in out.splitlines()] == ["n1", "n2", "hosts:"]


def test_csv_of_nothing_has_headings(capsys: pytest.CaptureFixture[str]) -> None:
    print_csv({"A": "a", "B": "b"}, ())
    assert capsys.readouterr().out == "A,B\n"
