"""What AWX gets of a node: its variables without secrets, and its groups.

AWX stores host variables and launch variables in clear text and shows them to whoever may read the object.
So no secret is sent: credentials of AWX supply them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from machines.model.rollout import FailureCode
from rolloutd.adapters.ansible.environment import RESERVED_HOST_VARIABLES
from rolloutd.configuration.secret_variables import map_secrets, marked_secrets
from rolloutd.ports import GROUPS, IMPLICIT_GROUPS, JSON, Failed, Host, RunRequest

_MACHINE_CREDENTIAL = frozenset(
    {
        *("ansible_password", "ansible_ssh_pass", "ansible_ssh_password"),
        *("ansible_become_password", "ansible_become_pass", "ansible_sudo_pass"),
        *("ansible_private_key_file", "ansible_ssh_private_key_file"),
    }
)
"""Variables that AWX's machine credential replaces: passwords, and paths of keys on this machine."""


def host_variables(host: Host) -> dict[str, JSON]:
    """Return a node's variables as Ansible must get them, without those of the machine credential."""
    left_out = _MACHINE_CREDENTIAL | set(RESERVED_HOST_VARIABLES)
    return {name: value for name, value in host.variables.items() if name not in left_out}


def groups_of(host: Host) -> Sequence[str]:
    return [str(name) for name in host.connection.get(GROUPS, ()) if name not in IMPLICIT_GROUPS]


def find_secrets(request: RunRequest, sent: Mapping[str, JSON], supplied: Collection[str]) -> Failed | None:
    """Return a refusal of a run that would give AWX a secret, or None."""
    marked = marked_secrets(request.host.connection)
    of_plan = _secret_names(request.variables, marked)
    of_node = [name for name in _secret_names(sent, marked) if name not in supplied]
    if of_plan:
        text = f"{request.node}: variable {of_plan[0]} of the plan is secret; give it to AWX as a credential"
    elif of_node:
        text = (
            f"{request.node}: variable {of_node[0]} is secret; give it to AWX as a credential and add it to"
            " `credential_variables`"
        )
    else:
        return None
    return Failed(text, code=FailureCode.NEVER_STARTED)


def _secret_names(variables: Mapping[str, JSON], marked: Collection[str]) -> list[str]:
    """Return the names of the variables that are a secret, or hold one."""
    found: dict[str, None] = {}
    for variable, value in variables.items():

        def note(_name: str, secret: JSON, variable: str = variable) -> JSON:
            found[variable] = None
            return secret

        map_secrets({variable: value}, note, marked)
    return list(found)
