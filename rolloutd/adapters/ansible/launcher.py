"""Start of a run before its claim: validation, its files and its wrapper process."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path

from machines.model.rollout import FailureCode
from rolloutd.adapters.ansible import environment, fence, processes, wrapper
from rolloutd.adapters.ansible.environment import RunPaths, TreeConfig
from rolloutd.adapters.ansible.inventory_cache import InventoryCache
from rolloutd.adapters.ansible.node_connections import NodeConnections, make_socket_directory
from rolloutd.adapters.ansible.run_directory import RunDirectory
from rolloutd.adapters.ansible.tree_cache import TreeCache
from rolloutd.ports import ConnectionDefaults, Failed, RunRequest


def validate_request(request: RunRequest) -> Failed | None:
    """Return why a request cannot run, or None."""
    problem = _request_problem(request)
    return None if problem is None else Failed(problem, code=FailureCode.NEVER_STARTED)


def _request_problem(request: RunRequest) -> str | None:
    if request.node not in request.inventory:
        return f"{request.node} is not in the inventory of this run: refresh the inventory and try again"
    path = Path(os.path.normpath(request.tree / request.playbook))
    if not path.is_relative_to(request.tree):
        return f"playbook {request.playbook} is outside its source; name one inside it"
    if not os.path.isfile(path):  # noqa: PTH113 - Path.is_file raises for a name that is too long
        return f"there is no playbook {request.playbook} in the source; check its path and its commit"
    return None


def prepare_run(
    directory: RunDirectory,
    request: RunRequest,
    *,
    binary: str,
    marker: str,
    defaults: ConnectionDefaults,
    interpreter: str | None,
    inventories: InventoryCache,
    tree_cache: TreeCache | None,
    connections: NodeConnections,
    pipelining: bool,
) -> None:
    """Create the run's directory with the files of the wrapper and Ansible; raises FileExistsError."""
    directory.create()
    sockets = make_socket_directory()
    try:
        _write_files(
            directory,
            request,
            sockets,
            binary,
            marker,
            defaults,
            interpreter,
            inventories,
            tree_cache,
            connections,
            pipelining,
        )
    except BaseException:
        wrapper.remove_scratch(os.fsencode(sockets))
        raise


def _write_files(
    directory: RunDirectory,
    request: RunRequest,
    sockets: Path,
    binary: str,
    marker: str,
    defaults: ConnectionDefaults,
    interpreter: str | None,
    inventories: InventoryCache,
    tree_cache: TreeCache | None,
    connections: NodeConnections,
    pipelining: bool,
) -> None:
    config = TreeConfig.load(request.tree)
    host = request.inventory[request.node]
    shared = connections.directory_for(request, config)
    remote_tmp = f"{environment.remote_tmp_base(config, host)}/{marker}"
    metadata = {
        "node": request.node,
        "playbook": request.playbook,
        "tree": str(request.tree),
        "timeout_s": request.timeout_s,
        "began_at": time.time(),
        "run": request.run_id,
        "sockets": str(sockets),
        "shared_sockets": str(shared or ""),
        "remote_tmp": remote_tmp,
    }
    directory.write_metadata(metadata)
    directory.write(directory.connection_file, dict(host))
    common_args = config.common_args
    build = partial(
        environment.build_inventory,
        request.inventory,
        request.groups,
        defaults=defaults,
        common_args=common_args,
    )
    inventories.link_to(directory.inventory_file, request.generation, common_args, build)
    if interpreter is not None:
        directory.write(
            directory.node_inventory_file, environment.build_node_inventory(request.node, interpreter)
        )
    directory.write(directory.variables_file, {**request.variables, "ansible_remote_tmp": remote_tmp})
    script = environment.render_ssh_wrapper(marker, remote_tmp, config, host)
    directory.write(directory.ssh_wrapper_file, script, mode=0o700)
    if request.fencing_token:
        directory.write(directory.fence_file, fence.build_play(request))
    local_tmp = sockets / "tmp"
    local_tmp.mkdir(mode=0o700)
    # On a file system mounted noexec the wrapper cannot run, and Ansible uses plain ssh.
    ssh_wrapper = directory.ssh_wrapper_file if os.access(directory.ssh_wrapper_file, os.X_OK) else None
    paths = RunPaths(
        request.run_id,
        directory.events_file,
        local_tmp,
        shared or sockets,
        ssh_wrapper,
        None if tree_cache is None else tree_cache.requirements_of(request.tree),
        None if tree_cache is None else tree_cache.modules_of(request.tree),
        pipelining,
    )
    directory.write_command(
        run_id=request.run_id,
        timeout_s=request.timeout_s,
        sockets=sockets,
        shared_sockets=shared,
        cwd=request.tree,
        argv=_build_argv(binary, directory, request, interpreter),
        environment=environment.build_environment(paths, config),
    )


def spawn_wrapper(directory: RunDirectory, run_id: str) -> int:
    """Start the wrapper in its own session, independent of the daemon; return its pid."""
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    argv = [sys.executable, "-I", "-S", wrapper.__file__, str(directory.path)]
    environ = {processes.RUN_ID_ENV: run_id, processes.RUN_DIR_ENV: str(directory.path)}
    return os.posix_spawn(argv[0], argv, environ, file_actions=null, setsid=True)


def _build_argv(
    binary: str, directory: RunDirectory, request: RunRequest, interpreter: str | None
) -> list[str]:
    own = ["--inventory", str(directory.node_inventory_file)] if interpreter is not None else []
    limit = ["--limit", request.node]
    variables = ["--extra-vars", f"@{directory.variables_file}"]
    playbooks = [str(directory.fence_file), request.playbook] if request.fencing_token else [request.playbook]
    check = ["--check", "--diff"] if request.check_only else []
    inventory = ["--inventory", str(directory.inventory_file), *own]
    return [binary, *check, *inventory, *limit, *variables, "--", *playbooks]
