"""Reaches a daemon on another machine: over ssh, to its socket there.

The tunnel is a process of its own, because the ssh library is heavy and the
command line starts quickly.  It ends with us, whatever becomes of us: it reads
our end of a pipe.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import rolloutd
from rolloutd.control.client import NoDaemon, default_socket

END_LIMIT_S = 10.0
"""How long the tunnel may take to close its connection in good order."""


@contextmanager
def reached(host: str, path: str | None) -> Iterator[str]:
    """Yield a socket here that leads to the one on the host; raises NoDaemon."""
    with tempfile.TemporaryDirectory(prefix="rolloutctl-") as directory:
        here = str(Path(directory) / "s")
        words = [sys.executable, "-P", "-m", "rolloutd.tunnel", host, path or default_socket(), here]
        tunnel = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None, env=_environment(), text=True
        )
        assert tunnel.stdin is not None
        assert tunnel.stdout is not None
        try:
            if tunnel.stdout.readline() != "ready\n":
                raise NoDaemon(f"{host} was not reached over ssh")
            yield here
        finally:
            tunnel.stdin.close()
            try:
                tunnel.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                tunnel.kill()
                tunnel.wait()
            tunnel.stdout.close()


def _environment() -> dict[str, str]:
    # Not the current directory but where we were found is searched for modules.
    places = [str(Path(rolloutd.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
