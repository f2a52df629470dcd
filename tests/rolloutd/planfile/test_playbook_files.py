"""Files of a source that a run reads: voters are shown each of them, however a playbook names it."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible.plugins.loader import get_all_plugin_loaders

from rolloutd.planfile.playbooks import playbook_digest, playbook_files

PLAY = "- hosts: all\n  tasks:\n"
PING = f"{PLAY}  - ping:\n"


def task(text: str, more: str = "") -> str:
    return f"{PLAY}  - {text}\n{more}"


LOCAL = "    delegate_to: localhost\n"

SOURCES = {
    "copy with src=": {"site.yml": task("copy: src=a.conf dest=/etc/a"), "files/a.conf": ""},
    "name with a space": {"site.yml": task("copy: {src: 'a b', dest: /x}"), "files/a b": ""},
    "name in quotes": {"site.yml": task("copy: src='a b.conf' dest=/x"), "files/a b.conf": ""},
    "tasks without a suffix": {
        "site.yml": task("include_tasks: more"),
        "more": "- include_tasks: b.yml\n",
        "b.yml": "- ping:\n",
    },
    "tasks of another suffix": {
        "site.yml": task("import_tasks: {file: more.txt}"),
        "more.txt": "- script: z.sh\n",
        "files/z.sh": "",
    },
    "tasks with file=": {"site.yml": task("include_tasks: file=b.yml"), "b.yml": "- ping:\n"},
    "variables in JSON": {
        "site.yml": "- hosts: all\n  vars_files: [v.json]\n  tasks: []\n",
        "v.json": """{"x": "{{ lookup('file', 'z') }}"}""",
        "z": "",
    },
    "path of the playbook": {
        "site.yml": task("command: '{{ playbook_dir }}/x.sh'", LOCAL),
        "x.sh": "",
    },
    "argument of a command": {"site.yml": task("command: sh scripts/x.sh", LOCAL), "scripts/x.sh": ""},
    "line of a script": {"site.yml": task("shell: |", f"      set -e\n      ./x.sh\n{LOCAL}"), "x.sh": ""},
    "path of a command from variables": {
        "site.yml": task("command: sh {{ d }}{{ e }}/evil", LOCAL),
        "evil": "",
    },
    "path of a command from a statement": {
        "site.yml": task("ansible.builtin.shell: {cmd: 'sh {% if 1 %}ev{% endif %}il'}", LOCAL),
        "evil": "",
    },
    "path of a local action": {"site.yml": task("local_action: command sh {{ d }}"), "evil": ""},
    "arguments of a local action": {
        "site.yml": task("local_action: {module: command, argv: [sh, '{{ d }}']}"),
        "evil": "",
    },
    "directory of a command": {
        "site.yml": task("command: ./evil", "    args: {chdir: '{{ d }}'}\n    connection: local\n"),
        "x/evil": "",
    },
    "role of a play on localhost": {
        "site.yml": "- hosts: localhost\n  roles: [r]\n",
        "roles/r/tasks/main.yml": "- import_tasks: more.yml\n",
        "roles/r/tasks/more.yml": "- block:\n  - command: sh {{ d }}\n",
        "evil": "",
    },
    "tasks that another host runs too": {
        "site.yml": task(
            "import_tasks: more.yml", "- hosts: localhost\n  tasks: [{import_tasks: more.yml}]\n"
        ),
        "more.yml": "- command: sh {{ d }}\n",
        "evil": "",
    },
    "template of a template": {
        "site.yml": task("template: {src: a.j2, dest: /x}"),
        "templates/a.j2": "{%- include 'b.j2' %}",
        "templates/b.j2": "",
    },
    "template of another suffix": {
        "site.yml": task("template: {src: ../x/a.txt, dest: /x}"),
        "x/a.txt": "{% from 'b' import c %}",
        "templates/b": "",
    },
    "template that is also a list of tasks": {
        "site.yml": task("template: {src: ../x, dest: /x}", "  - include_tasks: x\n"),
        "x": "- include_tasks: b.yml\n",
        "b.yml": "- ping:\n",
    },
    "modules of the configuration": {
        "site.yml": PING,
        "ansible.cfg": "[defaults]\nlibrary = ./mods\n",
        "mods/x.py": "",
    },
    "password script of the configuration": {
        "site.yml": PING,
        "ansible.cfg": "[defaults]\nvault_password_file = ./v.sh\n",
        "v.sh": "",
    },
    "program of another setting": {
        "site.yml": PING,
        "ansible.cfg": "[defaults]\nvault_identity_list = dev@./v.sh\n",
        "v.sh": "",
    },
    "program of an ssh option": {
        "site.yml": PING,
        "ansible.cfg": "[ssh_connection]\nssh_args = -o ProxyCommand=./p.sh\n",
        "p.sh": "",
    },
    "file without a suffix in the configuration": {
        "site.yml": PING,
        "ansible.cfg": "[defaults]\ncowpath = cow\n",
        "cow": "",
    },
    "setting with a colon": {
        "site.yml": PING,
        "ansible.cfg": "[defaults]\nlibrary : {{CWD}}/mods\n",
        "mods/x.py": "",
    },
    "program with a template": {
        "site.yml": PING,
        "ansible.cfg": "[defaults]\ncowpath = {{CWD}}/x.sh\n",
        "x.sh": "",
    },
    "plugin next to an imported playbook": {
        "site.yml": "- import_playbook: sub/site.yml\n",
        "sub/site.yml": PING,
        "sub/action_plugins/ping.py": "",
    },
    "plugin of a role": {
        "site.yml": "- hosts: all\n  roles: [r]\n",
        "roles/r/meta/main.yml": "dependencies: [s]\n",
        "roles/s/connection_plugins/x.py": "",
    },
}


def write(tree: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)


@pytest.mark.parametrize("case", SOURCES)
def test_file_that_runs_is_named(tmp_path: Path, case: str) -> None:
    write(tmp_path, SOURCES[case])
    assert playbook_files(tmp_path, {"site.yml": False}) == SOURCES[case].keys()


def test_playbook_without_a_suffix_is_followed(tmp_path: Path) -> None:
    write(tmp_path, {"site": task("include_tasks: b.yml"), "b.yml": "- ping:\n"})
    assert playbook_files(tmp_path, {"site": False}) == {"site", "b.yml"}


def test_plugins_of_every_kind_are_named(tmp_path: Path) -> None:
    """Ansible reads them unasked, next to a playbook."""
    kinds = {loader.subdir for _, loader in get_all_plugin_loaders() if loader.subdir}
    assert {"library", "connection_plugins", "callback_plugins"} <= kinds
    files = {f"plays/{kind}/x.py": "" for kind in kinds} | {"plays/site.yml": PING}
    write(tmp_path, files)
    assert playbook_files(tmp_path, {"plays/site.yml": False}) == files.keys()


def test_text_without_a_name_names_no_directory(tmp_path: Path) -> None:
    write(tmp_path, {"site.yml": task("shell: cd . ; ls ./ .. /"), "tasks/x": "", "files/y": ""})
    assert playbook_files(tmp_path, {"site.yml": False}) == {"site.yml"}


def test_harmless_configuration_names_no_other_file(tmp_path: Path) -> None:
    write(tmp_path, {"site.yml": PING, "ansible.cfg": "[defaults]\nlog_path = /x\nforks = 1\n", "README": ""})
    assert playbook_files(tmp_path, {"site.yml": False}) == {"site.yml", "ansible.cfg"}


def test_command_on_a_node_names_no_file_by_its_template(tmp_path: Path) -> None:
    more = f"  - wait_for: {{host: '{{{{ x }}}}'}}\n{LOCAL}  - local_action: debug msg={{{{ x }}}}\n"
    write(tmp_path, {"site.yml": task("command: rm {{ d }}", more), "other": ""})
    assert playbook_files(tmp_path, {"site.yml": False}) == {"site.yml"}


def test_build_runs_on_localhost(tmp_path: Path) -> None:
    write(tmp_path, {"site.yml": task("command: sh {{ d }}"), "evil": ""})
    assert playbook_files(tmp_path, {"site.yml": False}) == {"site.yml"}
    assert playbook_files(tmp_path, {"site.yml": True}) == {"site.yml", "evil"}
    before = playbook_digest(tmp_path, "site.yml", is_local=True)
    (tmp_path / "evil").write_text("changed")
    assert playbook_digest(tmp_path, "site.yml", is_local=True) != before


@pytest.mark.parametrize(
    "place",
    [
        "delegate_to: dc1.corp.local",
        "delegate_to: local",
        "delegate_to: my-localhost.example",
        "connection: local.ssh",
        "delegate_to: fe80::1",
    ],
)
def test_host_with_local_in_its_name_is_elsewhere(tmp_path: Path, place: str) -> None:
    write(tmp_path, {"site.yml": task("command: rm {{ d }}", f"    {place}\n"), "other": ""})
    assert playbook_files(tmp_path, {"site.yml": False}) == {"site.yml"}


@pytest.mark.parametrize("hosts", ["web:!local", "all:!localhost", "web,!127.0.0.1"])
def test_play_without_localhost_names_no_file(tmp_path: Path, hosts: str) -> None:
    write(
        tmp_path, {"site.yml": f"- hosts: {hosts}\n  tasks: [{{command: 'rm {{{{ d }}}}'}}]\n", "other": ""}
    )
    assert playbook_files(tmp_path, {"site.yml": False}) == {"site.yml"}


@pytest.mark.parametrize(
    "play",
    [
        "hosts: 'web:localhost'",
        "hosts: 'localhost:web'",
        "hosts: [a, '::1']",
        "hosts: all, connection: ansible.builtin.local",
    ],
)
def test_play_on_localhost_names_every_file(tmp_path: Path, play: str) -> None:
    write(tmp_path, {"site.yml": f"- {{{play}, tasks: [{{command: 'rm {{{{ d }}}}'}}]}}\n", "other": ""})
    assert playbook_files(tmp_path, {"site.yml": False}) == {"site.yml", "other"}


COMMAND = "command: 'rm {{ d }}'"

BY_VARIABLE = {
    "variable of a play": {
        "site.yml": f"- hosts: all\n  vars: {{ansible_connection: local}}\n  tasks: [{{{COMMAND}}}]\n"
    },
    "variable of a task": {
        "site.yml": task(COMMAND, "    vars: {ansible_connection: ansible.builtin.local}\n")
    },
    "variable of imported tasks": {
        "site.yml": task("import_tasks: b.yml", "    vars: {ansible_connection: local}\n"),
        "b.yml": f"- {COMMAND}\n",
    },
    "variable that is a template": {"site.yml": task(COMMAND, "    vars: {ansible_connection: '{{ c }}'}\n")},
    "variable of a group": {"site.yml": task(COMMAND), "group_vars/web.yml": "ansible_connection: local\n"},
    "variable of a group without a suffix": {
        "site.yml": task(COMMAND),
        "group_vars/all/main": "ansible_connection: '{% if 1 %}local{% endif %}'\n",
    },
    "variable of a host": {"site.yml": task(COMMAND), "host_vars/n1.yml": "ansible_connection: local\n"},
    "variable of a role": {
        "site.yml": task(COMMAND, "  roles: [r]\n"),
        "roles/r/vars/main.yml": "ansible_connection: local\n",
    },
    "variable of a file": {
        "site.yml": task("include_vars: v", f"  - {COMMAND}\n"),
        "v": "ansible_connection: local\n",
    },
    "fact": {"site.yml": task("set_fact: {ansible_connection: local}", f"  - {COMMAND}\n")},
    "fact of a task on localhost": {
        "site.yml": task("set_fact: {ansible_connection: local}", f"{LOCAL}  - {COMMAND}\n")
    },
    "fact as an argument": {"site.yml": task("set_fact: ansible_connection=local", f"  - {COMMAND}\n")},
    "fact as a long argument": {
        "site.yml": task(f"set_fact: {'ansible_connection=' * 50_000}", f"  - {COMMAND}\n")
    },
    "host that is added": {
        "site.yml": task("add_host: name=x ansible_connection='{{ c }}'", f"  - {COMMAND}\n")
    },
    "configuration": {"site.yml": task(COMMAND), "ansible.cfg": "[defaults]\ntransport = local\n"},
}


@pytest.mark.parametrize("case", BY_VARIABLE)
def test_local_connection_of_a_variable_names_every_file(tmp_path: Path, case: str) -> None:
    files = BY_VARIABLE[case] | {"other": ""}
    write(tmp_path, files)
    assert playbook_files(tmp_path, {"site.yml": False}) == files.keys()


@pytest.mark.parametrize(
    "more",
    [
        "    vars: {ansible_connection: ssh}\n",
        "    vars: {ansible_connection: local.ssh}\n",
        "  - {ping: , vars: {ansible_connection: local}}\n",
        "  - debug: {msg: ansible_connection = localhost}\n",
    ],
)
def test_other_connection_names_no_file(tmp_path: Path, more: str) -> None:
    write(tmp_path, {"site.yml": task(COMMAND, more), "other": ""})
    assert playbook_files(tmp_path, {"site.yml": False}) == {"site.yml"}


@pytest.mark.parametrize(
    "line",
    [
        "# not in files, see x.sh and {{ x }}",
        "  ; ./x.sh",
        "forks = 1 ; ./x.sh",
        "inventory = inventory/prod.yml",
        "remote_user = files",
    ],
)
def test_comment_or_inventory_of_configuration_names_no_file(tmp_path: Path, line: str) -> None:
    others = {"files/x": "", "x.sh": "", "inventory/prod.yml": "x: \"{{ lookup('file', 'z') }}\"\n"}
    write(tmp_path, {"site.yml": PING, "ansible.cfg": f"[defaults]\n{line}\n", **others})
    assert playbook_files(tmp_path, {"site.yml": False}) == {"site.yml", "ansible.cfg"}
