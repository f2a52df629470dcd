"""The Python of test nodes keeps the bytecode of what Ansible sends: else a module costs twice as much."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

from tests.support.node_python import node_python


def test_code_of_a_zip_is_compiled_once(tmp_path: Path) -> None:
    archive = tmp_path / "sent.zip"
    with zipfile.ZipFile(archive, "w") as sent:
        sent.writestr("sent.py", f"TEXT = {str(archive)!r}\n")
    subprocess.run([node_python(), "-c", "import sent"], env={"PYTHONPATH": str(archive)}, check=True)
    kept = Path(node_python()).parents[1].glob("lib/python*/site-packages/bytecode/*")
    assert any(str(archive).encode() in path.read_bytes() for path in kept)
