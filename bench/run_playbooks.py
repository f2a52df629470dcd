"""The playbooks of bench/runs.py: P1 to P3 and one that waits."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

BECOME_METHOD = "sudo" if shutil.which("sudo") else "su"
"""Without sudo, root becomes root by su, which costs the same on the controller's side."""

PLAYBOOKS = {"P1": "p1.yml", "P2": "p2.yml"}
if BECOME_METHOD == "sudo" or os.geteuid() == 0:
    PLAYBOOKS["P3"] = "p3.yml"

WAIT = "wait.yml"

_TEXTS = {
    "p1.yml": """\
- hosts: all
  gather_facts: false
  tasks:
    - name: ask the kernel
      ansible.builtin.command: uname -r
      changed_when: false
""",
    "p2.yml": """\
- hosts: all
  vars: {work: "@WORK@/{{ inventory_hostname }}"}
  handlers:
    - name: reload
      ansible.builtin.command: "true"
      changed_when: false
  roles: [service]
  tasks:
    - name: directories
      ansible.builtin.file: {path: "{{ work }}/{{ item }}", state: directory, mode: "0755"}
      loop: [conf.d, run]
    - name: limits
      ansible.builtin.template: {src: conf.j2, dest: "{{ work }}/limits", mode: "0644"}
      vars: {keys: {nofile: 65535, nproc: 4096}}
      notify: reload
    - name: parts
      ansible.builtin.template: {src: conf.j2, dest: "{{ work }}/conf.d/{{ item }}", mode: "0644"}
      vars: {keys: {part: "{{ item }}", cores: "{{ ansible_facts.processor_vcpus }}"}}
      loop: [one, two, three]
      notify: reload
    - name: a line
      ansible.builtin.lineinfile: {path: "{{ work }}/limits", line: "# by {{ team }}"}
    - name: a copy
      ansible.builtin.copy: {content: "{{ ansible_facts.kernel }}", dest: "{{ work }}/kernel", mode: "0644"}
    - name: a fact
      ansible.builtin.set_fact: {wanted: "{{ ansible_facts.kernel }}"}
    - name: look
      ansible.builtin.command: cat {{ work }}/kernel
      register: found
      changed_when: false
    - name: judge
      ansible.builtin.assert: {that: "found.stdout == wanted"}
""",
    "roles/service/tasks/main.yml": """\
- name: its directory
  ansible.builtin.file: {path: "{{ work }}", state: directory, mode: "0755"}
- name: its file
  ansible.builtin.copy: {content: "on\\n", dest: "{{ work }}/service", mode: "0644"}
  notify: reload
""",
    "templates/conf.j2": "{% for key, value in keys.items() %}\n{{ key }} = {{ value }}\n{% endfor %}\n",
    "p3.yml": f"""\
- hosts: all
  gather_facts: false
  become: true
  become_method: {BECOME_METHOD}
  tasks:
    - name: a directory
      ansible.builtin.file: {{path: "@WORK@", state: directory, mode: "0755"}}
    - name: a file
      ansible.builtin.copy: {{content: "on\\n", dest: "@WORK@/p3", mode: "0644"}}
    - name: look
      ansible.builtin.command: cat @WORK@/p3
      changed_when: false
    - name: its state
      ansible.builtin.stat: {{path: "@WORK@/p3"}}
""",
    WAIT: """\
- hosts: all
  gather_facts: false
  tasks:
    - name: wait
      ansible.builtin.shell: |
        touch @BEGAN@/{{ inventory_hostname }}
        while test ! -e @BEGAN@/go; do sleep 0.1; done
""",
}


def write_tree(tree: Path, work: Path) -> None:
    """Write the playbooks; on the node they work below `work`, and the waiting one beside it."""
    for name, text in _TEXTS.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("@WORK@", str(work)).replace("@BEGAN@", str(work.with_name("began"))))
