"""A plan without mistakes is read whole; one with mistakes is answered with all of them, in their lines."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from rolloutd.planfile import InvalidFile, read
from rolloutd.planfile.document import MAX_BYTES, MAX_DEPTH, MAX_VALUES
from tests.rolloutd.planfile.plan_samples import DESIGN_PLAN, FULL_PLAN, SMALLEST_PLAN, diagnostics_of


@pytest.mark.parametrize("text", [DESIGN_PLAN, SMALLEST_PLAN, FULL_PLAN])
def test_a_good_plan_is_read(text: str) -> None:
    assert diagnostics_of(text) == ()


def test_everything_but_four_keys_has_a_safe_default() -> None:
    spec = read(SMALLEST_PLAN.encode(), "plan.yaml").content["spec"]
    assert spec["source"] == {"git": None, "ref": None, "path": "."}
    assert spec["enrol"] == "auto"
    assert spec["canary"] is None
    assert spec["isolate"] == []
    assert spec["rollback"] is None
    assert spec["windows"] == []
    assert spec["soak"] == spec["probation"] == 0
    assert spec["gates"]["start"]["owner"] == 1
    assert spec["gates"]["continue"] == {"owner": 1, "each_team": 1, "four_eyes": False, "per_team": False}
    assert spec["gates"]["proceed"]["owner"] == 1
    [stage] = spec["maintain"]
    assert stage == {
        "name": "configure",
        "playbook": "site.yml",
        "vars": {},
        "timeout": 1800,
        "expected": 900,
        "on_unknown": "verify",
    }


def test_seven_mistakes_are_seven_errors_with_their_lines() -> None:
    text = """\
apiVersion: rolloutd/v1
kind: MaintenancePlan
metadata:
  name: seven
  owner: infra
  tickt: CHG-1
spec:
  targets: role in worker
  soak: 7200
  windows:
    - {days: mon-fri, from: "09:00", to: "16:00", zone: Europe/Amsterdan}
  maintain:
    playbook: ../site.yml
    on_unknown: shrug
  verify:
    - ssh:
        run: uptime
        equals: a
        matches: b
"""
    found = {(mistake.line, mistake.path) for mistake in diagnostics_of(text)}
    assert found == {
        (6, "metadata.tickt"),
        (8, "spec.targets"),
        (9, "spec.soak"),
        (11, "spec.windows[0].zone"),
        (13, "spec.maintain.playbook"),
        (14, "spec.maintain.on_unknown"),
        (19, "spec.verify[0].ssh.matches"),
    }


def test_a_mistyped_key_is_one_mistake_also_where_it_must_be_given() -> None:
    [mistake] = diagnostics_of(SMALLEST_PLAN.replace("targets:", "target:"))
    assert mistake.path == "spec.target"
    assert "did you mean `targets`?" in mistake.message
    text = SMALLEST_PLAN.replace("targets:", "zzz:")
    assert {mistake.path for mistake in diagnostics_of(text)} == {"spec.zzz", "spec.targets"}


def test_diagnostic_has_problem_found_and_allowed() -> None:
    [mistake] = diagnostics_of(SMALLEST_PLAN.replace("{playbook: site.yml}", "site.yml"))
    assert str(mistake).endswith(
        "spec.maintain: the value has the wrong type (found site.yml; allowed: a mapping (key: value) or a"
        " list of them)"
    )
    [mistake] = diagnostics_of(SMALLEST_PLAN.replace("targets:", "target:"))
    assert "; allowed: one of: " in str(mistake)
    [mistake] = diagnostics_of(SMALLEST_PLAN.replace("[{reachable: {}}]", "[]"))
    assert "at least 1 item, at most" in str(mistake)


def mistake_in(old: str, new: str, sample: str = DESIGN_PLAN) -> tuple[str, int, str]:
    """Return path, line and all words of the one mistake that an edit makes."""
    assert old in sample
    [mistake] = diagnostics_of(sample.replace(old, new, 1))
    assert mistake.file == "plan.yaml"
    assert mistake.column >= 1
    return mistake.path, mistake.line, f"{mistake.message} | {mistake.found} | {mistake.allowed}"


@pytest.mark.parametrize(
    ("old", "new", "path", "line", "words"),
    [
        ("enrol: auto", "enroll: auto", "spec.enroll", 7, "did you mean `enrol`?"),
        ("enrol: auto", "enrol: sometimes", "spec.enrol", 7, "'auto', 'ask' or 'never'"),
        ("enrol: auto", "enrol: automatic", "spec.enrol", 7, "did you mean `auto`?"),
        ("  probation: 2m", "  probation 2m", "spec.verify[1]", 19, "lacks `: `"),
        ("{within: 5m}", "{within: 5m", "spec.verify[0].reachable", 18, "the `{` of line 17 is not closed"),
        ("  verify:", "   verify:", "spec", 16, "indentation fits no line above"),
        ("start:    {owner: 1}", "start: 1", "spec.gates.start", 21, "a mapping with owner, each_team"),
        (
            "- playbook: {file: isolate.yml, undo: deisolate.yml}",
            "- up",
            "spec.isolate[0]",
            13,
            "one of command",
        ),
        ("apiVersion: rolloutd/v1", "apiVersion: v1", "apiVersion", 1, "rolloutd/v1"),
        ("soak: 2h", "soak: 2 hours", "spec.soak", 10, "1h30m"),
        ("soak: 2h", "soak: 400d", "spec.soak", 10, "at most 366d"),
        ("soak: 2h", 'soak: ""', "spec.soak", 10, "not a duration"),
        ("max_parallel: 8 ", "max_parallel: '8' ", "spec.max_parallel", 8, "remove its quotes"),
        ("max_parallel: 8 ", "max_parallel: 0 ", "spec.max_parallel", 8, "at least 1"),
        ("max_parallel: 8 ", "max_parallel: yes ", "spec.max_parallel", 8, "true or false"),
        ("site in (ams,fra)", "site in (ams", "spec.targets", 6, "',' or ')'"),
        ("days: mon-fri", "days: mon-fry", "spec.windows[0].days", 11, "'mon-fry'"),
        ('to: "16:00"', 'to: "25:00"', "spec.windows[0].to", 11, "24:00"),
        ('to: "16:00"', 'to: "9:00"', "spec.windows[0]", 11, "the whole day is 00:00 to 24:00"),
        ('to: "16:00"', 'to: "09:05"', "spec.windows", 11, "fits no window"),
        ("expected: 10m", "expected: 31m", "spec.maintain.expected", 14, "longer than its timeout"),
        ("  soak: 2h", "  traffic: {}\n  soak: 2h", "spec.traffic", 10, "a list"),
        *(
            ("  soak: 2h", f"  traffic: [{written}]\n  soak: 2h", f"spec.traffic[0].{path}", 10, words)
            for written, path, words in (
                ("{netflow: {ports: [443]}}", "netflow", "no adapter"),
                ("{graphite: {query: up}}", "graphite", "no adapter"),
                ("{kubernets: {pods: a=b}}", "kubernets", "did you mean `kubernetes`?"),
                ("{kubernetes: {}}", "kubernetes.pods", "Label selector of the pods that count"),
                ("{kubernetes: {pods: ''}}", "kubernetes.pods", "at least 1 character"),
                ("{kubernetes: {pods: a in b}}", "kubernetes.pods", "'('"),
                ("{kubernetes: {pods: a=b, namespaces: []}}", "kubernetes.namespaces", "at least 1"),
                (
                    "{kubernetes: {pods: a=b, namespaces: [Batch]}}",
                    "kubernetes.namespaces[0]",
                    "small letters",
                ),
            )
        ),
        *(
            ("  soak: 2h", f"  prepare: {written}\n  soak: 2h", path, 10, words)
            for written, path, words in (
                ("[]", "spec.prepare", "at least 1"),
                ("{stage: {}}", "spec.prepare.stage", "did you mean `stages`?"),
                ("[{stages: {}}]", "spec.prepare[0].stages", "did you mean `stage`?"),
                (
                    "[{stage: {}, install: {playbook: a.yml}}]",
                    "spec.prepare[0].install",
                    "an item has one kind",
                ),
                ("[{stage: {rate: 50}}]", "spec.prepare[0].stage.rate", "500KiB/s"),
                ("[{stage: {to: cache}}]", "spec.prepare[0].stage.to", "/var/cache/rolloutd"),
                (
                    "[{stage: {manifest: ../a}}]",
                    "spec.prepare[0].stage.manifest",
                    "leaves the source",
                ),
                ("[{stage: {method: playbook}}]", "spec.prepare[0].stage.method", "names no playbook"),
                ("[{stage: {playbook: a.yml}}]", "spec.prepare[0].stage.playbook", "`method: playbook`"),
                ("[{stage: {tolerate: half}}]", "spec.prepare[0].stage.tolerate", "a percentage"),
                ("{stages: [{install: {}}]}", "spec.prepare.stages[0].install.playbook", "is missing"),
                (
                    "[{stage: {name: a}}, {install: {name: a, playbook: a.yml}}]",
                    "spec.prepare[1].install.name",
                    "taken already",
                ),
                (
                    "[{install: {name: install-2, playbook: a.yml}}, {install: {playbook: a.yml}}]",
                    "spec.prepare[1].install",
                    "taken already",
                ),
                (
                    "[{install: {name: cleanup, playbook: a.yml}}]",
                    "spec.prepare[0].install.name",
                    "taken already",
                ),
            )
        ),
        ("- playbook: {file", "- playbok: {file", "spec.isolate[0].playbok", 13, "did you mean `playbook`?"),
        (
            "- reachable: {",
            "- graphite: {",
            "spec.verify[0].graphite",
            17,
            "no adapter",
        ),
        *(
            (
                "- playbook: {file",
                f"- kubernetes: {{{waits}}}\n    - playbook: {{file",
                "spec.isolate[0].kubernetes",
                13,
                "no time is left for the evictions",
            )
            for waits in (
                "prefer_no_schedule: 5m",
                "drain_timeout: 15m, wait_for_jobs: 10m, prefer_no_schedule: 5m",
            )
        ),
        (
            "file: isolate.yml",
            "file: /isolate.yml",
            "spec.isolate[0].playbook.file",
            13,
            "not a path inside the source",
        ),
        ('equals: "65535"', 'equals: "65535", exit: 1', "spec.verify[1].ssh.exit", 18, "takes only one of"),
        ('equals: "65535"', "equals: 1.10", "spec.verify[1].ssh.equals", 18, "put it in quotes"),
        ('equals: "65535"', 'matches: "a("', "spec.verify[1].ssh.matches", 18, "does not compile"),
        ('equals: "65535"', "exit: 256", "spec.verify[1].ssh.exit", 18, "at most 255"),
        ("sysctl -n net", "sysctl {{ nod.name }}", "spec.verify[1].ssh.run", 18, "unknown name 'nod'"),
        ("sysctl -n net", "sysctl {{ node.nam }}", "spec.verify[1].ssh.run", 18, "no 'nam'"),
        ("sysctl -n net", "sysctl {{ node.name }", "spec.verify[1].ssh.run", 18, "cannot be read"),
        ("sysctl -n net", "{{ 'x' * 9 }}", "spec.verify[1].ssh.run", 18, "mul is not allowed"),
        ("sysctl -n net", "{{ node.name.upper() }}", "spec.verify[1].ssh.run", 18, "call is not allowed"),
        (", ref: v1.4.2}", "}", "spec.source", 5, "lacks `ref`"),
        (", ref: v1.4.2}", ", ref: v1, path: x}", "spec.source", 5, "not both"),
        ("https://git.example", "ext::sh -c", "spec.source.git", 5, "https://"),
        ("ref: v1.4.2", "ref: --upload-pack=x", "spec.source.ref", 5, "a tag, a branch or a commit"),
        ("start:    {owner: 1}", "start:    {owner: 0}", "spec.gates.start", 21, "requires no vote"),
        ("vars: {somaxconn", "vars: {so-max", "spec.maintain.vars.so-max", 14, "no digit first"),
        (
            "vars: {somaxconn",
            "vars: {ansible_host",
            "spec.maintain.vars.ansible_host",
            14,
            "the inventory's word",
        ),
        *(
            ("vars: {somaxconn", f"vars: {{{name}", f"spec.maintain.vars.{name}", 14, "the inventory's word")
            for name in ("ansible_ssh_common_args", "ansible_ssh_args", "ansible_host_key_checking")
        ),
        ("https://git.ex", "https://ops:geheim@git.ex", "spec.source.git", 5, "credential helper"),
        ("name: somaxconn-2026-11", "name: So maxconn", "metadata.name", 3, "small letters"),
    ],
)
def test_a_mistake_is_named(old: str, new: str, path: str, line: int, words: str) -> None:
    found_path, found_line, found_words = mistake_in(old, new)
    assert (found_path, found_line) == (path, line)
    assert words in found_words


def test_a_plan_without_verify_is_refused() -> None:
    [mistake] = diagnostics_of(SMALLEST_PLAN.replace("  verify: [{reachable: {}}]\n", ""))
    assert (mistake.path, mistake.line, mistake.found) == ("spec.verify", 4, "nothing")


def test_a_bad_section_hides_no_mistake_elsewhere() -> None:
    text = SMALLEST_PLAN.replace("{name: small, owner: infra}", "7").replace(
        "site.yml", "site.yml, expected: 40m"
    )
    assert {mistake.path for mistake in diagnostics_of(text)} == {"metadata", "spec.maintain.expected"}


def test_several_stages_are_told_apart() -> None:
    text = SMALLEST_PLAN.replace("{playbook: site.yml}", "[{playbook: a.yml}, {name: b, playbook: b.yml}]")
    stages = read(text.encode(), "plan.yaml").content["spec"]["maintain"]
    assert [stage["name"] for stage in stages] == ["stage-1", "b"]
    [mistake] = diagnostics_of(text.replace("[{playbook", "[{name: b, playbook"))
    assert mistake.path == "spec.maintain[1].name"


def test_waves_do_not_take_the_names_every_plan_has() -> None:
    text = (
        SMALLEST_PLAN + "  waves: [{name: canary, select: a}, {name: x, select: b}, {name: x, select: c}]\n"
    )
    assert [mistake.path for mistake in diagnostics_of(text)] == ["spec.waves[0].name", "spec.waves[2].name"]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (b"", 1, "empty"),
        (b"# only a comment\n", 1, "empty"),
        (b"- a\n- b\n", 1, "mapping"),
        (b"a: 1\nb: \xff\n", 2, "UTF-8"),
        (b"a: 1\nb: \x00\n", 2, "control character"),
        (b"a: 1\n\tb: 2\n", 2, "tab"),
        (b"a: 1\nb: [1,\n", 2, "not YAML"),
        (b"a: 1\n---\nb: 1\n", 2, "more than one document"),
        (b"a: 1\nb: *nothing\n", 2, "no such anchor"),
        (b"a: &a [*a]\n", 1, "inside its own anchor"),
        (b"a: 1\na: 2\n", 2, "already in line 1"),
        (b"a: 1\n<<: {b: 1}\n", 2, "merge keys"),
        (b"a: !!python/object/apply:os.system [x]\n", 1, "tags are not read"),
        (b"a: 1\n1: x\n", 2, "a key must be text"),
        (b"a: {{ node.name }}\n", 1, "begins with {{"),
        (b"a: 1\nb: no\n", 2, "boolean to others"),
        (b"a: 0123\n", 1, "leading zeros"),
        (b"a: .inf\n", 1, "finite"),
        (b"a: 99999999999999999999\n", 1, "too large"),
        (b'a: "\\x00"\n', 1, "control character"),
        (b"[" * (MAX_DEPTH + 1), 1, "nested too deeply"),
        (b"[" * 100_000, 1, "nested too deeply"),
        (
            b"a: " + b"&a [" * (MAX_DEPTH - 2) + b"]" * (MAX_DEPTH - 2) + b"\nb: [[[*a]]]\n",
            2,
            "nested too deeply",
        ),
        (b"[" + b"a," * MAX_VALUES + b"]", 1, "too much"),
        (b"x" * (MAX_BYTES + 1), 1, "too large"),
    ],
)
def test_a_file_that_is_no_plan_at_all_says_why(text: bytes, line: int, words: str) -> None:
    mistakes = diagnostics_of(text)
    assert any(
        mistake.line == line and words in f"{mistake.message} {mistake.allowed}" for mistake in mistakes
    )


def test_an_alias_bomb_is_refused() -> None:
    levels = ["a0: &a0 [x,x,x,x,x,x,x,x,x,x]"]
    levels += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert any("too much" in mistake.message for mistake in diagnostics_of("\n".join(levels)))


def test_aliases_are_followed() -> None:
    text = SMALLEST_PLAN.replace("[{reachable: {}}]", "[&check {ssh: {run: uptime}}, *check]")
    assert len(read(text.encode(), "plan.yaml").content["spec"]["verify"]) == 2


def test_a_mistake_shows_little_of_what_was_found() -> None:
    [mistake] = diagnostics_of(SMALLEST_PLAN.replace("site.yml", "site.yml, timeout: " + "s3cret" * 100))
    assert len(mistake.found) <= 60


def test_deep_templates_and_patterns_are_mistakes_not_crashes() -> None:
    for run in ("{{ " + "(" * 3000, "{{ " + "9" * 5000 + " }}"):
        text = SMALLEST_PLAN.replace("{reachable: {}}", f'{{ssh: {{run: "{run}"}}}}')
        assert [mistake.path for mistake in diagnostics_of(text)] == ["spec.verify[0].ssh.run"]
    text = SMALLEST_PLAN.replace("{reachable: {}}", f'{{ssh: {{run: x, matches: "{"(" * 900}"}}}}')
    assert [mistake.path for mistake in diagnostics_of(text)] == ["spec.verify[0].ssh.matches"]


def test_a_plan_knows_its_name_owner_and_source() -> None:
    plan = read(DESIGN_PLAN.encode(), "plan.yaml")
    assert (plan.name, plan.owner) == ("somaxconn-2026-11", "infra")
    assert plan.source == {"git": "https://git.example/infra/playbooks.git", "ref": "v1.4.2"}
    assert read(SMALLEST_PLAN.encode(), "plan.yaml").source == {"path": "."}


def test_the_error_names_every_mistake() -> None:
    with pytest.raises(InvalidFile) as raised:
        read(b"kind: x\n", "some/plan.yaml")
    assert str(raised.value).count("some/plan.yaml:1:") == len(raised.value.diagnostics) == 4


GUARDED = SMALLEST_PLAN + "  guard:\n    paths: [{path}]\n    confirm: [{confirm}]\n"


def test_guard_has_safe_defaults() -> None:
    content = read((SMALLEST_PLAN + "  guard: {paths: [/etc/netplan]}\n").encode(), "plan.yaml").content
    assert content["spec"]["guard"] == {
        "paths": ["/etc/netplan"],
        "commands": [],
        "after": 120,
        "across_reboot": False,
        "confirm": None,
    }


@pytest.mark.parametrize("path", ["etc/netplan", "/", "/etc/../shadow", '"/etc/a\\nb"', "/etc/"])
def test_guarded_path_is_absolute_and_short(path: str) -> None:
    (mistake,) = diagnostics_of(GUARDED.replace("{path}", path).replace("{confirm}", "{reachable: {}}"))
    assert mistake.path == "spec.guard.paths[0]"


@pytest.mark.parametrize("key", ["in_service: true", "baseline: true", "repair: fix.yml"])
def test_confirming_check_runs_once(key: str) -> None:
    confirm = f"{{ssh: {{run: uptime, {key}}}}}"
    (mistake,) = diagnostics_of(GUARDED.replace("{path}", "/etc/a").replace("{confirm}", confirm))
    assert mistake.message == f"`{key.partition(':')[0]}` has no meaning in `confirm`"


def test_uninstalled_guard_is_refused() -> None:
    (mistake,) = diagnostics_of(f"{SMALLEST_PLAN}  guard: {{kind: switch, device: d1}}\n")
    assert (mistake.path, mistake.allowed) == ("spec.guard.kind", "one of: ssh")
    assert mistake.message == "no guard `switch` is installed; install the package that provides it"


MODULES_PLAN = (
    "apiVersion: rolloutd/v1\nkind: MaintenancePlan\nmetadata: {name: apps, owner: infra}\nspec:\n"
    '  source: {git: "https://git.example/apps.git", ref: main}\n  targets: kind=cluster\n'
    "  isolate: [{none: {}}]\n  maintain: {flux: {kustomization: apps}}\n  verify: [{cluster: {}}]\n"
)


def test_change_to_a_commit_of_a_directory_is_refused() -> None:
    source = '{git: "https://git.example/apps.git", ref: main}'
    (problem,) = diagnostics_of(MODULES_PLAN.replace(source, "{path: .}"))
    assert (problem.line, problem.allowed) == (8, "`source: {git, ref}`")
    assert not diagnostics_of(MODULES_PLAN)


@pytest.mark.parametrize(
    ("modules", "cycle"),
    [
        ({"net": ["apps"], "apps": ["net"]}, "Kustomization apps, Kustomization net"),
        ({"net": [], "apps": ["{{ node.name }}", "apps"]}, "Kustomization apps"),
        ({"net": [], "apps": ["net", "elsewhere"]}, None),
        ({"apps": ["net"], "net": []}, None),
    ],
)
def test_modules_that_wait_for_each_other_are_refused(
    modules: Mapping[str, list[str]], cycle: str | None
) -> None:
    stages = [
        {"flux": {"kustomization": name, "create": {"depends_on": needed}}}
        for name, needed in modules.items()
    ]
    problems = diagnostics_of(MODULES_PLAN.replace("{flux: {kustomization: apps}}", json.dumps(stages)))
    assert [each.found for each in problems] == ([] if cycle is None else [cycle])


def test_helm_release_waits_for_no_kustomization() -> None:
    release = "{flux: {helm_release: net, chart: ./net, create: {depends_on: [apps]}}}"
    module = "{flux: {kustomization: apps, create: {depends_on: [net]}}}"
    stages = f"[{release}, {module}]"
    assert not diagnostics_of(MODULES_PLAN.replace("{flux: {kustomization: apps}}", stages))
