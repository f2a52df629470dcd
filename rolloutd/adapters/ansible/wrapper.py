"""Supervisor of one run: claim, command, time limit, status.

The daemon starts it as a script (`python -I -S wrapper.py DIR`) in its own
session, so that it survives the daemon.  It imports only six small modules,
because every run waits for its start.  It does not import rolloutd and knows
only the run directory:

DIR/command    NUL-separated: run id, limit in seconds, the directory of ssh's
               sockets and temporary files, the directory of sockets that the node's runs share or
               nothing, working directory, binary, the number of arguments, the arguments, then
               NAME=VALUE for the whole environment
DIR/claim      created first, atomically and only once, by the wrapper or by the
               daemon: `holder pid start-time boot-id`
DIR/...        SECRET_FILES, removed when the command has ended
DIR/output     the first HEAD_BYTES of the command's output; later output goes to
               output.0 and output.1 alternately, TAIL_BYTES each
DIR/status     JSON, written last and atomically

Exit status: 0 if the status is recorded, 3 if the claim is already taken.
"""

import errno
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # the modules would be imported by every run
    from collections.abc import Callable
    from typing import NoReturn

    Execute = Callable[[bytes, list[bytes], list[bytes]], None]

HEAD_BYTES = 4 * 1024 * 1024
"""Bytes kept of the beginning of the output, which has a run's first error."""

TAIL_BYTES = 2 * 1024 * 1024
"""Size of each of the two alternating files, so that the last 2 MiB are always kept."""

TERM_GRACE_S = 3.0
"""Time between TERM and KILL: Ansible needs less than 1 s."""

KILL_TIMEOUT_S = 15.0
"""Limit of the wait for killed processes; after it the status has their number."""

SECRET_FILES = ("connection.json", "inventory.json", "own.json", "ssh", "tmp", "variables.json")
"""Files with the fleet's variables and the playbook's variables; `tmp` is of rolloutd 0.1."""

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

SPACE_RETRY_S = 1.0
"""Pause before a write is tried again on a full disk."""

MAX_WAIT_S = 3600.0
"""Longest wait of one poll(2): its limit, in milliseconds, is a C int, and a plan may allow a run months."""

CHUNK_BYTES = 65536
MAX_CHUNKS = 64
"""Reads of the output between two checks of the time limit: a run may print faster than it is stored."""

MIN_POLL_S, MAX_POLL_S = 0.002, 0.05
"""Pause between two searches for processes that are being ended; it doubles from MIN to MAX."""


def main(execute: "Execute | None" = None) -> int:
    """Run the command of the directory named on the command line, by exec unless `execute` becomes it."""
    os.chdir(sys.argv[1])
    if not wait_for_space(lambda: take_claim("claim", "run", os.getpid())):
        return 3
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with open("command", "rb") as file:  # noqa: PTH123 - pathlib costs more than the rest of this file
        run, limit, sockets, shared, cwd, binary, count, *rest = file.read().split(b"\0")
    arguments, environment = rest[: int(count)], rest[int(count) :]
    began, began_at = time.monotonic(), time.time()
    output_read, output_write = os.pipe2(os.O_CLOEXEC)
    pid = spawn(cwd, output_write)
    if not pid:
        (execute or execute_program)(binary, arguments, environment)
    os.close(output_write)
    ended, code = supervise(pid, output_read, wake_read, began + float(limit))
    exited_normally = ended == "exit" and code >= 0
    remaining = kill_processes(run, os.getcwdb(), sockets, b"ssh\n" if exited_normally else b"")  # noqa: PTH109 - as above
    if shared and not exited_normally:
        remaining += kill_processes(run, os.getcwdb(), shared)  # noqa: PTH109 - as above
    if ended != "exit":
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if not is_alive(pid) else -signal.SIGKILL
    remove_tree(os.fsdecode(sockets))  # after ssh's masters have ended
    remove_secrets(".")
    duration = time.monotonic() - began
    wait_for_space(lambda: write_status(ended, code, began_at, duration, remaining))
    return 0


def wait_for_space(write: "Callable[[], object]") -> object:
    """Write as soon as the disk has space: what a run needs to record must not be lost."""
    while True:
        try:
            return write()
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
        time.sleep(SPACE_RETRY_S)


def take_claim(path: str, holder: str, pid: int) -> bool:
    """Create the claim unless it exists; return whether it was created."""
    draft = f"{path}.{pid}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        try:
            os.write(fd, f"{holder} {pid} {start_time(pid)} {boot_id()}\n".encode())
        finally:
            os.close(fd)
        # A link fails if the name exists, and a reader never sees a partial claim.
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(draft)  # noqa: PTH108 - as above
    return True


def start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; empty if it is gone."""
    stat = read_proc_file(f"/proc/{pid}/stat")
    # The program's name, in parentheses, may contain spaces and parentheses: split after the last one.
    return stat[stat.rfind(b")") + 2 :].split()[19].decode() if stat else ""


def boot_id() -> str:
    return read_proc_file("/proc/sys/kernel/random/boot_id").decode().strip()


def read_proc_file(path: str) -> bytes:
    """Return a small file of /proc; empty if it is gone or unreadable."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - as above
            return file.read()
    except OSError:
        return b""


def spawn(cwd: bytes, output: int) -> int:
    """Fork with /dev/null as stdin and the pipe as stdout and stderr; return the pid, and 0 in the fork."""
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
    except OSError as error:
        fail(cwd, error)
    return 0


def execute_program(binary: bytes, arguments: list[bytes], environment: list[bytes]) -> None:
    try:
        os.execve(binary, arguments, dict(line.split(b"=", 1) for line in environment if line))  # noqa: S606 - a list
    except OSError as error:
        fail(binary, error)


def fail(path: bytes, error: OSError) -> "NoReturn":
    """End the process that could not become the command."""
    os.write(2, f"rolloutd: {os.fsdecode(path)}: {error.strerror}\n".encode())
    os._exit(127)


def supervise(pid: int, output: int, wake: int, deadline: float) -> tuple[str, int]:
    """Store the output until the command ends, reaches its time limit or is cancelled."""
    os.set_blocking(output, False)
    log = OutputLog()
    process = os.pidfd_open(pid)
    poll = select.poll()
    for fd in (output, process, wake):
        poll.register(fd, select.POLLIN)
    while True:
        left_s = deadline - time.monotonic()
        ready = {fd for fd, _ in poll.poll(1000 * min(max(0.0, left_s), MAX_WAIT_S))}
        if output in ready and not log.copy_from(output):
            poll.unregister(output)
        if process in ready:
            log.copy_from(output)
            return "exit", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if wake in ready:
            return "cancelled", 0
        if left_s <= 0:
            return "limit", 0


class OutputLog:
    """The stored output: its beginning, and its end in two alternating files."""

    def __init__(self) -> None:
        self._fd = self._open("output")
        self._remaining = HEAD_BYTES
        self._file_index = 1

    def copy_from(self, pipe: int) -> bool:
        """Copy the pipe's content to the files, or a part; return whether the pipe still has writers."""
        for _ in range(MAX_CHUNKS):
            try:
                chunk = os.read(pipe, CHUNK_BYTES)
            except BlockingIOError:
                break
            if not chunk:
                return False
            self._append(chunk)
        return True

    def _append(self, chunk: bytes) -> None:
        while chunk:
            if not self._remaining:
                os.close(self._fd)
                self._file_index = 1 - self._file_index
                self._fd, self._remaining = self._open(f"output.{self._file_index}"), TAIL_BYTES
            part, chunk = chunk[: self._remaining], chunk[self._remaining :]
            self._remaining -= len(part)
            try:
                os.write(self._fd, part)
            except OSError:
                return  # on a full disk output is lost, but not the run or its status

    @staticmethod
    def _open(name: str) -> int:
        try:
            return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError:  # a full disk has no inode either
            return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def kill_processes(run: bytes, directory: bytes, sockets: bytes, program: bytes = b"") -> int:
    """End every other process of a run on this machine; return how many remain.

    With `program`, end only processes of that name: after a normal exit ssh's
    masters end, and processes that the playbook started here on purpose stay.
    """
    began, step_s = time.monotonic(), MIN_POLL_S
    while pids := find_processes(run, directory, sockets, program):
        waited = time.monotonic() - began
        if waited > KILL_TIMEOUT_S:
            return len(pids)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL if waited > TERM_GRACE_S else signal.SIGTERM)
            except ProcessLookupError:
                continue
        time.sleep(step_s)
        step_s = min(step_s * 2, MAX_POLL_S)
    return 0


def remove_secrets(directory: str) -> None:
    """Remove the files of a run that may hold secrets: all that only the active run needs."""
    for name in SECRET_FILES:
        remove_tree(os.path.join(directory, name))  # noqa: PTH118 - as above


def remove_tree(path: str) -> None:
    """Remove a file or directory; what cannot be removed stays, and must not prevent the status."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):  # noqa: PTH112, PTH114 - as above
            # After a reboot another user may have made a directory of this name in /tmp, and could replace
            # its parts by links while they are removed.
            if os.stat(path).st_uid != os.geteuid():  # noqa: PTH116 - as above
                return
            for name in os.listdir(path):  # noqa: PTH208 - as above
                remove_tree(os.path.join(path, name))  # noqa: PTH118 - as above
            os.rmdir(path)  # noqa: PTH106 - as above
        else:
            os.unlink(path)  # noqa: PTH108 - as above
    except OSError:
        return


def find_processes(run: bytes, directory: bytes, sockets: bytes, program: bytes = b"") -> list[int]:
    """Return the live processes of a run without this one.

    Their environment names the run and its directory, because another daemon may
    have a run of the same name.  ssh's masters overwrite their environment with
    a title, which names the directory of the run's sockets.
    """
    own = os.getpid()
    return [
        int(name)
        for name in os.listdir("/proc")  # noqa: PTH208 - as above
        if name.isdecimal()
        and int(name) != own
        and (not program or read_proc_file(f"/proc/{name}/comm") == program)
        and (
            belongs_to_run(read_proc_file(f"/proc/{name}/environ").split(b"\0"), run, directory)
            or (sockets and sockets in read_proc_file(f"/proc/{name}/cmdline"))
        )
        and is_alive(int(name))
    ]


def belongs_to_run(environment: list[bytes], run: bytes, directory: bytes) -> bool:
    """Return whether an environment is of this run, not of another daemon's run of the same name."""
    if b"ROLLOUTD_RUN=" + run not in environment:
        return False
    run_dirs = [line for line in environment if line.startswith(b"ROLLOUTD_RUN_DIR=")]
    return all(line == b"ROLLOUTD_RUN_DIR=" + directory for line in run_dirs)


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    stat = read_proc_file(f"/proc/{pid}/stat")
    return bool(stat) and stat[stat.rfind(b")") + 2 :][:1] not in {b"Z", b"X"}


def write_status(ended: str, code: int, began_at: float, duration_s: float, left: int) -> None:
    """Write the status atomically; after this the run is over."""
    cpu_s = sum(os.times()[:4])  # of this process and of the command, which has been waited for
    text = (
        f'{{"ended": "{ended}", "code": {code}, "began_at": {began_at:.6f}, '
        f'"duration_s": {duration_s:.6f}, "left": {left}, "cpu_s": {cpu_s:.3f}}}\n'
    )
    draft = f"status.{os.getpid()}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
    os.rename(draft, "status")  # noqa: PTH104 - as above


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
