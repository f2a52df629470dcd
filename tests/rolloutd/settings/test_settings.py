"""Settings merge as trees, and every mistake of every file is named with its file and line."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rolloutd.errors import Diagnostic, InvalidFile
from rolloutd.plugin import Params, SettingsSection
from rolloutd.settings import MAX_FILES, load
from rolloutd.settings.model import Settings, _with_sections

FULL = """\
state_dir: state
socket: /run/rolloutd/control.sock
observe_only: true
inventory:
  - ansible: {path: hosts.yml, labels: [team, rack]}
  - ansible: {path: /abs/hosts.ini}
inventory_refresh: 90s
observe: [{reachable: {}}]
observe_within: 2m
pools:
  team: {max_unavailable: 2}
  rack: {max_unavailable: 25%, values: {r12: {max_unavailable: 2}}}
max_parallel: 32
teams:
  infra: {members: [root, "@ops"]}
  payments: {members: [alice], verify: [{ssh: {run: healthcheck}}], canaries: [pay-01]}
admins: [root, "@wheel"]
ssh: {known_hosts: known_hosts, user: ops, key_file: keys/id}
ansible: {parallel: 4, bin: null}
"""


def write(directory: Path, text: str, **later: str) -> Path:
    """Write a settings file, and files of config.d in the order of their names."""
    main = directory / "config.yaml"
    main.write_text(text)
    (directory / "config.d").mkdir(exist_ok=True)
    for name, content in later.items():
        (directory / "config.d" / f"{name}.yaml").write_text(content)
    return main


def mistakes_of(path: Path) -> tuple[Diagnostic, ...]:
    with pytest.raises(InvalidFile) as raised:
        load(path)
    return raised.value.diagnostics


def test_without_a_file_all_is_default() -> None:
    settings = load(None)
    assert settings.files == ()
    assert settings.state_dir == Path("/var/lib/rolloutd")
    assert settings.socket == Path("/run/rolloutd/control.sock")
    assert settings.pools["team"].max_unavailable == 1
    assert [dict(observer.items()) for observer in settings.observe] == [{"reachable": {}}]
    assert (settings.max_parallel, settings.observe_within_s, settings.inventory_refresh_s) == (64, 60, 300)
    assert settings.admins == ["root"]
    assert settings.teams == {}
    assert settings.ssh.user is None
    assert settings.ansible.bin is None


@pytest.mark.parametrize("found", ["0", "all"])
def test_value_that_fits_no_type_is_one_mistake(tmp_path: Path, found: str) -> None:
    [mistake] = mistakes_of(write(tmp_path, f"ansible:\n  parallel: {found}\n"))
    assert (mistake.line, mistake.path, mistake.found) == (2, "ansible.parallel", found)
    assert mistake.allowed == "a whole number, at least 1, at most 1000 or auto"


def test_everything_is_read(tmp_path: Path) -> None:
    settings = load(write(tmp_path, FULL))
    assert settings.observe_only is True
    assert settings.inventory_refresh_s == 90
    assert settings.observe_within_s == 120
    assert settings.pools["rack"].max_unavailable == "25%"
    assert settings.pools["rack"].values["r12"].max_unavailable == 2
    assert settings.teams["infra"].members == ["root", "@ops"]
    assert settings.teams["payments"].canaries == ["pay-01"]
    assert settings.teams["payments"].checks == [
        {"ssh": {"run": "healthcheck", "exit": 0, "in_service": False, "within": 0, "timeout": 60}}
    ]
    assert settings.ansible.parallel == 4


def test_how_long_things_are_kept_is_a_duration_or_for_ever(tmp_path: Path) -> None:
    assert (load(None).keep.runs_s, load(None).keep.trees_s) == (90 * 86_400, 30 * 86_400)
    keep = load(write(tmp_path, "keep: {runs: null, trees: 12h}\n")).keep
    assert (keep.runs_s, keep.trees_s) == (None, 43_200)
    (mistake,) = mistakes_of(write(tmp_path, "keep: {runs: 0s}\n"))
    assert "at least 1s" in str(mistake)


def test_paths_are_relative_to_the_file_they_stand_in(tmp_path: Path) -> None:
    main = write(tmp_path, FULL, ssh="ssh: {key_file: id}\nansible: {bin: venv/bin/ansible-playbook}\n")
    settings = load(main)
    assert settings.state_dir == tmp_path / "state"
    assert settings.ssh.known_hosts == tmp_path / "known_hosts"
    assert settings.ssh.key_file == tmp_path / "config.d" / "id"
    assert settings.ansible.bin == tmp_path / "config.d" / "venv/bin/ansible-playbook"
    paths = [params["path"] for source in settings.inventory for _, params in source.items()]
    assert paths == [str(tmp_path / "hosts.yml"), "/abs/hosts.ini"]


def test_a_bare_command_is_looked_for_not_resolved(tmp_path: Path) -> None:
    assert load(write(tmp_path, "ansible: {bin: ansible-playbook}\n")).ansible.bin == Path("ansible-playbook")


def test_required_signatures_need_a_trusted_key(tmp_path: Path) -> None:
    with pytest.raises(InvalidFile, match="no key is trusted"):
        load(write(tmp_path, "git: {verify_signatures: true}\n"))
    git = load(write(tmp_path, "git: {verify_signatures: true, allowed_signers: signers}\n")).git
    assert git.allowed_signers == tmp_path / "signers"


def test_maps_merge_and_lists_are_replaced(tmp_path: Path) -> None:
    main = write(
        tmp_path,
        FULL,
        a10="teams: {infra: {members: [bob]}, storage: {members: [carol]}}\n",
        b20="pools: {rack: {values: {r13: {max_unavailable: 0}}}}\nadmins: [dave]\n",
        c30="max_parallel: 16\n",
    )
    settings = load(main)
    assert [file.name for file in settings.files] == ["config.yaml", "a10.yaml", "b20.yaml", "c30.yaml"]
    assert {name: team.members for name, team in settings.teams.items()} == {
        "infra": ["bob"],
        "payments": ["alice"],
        "storage": ["carol"],
    }
    assert settings.pools["rack"].max_unavailable == "25%"
    assert sorted(settings.pools["rack"].values) == ["r12", "r13"]
    assert settings.admins == ["dave"]
    assert settings.max_parallel == 16


def test_only_yaml_files_beside_the_settings_count(tmp_path: Path) -> None:
    main = write(tmp_path, FULL)
    for name in (".hidden.yaml", "old.yaml.bak", "notes.txt"):
        (tmp_path / "config.d" / name).write_text("nonsense: [\n")
    assert load(main).files == (main,)


def test_an_empty_file_beside_others_says_nothing(tmp_path: Path) -> None:
    main = write(tmp_path, "# all in config.d\n", empty="---\n", teams="max_parallel: 3\n")
    assert load(main).max_parallel == 3


@pytest.mark.parametrize("name", ["config.yaml", "config.d/teams.yaml"])
def test_file_without_a_byte_is_mistake(tmp_path: Path, name: str) -> None:
    main = write(tmp_path, "max_parallel: 3\n", teams="max_parallel: 4\n")
    (tmp_path / name).write_bytes(b"")
    (mistake,) = mistakes_of(main)
    assert (mistake.file, mistake.found) == (str(tmp_path / name), "nothing")


@pytest.mark.parametrize("problem", ["a file", "a link to nothing", "unreadable"])
def test_config_d_that_cannot_be_listed_is_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    main = write(tmp_path, "max_parallel: 3\n")
    directory = tmp_path / "config.d"
    if problem == "unreadable":
        # Root may read everything, so the mode of a directory proves nothing here.
        monkeypatch.setattr(os, "listdir", refuse)
        monkeypatch.setattr(os, "scandir", refuse)
    else:
        directory.rmdir()
        directory.write_text("") if problem == "a file" else directory.symlink_to("nothing")
    (mistake,) = mistakes_of(main)
    assert (mistake.file, mistake.allowed) == (str(directory), "a directory the daemon can read")


def refuse(*_: object) -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize("text", ["# cut off\n", "---\n", "{}\n"])
def test_files_that_say_nothing_at_all_are_a_mistake(tmp_path: Path, text: str) -> None:
    """Most likely a full disk cut them off: a daemon without teams, pools and inventory helps nobody."""
    with pytest.raises(InvalidFile) as mistaken:
        load(write(tmp_path, text, empty=text))
    (mistake,) = mistaken.value.diagnostics
    assert (mistake.found, mistake.allowed) == ("nothing", "at least one key, here or in config.d")


def test_the_team_pool_is_kept_when_others_are_named(tmp_path: Path) -> None:
    assert sorted(load(write(tmp_path, "pools: {rack: {}}\n")).pools) == ["rack", "team"]


def test_every_mistake_of_every_file_is_named_at_once(tmp_path: Path) -> None:
    main = write(
        tmp_path,
        "max_paralel: 3\nobserve_within: 60\nteams:\n  infra:\n    members: [root, '']\n",
        first="admins: root\n\npools: {rack: {max_unavailable: 130%}}\n",
        second="teams: {infra: {verify: [{ssh: {}}, {prometheus: {}}, {}]}}\n",
        third="inventory:\n  - netbox: {url: http://n, filter: {bogus: x}}\n  - ansibel: {}\n",
        fourth="a: [\n",
        fifth="- a list\n",
    )
    found = {(Path(mistake.file).name, mistake.line, mistake.path) for mistake in mistakes_of(main)}
    assert found == {
        ("config.yaml", 1, "max_paralel"),
        ("config.yaml", 2, "observe_within"),
        ("config.yaml", 5, "teams.infra.members[1]"),
        ("first.yaml", 1, "admins"),
        ("first.yaml", 3, "pools.rack.max_unavailable"),
        ("second.yaml", 1, "teams.infra.verify[0].ssh.run"),
        ("second.yaml", 1, "teams.infra.verify[1].prometheus.query"),
        ("second.yaml", 1, "teams.infra.verify[2]"),
        ("third.yaml", 2, "inventory[0].netbox.token_file"),
        ("third.yaml", 2, "inventory[0].netbox.filter.bogus"),
        ("third.yaml", 3, "inventory[1].ansibel"),
        ("fourth.yaml", 1, "a[0]"),
        ("fifth.yaml", 1, "(file)"),
    }


def test_sources_of_one_kind_need_different_names(tmp_path: Path) -> None:
    netbox = "netbox: {url: http://n, token_file: t%s}"
    one, two = netbox % "", netbox % ", name: netbox"
    for pair in ([one, one], [one, two], [two, two]):
        [mistake] = mistakes_of(write(tmp_path, "inventory:\n" + "".join(f"  - {each}\n" for each in pair)))
        assert (mistake.line, mistake.found, mistake.allowed) == (3, "netbox", "a unique name")


def test_the_nearest_key_is_named_also_within_a_team(tmp_path: Path) -> None:
    [mistake] = mistakes_of(write(tmp_path, "teams: {infra: {member: [root]}}\n"))
    assert "did you mean `members`?" in mistake.message
    assert mistake.allowed == "one of: members, verify, windows, canaries, reboot_within"


def test_a_file_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    [mistake] = mistakes_of(tmp_path / "nowhere.yaml")
    assert (mistake.line, mistake.found) == (1, "No such file or directory")


def test_too_many_files_are_a_mistake(tmp_path: Path) -> None:
    main = write(
        tmp_path, "# none\n", **{f"f{number:03}": "max_parallel: 1\n" for number in range(MAX_FILES)}
    )
    [mistake] = mistakes_of(main)
    assert "at most" in mistake.allowed


@pytest.mark.parametrize("budget", ["-1", "1.5", "101%", "25 %", "true", '"2"', "[1]"])
def test_a_budget_is_a_number_or_a_percentage(tmp_path: Path, budget: str) -> None:
    [mistake] = mistakes_of(write(tmp_path, f"pools: {{rack: {{max_unavailable: {budget}}}}}\n"))
    assert mistake.path == "pools.rack.max_unavailable"
    assert "25%" in mistake.allowed


@pytest.mark.parametrize("member", ["a b", "@", "-x", "a:b"])
def test_a_member_is_a_user_or_a_group(tmp_path: Path, member: str) -> None:
    [mistake] = mistakes_of(write(tmp_path, f"admins: ['{member}']\n"))
    assert mistake.allowed == "a user name, or @group"


SECTION = """\
haproxy:
  lb1: {socket: /run/haproxy/admin.sock}
  lb2: {tcp: "127.0.0.1:9999"}
  lb3: {node: lb3, socket: /run/haproxy/admin.sock}
"""


def test_section_of_an_adapter_is_read_by_name(tmp_path: Path) -> None:
    settings = load(write(tmp_path, SECTION, more="haproxy: {lb4: {tcp: '[::1]:1'}}"))
    section = settings.section("haproxy")
    assert list(section) == ["lb1", "lb2", "lb3", "lb4"]
    assert section["lb3"].model_dump(exclude_none=True) == {
        "node": "lb3",
        "socket": "/run/haproxy/admin.sock",
    }
    assert load(None).section("haproxy") == {}
    assert settings.section("absent") == {}


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        ("haproxy: {lb1: {}}", "haproxy.lb1", "a balancer is reached in one way"),
        ("haproxy: {lb1: {socket: /s, tcp: 'h:1'}}", "haproxy.lb1", "a balancer is reached in one way"),
        ("haproxy: {lb1: {node: n, tcp: 'h:1'}}", "haproxy.lb1", "a balancer is reached in one way"),
        (
            "haproxy: {lb1: {sock: /s}}",
            "haproxy.lb1.sock",
            "there is no key `sock` here; did you mean `socket`?",
        ),
        ("haproxy: {lb1: {socket: s}}", "haproxy.lb1.socket", "the string should match pattern '^/.'"),
        (
            "haproksy: {lb1: {socket: /s}}",
            "haproksy",
            "there is no key `haproksy` here; did you mean `haproxy`?",
        ),
        (
            "teams: {a: {windows: [{from: '09:00', to: '9:00'}]}}",
            "teams.a.windows[0]",
            "the window ends when it begins; the whole day is 00:00 to 24:00",
        ),
        (
            "teams: {a: {verify: [{ssh: {run: x, equals: a, exit: 1}}]}}",
            "teams.a.verify[0].ssh.exit",
            "the section takes only one of equals, matches, exit",
        ),
        ("ssh: {user: ' '}", "ssh.user", "the text is empty"),
    ],
)
def test_mistake_in_section_of_an_adapter_is_found(
    tmp_path: Path, text: str, path: str, message: str
) -> None:
    (mistake,) = mistakes_of(write(tmp_path, text))
    assert (mistake.path, mistake.message) == (path, message)


def test_section_cannot_replace_a_key_of_rolloutd(caplog: pytest.LogCaptureFixture) -> None:
    section = SettingsSection(Params, "A section.")
    model = _with_sections({"teams": section, "observe_within": section, "mine": section})
    assert {field.alias for name, field in model.model_fields.items() if name.startswith("section_")} == {
        "mine"
    }
    assert "settings section observe_within: rolloutd has this key; rename the section" in caplog.text


def test_records_kept_shorter_than_cleaning_refused() -> None:
    assert Settings.model_validate({"keep": {"records": "60d"}}).keep.records_s == 60 * 86_400
    with pytest.raises(ValueError, match="cleaning needs them"):
        Settings.model_validate({"keep": {"records": "59d"}})
