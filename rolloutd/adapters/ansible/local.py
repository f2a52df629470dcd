"""The runner of this machine, by the settings."""

from __future__ import annotations

from functools import partial

from rolloutd.adapters.ansible import self_test
from rolloutd.adapters.ansible.artifact_store import OUTPUT_DIRECTORY, SharedOutput
from rolloutd.adapters.ansible.runner import AnsibleRunner
from rolloutd.adapters.ansible.tree_cache import TreeCache
from rolloutd.adapters.directory_store import shared_store
from rolloutd.ports import RunnerContext


def make_runner(context: RunnerContext) -> AnsibleRunner:
    """Return the runner of this machine, by the daemon's own settings `ansible` and `ssh`.

    It first removes the secrets of runs that a killed daemon prepared.
    """
    settings = context.settings
    ansible, ssh = settings.ansible, settings.ssh
    is_shared = settings.shared_files.is_named
    runner = AnsibleRunner(
        settings.state_dir / "runs",
        context.shell,
        context.find_tree,
        context.inventory,
        fence_dir=ansible.fence_dir,
        ansible_playbook=str(ansible.bin) if ansible.bin else None,
        parallel=None if ansible.parallel == "auto" else ansible.parallel,
        warm=ansible.warm == "auto",
        self_test=partial(self_test.run, settings.state_dir, context.shell),
        pipelining=ansible.pipelining == "on",
        known_hosts=ssh.known_hosts,
        user=ssh.user,
        key_file=ssh.key_file,
        tree_cache=TreeCache(settings.state_dir / "ansible", ansible.bin),
        machine=context.machine,
        shared_output=SharedOutput(shared_store(settings, OUTPUT_DIRECTORY)) if is_shared else None,
        inherited_nodes=context.inherited_nodes,
        marks=context.marks,
    )
    runner.artifacts.abandon_unbegun()
    return runner
