"""The fence's script on this machine: who takes it, and which commands it refuses afterwards."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rolloutd.adapters.ansible import fence

REFUSED = 4

EQUAL_TOKEN_ACCEPTED = fence.SCRIPT.replace('[ "$other" != "$holder" ]', "false")
"""A planted bug."""


def take(directory: Path, token: str, script: str = fence.SCRIPT) -> int:
    command = ["sh", "-c", script, "fence", token, str(directory), "n1", str(fence.CLOCK_SLACK_S)]
    return subprocess.run(command, capture_output=True, check=False).returncode


@pytest.mark.parametrize("script", [fence.SCRIPT, EQUAL_TOKEN_ACCEPTED], ids=["", "equal token accepted"])
def test_equal_tokens_have_one_holder(tmp_path: Path, script: str) -> None:
    def race(number: int) -> list[int]:
        tokens = [f"{number}.5 db 100 {holder}" for holder in ("here", "there")]
        with ThreadPoolExecutor(2) as both:
            return list(both.map(lambda token: take(tmp_path, token, script), tokens))

    results = [sorted(race(number)) for number in range(1, 11)]
    has_one_holder = all(each == [0, REFUSED] for each in results)
    assert has_one_holder is (script == fence.SCRIPT)


def test_holder_may_take_its_token_again(tmp_path: Path) -> None:
    assert [take(tmp_path, "3.5 db 100 here") for _ in range(2)] == [0, 0]


def test_newest_of_many_tokens_stays(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as all_at_once:
        list(all_at_once.map(lambda number: take(tmp_path, f"7.{number} db 100 run{number}"), range(40)))
    assert (tmp_path / "n1").read_text() == "7.39 db 100 run39\n"


@pytest.mark.parametrize(
    ("newer", "is_refused"),
    [
        ("3.10 db 100 run", False),
        ("3.9 db 100 older", False),
        ("3.10 db 100 another", True),
        ("3.11 db 100 another", True),
        ("4.1 db 100 another", True),
        ("9223372036854775807.1 db 100 another", True),
        ("1.1 other 100 another", False),
        ("1.1 other 161 another", True),
        ("3.11", False),
    ],
)
def test_command_after_a_newer_token_is_refused(tmp_path: Path, newer: str, is_refused: bool) -> None:
    (tmp_path / "n1").write_text(f"{newer}\n")
    refuse = fence.refuse_command("3.10 db 100 run", str(tmp_path), "n1")
    done = subprocess.run(["sh", "-c", f"{refuse}; echo done"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == ((REFUSED, "") if is_refused else (0, "done\n"))
    assert ("a newer run" in done.stderr) is is_refused


@pytest.mark.parametrize("token", ["", "3.10", "3.10 db 100"])
def test_run_without_a_whole_token_asks_no_fence(tmp_path: Path, token: str) -> None:
    assert fence.refuse_command(token, str(tmp_path), "n1") == ":"
    assert fence.refuse_command("3.10 db 100 run", str(tmp_path), "a'b") == ":"
