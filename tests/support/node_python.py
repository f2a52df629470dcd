"""The Python of test nodes, which keeps the bytecode of the modules that Ansible sends.

Ansible sends each module as a zip file without bytecode, and half of a module's CPU time on the node is its
compiling.  What a module does is the same.
"""

from __future__ import annotations

import os
import shlex
import sys
from functools import cache
from pathlib import Path

DIRECTORY = Path(__file__).parents[2] / ".pytest_cache" / "node-python"

_SITE = """\
import hashlib, marshal, os, zipimport

compile_source = zipimport._compile_source


def compile_once(name, source):
    path = f"{os.path.dirname(__file__)}/{hashlib.sha256(source).hexdigest()}.%s"
    try:
        with open(path, "rb") as file:
            return marshal.load(file)
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


@cache
def node_python() -> str:
    """Return the path of the command."""
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    _write(DIRECTORY / "sitecustomize.py", _SITE % sys.implementation.cache_tag)
    command = DIRECTORY / sys.implementation.cache_tag
    script = f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(DIRECTORY))} exec {shlex.quote(sys.executable)} "$@"\n'
    _write(command, script)
    return str(command)


def _write(path: Path, text: str) -> None:
    """Replace the file whole: other processes of the tests use it."""
    if path.exists() and path.read_text() == text:
        return
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(text)
    new.chmod(0o755)
    new.replace(path)
