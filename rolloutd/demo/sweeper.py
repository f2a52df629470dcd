"""Leaves nothing of the demo behind, however the demo ended.

Runs as a script of a bare interpreter in a session of its own and holds the
reading end of a pipe: when the demo ends, by whatever signal, the pipe closes,
and everything that carries the demo's mark is ended.  It knows the mark and the
directory, and nothing of what the demo shows.

    sweeper.py DIR [REMOVE ...]

DIR is whose processes are ended; REMOVE are directories that are then removed.
"""

import os
import shutil
import signal
import sys
import time

PATIENCE_S = 5.0
"""How long the daemon, the fleet and a run may take to end in good order."""

LIMIT_S = 20.0
"""When killed processes still stand after so long, only a person can help."""

LOOK_S = 0.05
"""Between two looks at what is left."""


def main(directory: str, *removed: str) -> int:
    """Wait for the demo's end, then sweep; return 0 when nothing is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(sys.stdin.fileno(), 1024):
        pass
    clean = sweep(directory, *removed)
    for place in removed:
        shutil.rmtree(place, ignore_errors=True)
    return 0 if clean else 1


def sweep(*directories: str) -> bool:
    """End every process that carries the mark; say whether all of them went."""
    began = time.monotonic()
    told: set[int] = set()
    while left := marked(*directories):
        waited = time.monotonic() - began
        if waited > LIMIT_S:
            return False
        for pid in left:
            if waited > PATIENCE_S:
                _send(pid, signal.SIGKILL)
            elif pid not in told:
                _send(pid, signal.SIGTERM)
                told.add(pid)
        time.sleep(LOOK_S)
    return True


def marked(directory: str, *others: str) -> list[int]:
    """Return the processes whose home is the demo's, and ssh masters with a socket in its directories.

    A master writes its title over its environment; the title names the socket.
    """
    home = f"HOME={directory}/home".encode()
    inside = [f"{place}/".encode() for place in (directory, *others)]
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208 - a bare interpreter starts quicker without pathlib
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        is_ours = home in _read(f"/proc/{name}/environ").split(b"\0") or (
            _read(f"/proc/{name}/comm").strip() == b"ssh"
            and any(place in _read(f"/proc/{name}/cmdline") for place in inside)
        )
        if is_ours and _lives(name):
            found.append(int(name))
    return found


def _lives(name: str) -> bool:
    stat = _read(f"/proc/{name}/stat")
    return bool(stat) and stat[stat.rfind(b")") + 2 :][:1] not in (b"Z", b"X")


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - as above
            return file.read()
    except OSError:
        return b""


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
