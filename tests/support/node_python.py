"""The Python of test nodes: without our packages, and with the bytecode of the modules that Ansible sends.

A node has none of our packages, which take longer to find than Python takes to start.  Ansible sends each
module as a zip file without bytecode, and half of a module's CPU time on the node is its compiling.  What a
module does is the same.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
import venv
from contextlib import suppress
from functools import cache
from pathlib import Path

DIRECTORY = Path(__file__).parents[2] / ".pytest_cache" / "node-python"

_SITE = """\
import _imp, marshal, os, zipimport

compile_source = zipimport._compile_source


def compile_once(name, source):
    path = f"{os.path.dirname(__file__)}/bytecode/{_imp.source_hash(0, source).hex()}"
    try:
        with open(path, "rb") as file:
            return marshal.loads(file.read())  # load() reads in small parts
    except FileNotFoundError:
        pass
    code = compile_source(name, source)
    try:
        with open(f"{path}.{os.getpid()}", "wb") as file:
            marshal.dump(code, file)
        os.replace(file.name, path)
    except OSError:
        pass  # another user's process
    return code


zipimport._compile_source = compile_once
"""

_NAME = "rolloutd_compile_once"
"""A .pth file imports it.  Debian's own sitecustomize would hide one of that name."""


@cache
def node_python() -> str:
    """Return the interpreter of a virtualenv without packages; it is made once for all tests."""
    directory = DIRECTORY / hashlib.sha256(f"{sys.version} {_NAME} {_SITE}".encode()).hexdigest()[:16]
    if not directory.exists():
        DIRECTORY.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=DIRECTORY))
        new.chmod(0o755)
        venv.create(new, symlinks=True, with_pip=False)
        (packages,) = new.glob("lib/python*/site-packages")
        (packages / "bytecode").mkdir()
        (packages / f"{_NAME}.py").write_text(_SITE)
        (packages / f"{_NAME}.pth").write_text(f"import {_NAME}\n")
        with suppress(OSError):  # another process of the tests made it
            new.rename(directory)
        shutil.rmtree(new, ignore_errors=True)
    return str(directory / "bin" / "python")
