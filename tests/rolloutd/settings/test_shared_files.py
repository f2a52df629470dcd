"""The directory that the machines of all daemons mount."""

from __future__ import annotations

from pathlib import Path

from rolloutd.settings import load


def test_shared_directory_has_the_files(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"state_dir: {tmp_path}\n")
    assert load(file).files_dir == tmp_path
    file.write_text(f"state_dir: {tmp_path}\nfiles: {{directory: {tmp_path / 'shared'}}}\n")
    assert load(file).files_dir == tmp_path / "shared"
