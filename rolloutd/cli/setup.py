"""Commands that set up this machine: init, hosts scan, store prepare, store move.

They need libraries that rolloutctl does not load, because its start-up counts.
"""

from __future__ import annotations

import json
from functools import partial
from typing import NoReturn

from rolloutd.cli.command_group import CommandGroup, Invocation
from rolloutd.cli.local import exec_module

_TEXTS = (
    ("--inventory", "FILE", "an Ansible inventory"),
    ("--kubeconfig", "FILE", "a kubeconfig that the daemon can read, or NAME=FILE"),
    ("--haproxy", "NAME=ADDRESS", "a balancer's Runtime API: a socket, or HOST:PORT"),
    ("--label", "VARIABLE", "a host variable that becomes a label"),
    ("--pool", "KEY=NUMBER", "how many nodes of one value of a label may be down; a percentage too"),
    ("--team", "NAME=MEMBERS", "a team and its members, such as web=alice,@web"),
)

_VALUES = (
    ("--config", "FILE", "the settings file (/etc/rolloutd/config.yaml)"),
    ("--netbox", "URL", "a NetBox; needs --netbox-token-file"),
    ("--netbox-token-file", "FILE", "file with NetBox's API token, which only the daemon may read"),
    ("--ssh-user", "USER", "user on the nodes"),
    ("--ssh-key", "FILE", "private key of the daemon; made if it does not exist"),
    ("--known-hosts", "FILE", "host keys of the nodes"),
    ("--state-dir", "DIR", "directory of the daemon's state"),
    ("--socket", "PATH", "the daemon's socket"),
    ("--nodes-playbook", "FILE", "write the playbook that prepares nodes"),
)

_SECOND_SOURCES = (
    ("--known", "FILE", "a known_hosts file to compare with"),
    ("--console", "DIR", "directory with each node's console output, NODE or NODE.log"),
    ("--sshfp", "FILE", "SSHFP records: a zone, or the output of dig"),
)


def register(commands: CommandGroup) -> None:
    summary = "write the daemon's settings from what this machine and the inventory have"
    parser = commands.add_command("init", partial(set_up, "init"), summary, formats=("json",), is_local=True)
    for name, metavar, text in _TEXTS:
        parser.argument(name, metavar=metavar, text=f"{text} (repeatable)", action="append", default=[])
    for name, metavar, text in _VALUES:
        parser.argument(name, metavar=metavar, text=text)
    text = "on: decide and explain everything, do nothing"
    parser.add_argument("--observe-only", choices=("on", "off"), help=text)
    parser.flag("--no-search", text="take only what the options name")
    parser.flag("--dry-run", text="write nothing")
    parser.flag("--yes", text="ask nothing: take what is proposed, and write")
    hosts = commands.add_group("hosts", "compare and store the host keys of nodes")
    summary = "collect host keys, compare them with second sources, and store what you approve"
    parser = hosts.add_command(
        "scan", partial(set_up, "host_keys"), summary, formats=("json",), is_local=True
    )
    parser.argument("nodes", metavar="NODE", text="only these nodes (all)", nargs="*")
    parser.argument("--config", metavar="FILE", text="the settings file (/etc/rolloutd/config.yaml)")
    for name, metavar, text in _SECOND_SOURCES:
        parser.argument(name, metavar=metavar, text=f"{text} (repeatable)", action="append", default=[])
    text = "store the changed keys of this node, as after a reinstallation (repeatable)"
    parser.argument("--replace", metavar="NODE", text=text, action="append", default=[])
    parser.flag("--unconfirmed", text="with --yes: store keys that no second source has, too")
    parser.reason(required=False, when="with --yes").yes()
    _register_store(commands.add_group("store", "prepare a PostgreSQL database, and move the store to it"))


def _register_store(store: CommandGroup) -> None:
    summary = "make or migrate the tables in PostgreSQL, and let the daemon's role use them"
    parser = store.add_command("prepare", change_store, summary, formats=("json",), is_local=True)
    text = "the database as its owner, such as 'host=db dbname=rolloutd user=rolloutd_owner'"
    parser.argument("--dsn", metavar="OWNER_DSN", text=text, required=True)
    parser.argument("--role", metavar="NAME", text="the daemon's role, which owns nothing", required=True)
    parser.argument("--password-file", metavar="FILE", text="file with the owner's password")
    summary = "move the store between the databases of two settings files; the daemons must be stopped"
    parser = store.add_command("move", change_store, summary, formats=("json",), is_local=True)
    parser.argument("--from", metavar="FILE", text="settings of the present store", required=True)
    parser.argument("--to", metavar="FILE", text="settings of the store to move to", required=True)


def change_store(call: Invocation) -> NoReturn:
    """Become the program that makes the tables, or moves the store."""
    verb = call.args.subcommand
    names = ("dsn", "role", "password_file") if verb == "prepare" else ("from", "to")
    values = {name: getattr(call.args, name) for name in names}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]
    exec_module("rolloutd.admin", [verb, *options, *(["--json"] if call.args.json else [])])


def set_up(module: str, call: Invocation) -> NoReturn:
    """Become the program of host keys, or that of the settings; it reads the options as JSON."""
    given = vars(call.args).items()
    options = {name: value for name, value in given if isinstance(value, str | bool | list)}
    exec_module(f"rolloutd.admin.{module}", [json.dumps(options)])
