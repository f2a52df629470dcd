"""A process that has imported Ansible and forks one ansible-playbook for each line of a connection.

A line is a JSON object with `argv`, `env`, `cwd` and `output`; the answer is `pid N`, later `exit N CODE`.
It saves a second of CPU time for each job, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import Any

_owners: dict[int, asyncio.StreamWriter] = {}
"""The connection that asked for each process."""


def main() -> None:
    import ansible.cli.playbook  # what each fork needs
    import ansible.executor.task_executor
    import ansible.plugins.connection.ssh
    import ansible.plugins.strategy.linear  # noqa: F401

    asyncio.run(_serve(sys.argv[1]))


async def _serve(path: str) -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGCHLD, _reap)
    server = await asyncio.start_unix_server(_answer, path)
    ended = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(ended), sys.stdin)
    await ended.read()
    server.close()


async def _answer(lines: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while line := await lines.readline():
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                _become(request)
            _owners[pid] = writer
            writer.write(f"pid {pid}\n".encode())
    writer.close()


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            writer = _owners.pop(pid)
            if not writer.is_closing():
                writer.write(f"exit {pid} {os.waitstatus_to_exitcode(status)}\n".encode())


def _become(request: dict[str, Any]) -> None:
    try:
        os.setsid()
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.chdir(request["cwd"])
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open("/dev/null", os.O_RDONLY)
        for source, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        os.closerange(3, 256)
        os.environ.clear()
        os.environ.update(request["env"])
        asyncio.events._set_running_loop(None)
        asyncio.set_event_loop(None)
        _renew_constants(request["cwd"])
        from ansible.cli.playbook import PlaybookCLI

        sys.argv = request["argv"]
        PlaybookCLI.cli_executor(request["argv"])
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        import traceback

        traceback.print_exc()
    os._exit(250)


def _renew_constants(tree: str) -> None:
    """Evaluate Ansible's settings again, as the environment and the project's ansible.cfg have them."""
    import ansible.constants as constants

    path = os.path.join(tree, "ansible.cfg")  # noqa: PTH118
    if os.path.exists(path):  # noqa: PTH110
        constants.config._config_file = path
        constants.config._parse_config_file()
    for name in constants.config.get_configuration_definitions():
        value = constants.config.get_config_value(name, variables=vars(constants))
        setattr(constants, name, value)


if __name__ == "__main__":
    main()
