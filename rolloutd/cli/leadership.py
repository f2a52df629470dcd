"""Commands for the leader among several daemons of one store."""

from __future__ import annotations

from rolloutd.cli.command_group import CommandGroup, Invocation


def register(commands: CommandGroup) -> None:
    group = commands.add_group("leader", "the daemon that acts, where a standby waits")
    group.add_command("step-down", step_down, "hand leadership over to a standby, at once").reason()


def step_down(call: Invocation) -> int:
    answer = call.client.post("/v1/leader/step-down", {"reason": call.args.reason})
    standbys = answer["standbys"]
    return call.report(answer, f"stepping down; next leads one of: {', '.join(standbys)}", *standbys)
