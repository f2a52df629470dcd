"""One inventory for all runs of a refresh: written once, never changed, gone with the last run."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rolloutd.adapters.ansible.inventory_cache import OLD_DIRECTORY_NAME, InventoryCache

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


def test_no_run_left_no_inventory_left(disk: Disk) -> None:
    for path in (disk.run("r1", 1), disk.run("r2", 1)):
        path.unlink()
    assert [path for path in disk.runs_dir.rglob("*") if path.is_file()] == []
    assert json.loads(disk.run("r3", 1).read_bytes()) == FLEET
    assert disk.made == 1  # the text is in memory


def test_run_keeps_inventory_of_its_refresh(disk: Disk) -> None:
    first = disk.run("r1", 1)
    second = disk.run("r2", 2, OTHER)
    assert json.loads(first.read_bytes()) == FLEET
    assert json.loads(second.read_bytes()) == OTHER


def test_inventory_without_generation_is_built_each_time(disk: Disk) -> None:
    assert not disk.run("r1", None).samefile(disk.run("r2", None))
    assert disk.made == 2


def test_each_variant_of_a_refresh_is_shared(disk: Disk) -> None:
    disk.run("r1", 1, FLEET, "-o ProxyJump=a")
    disk.run("r2", 1, OTHER, "-o ProxyJump=b")
    third = disk.run("r3", 1, FLEET, "-o ProxyJump=a")
    assert disk.made == 2
    assert json.loads(third.read_bytes()) == FLEET


def test_file_system_without_links_gets_copies(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    for name in ("r1", "r2"):
        copy = disk.run(name, 1)
        assert json.loads(copy.read_bytes()) == FLEET
        assert copy.stat().st_mode & 0o777 == 0o400
        assert copy.stat().st_nlink == 1


def test_inventories_of_version_0_1_are_removed(tmp_path: Path) -> None:
    (tmp_path / OLD_DIRECTORY_NAME).mkdir()
    (tmp_path / OLD_DIRECTORY_NAME / "0f3a.json").write_text("{}")
    InventoryCache(tmp_path)
    assert not (tmp_path / OLD_DIRECTORY_NAME).exists()
