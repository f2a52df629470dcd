"""Fast runs only by a tested ansible-core, and after a self-test that finds no difference."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

import pytest

from rolloutd.adapters.ansible import self_test
from rolloutd.adapters.ansible.environment import TreeConfig
from rolloutd.adapters.ansible.fast import fast_runs
from rolloutd.adapters.ansible.fast.fast_runs import TESTED_VERSIONS, FastRuns, NotForked, SelfTest
from rolloutd.adapters.ansible.run_directory import RunDirectory
from rolloutd.ports import TunedRunnerStatus
from tests.contracts.fakes.shell import FakeShell

ANSIBLE = Path(sys.executable).with_name("ansible-playbook")


def fast(self_test: SelfTest | None = None) -> tuple[FastRuns, TunedRunnerStatus]:
    status = TunedRunnerStatus()
    return FastRuns(str(ANSIBLE), status, enabled=True, self_test=self_test), status


def is_plain(runs: FastRuns) -> bool:
    return not runs.environment(TreeConfig(None, {}), "callbacks", None)


def install_version(site: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Python find this version of ansible-core first, as after an upgrade."""
    installed = site / f"ansible_core-{version}.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ansible-core\nVersion: {version}\n")
    monkeypatch.syspath_prepend(site)


async def test_untested_version_starts_plain_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install_version(tmp_path, "2.22.0", monkeypatch)
    runs, status = fast()
    assert is_plain(runs)
    assert status.plain_because.startswith("ansible-core 2.22.0 is not tested; install one of 2.19.")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with pytest.raises(NotForked, match=r"2\.22\.0"):
        await runs.fork(RunDirectory(tmp_path), tmp_path)


@pytest.mark.parametrize("version", TESTED_VERSIONS)
def test_tested_version_starts_fast_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    install_version(tmp_path, version, monkeypatch)
    assert not is_plain(fast()[0])


@pytest.mark.parametrize(
    ("answer", "because"),
    [
        ("", ""),
        ("they differ", "self-test: they differ"),
        (OSError("no disk"), "self-test: OSError: no disk"),
    ],
)
async def test_self_test_switches_when_it_has_ended(answer: str | OSError, because: str) -> None:
    end = asyncio.Event()

    async def compare() -> str:
        await end.wait()
        if isinstance(answer, OSError):
            raise answer
        return answer

    runs, status = fast(compare)
    runs.begin_self_test()
    runs.begin_self_test()
    (testing,) = asyncio.all_tasks() - {asyncio.current_task()}
    assert (is_plain(runs), status.plain_because) == (True, "the self-test has not ended")
    end.set()
    await asyncio.wait((testing,))
    await asyncio.sleep(0)
    assert (is_plain(runs), status.plain_because) == (bool(because), because)


async def test_passed_self_test_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await self_test.run(tmp_path, FakeShell()) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["self-test.json"]
    monkeypatch.setattr(self_test, "PLAYBOOK", "- no playbook\n")
    assert await self_test.run(tmp_path, FakeShell()) == ""
    install_version(tmp_path / "site", TESTED_VERSIONS[-1] + ".1", monkeypatch)
    assert "the plain run failed: ansible-playbook could not" in await self_test.run(tmp_path, FakeShell())


DIFFERENCES = {
    "variable": (
        "inventory_plugin/rolloutd_inventory.py",
        "**self._decode(self._encoded)",
        "**self._decode(self._encoded), 'x': 1",
    ),
    "host": (
        "inventory_plugin/rolloutd_inventory.py",
        'in root["hosts"].items()',
        'in {**root["hosts"], "more": {}}.items()',
    ),
    "output": (
        "callback/rolloutd_tuning.py",
        "        _compile_once()\n",
        "        self._display.display('more')\n",
    ),
}


@pytest.mark.parametrize("planted", DIFFERENCES)
async def test_planted_difference_fails_self_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    file, correct, wrong = DIFFERENCES[planted]
    copy = tmp_path / "fast"
    shutil.copytree(fast_runs.HERE, copy)
    text = (copy / file).read_text()
    (copy / file).write_text(text.replace(correct, wrong))
    assert text != (copy / file).read_text()
    monkeypatch.setattr(fast_runs, "HERE", copy)
    assert await self_test.run(tmp_path / "state", FakeShell())
    assert not (tmp_path / "state/self-test.json").exists()
