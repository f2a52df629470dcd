"""Fork server: a process that has imported Ansible and forks one wrapper for each run.

The daemon starts it as a script (`python fork_server.py FD BINARY TREE INVENTORY ROOM`) with the environment
of a run, except what differs from run to run.  INVENTORY is the file that all runs of its generation have.
ROOM, and the variable ROLLOUTD_ROOM, are memory that a fork overwrites with its own command line and
environment, by which people and rolloutd recognize a run's processes.

On the socket FD it gets one message for each run, the run's directory, and answers with the wrapper's pid.
It ends when the daemon closes the socket.  A run needs nothing of it after the fork: the wrapper has its own
session, and its command is Ansible in a fork of the wrapper.

A fork must behave as `ansible-playbook` does.  So nothing of a run is in the server: it parses no command
line and no playbook, and initializes no plugin loader.  What Ansible decides at its import is
decided again in the fork where the run's environment differs.  If anything is unusual, the server answers
`refused REASON`, and the daemon starts the run as a new process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import os
import secrets
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import fork_inventory  # type: ignore[import-not-found]  # siblings, without the package around them
import fork_plugins  # type: ignore[import-not-found]

sys.path.append(fork_plugins.OWN)
import wrapper  # type: ignore[import-not-found]

MAX_MESSAGE_BYTES = 8192

PRELOADED = (
    "ansible._internal._errors._task_timeout",
    "ansible._internal._json._profiles._inventory_legacy",
    "ansible.cli.playbook",
    "ansible.executor.process.worker",
    "ansible.executor.task_executor",
    "ansible.module_utils._internal._json._profiles._module_legacy_c2m",
    "ansible.module_utils._internal._json._profiles._module_legacy_m2c",
    "ansible.module_utils.connection",
    "ansible.playbook.handler_task_include",
    "ansible.playbook.included_file",
    "ansible.playbook.role_include",
    "ansible.utils.hashing",
    "ansible.utils.shlex",
    "cmd",
    "multiprocessing.popen_fork",
    "multiprocessing.resource_tracker",
    "multiprocessing.shared_memory",
    "multiprocessing.synchronize",
    "pprint",
    "pty",
)
"""Modules that every run imports.  None is a plugin: a tree may have its own of the same name."""


def main() -> None:
    """Serve until the daemon closes the socket; return only in a process that is to become Ansible."""
    descriptor, binary, tree, inventory = int(sys.argv[1]), *sys.argv[2:5]
    prepare_imports(binary)
    channel = socket.socket(fileno=descriptor)
    # show_as() overwrites this memory; a run must not inherit the variable.
    del os.environ["ROLLOUTD_ROOM"]
    initial, prepared = dict(os.environ), [fork_plugins.PluginCache()]
    # What the import makes there is removed, so each fork makes its own, also the first with the same value.
    del initial["ANSIBLE_LOCAL_TEMP"]
    problem = preload(prepared, inventory) or show_as(["rolloutd fork server of", tree], initial)
    channel.send(f"refused {problem}".encode() if problem else b"ready")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the wrappers
    while not problem and (directory := channel.recv(MAX_MESSAGE_BYTES)):
        if threads := other_threads():
            channel.send(f"refused {threads} other threads run in the fork server".encode())
            continue
        pid = os.fork()
        if pid == 0:
            channel.close()
            run_wrapper(os.fsdecode(directory), initial, prepared)
        channel.send(str(pid).encode())
    os._exit(0)


def prepare_imports(binary: str) -> None:
    """Make sys.path and sys.modules those of `binary`, which is a script of this Python."""
    sys.path[0] = os.path.dirname(os.path.realpath(binary))  # noqa: PTH120
    sys.path.remove(fork_plugins.OWN)
    # A plugin of the tree may import its own module of the same name.
    for name in ("fork_inventory", "fork_plugins", "wrapper"):
        del sys.modules[name]


Prepared = list["fork_plugins.PluginCache | fork_inventory.PreparedInventory"]
"""What a fork installs into Ansible."""


def preload(prepared: Prepared, inventory: str) -> str:
    """Import Ansible and read the inventory; return what is unusual, or an empty string."""
    (plugins,) = prepared
    with captured_output() as output:
        try:
            for name in PRELOADED:
                importlib.import_module(name)
            plugins.fill()
        except SystemExit as error:
            return f"Ansible did not start (exit {error.code})"
        except Exception as error:  # noqa: BLE001 - whatever it is, a new process reports it
            return f"Ansible could not be imported ({type(error).__name__})"
    if os.fstat(output).st_size:
        return "Ansible prints warnings as it starts"
    constants = sys.modules["ansible.constants"]
    if getattr(constants, "DEFAULT_LOG_PATH", None):
        return "ansible.cfg names a log_path"
    remove_local_tmp(constants)
    with captured_output() as output, contextlib.suppress(Exception):  # a run reads it itself, and says why
        prepared.append(fork_inventory.PreparedInventory(inventory, plugins.inventory_plugin))
    if os.fstat(output).st_size:
        prepared[1:] = []
        sys.modules["ansible.utils.display"].Display()._warns.clear()
    gc.collect()
    gc.freeze()  # so that collections in a fork do not copy the pages of what was imported
    return ""


@contextlib.contextmanager
def captured_output() -> Iterator[int]:
    """Write standard output and standard error to a file in memory."""
    output = os.memfd_create("output")
    saved = os.dup(1), os.dup(2)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        yield output
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        for fd, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, fd)
            os.close(copy)


def remove_local_tmp(constants: Any) -> None:
    """Remove the temporary directory that the import has made, and Ansible's note to remove it at exit."""
    manager = sys.modules["ansible.config.manager"]
    atexit.unregister(manager.cleanup_tmp_file)
    shutil.rmtree(constants.DEFAULT_LOCAL_TMP, ignore_errors=True)


def other_threads() -> int:
    """Return the number of this process's threads but one: a fork would copy their locks and not them."""
    return len(os.listdir("/proc/self/task")) - 1  # noqa: PTH208


def run_wrapper(directory: str, initial: dict[str, str], prepared: Prepared) -> None:
    """Be the wrapper of a run; return only in its command, which is to become Ansible."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else nothing could wait for the command
    os.setsid()
    sys.argv = [wrapper.__file__, directory]
    os.environ.clear()
    run_id = os.path.basename(directory).partition("~")[0]  # noqa: PTH119  # ports.id_of(), which is not here
    show_as(sys.argv, {"ROLLOUTD_RUN": run_id, "ROLLOUTD_RUN_DIR": directory})
    code = wrapper.main(functools.partial(become_ansible, initial, prepared))
    # Without Python's own end: it would free the server's objects, and so copy their pages first.
    os._exit(code)


def become_ansible(
    initial: dict[str, str],
    prepared: Prepared,
    binary: bytes,
    arguments: list[bytes],
    environment: list[bytes],
) -> None:
    """Run the command in this process, as the script `binary` would, and end as it would."""
    known = frozenset(sys.modules)
    try:
        _prepare_fork(arguments, environment, initial)
        for each in prepared:
            each.install()
    except Exception:  # noqa: BLE001 - another version of Ansible may have anything else here
        wrapper.execute_program(binary, arguments, environment)
    cli: Any = sys.modules["ansible.cli.playbook"]
    code: Any = 0
    try:
        cli.PlaybookCLI.cli_executor(sys.argv)
    except SystemExit as end:
        if isinstance(end.code, int) and not has_foreign_modules(known):
            exit_at_once(end.code)
        code = end.code
    # Python finalizes what is frozen, or held by the caught one's frames, in another order: a file that a
    # plugin of the user leaves open would lose what it has not flushed.
    gc.unfreeze()
    gc.collect()
    raise SystemExit(code)


def _prepare_fork(arguments: list[bytes], environment: list[bytes], initial: dict[str, str]) -> None:
    """Make this process what a new one would be after it has imported Ansible."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # as exec does
    own = dict(os.fsdecode(line).split("=", 1) for line in environment if line)
    os.environ.update(own)
    sys.argv = [os.fsdecode(word) for word in arguments]
    show_as(sys.argv, dict(sorted(own.items(), key=lambda item: not item[0].startswith("ROLLOUTD_RUN"))))
    # Python sets this handler only at its start; the wrapper had its own.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    renew_constants({name for name in own.keys() | initial.keys() if own.get(name) != initial.get(name)})
    utilities: Any = sys.modules["ansible.utils.vars"]
    utilities.random_int = secrets.token_hex(4)  # the prefix of task ids is chosen at import


def renew_constants(changed: set[str]) -> None:
    """Evaluate again the settings whose variables differ from those at import."""
    constants: Any = sys.modules["ansible.constants"]
    # Not by importing it again: the modules of Ansible hold this one.
    for name, definition in constants.config.get_configuration_definitions().items():
        if any(entry.get("name") in changed for entry in definition.get("env") or ()):
            setattr(constants, name, constants.config.get_config_value(name, variables=vars(constants)))


def has_foreign_modules(known: Set[str]) -> bool:
    """Return whether code of others was imported: neither of Ansible, Python nor rolloutd."""
    own = os.path.dirname(str(sys.modules["ansible"].__file__)) + "/", fork_plugins.OWN + "/"  # noqa: PTH120
    return any(
        not str(getattr(sys.modules[name], "__file__", "")).startswith((*own, "<ansible_synthetic"))
        for name in sys.modules.keys() - known
        if name.partition(".")[0] not in sys.stdlib_module_names
    )


def exit_at_once(code: int) -> None:
    """End as Python does, but do not free what was imported: that would first copy the server's memory.

    Objects of Ansible itself need no finalizer.  Those of other code may, as a file that is not closed.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def show_as(arguments: list[str], environment: Mapping[str, str]) -> str:
    """Write what /proc shows as this process's command line and environment; return the problem, if any.

    os.environ must be empty or copied: C reads its variables from the same memory.
    """
    with open("/proc/self/stat") as file:  # noqa: PTH123
        fields = file.read().rpartition(")")[2].split()
    # Fields 48 to 51 of proc(5); the first one here is field 3.
    argument_start, argument_end, environment_start, environment_end = map(int, fields[45:49])
    if not 0 < argument_start < argument_end <= environment_start < environment_end:
        return "the kernel does not say where the environment is"
    _fill(argument_start, argument_end, arguments)
    _fill(environment_start, environment_end, [f"{name}={value}" for name, value in environment.items()])
    return ""


def _fill(start: int, end: int, words: Iterable[str]) -> None:
    """Write the words that fit, and zeros after them."""
    content, size = b"", end - start
    for word in map(os.fsencode, words):
        if len(content) + len(word) + 1 < size:
            content += word + b"\0"
    ctypes.memmove(start, content.ljust(size, b"\0"), size)


if __name__ == "__main__":
    main()
