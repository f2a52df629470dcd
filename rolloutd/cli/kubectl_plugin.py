"""`kubectl rolloutd`: read a rollout and vote, with the token of the kubeconfig.

It asks the daemon over TLS.  The token goes to no command line and to no file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from rolloutd.cli.output import print_line, sanitize

SERVER_VARIABLE, CA_VARIABLE = "ROLLOUTD_VOTES", "ROLLOUTD_VOTES_CA"
"""The daemon's address, and the file of the authority that signed its certificate."""

TIMEOUT_S = 90.0
"""Longer than the daemon takes at most."""

MAX_ANSWER_BYTES = 16 * 1024 * 1024
REFUSED, MISUSED = 1, 2


class Failed(Exception):
    """The command ends with this sentence."""


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; 0 for success, 1 for a refusal, 2 for a wrong call."""
    args = _parser().parse_args(words)
    try:
        return int(args.run(args))
    except Failed as failure:
        sys.stderr.write(f"{sanitize(str(failure))}\n")
        return REFUSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kubectl rolloutd", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="show a rollout, its gates and its failures")
    show.set_defaults(run=_show)
    why = commands.add_parser("why", help="explain why a node waits, in the namespace's rollouts")
    why.set_defaults(run=_why)
    why.add_argument("node", metavar="NODE", help="name of the node")
    votes = []
    for name, summary in (("approve", "vote yes at a gate"), ("reject", "vote no at a gate")):
        vote = commands.add_parser(name, help=summary)
        vote.set_defaults(run=_vote, yes=name == "approve")
        votes.append(vote)
    for each in (show, *votes):
        each.add_argument("name", metavar="NAME", help="name of the MaintenanceRollout")
    for each in (show, why, *votes):
        each.add_argument("-n", "--namespace", help="its namespace (that of the kubeconfig's context)")
        each.add_argument("--kubeconfig", help="kubeconfig (as kubectl)")
        each.add_argument("--context", help="its context (the current one)")
        each.add_argument("--server", help=f"HOST:PORT of the daemon's votes (default: ${SERVER_VARIABLE})")
        each.add_argument("--ca-file", help=f"authority of its certificate (default: ${CA_VARIABLE})")
    for vote in votes:
        vote.add_argument("gate", metavar="GATE", choices=("pilot", "start", "continue", "proceed"))
        vote.add_argument("--reason", required=True, help="why; the audit keeps it")
        vote.add_argument("--wave", help="wave after which the gate continue is (the first that waits)")
        vote.add_argument("--team", help="team for which to vote (all of yours)")
        vote.add_argument("--unseen", action="store_true", help="approve also what the review cannot show")
    return parser


def _show(args: argparse.Namespace) -> int:
    daemon = _Daemon(args)
    answer = daemon.ask("GET", daemon.rollout_path(args.name))
    rollout = answer["rollout"]
    done = f"{rollout['done']} of {rollout['total']} nodes done"
    lines = [f"{rollout['rollout']}: {rollout['state']}, {done}", f"digest {rollout['digest']}"]
    for gate in rollout["gates"]:
        missing = f", {gate['missing']}" if gate["missing"] else ""
        lines.append(f"gate {gate['gate']}: {gate['state']}{missing}")
    if rollout["reason"]:
        lines.append(rollout["reason"]["text"])
    for line in lines:
        print_line(sanitize(line))
    _print_failures(answer["failures"])
    return 0


def _why(args: argparse.Namespace) -> int:
    daemon = _Daemon(args)
    answer = daemon.ask("GET", f"namespaces/{daemon.namespace}/nodes/{quote(args.node, safe='')}/why")
    for each in answer["rollouts"]:
        reason = each["reason"]
        lines = [f"{each['object']}: {each['node']} is {each['phase']}"]
        if reason is not None:
            lines[0] += f": {reason['text']} ({reason['code']})"
            lines += [f"lifted by {reason['lifted_by']}"] if reason["lifted_by"] else []
        elif each["phase"] != "done" and not each["trouble"]:
            lines[0] += "; nothing blocks it"
        lines += [f"the daemon has trouble: {each['trouble']}"] if each["trouble"] else []
        for line in lines:
            print_line(sanitize(line))
    return 0


def _vote(args: argparse.Namespace) -> int:
    daemon = _Daemon(args)
    path = daemon.rollout_path(args.name)
    answer = daemon.ask("GET", path)
    gates = [gate for gate in answer["rollout"]["gates"] if gate["gate"] == args.gate]
    if not gates:
        raise Failed(f"{args.name}: no gate {args.gate}; show it with kubectl rolloutd show {args.name}")
    body: dict[str, Any] = {
        "gate": args.gate,
        "yes": args.yes,
        "reason": args.reason,
        "digest": gates[0]["digest"],
        "unseen": args.unseen,
    }
    body |= {key: getattr(args, key) for key in ("wave", "team") if getattr(args, key)}
    if args.gate == "proceed" and args.yes:
        # The vote covers what was printed, and nothing that fails meanwhile.
        _print_failures(answer["failures"])
        body["shown"] = [each["id"] for each in answer["failures"]]
    voted = daemon.ask("POST", f"{path}/votes", body)
    answered = f"{'yes' if args.yes else 'no'} at {voted['gate']}"
    print_line(sanitize(f"{voted['rollout']}: {answered} as {voted['voter']}"))
    return 0


def _print_failures(failures: Sequence[dict[str, Any]]) -> None:
    for each in failures:
        print_line(sanitize(f"failed: {each['node']}: {each['step']}: {each['message']}"))


class _Daemon:
    """The daemon, asked with the kubeconfig's token about a namespace."""

    def __init__(self, args: argparse.Namespace) -> None:
        server = args.server or os.environ.get(SERVER_VARIABLE)
        if not server:
            raise Failed(f"--server: not given; name HOST:PORT, or set ${SERVER_VARIABLE}")
        token, namespace = asyncio.run(_credentials(args.kubeconfig, args.context))
        self.namespace = quote(args.namespace or namespace, safe="")
        self._url = f"https://{server}/v1/"
        self._token = token
        ca_file = args.ca_file or os.environ.get(CA_VARIABLE)
        try:
            self._tls = ssl.create_default_context(cafile=ca_file)
        except OSError as error:
            raise Failed(f"{ca_file}: {error.strerror or error}; name the authority's file") from None

    def rollout_path(self, name: str) -> str:
        return f"rollouts/{self.namespace}/{quote(name, safe='')}"

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers, method=method)  # noqa: S310  # https
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=self._tls) as response:  # noqa: S310
                return json.loads(response.read(MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            raise Failed(_error_text(error.read(MAX_ANSWER_BYTES), error)) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            check = "--server and --ca-file" if isinstance(reason, ssl.SSLError) else "--server"
            raise Failed(f"{self._url}: {reason}; check {check}") from None


def _error_text(raw: bytes, error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(raw)["error"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"


async def _credentials(kubeconfig: str | None, context: str | None) -> tuple[str, str]:
    """Return the token and the namespace of a kubeconfig's context; its plugin may run."""
    # Imported here: the library takes a second, and a wrong call should not.
    from kubernetes_asyncio import config
    from kubernetes_asyncio.client import Configuration

    loaded = Configuration()
    try:
        await config.load_kube_config(
            config_file=kubeconfig, context=context, client_configuration=loaded, persist_config=False
        )
        contexts, active = config.list_kube_config_contexts(config_file=kubeconfig)
    except (config.ConfigException, OSError) as error:
        raise Failed(f"kubeconfig: {error}; name one with --kubeconfig") from None
    chosen = next((each for each in contexts if each["name"] == context), active) or {}
    scheme, _, token = str(loaded.api_key.get("BearerToken", "")).partition(" ")
    if scheme != "Bearer" or not token:
        raise Failed("kubeconfig: no token in this context; votes need one, log in with one")
    return token, str(chosen.get("context", {}).get("namespace") or "default")


if __name__ == "__main__":
    sys.exit(main())
