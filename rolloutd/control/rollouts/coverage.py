"""What a plan probes and isolates on its nodes, and what it leaves out, for people who vote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from machines.facts.index import Index
from machines.model.node import Node, natural_sort_key
from machines.model.plan import Plan, StepDef
from machines.model.rollout import Rollout
from machines.model.target_plan import applicable, isolators_for, lacks_isolator
from rolloutd.control.kept_answers import KeptAnswers
from rolloutd.engine.state import State
from rolloutd.engine.tasks import compute_over
from rolloutd.plugin import PROBES, installed_adapters
from rolloutd.texts.formats import pluralize

MAX_NAMED_NODES = 3
"""Nodes named in one line; the preview and `why` show each node's own reason."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a plan leaves out on its nodes, and the facts for which that was found."""

    plan: Plan
    basis: tuple[int, int]
    not_probed: list[str]
    not_isolated: list[str]


class KeptCoverages(dict[str, Coverage]):
    """By rollout, what its plan was last found to leave out."""


async def coverage_of(state: State, answers: KeptAnswers, index: Index, rollout: Rollout) -> Coverage:
    """Return what a plan leaves out; the answer is kept until a node or the number of targets changes."""
    # A status must not cost the size of the fleet: consoles ask for it again and again.
    total = index.counters(rollout.id).phases.total()
    kept = answers.of(KeptCoverages)
    known = kept.get(rollout.id)
    basis = (index.node_changes, total)
    if known is not None and known.plan is rollout.plan and known.basis == basis:
        return known
    found = await compute_over(total, _find_coverage, index.fork(), rollout, basis)
    for gone in kept.keys() - state.index.rollouts.keys():
        del kept[gone]
    if rollout.id in state.index.rollouts:
        kept[rollout.id] = found
    return found


def _find_coverage(index: Index, rollout: Rollout, basis: tuple[int, int]) -> Coverage:
    known = map(index.nodes.get, index.targets_by_node(rollout.id))
    nodes = [node for node in known if node is not None]
    plan = rollout.plan
    return Coverage(plan, basis, not_probed(plan, nodes), not_isolated(plan, nodes))


def traffic_probes(plan: Plan) -> list[str]:
    return [f"client traffic: {spec.kind} {_describe_params(spec)}" for spec in plan.traffic]


def not_probed(plan: Plan, nodes: Sequence[Node]) -> list[str]:
    """Return what the user may expect to be probed, and is not."""
    if not plan.traffic:
        return ["client traffic (the plan has no traffic probe)"]
    missed = _describe_nodes(_select(plan, nodes, lambda node: not applicable(plan.traffic, node)))
    found = [f"client traffic on {missed} (no traffic probe applies)"] if missed else []
    adapters = installed_adapters(PROBES)
    kinds = dict.fromkeys(spec.kind for spec in plan.traffic)
    blind = {kind: adapters[kind].cannot_see for kind in kinds if kind in adapters}
    return found + [f"{text} (probe {kind})" for kind, text in blind.items() if text]


def not_isolated(plan: Plan, nodes: Sequence[Node]) -> list[str]:
    """Return which nodes stay in service while they are changed, and why."""
    if not plan.isolate:
        return ["all nodes (the plan has no isolator)"]
    unisolated = _select(plan, nodes, lambda node: not isolators_for(plan, node))
    lacking = [node for node in unisolated if lacks_isolator(plan, node)]
    by_word = [node for node in unisolated if not lacks_isolator(plan, node)]
    found = []
    if lacking:
        found.append(f"{_describe_nodes(lacking)} (no isolator applies, so they cannot start)")
    if by_word:
        found.append(f"{_describe_nodes(by_word)} (the plan says that they stay in service)")
    return found


def _select(plan: Plan, nodes: Sequence[Node], wanted: Callable[[Node], bool]) -> list[Node]:
    """Return the nodes for which `wanted` holds; it is asked once for nodes that no item distinguishes."""
    steps = (*plan.traffic, *plan.isolate)
    keys = {need.key for spec in steps if spec.where is not None for need in spec.where.requirements}
    if not keys:
        # Mostly: then 100,000 nodes take some milliseconds.
        examples = {node.kind: node for node in nodes}
        kinds = {kind for kind, node in examples.items() if wanted(node)}
        return [node for node in nodes if node.kind in kinds] if kinds else []
    known: dict[object, bool] = {}
    found = []
    for node in nodes:
        like = (node.kind, *[node.labels.get(key) for key in keys])
        if like not in known:
            known[like] = wanted(node)
        if known[like]:
            found.append(node)
    return found


def _describe_nodes(nodes: list[Node]) -> str:
    names = sorted((node.name for node in nodes), key=natural_sort_key)
    return (
        f"{pluralize(len(names), 'node')}: {', '.join(names[:MAX_NAMED_NODES])}"
        + (", ..." if len(names) > MAX_NAMED_NODES else "")
        if names
        else ""
    )


def _describe_params(spec: StepDef) -> str:
    """Return the parameters that say what is read, and where."""
    where = {} if spec.where is None else {"where": spec.where.text}
    return "; ".join(
        f"{key} {', '.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in chain(spec.params.items(), where.items())
        if key != "timeout"
    )
