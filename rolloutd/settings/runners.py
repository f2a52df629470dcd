"""Models of how playbooks are run: on the daemon's machine, and elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field

from rolloutd.planfile.steps import Step, step_model
from rolloutd.plugin import ABSENT, CHANGES, LOCAL_RUNNER, RUNNERS, Params, SelectorText, installed_adapters
from rolloutd.plugin.field_types import MAX_ITEMS, InvalidValue, OptionalPath, raise_invalid

MAX_RUNNER_PARALLEL = 1000
"""Nodes at once on one runner; as many as the daemon's own machine may have runs."""


class Ansible(Params):
    """How playbooks are run."""

    parallel: Annotated[int, Field(ge=1, le=1000)] | Literal["auto"] = Field(
        default="auto",
        description="Runs at once on this machine; `auto` follows its cores and the CPU time of the runs.",
    )
    bin: OptionalPath = Field(
        default=None, description="The ansible-playbook command; by default the one of the daemon's Python."
    )
    warm: Literal["auto", "off"] = Field(
        default="auto",
        description="`auto` forks a run from a process that has imported Ansible, if this version of"
        " ansible-core was tested and a self-test shows the same as a new process; `off` starts a new process"
        " for each run, without what relies on private parts of ansible-core.",
    )
    pipelining: Literal["as-configured", "on"] = Field(
        default="as-configured",
        description="`on` turns Ansible's pipelining on for all runs, which saves ssh connections; sudo on"
        " the nodes must not require a terminal (`requiretty`).",
    )
    fence_dir: Annotated[str, Field(min_length=2, max_length=255, pattern="^/")] = Field(
        default="/var/lib/rolloutd-fence",
        description="Directory on the nodes that remembers the newest run there; if the user on the node"
        " cannot write it, a directory in that user's home.",
    )


class _Runner(Step):
    common_keys: ClassVar[frozenset[str]] = frozenset({"name", "match", "parallel"})

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 4})

    name: Annotated[str, Field(min_length=1, max_length=40, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")] = (
        Field(
            default=ABSENT,
            description="Name in reasons, metrics and the handles of runs; its kind if not given. A run under"
            " way is not found again under another name.",
        )
    )
    match: SelectorText = Field(
        default=ABSENT,
        description="Label selector of the nodes whose playbooks it runs; the key `kind` is the node's kind."
        " All nodes that no runner before it matches if not given.",
    )
    parallel: Annotated[int, Field(ge=1, le=MAX_RUNNER_PARALLEL)] = Field(
        default=ABSENT,
        description="How many of its nodes may be in flight; no limit of its own if not given.",
    )

    @property
    def runner_name(self) -> str:
        return self.name or self.kind


def _require_own_names(runners: Sequence[_Runner]) -> Sequence[_Runner]:
    """Reject runners that share a name, or have that of this machine's runner or of a kind of change."""
    errors, taken = [], {LOCAL_RUNNER, *installed_adapters(CHANGES)}
    for index, runner in enumerate(runners):
        if (name := runner.runner_name) in taken:
            path = (index, "name") if runner.name else (index,)
            message = (
                "this is the runner of the daemon's machine"
                if name == LOCAL_RUNNER
                else "another runner, or a kind of change, has this name"
            )
            errors.append(InvalidValue(message, "a unique `name`", at=path, found=name))
        taken.add(name)
    raise_invalid(errors)
    return runners


if TYPE_CHECKING:
    RunnerEntry = _Runner
else:
    RunnerEntry = step_model("RunnerEntry", "One system that runs playbooks.", RUNNERS, base=_Runner)

RunnerList = Annotated[list[RunnerEntry], Field(max_length=MAX_ITEMS), AfterValidator(_require_own_names)]
