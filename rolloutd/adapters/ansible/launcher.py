"""Start of a run before its claim: validation, its files and its wrapper process."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

from machines.model.rollout import FailureCode
from rolloutd import ports
from rolloutd.adapters.ansible import environment, fence, processes, wrapper
from rolloutd.adapters.ansible.environment import RunPaths, TreeConfig
from rolloutd.adapters.ansible.fast.fast_runs import FastRuns
from rolloutd.adapters.ansible.inventory_cache import InventoryCache
from rolloutd.adapters.ansible.node_connections import NodeConnections, make_socket_directory
from rolloutd.adapters.ansible.run_directory import RunDirectory
from rolloutd.adapters.ansible.tree_cache import TreeCache


def _is_local(connection: Mapping[str, ports.JSON]) -> bool:
    return bool(ports.plain_value(connection.get("ansible_connection")) == "local")


@dataclass(frozen=True, slots=True)
class LocalRun:
    """A run, and what its request names on this machine: the tree of its source, and the inventory."""

    request: ports.RunRequest
    tree: Path
    inventory: ports.InventorySnapshot

    @classmethod
    def resolve(cls, request: ports.RunRequest, tree: Path, inventory: ports.InventorySnapshot) -> Self:
        """Return the run; a host that the inventory does not have is added to it.

        A request for this machine stays here, also if the inventory knows another host by its name.
        """
        known, own = inventory.hosts.get(request.node), request.host.variables
        if known is None or (_is_local(own) and not _is_local(known)):
            hosts = {**inventory.hosts, request.node: own}
            inventory = ports.InventorySnapshot(hosts, inventory.groups)
        return cls(request, tree, inventory)

    @property
    def variables(self) -> Mapping[str, ports.JSON]:
        """The host's variables in the inventory, as plain texts."""
        return self.host.connection

    @property
    def host(self) -> ports.Host:
        return replace(self.request.host, connection=self.inventory.hosts[self.request.node])


def validate_playbook(tree: Path, playbook: str) -> ports.Failed | None:
    """Return why a playbook cannot run, or None."""
    path = Path(os.path.normpath(tree / playbook))
    if not path.is_relative_to(tree):
        problem = f"playbook {playbook}: it is outside the source; name one inside it"
    elif not os.path.isfile(path):  # noqa: PTH113 - Path.is_file raises for a name that is too long
        problem = f"playbook {playbook}: the source does not have it; check its path and the commit"
    else:
        return None
    return ports.Failed(problem, code=FailureCode.NEVER_STARTED)


def record_refusal(directory: RunDirectory, request: ports.RunRequest, refusal: ports.Failed) -> None:
    directory.create()
    facts = {"rollout": request.rollout, "node": request.node, "code": refusal.code}
    directory.write_metadata({**facts, "refused": refusal.text, "evidence": refusal.output})
    directory.take_claim()


@dataclass(frozen=True, slots=True)
class Launcher:
    """Writes the files of runs, with what all runs of this machine share."""

    binary: str
    defaults: ports.ConnectionDefaults
    fence_dir: str
    pipelining: bool
    inventories: InventoryCache
    connections: NodeConnections
    fast: FastRuns
    tree_cache: TreeCache | None

    def prepare(self, directory: RunDirectory, run: LocalRun, marker: str, interpreter: str | None) -> None:
        """Create the run's directory with the files of the wrapper and Ansible; raises FileExistsError."""
        directory.create()
        sockets = make_socket_directory()
        try:
            self._write_files(directory, run, sockets, marker, interpreter)
        except BaseException:
            wrapper.remove_tree(str(sockets))
            raise

    def _write_files(
        self, directory: RunDirectory, run: LocalRun, sockets: Path, marker: str, interpreter: str | None
    ) -> None:
        request, config = run.request, TreeConfig.load(run.tree)
        shared = None
        if not request.check_only:
            variables = {**run.variables, **request.variables}
            shared = self.connections.directory_for(request.node, run.tree, variables, config)
        remote_tmp = f"{environment.remote_tmp_base(config, run.variables)}/{marker}"
        directory.write_metadata(_describe(run, sockets, shared, remote_tmp))
        directory.write(directory.connection_file, dict(run.variables))
        generation = self._link_inventory(directory, run, config.common_args)
        if interpreter is not None:
            node_inventory = environment.build_node_inventory(request.node, interpreter)
            directory.write(directory.node_inventory_file, node_inventory)
        # Extra variables win over every other: the cleanup knows where the run's files are, and a playbook
        # which rollout's change it makes or undoes.
        given = run.host.variables.get("ansible_remote_tmp")
        own = {
            "ansible_remote_tmp": ports.marked_as(given, remote_tmp),
            "rolloutd_rollout": request.rollout,
            "rolloutd_attempt": request.attempt,
        }
        directory.write(directory.variables_file, {**request.variables, **own})
        refuse = ":"
        if request.fencing_token:
            token = f"{request.fencing_token} {directory.path.name}"
            directory.write(directory.fence_file, fence.build_play(token, self.fence_dir, request.node))
            refuse = fence.refuse_command(token, self.fence_dir, request.node)
        script = environment.render_ssh_wrapper(marker, remote_tmp, config, run.variables, refuse)
        directory.write(directory.ssh_wrapper_file, script, mode=0o700)
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
            None if self.tree_cache is None else self.tree_cache.requirements_of(run.tree),
            self.pipelining,
            generation,
        )
        variables_of_run = environment.build_environment(paths, config)
        modules = None if self.tree_cache is None else self.tree_cache.modules_of(run.tree)
        callbacks = variables_of_run["ANSIBLE_CALLBACK_PLUGINS"]
        directory.write_command(
            run_id=request.run_id,
            timeout_s=request.timeout_s,
            sockets=sockets,
            shared_sockets=shared,
            cwd=run.tree,
            argv=_build_argv(self.binary, directory, request, interpreter),
            environment={**variables_of_run, **self.fast.environment(config, callbacks, modules)},
        )

    def _link_inventory(self, directory: RunDirectory, run: LocalRun, common_args: str) -> str:
        build = partial(
            environment.build_inventory,
            run.inventory.hosts,
            run.inventory.groups,
            defaults=self.defaults,
            common_args=common_args,
        )
        return self.inventories.link_to(
            directory.inventory_file, run.inventory.generation, common_args, build
        )


def _describe(run: LocalRun, sockets: Path, shared: Path | None, remote_tmp: str) -> Mapping[str, ports.JSON]:
    """Return what the runner needs to know of a run after a restart."""
    request = run.request
    return {
        "rollout": request.rollout,
        "node": request.node,
        "attempt": request.attempt,
        "step": request.step,
        "playbook": request.playbook,
        "tree": str(run.tree),
        "timeout_s": request.timeout_s,
        "began_at": time.time(),
        "run": request.run_id,
        "sockets": str(sockets),
        "shared_sockets": str(shared or ""),
        "remote_tmp": remote_tmp,
        "fenced": bool(request.fencing_token),
    }


def spawn_wrapper(directory: RunDirectory, run_id: str) -> int:
    """Start the wrapper in its own session, independent of the daemon; return its pid."""
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    argv = [sys.executable, "-I", "-S", wrapper.__file__, str(directory.path)]
    environ = {processes.RUN_ID_ENV: run_id, processes.RUN_DIR_ENV: str(directory.path)}
    return os.posix_spawn(argv[0], argv, environ, file_actions=null, setsid=True)


def _build_argv(
    binary: str, directory: RunDirectory, request: ports.RunRequest, interpreter: str | None
) -> list[str]:
    own = ["--inventory", str(directory.node_inventory_file)] if interpreter is not None else []
    limit = ["--limit", request.node]
    variables = ["--extra-vars", f"@{directory.variables_file}"]
    playbooks = [str(directory.fence_file), request.playbook] if request.fencing_token else [request.playbook]
    check = ["--check", "--diff"] if request.check_only else []
    inventory = ["--inventory", str(directory.inventory_file), *own]
    return [binary, *check, *inventory, *limit, *variables, "--", *playbooks]
