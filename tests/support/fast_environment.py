"""Environment of a fast run, as a runner gives it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from rolloutd.adapters.ansible.environment import RunPaths, TreeConfig, build_environment
from rolloutd.adapters.ansible.fast.fast_runs import FastRuns
from rolloutd.ports import TunedRunnerStatus


def fast_environment(paths: RunPaths, tree: Path, modules: Path | None = None) -> Mapping[str, str]:
    """Return the environment of a run of this tree, which shares built `modules`."""
    binary, config = Path(sys.executable).with_name("ansible-playbook"), TreeConfig.load(tree)
    fast = FastRuns(str(binary), TunedRunnerStatus(), enabled=True, self_test=None)
    plain = build_environment(paths, config)
    return {**plain, **fast.environment(config, plain["ANSIBLE_CALLBACK_PLUGINS"], modules)}
