"""Every argument of every command with a value that does not exist or does not parse."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from tests.rolloutd.cli.command_lines import leaf_parsers
from tests.rolloutd.cli.populated_daemon import PopulatedDaemon, populated_daemon
from tests.rolloutd.control_environment import PLAN

REASON = "--reason x"
WRONG = f"""
status nosuch
status ''
nodes ''
why {{live}} ''
logs {{live}} ''
nodes nosuch
nodes {{live}} --selector 'team in'
nodes {{live}} --phase nosuch
nodes {{live}} --pool rack/nosuch --sort-by nosuch
wait nosuch --for done
wait {{live}} --for nosuch
wait {{live}} --for gate=nosuch
wait {{live}} --for gate=pilot
wait {{live}} --for node/nosuch=done
wait {{live}} --for done --timeout soon
wait {{live}} --for done --timeout 0s
wait {{cancelled}} --for done
forecast nosuch
forecast {{dir}}/nosuch.yml
forecast {{cancelled}}
forecast {{live}} --approve-after soon
forecast {{live}} --approve soon
forecast {{live}} --failure-rate 2
forecast {{live}} --draws 0
forecast {{live}} --seed -1
forecast {{live}} --set pool.rack=1
forecast {{live}} --freeze team/nosuch:fri
forecast {{live}} --without nosuch
forecast {{live}} --with-failure nosuch
forecast {{live}} --at yesterday
forecast {{live}} --team payments
forecast --at 2h
forecast {{live}} --ics --at 2h
forecast --score --ics
explain nosuch
explain plan.spec.nosuch
explain plan.apiVersion.nosuch
context add local --host ops1
context add prod --host -oProxyCommand=evil
context use nosuch
context remove nosuch
context remove local
status --sort-by nosuch
status --jq .[
status --jq '.rollouts + 1'
rollouts --sort-by nosuch
inventory --sort-by nosuch
changes --sort-by nosuch
verdicts --sort-by nosuch
context list --sort-by nosuch
why nosuch
why {{live}} nosuch
watch nosuch
logs nosuch p1
logs {{live}}
logs {{live}} p1 --failed
logs {{live}} --failed --follow
logs {{live}} p1 --tail -2
logs {{live}} p1 --since yesterday
logs {{live}} nosuch
logs {{live}} p1 --attempt 99
logs {{live}} p1 --attempt x
logs {{prepared}} p1 --stage nosuch
handover --since yesterday
handover --since 2h3x
handover --since 2100-01-01T00:00:00Z
compare nosuch
changes ''
changes nosuch
config ''
config nosuch
config p1 --record nosuch
diff nosuch
diff p1 nosuch
diff p1 previous current
drift nosuch
gates nosuch
review nosuch
team show nosuch
team windows nosuch --none {REASON}
team windows payments monday {REASON}
team windows payments 'mon 09:00-16:00 Nowhere/Here' {REASON}
team windows payments 'xxx 09:00-16:00' {REASON}
team windows payments 'mon 25:00-16:00' {REASON}
team windows payments {REASON}
team canaries payments nosuch {REASON}
team canaries payments s1 {REASON}
team canaries nosuch p1 {REASON}
team freeze nosuch {REASON}
team freeze payments --until yesterday {REASON}
team unfreeze nosuch
prepare nosuch
prepare {{prepared}} --node nosuch
checkpoints nosuch
artifacts report nosuch
artifacts manifest {{dir}}/nosuch
artifacts manifest {{dir}}/plan.yml
artifacts verify {{dir}}/nosuch
artifacts verify {{dir}}/plan.yml
artifacts verify {{dir}}
verdicts nosuch
verdicts clear
verdicts clear nosuch {REASON}
verdicts clear {{verdict}}
audit nosuch
audit --rollout nosuch
audit --kind nosuch
audit --rollout nosuch --node p1
audit --after -1
audit --since yesterday
audit --limit x
audit --last 0
audit {{live}} extra
audit -f nosuch
audit export nosuch
audit export --rollout nosuch
audit export {{live}} --output {{dir}}/nosuch/file
audit settle nosuch --keep audit {REASON}
audit settle all
audit settle vote/v9 --keep nosuch {REASON}
audit verify --head abc
audit verify --database {{dir}}/nosuch
audit verify --database {{dir}}/nosuch --segments {{dir}}/nosuch
audit verify --anchor {{dir}}/nosuch
audit verify --anchor {{dir}}/plan.yml
audit head --database {{dir}}/nosuch
clean nosuch --dry-run
clean nosuch --yes {REASON}
clean p1
plan validate {{dir}}/nosuch
plan validate {{dir}}
plan validate {{dir}}/files/tool-1.2.3.tar
plan preview {{dir}}/nosuch
plan preview {{dir}}/selector.yml
plan submit {{dir}}/nosuch
plan submit {{dir}}/selector.yml
plan submit {{dir}}/plan.yml --force-stage nosuch
plan submit {{dir}}/plan.yml --node p1
plan submit {{dir}}/plan.yml --override-verdict nosuch {REASON}
plan submit {{dir}}/plan.yml --override-verdict {{verdict}} {REASON}
plan submit {{dir}}/plan.yml --override-verdict nosuch
plan schema {{dir}}/nosuch/x
approve '' start {REASON}
approve nosuch start {REASON}
approve {{live}} nosuch {REASON}
approve {{live}} start {REASON}
approve {{live}} pilot {REASON}
approve {{live}} continue --wave nosuch {REASON}
approve {{live}} continue {REASON}
approve {{live}} proceed --node nosuch {REASON}
approve {{live}} proceed --team nosuch {REASON}
approve {{live}} proceed --more 0 {REASON}
approve {{live}} proceed --more 3 --until yesterday {REASON}
approve {{waiting}} start --digest nosuch {REASON}
approve {{waiting}} start --node p1 {REASON}
approve {{cancelled}} start {REASON}
reject nosuch start {REASON}
reject {{live}} continue --wave nosuch {REASON}
reject {{waiting}} start --team nosuch {REASON}
reject {{waiting}} start --digest nosuch {REASON}
reject {{prepared}} proceed {REASON}
withdraw nosuch start {REASON}
withdraw {{waiting}} start {REASON}
withdraw {{waiting}} start --team nosuch {REASON}
withdraw {{live}} continue --wave nosuch {REASON}
token sign nosuch start --service s --key-file {{dir}}/plan.yml --for ann {REASON}
token sign {{live}} start --service s --key-file {{dir}}/nosuch --for ann {REASON}
token sign {{live}} start --service s --key-file {{dir}}/plan.yml --for ann {REASON} --expires yesterday
token sign {{live}} continue --wave nosuch --service s --key-file {{dir}}/plan.yml --for ann {REASON}
token sign {{live}} start --team nosuch --service s --key-file {{dir}}/nosuch --for ann {REASON}
token use nosuch {{dir}}/token
token use {{live}} {{dir}}/nosuch
token use {{live}} {{dir}}/plan.yml
token use {{live}} {{dir}}/token
pause nosuch {REASON}
pause {{cancelled}} {REASON}
resume nosuch {REASON}
resume {{live}} {REASON}
cancel nosuch --yes {REASON}
retry nosuch {REASON}
retry nosuch p1 {REASON}
retry {{live}} {REASON}
retry {{live}} p1 {REASON}
retry {{live}} nosuch {REASON}
advance nosuch p1 {REASON}
advance {{live}} nosuch {REASON}
advance {{live}} p1 {REASON}
skip {{live}} '' {REASON}
skip nosuch p1 {REASON}
skip {{live}} nosuch {REASON}
skip {{live}} p1 {REASON}
skip {{live}} s1 {REASON}
rollback nosuch --all --yes {REASON}
rollback {{live}} nosuch {REASON}
rollback {{live}} --wave nosuch --yes {REASON}
rollback {{live}} p2 {REASON}
rollback {{live}} nosuch --withdraw {REASON}
rollback {{live}} --wave nosuch --withdraw {REASON}
rollback {{live}} {REASON}
return nosuch
return p2
train add t nosuch {REASON}
train add t sysctl --wait never {REASON}
train approve nosuch {REASON}
train show nosuch
train remove nosuch {REASON}
hold nosuch {REASON}
hold nosuch --as me {REASON}
hold p1 --source fleetlock {REASON}
hold p1 --until yesterday {REASON}
hold p1 --until 2020-01-01T00:00:00Z {REASON}
hold p1 --until 0h {REASON}
release nosuch
release p1 --as nosuch
release p1 --source nosuch
freeze --scope nosuch {REASON}
freeze --scope team/nosuch {REASON}
freeze --scope node/nosuch {REASON}
freeze --until never {REASON}
unfreeze --scope nosuch
unfreeze --scope rack/nosuch
inventory nosuch
inventory nosuch extra
inventory conflicts extra
inventory accept
inventory pin
inventory pin nosuch {REASON}
shell nosuch --show
shell nosuch {REASON} --yes
shell p1
rollouts delete nosuch --yes
rollouts delete {{live}} --yes
rollouts nosuch
report nosuch
completion nosuch
names nosuch
help nosuch
web --port 99999
demo --nodes 0
"""

ADMIN_COMMANDS = {"backup", "restore", "init", "hosts scan", "store prepare", "store move"}
"""Commands that become another program, which has tests of its own."""

UNTRIED = {
    # Other tests try them: those of usage, of tunnels, of tokens and of the demo.
    *(
        "--reason",
        "--socket",
        "--host",
        "--service",
        "--for",
        "--dir",
        "--fault",
        "--config",
        "--context",
        "--jq",
    ),
    # Any name is right: a filter that matches nothing, and names that users give.
    *("--actor", "--by"),
}
"""Options without a line."""

FORM = re.compile(r"^\S.*?: .+?[;?] ?")
"""An error is `<object>: <problem>; <action>`; a suggestion ends in a question mark."""

MAX_WORDS = 25


def test_each_argument_has_a_wrong_value() -> None:
    parsers = leaf_parsers()
    tried: dict[str, list[list[str]]] = {name: [] for name in parsers}
    for line in WRONG.strip().splitlines():
        words = line.split()
        tried[next(name for name in (" ".join(words[:2]), words[0]) if name in parsers)].append(words)
    missing = [
        f"{name} {action.option_strings or action.dest}"
        for name, parser in parsers.items()
        for action in parser._actions
        if name not in ADMIN_COMMANDS
        and action.nargs != 0
        and action.help != argparse.SUPPRESS
        and not action.choices
        if not _is_tried(action, tried[name])
    ]
    assert missing == []


def _is_tried(action: argparse.Action, lines: list[list[str]]) -> bool:
    options = set(action.option_strings)
    if not options:
        return bool(lines)
    return bool(options & UNTRIED) or any(options & set(words) for words in lines)


async def test_wrong_value_is_an_error_with_an_action(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with populated_daemon(tmp_path) as daemon:
        (tmp_path / "selector.yml").write_text(PLAN.replace('targets: ""', 'targets: "team=nosuch"'))
        (tmp_path / "token").write_text("rdt1.e30.c2ln\n")
        problems = [await _find_problem(daemon, capsys, line) for line in WRONG.strip().splitlines()]
    assert not any(problems), "\n".join(filter(None, problems))


async def _find_problem(daemon: PopulatedDaemon, capsys: pytest.CaptureFixture[str], line: str) -> str:
    """Return what is wrong with the answer to a wrong value; empty if it is as it should be."""
    code = await daemon.run(*shlex.split(" ".join(daemon.fill(line))))
    out, err = capsys.readouterr()
    lines = err.splitlines() or [""]
    if "Traceback" in err or code not in (1, 2, 4):
        return f"{line}: exit code {code}: {out}{err}"
    if lines[-1].startswith("see rolloutctl"):  # argparse: the help has the action
        return ""
    found = [text for text in (*out.splitlines(), *lines) if FORM.match(text)]
    if not found:
        return f"{line}: not <object>: <problem>; <action>: {out}{err}"
    is_long = len(found[-1].split()) > MAX_WORDS and "allowed:" not in found[-1]
    return f"{line}: too long: {found[-1]}" if is_long else ""
