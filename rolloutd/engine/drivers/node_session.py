"""One node of one rollout, and the adapters and facts that its steps need."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from operator import is_
from pathlib import Path
from typing import Any, TypeVar

from machines.model.plan import Capability, Plan, StepDef
from machines.model.rollout import Target
from machines.model.target_plan import plan_for_target
from rolloutd import ports
from rolloutd.configuration.shown_variables import hide_in_text, is_shown, texts_of_hidden
from rolloutd.engine.outcomes import capture_errors
from rolloutd.engine.state import State, StepProgress
from rolloutd.errors import NotFound, SourceFailed
from rolloutd.plugin.templates import render, rendered_texts, variables_named_in

T = TypeVar("T")

_WITH_TEXT = (ports.Ok, ports.Failed, ports.Busy, ports.Unknown, ports.IsolationStatus)
"""Results of adapters that people read."""


@dataclass(frozen=True, slots=True)
class PreparationAdapters:
    """What prepare stages need; `stagers` are by method, `find_tree` returns the files of a source.

    `built` has the directories of builds.
    """

    stagers: Mapping[str, ports.Stager]
    snapshots: ports.NodeSnapshots
    checkpoints: ports.Checkpoints
    staged_files: ports.StagedFiles
    find_tree: Callable[[ports.PinnedSource], Path]
    built: ports.SharedDirectories


@dataclass(frozen=True, slots=True)
class AdapterSet:
    """Adapters by kind; `source` returns the pinned source of a rollout, NotFound if it was removed."""

    runners: ports.Runners
    isolators: Mapping[str, ports.Isolator]
    checks: Mapping[str, ports.Check]
    source: Callable[[str], Awaitable[ports.PinnedSource]]
    probes: Mapping[str, ports.TrafficProbe] = field(default_factory=dict)
    guards: Mapping[str, ports.NodeGuard] = field(default_factory=dict)
    preparation: PreparationAdapters | None = None

    @property
    def preparation_adapters(self) -> PreparationAdapters:
        assert self.preparation is not None, "the daemon was made without stagers"
        return self.preparation


@dataclass(frozen=True, slots=True)
class NodeSession:
    """One node of one rollout; it reads the facts on each access, because commands change them."""

    state: State
    adapters: AdapterSet
    rollout: str
    node: str
    _kept: dict[str, tuple[tuple[object, ...], Any]] = field(default_factory=dict, repr=False, compare=False)
    """By name, what was computed, and what it was computed of: a node in flight asks some ten times."""

    @property
    def subject(self) -> str:
        """The name of this node in logs and in the daemon's conditions."""
        return f"{self.rollout}/{self.node}"

    @property
    def target(self) -> Target:
        """The node's target in the rollout; raises NotFound when the rollout was deleted."""
        self._require_rollout()
        return self.state.index.target(self.rollout, self.node)

    @property
    def plan(self) -> Plan:
        """The rollout's whole plan, with the items for other nodes; raises NotFound as `target` does."""
        self._require_rollout()
        return self.state.index.rollout(self.rollout).plan

    def node_plan(self, in_effect: Collection[str] = ()) -> Plan:
        """Return the plan as it applies to this node; `in_effect` are its isolators that are not reverted.

        Raises NotFound when the inventory lost the node.
        """
        node = self.state.index.nodes.get(self.node)
        if node is None:
            raise NotFound(f"{self.node}: the inventory no longer has it")
        return plan_for_target(self.plan, self.target, node, in_effect=in_effect)

    @property
    def progress(self) -> StepProgress:
        return self.state.step_progress.setdefault((self.rollout, self.node), StepProgress())

    @property
    def published_progress(self) -> StepProgress | None:
        """The progress of the node's attempt; a check outside an attempt has none."""
        return self.state.step_progress.get((self.rollout, self.node))

    async def capture_errors(
        self, awaitable: Awaitable[T], *, of: StepDef | None = None
    ) -> T | ports.Failed | ports.Unknown:
        """Capture errors as capture_errors() does, show waits, and hide what people may not see."""
        with ports.reported_waits(self._show_wait):
            return self.without_hidden(await capture_errors(self.state, self.subject, awaitable, of=of))

    def without_hidden(self, result: T) -> T:
        """Return an adapter's result without the values of variables that people may not see.

        Adapters quote the commands, URLs and queries of the plan, in which it may name its variables.
        """
        index = self.state.index
        if self.rollout not in index.rollouts or self.node not in index.nodes:
            return result  # nothing is recorded of it any more
        if not isinstance(result, _WITH_TEXT):
            return result
        if not (hidden := self._hidden_texts()):
            return result
        shown: dict[str, Any] = {"text": hide_in_text(result.text, hidden)}
        if isinstance(result, ports.Ok | ports.Failed):
            shown["output"] = hide_in_text(result.output, hidden)
        return replace(result, **shown)

    def _hidden_texts(self) -> dict[str, str]:
        """Return what stands for hidden variables in the plan's filled templates, and their templates."""
        plan, show_vars, host = self.plan, self.state.settings.show_vars, self.state.host(self.node)
        return self._keep("hidden texts", (plan, show_vars, host), lambda: self._find_hidden(plan, host))

    def _find_hidden(self, plan: Plan, host: ports.Host) -> dict[str, str]:
        variables, allowed = self.variables, (*self.state.settings.show_vars, *plan.shown_variables)
        specs = [*plan.traffic, *plan.isolate, *plan.verify, *plan.rollback_verify, *plan.fallback_verify]
        specs += plan.guard.confirm if plan.guard is not None else ()
        named = {name for spec in specs for name in variables_named_in(spec.params)} & variables.keys()
        named = {name for name in named if not is_shown(name, allowed)}
        if not named:
            return {}
        filled = dict[str, str]()
        for spec in specs:
            filled |= rendered_texts(
                spec.params,
                named,
                node=host.name,
                address=host.address,
                labels=host.labels,
                variables=variables,
                commands=spec.commands,
            )
        return texts_of_hidden(filled, {name: variables[name] for name in named})

    def _keep(self, name: str, inputs: tuple[object, ...], compute: Callable[[], T]) -> T:
        """Return what was computed of these same objects, or compute it."""
        kept = self._kept.get(name)
        if kept is None or not all(map(is_, kept[0], inputs)):
            kept = self._kept[name] = (inputs, compute())
        result: T = kept[1]
        return result

    @property
    def variables(self) -> Mapping[str, ports.JSON]:
        """The variables of the plan's stages; where two set the same one, the earlier stage wins."""
        return {k: v for stage in reversed(self.plan.stages) for k, v in stage.variables.items()}

    def _show_wait(self, text: str) -> None:
        if (progress := self.published_progress) is not None:
            if text and not progress.api_problem:
                progress.api_problem_since = self.state.now()
            progress.api_problem = text

    async def step_context(
        self,
        spec: StepDef,
        *,
        step: str = "",
        number: int = 1,
        prior: Any = None,
        cordon_only: bool = False,
        is_baseline: bool = False,
        baseline: Any = None,
    ) -> ports.StepContext:
        """Return the context of one step, named as its spec unless `step` says otherwise.

        Its idempotency key is the same after a restart.
        Raises RolloutdError when the parameters cannot be rendered, or the source or the rollout was removed.
        """
        state = self.state
        self._require_rollout()
        if state.awaited_sources(self.node):
            raise SourceFailed(f"{self.node}: its inventory source has not answered since the daemon started")
        host, attempt, step = state.host(self.node), self.target.attempt, step or spec.name
        plan, variables = self.plan, self.variables
        params: Mapping[str, ports.JSON] = self._keep(
            f"params of {spec.name}",
            (spec, host, plan),
            lambda: render(
                spec.params,
                node=host.name,
                address=host.address,
                labels=host.labels,
                variables=variables,
                commands=spec.commands,
            ),
        )
        return ports.StepContext(
            host=host,
            rollout=self.rollout,
            attempt=attempt,
            step=step,
            idempotency_key=f"{self.rollout}.{self.node}.{attempt}.{step}.{number}",
            params=dict(params),  # an adapter may change its own
            deadline=state.now() + spec.timeout_s,
            source=await self.adapters.source(self.rollout),
            prior=prior,
            variables=variables,
            cordon_only=cordon_only,
            is_baseline=is_baseline,
            baseline=baseline,
            hold_reason=describe_holds(state, self.node),
            fencing_token=await state.fence_token() if Capability.STARTS_RUN in spec.capabilities else "",
        )

    def with_run_id(self, ctx: ports.StepContext, recorded: str, name: str) -> ports.StepContext:
        """Return the context of a step that is a run, with the run's id.

        That is the recorded id, unless its runner is elsewhere: then the step is repeated by another one.
        """
        runners = self.adapters.runners
        is_here = bool(recorded) and not runners.is_elsewhere(recorded)
        return replace(ctx, run_id=recorded if is_here else runners.run_id_for(name, self.node))

    def _require_rollout(self) -> None:
        if self.rollout not in self.state.index.rollouts:
            raise NotFound(f"{self.rollout}: the rollout was deleted")


def describe_holds(state: State, node: str) -> str:
    """Return who holds the node, without the holds that keep the slot of a node that was left isolated."""
    now = state.now()
    holds = (hold for hold in state.index.holds_on(node) if hold.until is None or now < hold.until)
    return "; ".join(f"held by {each.actor.name}: {each.reason}" for each in holds if each.source != "left")


async def end_runs_on_node(
    state: State, adapters: AdapterSet, node: str, timeout_s: float
) -> ports.Ok | ports.Failed | ports.Unknown:
    """Let the node refuse every command of the runs before, then end what they left there."""
    host, token = state.host(node), await state.fence_token()
    return await adapters.runners.clean_up_stale_runs(host, timeout_s=timeout_s, fencing_token=token)
