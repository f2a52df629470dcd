"""Needs of a run before its launch: a template, files, a Python, no secrets, and the fence of its node."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from machines.model.rollout import FailureCode
from rolloutd.adapters.ansible import fence
from rolloutd.adapters.ansible.environment import RESERVED_HOST_VARIABLES
from rolloutd.adapters.ansible.interpreter import InterpreterCache
from rolloutd.adapters.ansible.launcher import validate_playbook
from rolloutd.adapters.ansible.older_runs import FENCE_TIMEOUT_S
from rolloutd.adapters.awx import module_wrapper
from rolloutd.adapters.awx.templates import Template, Templates, TemplateUnusable
from rolloutd.adapters.awx.tree import PlaybookTasks
from rolloutd.concurrency import threads
from rolloutd.configuration.secret_variables import map_secrets, marked_secrets
from rolloutd.ports import GROUPS, IMPLICIT_GROUPS, JSON, Failed, Host, RunnerContext, RunRequest, StaleRuns

_MACHINE_CREDENTIAL = frozenset(
    {
        *("ansible_password", "ansible_ssh_pass", "ansible_ssh_password"),
        *("ansible_become_password", "ansible_become_pass", "ansible_sudo_pass"),
        *("ansible_private_key_file", "ansible_ssh_private_key_file"),
    }
)
"""Variables that AWX's machine credential replaces: passwords, and paths of keys on this machine."""


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run that AWX can launch; `python` is empty if the tree names it, so that the run has no wrapper."""

    template: Template
    tasks: int
    python: str
    variables: Mapping[str, JSON]


class LaunchChecks:
    """The checks of a run before its claim, and its files on the node after it."""

    def __init__(self, context: RunnerContext, templates: Templates, stale_runs: StaleRuns) -> None:
        self._context = context
        self._templates = templates
        self._stale_runs = stale_runs
        self._interpreters = InterpreterCache(context.shell)
        self._credential_variables = frozenset(context.params.get("credential_variables", ()))

    async def check(self, request: RunRequest) -> PreparedRun | Failed:
        """Return the run, or why it cannot begin; raises RunnerUnavailable."""
        try:
            project = self._templates.require_source(request.source.kind, request.source.url)
            template = await self._templates.find(project, request.playbook)
        except TemplateUnusable as error:
            return Failed(str(error), code=FailureCode.NEVER_STARTED)
        tasks = await threads.FILES.run(self._read_tasks, request)
        if isinstance(tasks, Failed):
            return tasks
        sent, supplied = host_variables(request.host), self._credential_variables
        if (refusal := find_secrets(request, sent, supplied)) is not None:
            return refusal
        variables = {name: value for name, value in sent.items() if name not in supplied}
        python = await self._find_python(request)
        return python if isinstance(python, Failed) else PreparedRun(template, tasks, python, variables)

    async def prepare_node(
        self, request: RunRequest, handle: str, python: str
    ) -> Mapping[str, JSON] | Failed:
        """Take the node's fence and build the run's wrapper; return the wrapper's host variables."""
        host, fence_dir = request.host, self._context.settings.ansible.fence_dir
        # Each claim of a run has its token and its holder, so that none of them refuses the next one.
        token = f"{request.fencing_token} {request.run_id}" if request.fencing_token else ""
        shell = self._context.shell
        if token:
            refusal = await fence.take(shell, host, token, fence_dir, timeout_s=FENCE_TIMEOUT_S)
            if refusal is not None:
                is_reached = refusal.code is not FailureCode.UNREACHABLE
                return replace(refusal, code=FailureCode.NEVER_STARTED) if is_reached else refusal
        if not python or not module_wrapper.has_safe_name(host.name):
            return {}
        marker, run_marker = (
            self._stale_runs.run_marker(host.name, name) for name in (handle, request.run_id)
        )
        directory = await module_wrapper.build(
            shell,
            host,
            marker=marker,
            run_marker=run_marker,
            token=token,
            fence_dir=fence_dir,
            python=python,
        )
        return directory if isinstance(directory, Failed) else module_wrapper.wrapper_variables(directory)

    def forget(self, node: str) -> None:
        """Discover the node's Python again: what ran there may have replaced it."""
        self._interpreters.forget(node)

    def _read_tasks(self, request: RunRequest) -> int | Failed:
        tree = self._context.find_tree(request.source)
        if (refusal := validate_playbook(tree, request.playbook)) is not None:
            return refusal
        tasks = PlaybookTasks.read(tree, request.playbook)
        if request.check_only and tasks.defying:
            text = f'check mode would execute task "{tasks.defying}" on {request.node}: '
            remedy = "add `changed_when: false` to it if it changes nothing"
            return Failed(text + remedy, code=FailureCode.NEVER_STARTED)
        return tasks.count

    async def _find_python(self, request: RunRequest) -> str | Failed:
        named = str(request.host.connection.get("ansible_python_interpreter") or "")
        if named:
            return named if named.startswith("/") else ""
        tree: Path = self._context.find_tree(request.source)
        python = await self._interpreters.resolve(request.host, tree, tree / request.playbook)
        return python or ""


def host_variables(host: Host) -> dict[str, JSON]:
    """Return a node's variables as Ansible must get them, without those of the machine credential."""
    left_out = _MACHINE_CREDENTIAL | set(RESERVED_HOST_VARIABLES)
    return {name: value for name, value in host.variables.items() if name not in left_out}


def groups_of(host: Host) -> Sequence[str]:
    return [str(name) for name in host.connection.get(GROUPS, ()) if name not in IMPLICIT_GROUPS]


def find_secrets(request: RunRequest, sent: Mapping[str, JSON], supplied: Collection[str]) -> Failed | None:
    """Return a refusal of a run that would give AWX a secret, or None."""
    marked = marked_secrets(request.host.connection)
    of_plan = _secret_names(request.variables, marked)
    of_node = [name for name in _secret_names(sent, marked) if name not in supplied]
    if of_plan:
        text = f"{request.node}: variable {of_plan[0]} of the plan is secret; give it to AWX as a credential"
    elif of_node:
        text = (
            f"{request.node}: variable {of_node[0]} is secret; give it to AWX as a credential and add it to"
            " `credential_variables`"
        )
    else:
        return None
    return Failed(text, code=FailureCode.NEVER_STARTED)


def _secret_names(variables: Mapping[str, JSON], marked: Collection[str]) -> list[str]:
    """Return the names of the variables that are a secret, or hold one."""
    found: dict[str, None] = {}
    for variable, value in variables.items():

        def note(_name: str, secret: JSON, variable: str = variable) -> JSON:
            found[variable] = None
            return secret

        map_secrets({variable: value}, note, marked)
    return list(found)
