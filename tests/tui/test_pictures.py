"""The pictures in the documents are what the console shows (`make screenshots` draws them anew)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tui.scenes import PICTURES, SCENES, Scene, draw


@pytest.fixture(autouse=True)
def _greenwich(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Show the same time of day everywhere."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
async def test_pictures_are_true(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> None:
    drawn = await draw(scene, tmp_path_factory.mktemp("p"))
    kept = PICTURES / f"{scene.name}.svg"
    if drawn != kept.read_text():
        fresh: Path = tmp_path_factory.mktemp("drawn") / kept.name
        fresh.write_text(drawn)
        pytest.fail(f"{kept} is not what is shown, which is in {fresh}; make screenshots draws all anew")
