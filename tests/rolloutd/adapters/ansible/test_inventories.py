"""One inventory for all runs of a refresh: written once, never changed, gone when nobody uses it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rolloutd.adapters.ansible.inventory_cache import DIRECTORY_NAME, InventoryCache

FLEET = {"all": {"hosts": {"n1": {"secret": "one"}}}}
OTHER = {"all": {"hosts": {"n1": {"secret": "two"}}}}


class Disk:
    """A directory of runs, and how often an inventory was made for them."""

    def __init__(self, runs_dir: Path) -> None:
        self.runs_dir = runs_dir
        self.inventories = InventoryCache(runs_dir)
        self.made = 0

    def run(
        self, name: str, generation: int | None, content: dict[str, Any] = FLEET, variant: str = ""
    ) -> Path:
        """Begin a run; return its inventory."""
        place = self.runs_dir / name / "inventory.json"
        place.parent.mkdir()

        def make() -> dict[str, Any]:
            self.made += 1
            return content

        self.inventories.link_to(place, generation, variant, make)
        return place

    def shared(self) -> list[Path]:
        """Return the files that runs share."""
        return sorted((self.runs_dir / DIRECTORY_NAME).iterdir())


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    """An empty one."""
    return Disk(tmp_path)


def test_runs_share_one_private_inventory_file(disk: Disk) -> None:
    first, second = disk.run("r1", 1), disk.run("r2", 1)
    assert disk.made == 1
    assert first.samefile(second)
    assert json.loads(second.read_bytes()) == FLEET
    assert first.stat().st_mode & 0o777 == 0o400
    assert (disk.runs_dir / DIRECTORY_NAME).stat().st_mode & 0o777 == 0o700


def test_inventory_kept_until_last_run_ends(disk: Disk) -> None:
    first = disk.run("r1", 1)
    second = disk.run("r2", 2, OTHER)
    assert json.loads(first.read_bytes()) == FLEET
    assert json.loads(second.read_bytes()) == OTHER
    assert len(disk.shared()) == 2
    first.unlink()
    disk.run("r3", 2, OTHER)
    assert [path.samefile(second) for path in disk.shared()] == [True]


def test_a_refresh_that_changed_nothing_after_all_is_the_same_file(disk: Disk) -> None:
    assert disk.run("r1", 1).samefile(disk.run("r2", 2))
    assert disk.run("r3", None).samefile(disk.run("r4", None))
    assert disk.made == 4


def test_each_variant_of_a_refresh_is_kept(disk: Disk) -> None:
    one = disk.run("r1", 1, FLEET, "-o ProxyJump=a")
    other = disk.run("r2", 1, OTHER, "-o ProxyJump=b")
    for path in (one, other):
        path.unlink()
    disk.run("r3", 1, FLEET, "-o ProxyJump=a")
    assert (disk.made, len(disk.shared())) == (2, 2)


def test_what_a_power_cut_has_torn_is_written_again(disk: Disk) -> None:
    torn = disk.run("r1", 1)
    (shared,) = disk.shared()
    shared.unlink()
    shared.write_text("{")
    (disk.runs_dir / DIRECTORY_NAME / "draft.1").write_text("{")
    again = Disk(disk.runs_dir).run("r2", 1)
    assert json.loads(again.read_bytes()) == FLEET
    assert json.loads(torn.read_bytes()) == FLEET
    assert [path.samefile(again) for path in disk.shared()] == [True]


def test_where_there_are_no_links_a_run_gets_a_copy(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    copy = disk.run("r1", 1)
    assert json.loads(copy.read_bytes()) == FLEET
    assert copy.stat().st_mode & 0o777 == 0o400
    assert copy.stat().st_nlink == 1
