# ruff: noqa: E501 - playbooks, as they are
"""Playbooks and source trees on which a forked Ansible must do what a new process does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

VAULTED = {
    "__ansible_vault": "$ANSIBLE_VAULT;1.1;AES256\n"
    "38306131653130303537313237323030623261646532613337316264646234386235343066326264\n"
    "3834323330636631316465636566646132343165633231360a656533353365343333373430613237\n"
    "61633030306266626465666135343530326133313263363761323663613637636435326533623530\n"
    "3161313036336534300a633631623735386566383330333538373366376537346432343665323031\n"
    "3435\n"
}
"""A variable of a host, encrypted with the corpus's vault password."""

LOCAL = "- hosts: all\n  gather_facts: false\n  tasks:\n"


def _tasks(text: str) -> str:
    return LOCAL + "".join(f"    {line}\n" for line in text.strip().splitlines())


PLAYBOOKS = {
    "ok": _tasks("- command: echo done"),
    "changed-when": _tasks("- command: echo x\n  changed_when: false"),
    "failed": _tasks("- fail: {msg: no such package}"),
    "failed-command": _tasks("- command: sh -c 'echo out; echo err >&2; exit 3'"),
    "ignored": _tasks("- command: 'false'\n  ignore_errors: true\n- debug: {msg: after}"),
    "rescued": _tasks(
        "- block:\n    - command: 'false'\n  rescue:\n    - debug: {var: ansible_failed_result.rc}\n"
        "  always:\n    - debug: {msg: always}"
    ),
    "syntax-error": "- hosts: all\n  tasks:\n    - name: x\n   - y\n",
    "unknown-module": _tasks("- no_such_module: {}"),
    "unknown-keyword": _tasks("- command: 'true'\n  wehn: x"),
    "undefined-variable": _tasks("- debug: {msg: '{{ nowhere }}'}"),
    "template-error": _tasks("- debug: {msg: '{{ 1 | nosuchfilter }}'}"),
    "assert": _tasks("- assert: {that: [1 == 2], fail_msg: they differ}"),
    "failed-when": _tasks("- command: echo x\n  register: r\n  failed_when: r.stdout == 'x'"),
    "loop": _tasks(
        "- debug: {msg: '{{ item.a }}'}\n  loop: [{a: 1}, {a: 2}]\n  loop_control: {label: '{{ item.a }}'}"
    ),
    "until": _tasks("- command: 'false'\n  register: r\n  until: r.rc == 0\n  retries: 1\n  delay: 0"),
    "set-fact": _tasks("- set_fact: {x: '{{ 2 + 3 }}', cacheable: true}\n- debug: {var: x}"),
    "handlers": "- hosts: all\n  gather_facts: false\n  handlers: [{name: h, debug: {msg: handled}}]\n"
    "  tasks:\n    - {command: echo x, notify: h}\n    - meta: flush_handlers\n    - {command: echo y, notify: h}\n",
    "end-play": _tasks("- meta: end_play\n- fail: {msg: not reached}")
    + LOCAL
    + "    - debug: {msg: second}\n",
    "end-host": _tasks("- meta: end_host\n- fail: {msg: not reached}"),
    "no-hosts": "- hosts: others\n  tasks: [{debug: {msg: never}}]\n",
    "inventory": _tasks(
        "- debug: {msg: '{{ groups }} {{ hostvars.db1 }} {{ inventory_file | basename }} {{ derived }}'}\n"
        "- debug: {msg: \"{{ query('inventory_hostnames', 'all:!web') }} {{ hostvars.db1.hidden }}\"}\n"
        "- add_host: {name: late, groups: [new], own: 3}\n"
        "- debug: {msg: '{{ groups }} {{ hostvars.late.own }} {{ inventory_dir == hostvars.db1.inventory_dir }}'}"
    ),
    "inventory-of-plugin": _tasks(
        "- debug: {msg: \"{{ lookup('hosts_of', 'x1,x2,') }} {{ hidden | default('') }} {{ groups.all }}\"}"
    ),
    "inventory-own": _tasks("- debug: {msg: 'own is {{ own }}'}"),
    "other-group": "- hosts: web:!db\n  gather_facts: false\n  tasks: [{debug: {var: groups}}]\n",
    "facts": "- hosts: all\n  gather_facts: true\n  gather_subset: [min]\n  tasks:\n"
    "    - {debug: {msg: '{{ ansible_facts.system }} {{ ansible_facts.user_id }}'}}\n",
    "include": _tasks(
        "- include_tasks: included.yml\n  vars: {x: 1}\n- import_tasks: included.yml\n  vars: {x: 2}"
    ),
    "import-playbook": "- import_playbook: imported.yml\n",
    "role": "- hosts: all\n  gather_facts: false\n  roles: [r1]\n",
    "include-role": _tasks("- include_role: {name: r1, tasks_from: other.yml}"),
    "collection-role": _tasks("- include_role: {name: acme.tools.deploy}\n- acme.tools.greet: {name: you}"),
    "own-module": _tasks("- own_module: {word: hello}\n  register: r\n- debug: {var: r.word}"),
    "own-filter": _tasks("- debug: {msg: \"{{ 'a' | shout }} {{ 3 is tiny }} {{ lookup('fixed') }}\"}"),
    "own-action": _tasks("- template: {src: nowhere.j2, dest: /nowhere}"),
    "builtin-action": _tasks("- ansible.builtin.debug: {msg: built in}\n- set_stats: {data: {a: 1}}"),
    "vars-prompt": "- hosts: all\n  vars_prompt: [{name: answer, prompt: Which}]\n  tasks: []\n",
    "vars-files": "- hosts: all\n  gather_facts: false\n  vars_files: [more.yml]\n"
    "  tasks: [{debug: {msg: '{{ more }} {{ of_group }} {{ of_host }} {{ of_all }}'}}]\n",
    "vault-file": "- hosts: all\n  gather_facts: false\n  vars_files: [secret.yml]\n"
    "  tasks: [{debug: {msg: '{{ secret | length }}'}}]\n",
    "no-log": _tasks("- command: echo password\n  no_log: true"),
    "environment": _tasks("- command: sh -c 'echo $WHO'\n  environment: {WHO: me}"),
    "copy": _tasks(
        "- tempfile: {state: directory}\n  register: t\n"
        "- copy: {content: 'x {{ 1 + 1 }}', dest: '{{ t.path }}/f', mode: '0600'}\n  diff: true\n"
        "- slurp: {src: '{{ t.path }}/f'}\n  register: s\n- debug: {msg: '{{ s.content | b64decode }}'}\n"
        "- file: {path: '{{ t.path }}', state: absent}"
    ),
    "check-mode": _tasks(
        "- command: 'true'\n  check_mode: true\n- file: {path: /nowhere/x, state: touch}\n  check_mode: true"
    ),
    "script": _tasks("- script: script.sh one two"),
    "raw": _tasks("- raw: echo raw words"),
    "async": _tasks("- command: echo late\n  async: 20\n  poll: 1"),
    "delegate": _tasks("- command: echo there\n  delegate_to: db1\n- debug: {msg: once}\n  run_once: true"),
    "free": "- hosts: web\n  strategy: free\n  gather_facts: false\n  tasks: [{command: echo free}]\n",
    "serial": "- hosts: all\n  serial: 1\n  any_errors_fatal: true\n  gather_facts: false\n  tasks: [{debug: {msg: x}}]\n",
    "tags": _tasks("- debug: {msg: never}\n  tags: [never]\n- debug: {msg: always}\n  tags: [always]"),
    "unreachable": _tasks(
        "- command: 'true'\n  vars: {ansible_connection: ssh, ansible_host: 127.0.0.1, ansible_port: 1}"
    ),
    "unreachable-recovered": _tasks(
        "- command: 'true'\n  ignore_unreachable: true\n"
        "  vars: {ansible_connection: ssh, ansible_host: 127.0.0.1, ansible_port: 1}\n"
        "- command: echo back"
    ),
    "ssh-password": _tasks(
        "- command: 'true'\n  vars: {ansible_connection: ssh, ansible_host: 127.0.0.1, ansible_port: 1, "
        "ansible_password: x}"
    ),
    "become-missing": _tasks("- command: id -u\n  become: true\n  vars: {ansible_become_exe: /no/such/sudo}"),
    "become-password": _tasks(
        "- command: id -u\n  become: true\n  vars: {ansible_become_exe: /no/sudo, ansible_become_password: x}"
    ),
    "reboot": _tasks("- reboot: {}"),
    "deprecated": _tasks("- debug: {msg: \"{{ ansible_hostname | default('none') }}\"}\n  when: 'true'"),
    "hash-order": _tasks("- debug: {msg: \"{{ ['b', 'a', 'c'] | unique | sort | join }}\"}"),
}
"""The name of a playbook, without `.yml`, and its text; all of them are in one tree."""

CONFIGURATIONS = {
    "callbacks": "[defaults]\nstdout_callback = loud\ncallbacks_enabled = tally\ncallback_plugins = callbacks\n",
    "log-path": "[defaults]\nlog_path = ansible.log\n",
    "invalid-value": "[defaults]\nforks = many\n",
    "fact-cache": "[defaults]\nfact_caching = jsonfile\nfact_caching_connection = cache\ngathering = smart\n",
    "broken": "[defaults\nforks = 5\n",
    "own-strategy": "[defaults]\nstrategy_plugins = strategies\nstrategy = slow\nvars_plugins = variables\n",
    "vault-script": "[defaults]\nvault_identity_list = one@vault-client.sh\n",
}
"""Names of trees with the text of an ansible.cfg each; the playbook of all is SAMPLE."""

SAMPLE = _tasks("- command: echo sample\n- debug: {msg: '{{ from_plugin | default(0) }}'}")

_FILES = {
    "included.yml": "- debug: {msg: 'x is {{ x }}'}\n",
    "imported.yml": _tasks("- debug: {msg: imported}"),
    "more.yml": "more: from a file\n",
    "group_vars/web.yml": "of_group: web\n",
    "group_vars/all.yml": "of_all: all\n",
    "host_vars/n0.yml": "of_host: n0\n",
    "script.sh": "#!/bin/sh\necho script $1 $2\n",
    "roles/r1/tasks/main.yml": "- debug: {msg: '{{ of_role }}'}\n- role_module: {}\n",
    "roles/r1/tasks/other.yml": "- debug: {msg: other}\n  notify: role handler\n",
    "roles/r1/handlers/main.yml": "- {name: role handler, debug: {msg: handled}}\n",
    "roles/r1/defaults/main.yml": "of_role: a default\n",
    "roles/r1/library/role_module.py": '#!/usr/bin/python\nprint(\'{"changed": true, "role": 1}\')\n',
    "library/own_module.py": "from ansible.module_utils.basic import AnsibleModule\n"
    "module = AnsibleModule({'word': {'type': 'str'}})\nmodule.exit_json(word=module.params['word'])\n",
    "filter_plugins/core.py": "class FilterModule:\n"
    "    def filters(self):\n        return {'shout': lambda word: word.upper()}\n",
    "test_plugins/core.py": "class TestModule:\n    def tests(self):\n        return {'tiny': lambda n: n < 9}\n",
    "lookup_plugins/fixed.py": "from ansible.plugins.lookup import LookupBase\n"
    "class LookupModule(LookupBase):\n    def run(self, terms, variables=None, **kwargs):\n        return ['fixed']\n",
    "lookup_plugins/hosts_of.py": "from ansible.inventory.manager import InventoryManager\n"
    "from ansible.parsing.dataloader import DataLoader\nfrom ansible.plugins.lookup import LookupBase\n"
    "class LookupModule(LookupBase):\n    def run(self, terms, variables=None, **kwargs):\n"
    "        return [sorted(InventoryManager(DataLoader(), sources=terms).hosts)]\n",
    # Of the same name as Ansible's own, which the fork server has imported.
    "action_plugins/template.py": "from ansible.plugins.action import ActionBase\n"
    "class ActionModule(ActionBase):\n    def run(self, tmp=None, task_vars=None):\n"
    "        return {'changed': False, 'msg': 'the action of the tree'}\n",
    "collections/ansible_collections/acme/tools/galaxy.yml": "{namespace: acme, name: tools, version: 1.0.0}\n",
    "collections/ansible_collections/acme/tools/roles/deploy/tasks/main.yml": "- debug: {msg: deployed}\n",
    "collections/ansible_collections/acme/tools/plugins/modules/greet.py": "from ansible.module_utils.basic "
    "import AnsibleModule\nmodule = AnsibleModule({'name': {}})\nmodule.exit_json(greeting='hello')\n",
    "vault-password": "open sesame\n",
    "vault-client.sh": "#!/bin/sh\necho open sesame\n",
    "callbacks/loud.py": "from ansible.plugins.callback.default import CallbackModule as Default\n"
    "DOCUMENTATION = '''\nname: loud\ntype: stdout\nshort_description: x\ndescription: x\n"
    "extends_documentation_fragment: [default_callback, result_format_callback]\n'''\n"
    "class CallbackModule(Default):\n    CALLBACK_NAME = 'loud'\n"
    "    def v2_playbook_on_start(self, playbook):\n        self._display.display('LOUD')\n",
    "callbacks/tally.py": "import atexit\nfrom ansible.plugins.callback import CallbackBase\n"
    "class CallbackModule(CallbackBase):\n    CALLBACK_NAME = 'tally'\n    CALLBACK_NEEDS_ENABLED = True\n"
    "    def v2_playbook_on_stats(self, stats):\n        self._display.display('TALLY')\n"
    # Only the end of the process writes this; without atexit, Python may drop the buffer.
    "        kept = open(1, 'w', closefd=False)\n        kept.write('KEPT\\n')\n"
    "        atexit.register(kept.flush)\n",
    "strategies/slow.py": "from ansible.plugins.strategy.linear import StrategyModule as Linear\n"
    "DOCUMENTATION = '''\nname: slow\nshort_description: x\ndescription: x\n'''\n"
    "class StrategyModule(Linear):\n    pass\n",
    "variables/host_group_vars.py": "from ansible.plugins.vars import BaseVarsPlugin\n"
    "class VarsModule(BaseVarsPlugin):\n    REQUIRES_ENABLED = False\n"
    "    def get_vars(self, loader, path, entities, cache=True):\n        return {'from_plugin': 7}\n",
}


def write_tree(tree: Path, configuration: str) -> None:
    """Write the corpus as one source tree with this ansible.cfg."""
    files = {f"{name}.yml": text for name, text in PLAYBOOKS.items()} | _FILES | {"sample.yml": SAMPLE}
    for name, text in files.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if name.endswith(".sh") else 0o644)
    (tree / "secret.yml").write_text("secret: abc\n")
    vault = Path(sys.executable).with_name("ansible-vault")
    words = [vault, "encrypt", "--vault-password-file", "vault-password", "secret.yml"]
    subprocess.run(words, cwd=tree, check=True, capture_output=True)
    (tree / "ansible.cfg").write_text(configuration)
