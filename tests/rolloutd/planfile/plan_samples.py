"""Plans that the tests of the plan file share."""

from __future__ import annotations

from rolloutd.errors import Diagnostic, InvalidFile
from rolloutd.planfile import read

DESIGN_PLAN = """\
apiVersion: rolloutd/v1
kind: MaintenancePlan
metadata: {name: somaxconn-2026-11, owner: infra, ticket: CHG-4711, description: raise net.core.somaxconn}
spec:
  source: {git: "https://git.example/infra/playbooks.git", ref: v1.4.2}   # a ref becomes a commit at submit
  targets: "role=worker,site in (ams,fra)"      # Kubernetes label-selector grammar over node labels
  enrol: auto
  max_parallel: 8                               # of this rollout
  canary: {select: "canary=true", max_parallel: 1}
  soak: 2h
  windows: [{days: mon-fri, from: "09:00", to: "16:00", zone: Europe/Amsterdam}]
  isolate:
    - playbook: {file: isolate.yml, undo: deisolate.yml}
  maintain: {playbook: sysctl.yml, vars: {somaxconn: 65535}, timeout: 30m, expected: 10m, on_unknown: verify}
  rollback: {playbook: sysctl-undo.yml, timeout: 30m}
  verify:
    - reachable: {within: 5m}
    - ssh: {run: "sysctl -n net.core.somaxconn", equals: "65535"}
  probation: 2m
  gates:
    start:    {owner: 1}
    continue: {owner: 1, each_team: 1}
    proceed:  {owner: 1}
"""
"""The plan of the design, without the kinds of later versions."""

SMALLEST_PLAN = """\
apiVersion: rolloutd/v1
kind: MaintenancePlan
metadata: {name: small, owner: infra}
spec:
  targets: ""
  maintain: {playbook: site.yml}
  verify: [{reachable: {}}]
"""

FULL_PLAN = """\
apiVersion: rolloutd/v1
kind: MaintenancePlan
metadata: {name: everything, owner: infra, ticket: CHG-1, description: every key there is}
spec:
  source: {path: ./playbooks}
  targets: role=worker
  enrol: ask
  max_parallel: 8
  pools: {by: [feed]}
  canary: {select: canary=true, max_parallel: 2}
  soak: 2h
  waves:
    - {name: second, select: site=ams, max_parallel: 4, soak: 30m, gate: continue}
    - {name: third, select: site=fra}
  windows: [{days: mon-fri, from: "09:00", to: "16:00", zone: Europe/Amsterdam}]
  traffic:
    - kubernetes: {pods: "app.kubernetes.io/component=job", namespaces: [batch], timeout: 20s}
  idle_for: 30s
  skip_compliant: true
  keep: true
  every: 2h
  train: true
  bootstrap: true
  strategy: {incremental: {maxUnready: 3}}
  poll: 20s
  isolate:
    - command: {do: drain, undo: undrain, look: is-drained, timeout: 1m}
    - playbook: {file: isolate.yml, undo: deisolate.yml, timeout: 2m}
  prepare:
    stages:
      - build: {name: make, playbook: build.yml, host: b1, manifest: made.yml, vars: {a: 1}, timeout: 1h}
      - stage:
          {
            name: copy, manifest: made.yml, to: /srv/cache, method: playbook, playbook: copy.yml,
            vars: {b: 1}, url: "https://mirror.example", rate: 50MiB/s, rate_by: site, max_parallel: 20,
            tolerate: 5, may_change: ["mount/*"], where: arch=amd64, timeout: 1h,
          }
      - install: {name: put, playbook: install.yml, vars: {c: 1}, max_parallel: 5, tolerate: 1%, timeout: 1h}
    windows: [{days: sat, from: "01:00", to: "02:00", zone: Europe/Amsterdam}]
    tolerate: 2%
    cleanup: {playbook: cleanup.yml, vars: {d: 1}, timeout: 5m}
  maintain:
    - {name: stage, playbook: stage.yml, vars: {a: [1]}, timeout: 10m, expected: 5m, on_unknown: rerun}
    - {name: configure, playbook: site.yml}
  guard:
    paths: [/etc/netplan, "/etc/{{ node.name }}.conf"]
    commands: [netplan apply]
    after: 3m
    across_reboot: true
    confirm: [{reachable: {within: 1m}}]
  rollback:
    playbook: undo.yml
    vars: {a: 1}
    timeout: 20m
    verify: [{ssh: {run: is-old, exit: 3}}]
  verify:
    - reachable: {within: 6m}
    - ssh: {run: "name {{ node.name }}", equals: "x", within: 1m, in_service: true, timeout: 30s}
    - ssh: {run: version, matches: "^5[.]"}
    - ssh: {run: "true", exit: 0}
  on_failure: rollback-wave
  at_most: 5
  show_vars: ["enable_*"]
  probation: 2m
  gates:
    start: {owner: 2, four_eyes: true}
    continue: {owner: 1, each_team: 1, per_team: true}
    proceed: {each_team: 1}
  limits: {isolate: 20m, votes: 7d, start: 10m}
"""
"""A plan that has every key, none at its default."""


def diagnostics_of(text: str | bytes) -> tuple[Diagnostic, ...]:
    """Return the mistakes of a plan; none when it is valid."""
    try:
        read(text.encode() if isinstance(text, str) else text, "plan.yaml")
    except InvalidFile as invalid:
        return invalid.diagnostics
    return ()
