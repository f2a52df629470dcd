"""What the doctor says of settings."""

from __future__ import annotations

from pathlib import Path

from rolloutd.admin.doctor import check_settings


def test_settings_without_inventory_name_the_next_command(tmp_path: Path) -> None:
    settings = tmp_path / "config.yaml"
    settings.write_text("observe_only: true\n")
    told = f"{settings}: no inventory; run rolloutctl init, or name the settings with --config"
    assert check_settings(settings).text == told
