"""Cleanup process of the demo: it ends processes and removes directories.

It is a script of a bare interpreter in its own session and holds the reading end
of a pipe.  The pipe closes when the demo ends, even by SIGKILL; then the script
ends every process with the demo's mark.

    cleanup.py DIR [REMOVE ...]

DIR is the demo's directory, REMOVE are the directories to remove afterwards.
"""

import os
import shutil
import signal
import sys
import time

TERM_TIMEOUT_S = 5.0
"""Grace period of the daemon, the fleet and runs before SIGKILL."""

KILL_TIMEOUT_S = 20.0
"""Time after which the script gives up on processes that SIGKILL does not end."""

POLL_INTERVAL_S = 0.05
"""Pause between two scans for remaining processes."""


def main(directory: str, *removed: str) -> int:
    """Wait for the demo's end, then clean up; return 0 if no process is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The pipe ends when its last writer does, also by SIGKILL.
    while os.read(sys.stdin.fileno(), 1024):
        pass
    all_ended = end_processes(directory, *removed)
    for place in removed:
        shutil.rmtree(place, ignore_errors=True)
    return 0 if all_ended else 1


def end_processes(*directories: str) -> bool:
    """End every process with the mark; return whether all of them ended."""
    began = time.monotonic()
    terminated: set[int] = set()
    while remaining := marked_processes(*directories):
        waited = time.monotonic() - began
        if waited > KILL_TIMEOUT_S:
            return False
        for pid in remaining:
            if waited > TERM_TIMEOUT_S:
                _send_signal(pid, signal.SIGKILL)
            elif pid not in terminated:
                _send_signal(pid, signal.SIGTERM)
                terminated.add(pid)
        time.sleep(POLL_INTERVAL_S)
    return True


def marked_processes(directory: str, *others: str) -> list[int]:
    """Return the pids of processes whose HOME is the demo's, and of ssh masters with a socket in it."""
    return processes_with(f"HOME={directory}/home", *(f"{place}/" for place in (directory, *others)))


def processes_with(variable: str, *sockets: str) -> list[int]:
    """Return the pids of other processes with a variable, and of ssh masters with a socket in a directory."""
    mark, inside = variable.encode(), [place.encode() for place in sockets]
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208 - a bare interpreter starts quicker without pathlib
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        is_marked = mark in _read(f"/proc/{name}/environ").split(b"\0") or (
            # A master overwrites its environment with its title, which names the socket.
            _read(f"/proc/{name}/comm").strip() == b"ssh"
            and any(place in _read(f"/proc/{name}/cmdline") for place in inside)
        )
        # A zombie has ended; its parent may never ask for its status.
        if is_marked and _is_alive(name):
            found.append(int(name))
    return found


def _is_alive(name: str) -> bool:
    stat = _read(f"/proc/{name}/stat")
    return bool(stat) and stat[stat.rfind(b")") + 2 :][:1] not in (b"Z", b"X")


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - as above
            return file.read()
    except OSError:
        return b""


def _send_signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
