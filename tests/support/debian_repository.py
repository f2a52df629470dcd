"""A repository of real Debian packages in a directory, for apt's `file:` sources."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from pathlib import Path

_CONTROL = """\
Package: {name}
Version: {version}
Architecture: all
Maintainer: tests <tests@example.org>
{depends}Description: a package of the tests
"""


def publish(repository: Path, name: str, version: str, *, depends: str = "", postinst: str = "") -> None:
    """Add a package in one version, with a file that has its version, and update the index."""
    repository.mkdir(parents=True, exist_ok=True)
    control = _CONTROL.format(name=name, version=version, depends=f"Depends: {depends}\n" if depends else "")
    package = repository / f"{name}_{version}_all.deb"
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        tree.chmod(0o755)
        for path, text in ((f"usr/share/{name}/version", f"{version}\n"), ("DEBIAN/control", control)):
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(text)
        if postinst:
            (tree / "DEBIAN/postinst").write_text(postinst)
            (tree / "DEBIAN/postinst").chmod(0o755)
        command = ["dpkg-deb", "--root-owner-group", "--build", str(tree), str(package)]
        subprocess.run(command, check=True, capture_output=True)
    content = package.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    facts = f"Filename: ./{package.name}\nSize: {len(content)}\nSHA256: {digest}\n"
    index = repository / "Packages"
    before = f"{index.read_text()}\n" if index.exists() else ""
    index.write_text(before + control + facts)
