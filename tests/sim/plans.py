"""Plans and fleets, by seed: small, and between them with everything a plan can say."""

from __future__ import annotations

import copy
import random
from functools import lru_cache
from typing import Any

import yaml

from machines.facts.projection import Projection
from machines.model.events import RolloutOpened
from machines.model.node import pools_of
from machines.model.plan import Digest, Plan
from machines.model.rollout import Actor, Target
from machines.rules.waves import assign_waves
from rolloutd import planfile
from rolloutd.configuration.target_values import resolve_values, stages_with_values
from rolloutd.engine.state import State
from rolloutd.settings import Settings

TEAMS = ("a", "b")

COMMAND = {
    "command": {
        "do": "out {{ node.labels.note }}",
        "undo": "in {{ node.labels.note }}",
        "look": "is-out {{ node.labels.note }}",
    }
}
"""The label is a text that a shell would run."""
PLAYBOOK = {"playbook": {"file": "out.yml", "undo": "in.yml"}}
CORDON: dict[str, Any] = {"kubernetes": {}}
"""What can be done gently: to keep new work away and drive nothing off."""

FIRST_CORDON = "isolate.0.kubernetes"
"""The name of that step where it is the first."""

JOBS = {"kubernetes": {"pods": "kind=job"}}
"""The probe of traffic: what it is asked is nothing to the world, which knows what is on its nodes."""

DEEP_CHECK = {"ssh": {"run": "version", "equals": "new", "within": "2m"}}

GUARD: dict[str, Any] = {"paths": ["/etc/net"], "after": "30s"}
"""A node that hears nothing of the daemon for so long restores its version; slow answers take longer."""

SMALL: dict[str, Any] = {
    "targets": "",
    "isolate": [COMMAND],
    "maintain": {"playbook": "change.yml", "vars": {"version": "new"}, "expected": "2m"},
    "verify": [{"reachable": {"within": "1m"}}, DEEP_CHECK],
    "gates": {"start": {"owner": 1}, "continue": {"owner": 1}, "proceed": {"owner": 1}},
}
"""The smallest plan that has every step."""


def random_spec(shape: random.Random) -> dict[str, Any]:
    """Return the spec of a plan as the seed has it."""
    spec = {**SMALL, "maintain": dict(SMALL["maintain"]), "verify": list(SMALL["verify"])}
    spec["isolate"] = shape.choice(([COMMAND], [COMMAND, PLAYBOOK], [PLAYBOOK], [CORDON], [CORDON, COMMAND]))
    spec["maintain"]["on_unknown"] = shape.choice(("verify", "verify", "rerun", "pause"))
    spec["maintain"]["timeout"] = "10m"
    spec["enrol"] = shape.choice(("auto", "auto", "ask", "never"))
    if shape.random() < 0.7:
        spec["rollback"] = {"playbook": "undo.yml", "vars": {"version": "old"}, "timeout": "10m"}
    if shape.random() < 0.4:
        spec["probation"] = "90s"
    if shape.random() < 0.4:
        spec["verify"].append({"ssh": {"run": "serves", "in_service": True}})
    if shape.random() < 0.7:
        spec["soak"] = "10m"
    if shape.random() < 0.3:
        spec["max_parallel"] = 2
    if shape.random() < 0.3:
        spec["pools"] = {"by": ["zone"]}
    if shape.random() < 0.2:
        spec["windows"] = [{"from": "08:00", "to": "16:00"}]
    if shape.random() < 0.3:
        spec["waves"] = [{"name": "second", "select": "zone=z1", "soak": "2m", "gate": "continue"}]
    if shape.random() < 0.3:
        spec["limits"] = {"isolate": "5m", "votes": "12h"}
    if shape.random() < 0.5:
        spec["gates"] = {
            "start": {"owner": 1, "each_team": shape.choice((0, 1)), "per_team": shape.random() < 0.3},
            "continue": {"owner": 1, "each_team": shape.choice((0, 1)), "four_eyes": shape.random() < 0.3},
            "proceed": {"owner": shape.choice((1, 2))},
        }
    return spec


NOTE: dict[str, Any] = {"note": {"text": "new"}, "expected": "2m"}
"""A change of a kind that records what it replaces, in place of a playbook."""


def random_cluster_spec(clusters: random.Random) -> dict[str, Any]:
    """Return the spec of a plan for clusters: a change with a value of each, and a strategy."""
    spec = {**SMALL, "isolate": [PLAYBOOK], "verify": [{"cluster": {}}], "enrol": "auto"}
    values = {"host": {"field": "/spec/endpoint"}}
    spec["maintain"] = {**NOTE, "note": {"text": "new", "values": values}, "timeout": "10m"}
    strategy = {"incremental": {"maxUnready": clusters.choice((1, 2))}}
    spec["strategy"] = clusters.choice((strategy, strategy, {"replace_all": True}))
    if clusters.random() < 0.5:
        spec["bootstrap"] = True
    if clusters.random() < 0.3:
        spec |= {"keep": True, "every": "10m"}
    if clusters.random() < 0.5:
        spec["on_failure"] = clusters.choice(("rollback-node", "rollback-wave", "rollback-all"))
    if clusters.random() < 0.5:
        spec["soak"] = "5m"
    return spec


def with_values(content: dict[str, Any], plan: Plan, state: State) -> dict[str, Any]:
    """Return the content with the values of its targets, as submit resolves them."""
    nodes = [node for node in state.index.nodes.values() if plan.selector.matches(node.labels)]
    values = {
        node.name: resolve_values(plan, node.name, node.labels, state.connections.get(node.name, {}), {})
        for node in nodes
        if any(stages_with_values(plan))
    }
    return {**content, "spec": {**content["spec"], "values": values}} if values else content


def with_random_probes(traffic: random.Random, spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec, here and there with probes of traffic and what they make possible."""
    if traffic.random() >= 0.35:
        return spec
    isolate = traffic.choice((spec["isolate"], [CORDON], [CORDON], [COMMAND, CORDON]))
    return {**spec, "traffic": [JOBS], "isolate": isolate}


def with_random_pilot(pilots: random.Random, spec: dict[str, Any], nodes: int) -> dict[str, Any]:
    """Return the spec, sometimes with a pilot, or with a waived one."""
    if pilots.random() >= 0.3:
        return spec
    if pilots.random() < 0.2:
        return {**spec, "pilot": {"waived": "the change was tried yesterday"}}
    need = {"owner": 1, "each_team": pilots.choice((0, 1))}
    gates = {**spec["gates"], "pilot": need}
    return {**spec, "pilot": {"node": f"n{pilots.randint(1, nodes)}"}, "gates": gates}


def with_random_check_options(options: random.Random, spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec, sometimes with checks that also run before the isolation or name a repair."""
    verify = [{kind: dict(params) for kind, params in check.items()} for check in spec["verify"]]
    for check in verify:
        params = check.get("ssh", {})
        if params.get("run") == "serves" and options.random() < 0.5:
            params["baseline"] = True
        if params.get("run") == "version" and options.random() < 0.3:
            params["repair"] = "repair.yml"
    return {**spec, "verify": verify}


def with_random_guard(guards: random.Random, spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec, sometimes with a guard."""
    if guards.random() >= 0.3:
        return spec
    return {**spec, "guard": {**GUARD, "after": guards.choice(("30s", "2m"))}}


def with_random_compliance(compliance: random.Random, spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec, sometimes one that skips the nodes that need nothing, or keeps its change."""
    if compliance.random() < 0.3:
        spec = {**spec, "skip_compliant": True}
    return {**spec, "keep": True, "every": "10m"} if compliance.random() < 0.3 else spec


def with_random_rollbacks(rollbacks: random.Random, spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec, sometimes one that rolls back by itself, or that waits for an unreachable node."""
    if rollbacks.random() < 0.3:
        spec = {**spec, "limits": {**spec.get("limits", {}), "start": "5m"}}
    if "rollback" in spec and rollbacks.random() < 0.5:
        # Short, so that an isolation whose work does not end is aborted before one of its tries fails.
        spec = {**spec, "limits": {**spec.get("limits", {}), "isolate": "1m"}}
    if "rollback" not in spec or rollbacks.random() < 0.5:
        return spec
    spec = {**spec, "on_failure": rollbacks.choice(("rollback-node", "rollback-wave", "rollback-all"))}
    return {**spec, "at_most": rollbacks.choice((1, 2))} if rollbacks.random() < 0.2 else spec


def with_random_selection(selections: random.Random, spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec, sometimes one whose cordon is for the nodes of one rack only."""
    if CORDON not in spec["isolate"] or "traffic" in spec or selections.random() >= 0.5:
        return spec
    return {**spec, "isolate": [COMMAND, {"kubernetes": {"where": "rack=r1"}}]}


PREPARE: dict[str, Any] = {
    "stages": [
        {"stage": {"manifest": "artifacts.yml", "max_parallel": 3}},
        {"install": {"name": "unpack", "playbook": "unpack.yml", "max_parallel": 2}},
        {"install": {"name": "install", "playbook": "install.yml", "vars": {"may_disturb": True}}},
    ]
}
"""Three prepare stages, of which the last may disturb."""

ARTIFACTS = [
    {
        "name": name,
        "version": "1",
        "kind": "file",
        "size": 1024,
        "sha256": name * 8,
        "path": name,
        "url": "",
        "select": select,
        "mode": "",
        "owner": "",
        "unpack": False,
    }
    for name, select in (("app", None), ("data", "rack=r1"))
]


def with_random_preparation(preparation: random.Random, spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec, sometimes with prepare stages."""
    if preparation.random() >= 0.35:
        return spec
    tolerate = preparation.choice((0, 1, "50%"))
    stages = copy.deepcopy(PREPARE["stages"][: preparation.choice((1, 3, 3))])
    if len(stages) > 1:
        stages[1]["install"]["vars"] = {"release": preparation.choice((1, 2))}
    return {**spec, "prepare": {"stages": stages, "tolerate": tolerate}}


def with_new_artifacts(content: dict[str, Any], release: str) -> dict[str, Any]:
    """Return the content with other artifacts under the same names, if the plan stages any."""
    prepare = content["spec"].get("prepare")
    if prepare is None:
        return content
    artifacts = [{**each, "sha256": f"{each['name']}{release}" * 8} for each in ARTIFACTS]
    prepare = {**prepare, "resolved": {**prepare["resolved"], "stage": {"artifacts": artifacts}}}
    return {**content, "spec": {**content["spec"], "prepare": prepare}}


def content_of(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Return the canonical content of a plan, as the plan file's reader makes it."""
    document = {
        "apiVersion": "rolloutd/v1",
        "kind": "MaintenancePlan",
        "metadata": {"name": name, "owner": "infra"},
        "spec": {"source": {"path": "."}, **spec},
    }
    content = _read(yaml.safe_dump(document))
    prepare = content["spec"].get("prepare")
    if prepare is None:
        return content
    resolved = {"stage": {"artifacts": ARTIFACTS}}
    return {**content, "spec": {**content["spec"], "prepare": {**prepare, "resolved": resolved}}}


@lru_cache(maxsize=512)
def _read(text: str) -> dict[str, Any]:
    return planfile.read(text.encode(), "plan.yml").content


def random_settings(shape: random.Random, nodes: int) -> Settings:
    """Return the daemon's settings as the seed has them."""
    rack: int | str = shape.choice((1, 2, "50%"))
    team = shape.choice((1, 1, 2)) if nodes > 2 else 1
    check = [{"ssh": {"run": "team-a"}}] if shape.random() < 0.5 else []
    return Settings.model_validate(
        {
            "inventory_refresh": "10m",
            "pools": {"team": {"max_unavailable": team}, "rack": {"max_unavailable": rack}},
            "teams": {"infra": {}, "a": {"verify": check}, "b": {}},
            "max_parallel": shape.choice((64, 2)),
        }
    )


def with_workers(settings: Settings, workers: int) -> Settings:
    """Return the settings with an inventory of clusters that so many controllers work on."""
    hub = {"name": "hub", "kubeconfig": "/etc/rolloutd/hub.kubeconfig", "workers": workers}
    inventory = Settings.model_validate({"inventory": [{"clusterapi": hub}]}).inventory
    return settings.model_copy(update={"inventory": inventory})


def with_random_cleaning(cleaning: random.Random, settings: Settings) -> Settings:
    """Return the settings, sometimes those of a daemon that soon cleans nodes by itself."""
    keep = settings.keep.model_copy(update={"on_nodes_s": 300})
    return settings.model_copy(update={"keep": keep}) if cleaning.random() < 0.5 else settings


def with_random_limits(faults: random.Random, settings: Settings) -> Settings:
    """Return the settings with other limits."""
    content = settings.model_dump(include={"pools", "max_parallel"})
    content["pools"]["team"]["max_unavailable"] = faults.choice((1, 2))
    content["pools"]["rack"]["max_unavailable"] = faults.choice((1, 2, "50%"))
    content["max_parallel"] = faults.choice((64, 2, 1))
    pools = Settings.model_validate({"pools": content["pools"]}).pools
    return settings.model_copy(update={"pools": pools, "max_parallel": content["max_parallel"]})


def with_team_limit(settings: Settings, nodes: int) -> Settings:
    """Return the settings by which so many nodes of a team may be down."""
    pools = Settings.model_validate({"pools": {"team": {"max_unavailable": nodes}}}).pools
    return settings.model_copy(update={"pools": pools})


def default_settings() -> Settings:
    """Return the settings under which the small plans run: one node of a team at a time."""
    return Settings.model_validate({"inventory_refresh": "10m", "teams": {"infra": {}, "a": {}, "b": {}}})


def random_labels(shape: random.Random, number: int) -> dict[str, str]:
    """Return the labels of one node."""
    return {
        "team": shape.choice(TEAMS),
        "rack": shape.choice(("r1", "r2")),
        "zone": shape.choice(("z1", "z2")),
        "canary": "true" if number == 1 else "false",
    }


def rollout_opened(
    rollout: str,
    content: dict[str, Any],
    plan: Plan,
    index: Projection,
    by: Actor,
    at: float,
    *,
    maybe_current: bool,
) -> RolloutOpened:
    """Return the submit of a plan for all nodes that it selects, as rolloutd.commands.submit makes it."""
    matching = [node for node in index.nodes.values() if plan.selector.matches(node.labels)]
    keys = tuple(dict.fromkeys((*index.limits.pools, *plan.pool_keys)))
    targets = tuple(
        Target(
            rollout,
            node.name,
            node.team,
            pools_of(node.labels, keys),
            wave,
            position,
            since=at,
            maybe_current=maybe_current,
        )
        for node, wave, position in assign_waves(matching, plan, {})
    )
    pin = {"kind": "tree", "pin": "0" * 64}
    parts = planfile.digest(content, pin, sorted(target.node for target in targets))
    digest = Digest(parts["change"], parts["scope"], parts["policy"], parts["whole"])
    selector = planfile.selector_digest(content)
    return RolloutOpened(rollout, plan.name, content, pin, digest, selector, by, at, targets)
