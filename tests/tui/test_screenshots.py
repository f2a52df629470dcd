"""The pictures in the documents match the console (`make screenshots` draws them again)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tui.screenshots import SCENES, SCREENSHOT_DIR, Scene, render_scene

pytestmark = pytest.mark.usefixtures("utc")


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
async def test_screenshots_match_the_console(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> None:
    drawn = await render_scene(scene, tmp_path_factory.mktemp("p"))
    kept = SCREENSHOT_DIR / f"{scene.name}.svg"
    if drawn != kept.read_text():
        fresh: Path = tmp_path_factory.mktemp("drawn") / kept.name
        fresh.write_text(drawn)
        pytest.fail(f"{kept} differs from the console, see {fresh}; run make screenshots")
