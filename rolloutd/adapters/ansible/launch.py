"""How a run is begun: what is refused, what is written for it, and its wrapper's birth.

Everything here happens before the claim; following, judging and ending a run
are the runner's.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from rolloutd.adapters.ansible import environment, fence, processes, wrapper
from rolloutd.adapters.ansible.environment import Defaults, Places, TreeConfig
from rolloutd.adapters.ansible.inventories import Inventories
from rolloutd.adapters.ansible.rundir import RunDir
from rolloutd.ports import Failed, RunRequest

SHORT_PATH = 32
"""Longest directory under which a socket's name still fits its 108 bytes."""


def refusal(request: RunRequest) -> Failed | None:
    """Say why a request cannot be run at all."""
    if request.node not in request.inventory:
        return Failed(
            f"{request.node} is not in the inventory of this run: refresh the inventory and try again"
        )
    path = Path(os.path.normpath(request.tree / request.playbook))
    if not path.is_relative_to(request.tree):
        return Failed(f"playbook {request.playbook} is outside its source; name one inside it")
    if not path.is_file():
        return Failed(
            f"there is no playbook {request.playbook} in the source; look at its path and its commit"
        )
    return None


def prepare(
    directory: RunDir,
    request: RunRequest,
    *,
    binary: str,
    mark: str,
    defaults: Defaults,
    interpreter: str | None,
    inventories: Inventories,
) -> None:
    """Make the run's directory and write all that the wrapper and Ansible read.

    Raises FileExistsError when the directory is there already.
    """
    directory.make()
    config = TreeConfig.of(request.tree)
    host = request.inventory[request.node]
    sockets = Path(tempfile.mkdtemp(prefix="rolloutd-", dir=_short_directory()))
    remote_tmp = f"{environment.remote_tmp_base(config, host)}/{mark}"
    facts = {
        "node": request.node,
        "playbook": request.playbook,
        "tree": str(request.tree),
        "timeout_s": request.timeout_s,
        "began_at": time.time(),
        "run": request.run,
        "sockets": str(sockets),
        "remote_tmp": remote_tmp,
        "connection": dict(host),
    }
    directory.write_facts(facts)
    common = config.common_args
    make = partial(
        environment.static_inventory, request.inventory, request.groups, defaults=defaults, common=common
    )
    inventories.put(directory.inventory_file, request.generation, common, make)
    if interpreter is not None:
        directory.write(directory.own_inventory_file, environment.own_inventory(request.node, interpreter))
    directory.write(directory.variables_file, {**request.variables, "ansible_remote_tmp": remote_tmp})
    script = environment.ssh_script(mark, remote_tmp, config, host)
    directory.write(directory.ssh_file, script, mode=0o700)
    if request.fence:
        directory.write(directory.fence_file, fence.playbook(request))
    directory.local_tmp.mkdir(mode=0o700)
    marked_ssh = directory.ssh_file if os.access(directory.ssh_file, os.X_OK) else None
    places = Places(request.run, directory.events_file, directory.local_tmp, sockets, marked_ssh)
    directory.write_command(
        run=request.run,
        limit_s=request.timeout_s,
        sockets=sockets,
        cwd=request.tree,
        argv=_argv(binary, directory, request, interpreter),
        environment=environment.environment(places, config),
    )


def spawn(directory: RunDir, run: str) -> int:
    """Start the wrapper in a session of its own, with nothing that ties it to us; return its pid."""
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    argv = [sys.executable, "-I", "-S", wrapper.__file__, str(directory.path)]
    environ = {processes.MARK: run, processes.PLACE: str(directory.path)}
    return os.posix_spawn(argv[0], argv, environ, file_actions=null, setsid=True)


def _argv(binary: str, directory: RunDir, request: RunRequest, interpreter: str | None) -> list[str]:
    own = ["--inventory", str(directory.own_inventory_file)] if interpreter is not None else []
    limit = ["--limit", request.node]
    variables = ["--extra-vars", f"@{directory.variables_file}"]
    books = [str(directory.fence_file), request.playbook] if request.fence else [request.playbook]
    return [binary, "--inventory", str(directory.inventory_file), *own, *limit, *variables, "--", *books]


def _short_directory() -> str:
    found = tempfile.gettempdir()
    return found if len(found) <= SHORT_PATH else "/tmp"  # noqa: S108 - mkdtemp makes a 0700 directory there
