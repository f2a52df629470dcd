"""Holds one run: claims it, runs the command, keeps its limits, records how it ended.

This file is run as a script by a bare interpreter (`python -I -S wrapper.py
DIR`) in a session of its own, so that it lives on when the daemon dies, and it
imports five small modules, because every run waits for its start.  It knows the
run directory and nothing else of rolloutd:

DIR/command    NUL-separated: run id, limit in seconds, the directory of ssh's
               sockets, working directory, binary, the number of arguments, the
               arguments, then NAME=VALUE for the whole environment
DIR/claim      made here, as the first act, if nobody made it before: `by pid
               start-time boot-id`; it appears whole or not at all, and only once
DIR/output     what the command wrote, at most HEAD bytes; what came later is in
               output.0 and output.1 by turns, TAIL bytes each
DIR/status     JSON, written last and in one piece

Exit status: 0 recorded, 3 somebody else holds the claim.
"""

import os
import select
import signal
import sys
import time

HEAD_BYTES = 4 * 1024 * 1024
"""The beginning of the output that is kept: where a run's first mistake stands."""

TAIL_BYTES = 2 * 1024 * 1024
"""Each of the two turns of the end that is kept, so the last 2 MiB are always there."""

TERM_PATIENCE_S = 3.0
"""How long a process may take after TERM before it is killed: Ansible needs under 1 s."""

SWEEP_LIMIT_S = 15.0
"""When killed processes still stand after so long, the status says so instead of waiting on."""

FIRST_STEP_S, LAST_STEP_S = 0.002, 0.05
"""Pause between two looks at processes that are being ended; it doubles from first to last."""


def main() -> int:
    """Run the command of the directory named on the command line."""
    os.chdir(sys.argv[1])
    if not claim("claim", "run", os.getpid()):
        return 3
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with open("command", "rb") as file:  # noqa: PTH123 - pathlib costs more than the rest of this file
        run, limit, sockets, cwd, binary, count, *rest = file.read().split(b"\0")
    arguments, environment = rest[: int(count)], rest[int(count) :]
    began, began_at = time.monotonic(), time.time()
    output_read, output_write = os.pipe2(os.O_CLOEXEC)
    pid = spawn(cwd, binary, arguments, environment, output_write)
    os.close(output_write)
    ended, code = hold(pid, output_read, wake_read, began + float(limit))
    own_end = ended == "exit" and code >= 0
    own_end = ended == "exit" and code >= 0
    left = sweep(run, os.getcwdb(), sockets, b"ssh\n" if own_end else b"")  # noqa: PTH109 - as above
    if ended != "exit":
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if not alive(pid) else -signal.SIGKILL
    remove(sockets)
    duration = time.monotonic() - began
    record(ended, code, began_at, duration, left)
    return 0


def claim(path: str, by: str, pid: int) -> bool:
    """Make the claim unless it exists; a reader sees the whole of it or none."""
    draft = f"{path}.{pid}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(fd, f"{by} {pid} {start_time(pid)} {boot_id()}\n".encode())
    os.close(fd)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(draft)  # noqa: PTH108 - as above
    return True


def start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; empty when it is gone."""
    stat = read(f"/proc/{pid}/stat")
    return stat[stat.rfind(b")") + 2 :].split()[19].decode() if stat else ""


def boot_id() -> str:
    """Return the kernel's name for this boot."""
    return read("/proc/sys/kernel/random/boot_id").decode().strip()


def read(path: str) -> bytes:
    """Return a small file of /proc; empty when it is gone or not ours to read."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - as above
            return file.read()
    except OSError:
        return b""


def spawn(cwd: bytes, binary: bytes, arguments: list[bytes], environment: list[bytes], output: int) -> int:
    """Start the command with its output to the pipe and nothing to read."""
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(cwd)
        os.execve(binary, arguments, dict(line.split(b"=", 1) for line in environment if line))  # noqa: S606 - a list
    except OSError as error:
        os.write(2, f"rolloutd: {os.fsdecode(binary)}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def hold(pid: int, output: int, wake: int, deadline: float) -> tuple[str, int]:
    """Keep the output until the command ends, its time is over or somebody cancels."""
    os.set_blocking(output, False)
    keep = Kept()
    process = os.pidfd_open(pid)
    poll = select.poll()
    for fd in (output, process, wake):
        poll.register(fd, select.POLLIN)
    while True:
        left_s = deadline - time.monotonic()
        ready = {fd for fd, _ in poll.poll(max(0.0, left_s * 1000))}
        if output in ready and not keep.take(output):
            poll.unregister(output)
        if process in ready:
            keep.take(output)
            return "exit", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if wake in ready:
            return "cancelled", 0
        if left_s <= 0:
            return "limit", 0


class Kept:
    """The output as it is kept: a beginning, and two turns of the end."""

    def __init__(self) -> None:
        self._fd = self._open("output")
        self._room = HEAD_BYTES
        self._turn = 1

    def take(self, pipe: int) -> bool:
        """Move what the pipe holds to the files; false when no writer is left."""
        while True:
            try:
                chunk = os.read(pipe, 65536)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self._put(chunk)

    def _put(self, chunk: bytes) -> None:
        while chunk:
            if not self._room:
                os.close(self._fd)
                self._turn = 1 - self._turn
                self._fd, self._room = self._open(f"output.{self._turn}"), TAIL_BYTES
            part, chunk = chunk[: self._room], chunk[self._room :]
            self._room -= len(part)
            try:
                os.write(self._fd, part)
            except OSError:
                return  # a full disk costs output, never the run or its status

    @staticmethod
    def _open(name: str) -> int:
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)


def sweep(run: bytes, directory: bytes, sockets: bytes, program: bytes = b"") -> int:
    """End every other process of a run on this machine; return how many would not go.

    With a program's name only that is ended: after a run that ended by itself
    ssh's masters are, and what a playbook started here on purpose is not.
    """
    began, step_s = time.monotonic(), FIRST_STEP_S
    while pids := marked(run, directory, sockets, program):
        waited = time.monotonic() - began
        if waited > SWEEP_LIMIT_S:
            return len(pids)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL if waited > TERM_PATIENCE_S else signal.SIGTERM)
            except ProcessLookupError:
                continue
        time.sleep(step_s)
        step_s = min(step_s * 2, LAST_STEP_S)
    return 0


def remove(sockets: bytes) -> None:
    """Remove the directory of ssh's sockets; what is in it has no owner any more."""
    try:
        for name in os.listdir(sockets):  # noqa: PTH208 - as above
            os.unlink(os.path.join(sockets, name))  # noqa: PTH108, PTH118 - as above
        os.rmdir(sockets)  # noqa: PTH106 - as above
    except OSError:
        return  # an empty directory left behind harms nobody; the outcome matters more


def marked(run: bytes, directory: bytes, sockets: bytes, program: bytes = b"") -> list[int]:
    """Return the live processes of a run, ourselves apart.

    They carry its mark in their environment, but for ssh's masters, which write
    their title over it: that title names the directory of the run's sockets.
    Another daemon's run of the same name is told by its directory.
    """
    own = os.getpid()
    return [
        int(name)
        for name in os.listdir("/proc")  # noqa: PTH208 - as above
        if name.isdecimal()
        and int(name) != own
        and (not program or read(f"/proc/{name}/comm") == program)
        and (
            carries(read(f"/proc/{name}/environ").split(b"\0"), run, directory)
            or (sockets and sockets in read(f"/proc/{name}/cmdline"))
        )
        and alive(int(name))
    ]


def carries(environment: list[bytes], run: bytes, directory: bytes) -> bool:
    """Say whether an environment is of the run, and not of a run of that name elsewhere."""
    if b"ROLLOUTD_RUN=" + run not in environment:
        return False
    places = [line for line in environment if line.startswith(b"ROLLOUTD_RUN_DIR=")]
    return all(line == b"ROLLOUTD_RUN_DIR=" + directory for line in places)


def alive(pid: int) -> bool:
    """Say whether a process exists and is more than an unread exit status."""
    stat = read(f"/proc/{pid}/stat")
    return bool(stat) and stat[stat.rfind(b")") + 2 :][:1] not in {b"Z", b"X"}


def record(ended: str, code: int, began_at: float, duration_s: float, left: int) -> None:
    """Write the status; after this the run is over."""
    text = (
        f'{{"ended": "{ended}", "code": {code}, "began_at": {began_at:.6f}, '
        f'"duration_s": {duration_s:.6f}, "left": {left}}}\n'
    )
    draft = f"status.{os.getpid()}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(fd, text.encode())
    os.close(fd)
    os.rename(draft, "status")  # noqa: PTH104 - as above


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
