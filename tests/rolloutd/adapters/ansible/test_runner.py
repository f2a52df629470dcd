"""The Ansible runner: claims, markers, limits, secrets, stale processes.

Longer than 500 lines: all tests share one node and its runner.
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from machines.model.rollout import FailureCode
from rolloutd.adapters.ansible import older_runs, stale_processes, wrapper
from rolloutd.adapters.ansible.artifact_store import SharedOutput
from rolloutd.adapters.ansible.run_directory import RunDirectory
from rolloutd.adapters.ansible.runner import AnsibleRunner
from rolloutd.adapters.directory_store import DirectoryStore
from rolloutd.ports import Failed, Host, Ok, RunState, ShellResult, Unknown, wait_for_end
from tests.contracts.runner_backends import AnsibleBackend
from tests.support.waiting import wait_in_loop_until

pytestmark = pytest.mark.servers


@pytest.fixture
async def real(tmp_path: Path) -> AsyncIterator[AnsibleBackend]:
    """A real node with real Ansible."""
    made = AnsibleBackend(tmp_path)
    yield made
    await made.close()


async def ended(runner: AnsibleRunner, handle: str) -> tuple[RunState, list[float]]:
    """Wait for the outcome; return it with all percentages on the way."""
    percents = []
    while (state := await runner.wait_for_change(handle)).result is None:
        percents.append(state.percent)
    return state, percents


async def play(real: AnsibleBackend, text: str) -> tuple[RunState, RunDirectory, list[float]]:
    """Run a playbook of this text to its end."""
    (real.tree / "play.yml").write_text(text)
    runner = real.runner()
    handle = await runner.start(real.request("play.yml"))
    state, percents = await ended(runner, handle)
    return state, RunDirectory(real.runs_dir / handle), percents


async def test_a_late_wrapper_finds_the_daemons_claim_and_refuses(real: AnsibleBackend) -> None:
    runner = real.runner()
    await ended(runner, await runner.start(real.request("ok.yml")))
    directory = RunDirectory(real.runs_dir / "late")
    directory.create()
    command = (real.runs_dir / "r1" / "command").read_bytes()
    (directory.path / "command").write_bytes(command)
    directory.write_metadata({"node": "n0"})

    state = await runner.get_state("late")
    assert isinstance(state.result, Unknown)
    assert "never began" in state.result.text
    assert not state.has_begun
    late = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", wrapper.__file__, directory.path)
    assert await late.wait() == 3
    assert not (directory.path / "status").exists()
    assert real.started_runs() == ["r1"]


async def test_unclaimed_directory_claimed_and_run_elsewhere(real: AnsibleBackend) -> None:
    RunDirectory(real.runs_dir / "r1").path.mkdir(parents=True)
    runner = real.runner()
    handle = await runner.start(real.request("ok.yml"))
    assert handle != "r1"
    assert (real.runs_dir / "r1" / "claim").read_text().startswith("daemon ")
    assert isinstance((await ended(runner, handle))[0].result, Ok)
    # A caller that has not stored the new handle asks by the run's id.
    assert (await real.runner().get_state("r1")).has_begun
    assert await real.runner().start(real.request("ok.yml")) == handle
    assert real.started_runs() == ["r1"]


async def test_a_command_that_fails_is_told_with_its_status(real: AnsibleBackend) -> None:
    runner = real.runner()
    for name, script, said in (
        ("silent", "exit 3", "(3)"),
        ("loud", "echo no room >&2; exit 4", "(4): no room"),
    ):
        task = f"{{ansible.builtin.shell: {script!r}}}"
        (real.tree / f"{name}.yml").write_text(f"- hosts: all\n  gather_facts: false\n  tasks: [{task}]\n")
        state, _ = await ended(runner, await runner.start(real.request(f"{name}.yml", name)))
        assert isinstance(state.result, Failed)
        assert state.result.text.endswith(f"non-zero return code {said}")


async def test_nothing_of_a_run_stays_on_this_machine(real: AnsibleBackend) -> None:
    runner = real.runner()
    handle = await runner.start(real.request("ok.yml"))
    await ended(runner, handle)
    facts = RunDirectory(real.runs_dir / handle).read_metadata()
    sockets = facts["sockets"]
    assert (
        wrapper.find_processes(handle.encode(), os.fsencode(real.runs_dir / handle), sockets.encode()) == []
    )
    assert not Path(sockets).exists()


async def test_secrets_are_in_no_argument_and_in_no_readable_file(real: AnsibleBackend) -> None:
    secret = "correct-horse-battery"
    real.connection["ansible_become_password"] = secret
    runner = real.runner()
    handle = await runner.start(real.request("long.yml"))
    await wait_in_loop_until(real.has_work)
    lines = b"".join(wrapper.read_proc_file(f"/proc/{pid}/cmdline") for pid in real.processes_of(handle))
    environs = b"".join(wrapper.read_proc_file(f"/proc/{pid}/environ") for pid in real.processes_of(handle))
    assert b"ansible-playbook" in lines
    assert secret.encode() not in lines + environs
    directory = real.runs_dir / handle
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    holding = [
        path for path in directory.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()
    ]
    assert holding
    assert [path for path in holding if path.stat().st_mode & 0o077] == []
    assert {path.name for path in holding} == {"inventory.json", "connection.json"}
    await runner.cancel(handle)
    left = [path for path in directory.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert left == []


async def test_temporary_directory_of_plugin_is_no_template(real: AnsibleBackend, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    attack = f"/tmp/{{{{ lookup('pipe', 'touch {canary}') }}}}"
    real.connection["ansible_remote_tmp"] = {"__ansible_unsafe": attack}
    runner = real.runner()
    await ended(runner, await runner.start(real.request("change.yml")))
    assert not canary.exists()


async def test_run_removes_its_secrets_without_the_daemon(real: AnsibleBackend) -> None:
    secret = "correct-horse-battery"
    real.connection["ansible_become_password"] = secret
    runner = real.runner()
    handle = await runner.start(real.request("ok.yml"))
    await runner.close()
    directory = RunDirectory(real.runs_dir / handle)
    await wait_in_loop_until(lambda: directory.read_status() is not None)
    files = [path for path in real.runs_dir.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if secret.encode() in path.read_bytes()] == []


async def test_a_run_that_never_began_keeps_no_secret(real: AnsibleBackend) -> None:
    secret = "correct-horse-battery"

    def prepared(name: str) -> RunDirectory:
        directory = RunDirectory(real.runs_dir / name)
        directory.path.mkdir(parents=True)
        directory.write_metadata({"node": "n0", "connection": {"ansible_become_password": secret}})
        directory.write(directory.variables_file, {"token": secret})
        directory.write(directory.inventory_file, {"all": {"vars": {"token": secret}}})
        return directory

    seen, again, half = prepared("seen"), prepared("r1"), prepared("half")
    (half.path / "claim").write_text("daemon 1 1 another-boot")
    runner = real.runner()
    for handle in ("seen", "half"):
        assert isinstance((await runner.get_state(handle)).result, Unknown)
    await ended(runner, await runner.start(real.request("ok.yml")))
    for directory in (seen, again, half):
        files = [path for path in directory.path.rglob("*") if path.is_file()]
        assert [path for path in files if secret.encode() in path.read_bytes()] == []


async def test_start_cancelled_in_preparation_keeps_no_secret(real: AnsibleBackend) -> None:
    secret = "correct-horse-battery"
    real.connection["ansible_become_password"] = secret
    runner = real.runner()
    starting = asyncio.create_task(runner.start(real.request("ok.yml")))
    while not (real.runs_dir / "r1").exists():
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait({starting})
    assert starting.cancelled()
    # The thread that prepares the run is not cancelled with it; what is removed meanwhile may fail it.
    while any("ThreadPool.run" in repr(task) for task in asyncio.all_tasks()):
        await asyncio.sleep(0)
    await asyncio.sleep(0)  # the removal is the call's callback
    files = [path for path in (real.runs_dir / "r1").rglob("*") if path.is_file()]
    assert [path for path in files if secret.encode() in path.read_bytes()] == []
    again = await runner.start(real.request("ok.yml"))
    assert isinstance((await ended(runner, again))[0].result, Ok)


async def test_runs_that_never_began_are_swept_at_start(real: AnsibleBackend) -> None:
    directories = [RunDirectory(real.runs_dir / name) for name in ("unclaimed", "claimed", "running")]
    for directory in directories:
        directory.path.mkdir(parents=True)
        directory.write(directory.connection_file, {"ansible_become_password": "correct-horse-battery"})
    (directories[1].path / "claim").write_text("daemon 1 1 another-boot")
    (directories[2].path / "claim").write_text(f"run {os.getpid()} 1 this-boot")
    real.runner().artifacts.abandon_unbegun()
    assert [each.connection_file.exists() for each in directories] == [False, False, True]


async def test_no_log_hides_a_result_from_the_events(real: AnsibleBackend) -> None:
    state, directory, _ = await play(
        real,
        """
- hosts: all
  gather_facts: false
  tasks:
    - name: hidden
      ansible.builtin.fail: {msg: hunter2}
      no_log: true
""",
    )
    assert isinstance(state.result, Failed)
    assert state.result.text == 'task "hidden" failed on n0: the output is hidden by no_log'
    assert "hunter2" not in directory.events_file.read_text()


async def test_percent_counts_blocks_includes_handlers_and_rescues(real: AnsibleBackend) -> None:
    (real.tree / "more.yml").write_text(
        "- ansible.builtin.debug: {msg: a}\n- ansible.builtin.debug: {msg: b}\n"
    )
    state, directory, percents = await play(
        real,
        """
- hosts: others
  tasks: [{ansible.builtin.debug: {msg: not ours}}]
- hosts: all
  gather_facts: false
  handlers:
    - name: told
      ansible.builtin.debug: {msg: told}
  tasks:
    - block:
        - ansible.builtin.command: "false"
      rescue:
        - ansible.builtin.debug: {msg: rescued}
    - ansible.builtin.include_tasks: more.yml
    - ansible.builtin.command: "true"
      notify: told
    - ansible.builtin.debug: {msg: never}
      when: false
    - ansible.builtin.command: "false"
      ignore_errors: true
- hosts: all
  gather_facts: false
  tasks: [{ansible.builtin.meta: end_host}]
""",
    )
    assert isinstance(state.result, Ok)
    assert percents == sorted(percents)
    assert max(percents) < 100.0
    events = [line.event for line in directory.iter_events(0) if line.event["kind"] != "process"]
    assert events[0]["todo"] == 5
    assert events[-1]["done"] == events[-1]["todo"]
    assert [event["task"] for event in events if event.get("ends")] == ["ansible.builtin.meta"]
    assert [event["kind"] for event in events if event.get("host")] == [
        "failed", "ok", "ok", "ok", "ok", "changed", "skipped", "ignored", "ok",
    ]  # fmt: skip


async def test_the_output_is_kept_with_a_limit(real: AnsibleBackend) -> None:
    directory = RunDirectory(real.directory / "flood")
    directory.create()
    flood = "import sys\nfor n in range(1500000): print(n, 'x' * 10)\n"
    directory.write_command(
        run_id="flood",
        timeout_s=300.0,
        sockets=real.directory / "none",
        cwd=real.directory,
        argv=[sys.executable, "-c", flood],
        environment={},
    )
    held = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", wrapper.__file__, directory.path)
    assert await held.wait() == 0
    kept = sum(path.stat().st_size for path in directory.path.glob("output*"))
    assert kept <= wrapper.HEAD_BYTES + 2 * wrapper.TAIL_BYTES
    assert (directory.path / "output").read_text().startswith("0 xxx")
    assert directory.read_output_tail().startswith("[... the beginning is left out ...]")
    assert directory.read_output_tail().rstrip().endswith("1499999 xxxxxxxxxx")


async def test_a_named_interpreter_that_is_not_there_is_a_clear_error(real: AnsibleBackend) -> None:
    real.connection["ansible_python_interpreter"] = "/opt/nowhere/python3"
    runner = real.runner()
    request = real.request("change.yml")
    state, _ = await ended(runner, await runner.start(request))
    assert isinstance(state.result, Failed)
    assert "/opt/nowhere/python3" in state.result.text
    assert "ansible_python_interpreter" in state.result.text
    assert state.result.code is FailureCode.NEVER_STARTED


@pytest.mark.parametrize("fence", ["3.1", ""])
async def test_node_lost_in_its_first_task_is_not_unreached(real: AnsibleBackend, fence: str) -> None:
    runner = real.runner()
    handle = await runner.start(real.request("long.yml", fence=fence))
    await wait_in_loop_until(real.has_work)
    real.node.stop()
    state, _ = await ended(runner, handle)
    assert isinstance(state.result, Failed)
    # Without its fence nothing shows that the run had reached the node; the daemon always gives one.
    assert state.result.code is (FailureCode.LOST if fence else FailureCode.UNREACHABLE)


async def test_interpreter_is_discovered_until_a_run_replaces_it(real: AnsibleBackend) -> None:
    real.connection.pop("ansible_python_interpreter")
    programs = real.directory / "bin"
    programs.mkdir()
    (programs / "python3.13").symlink_to("/usr/bin/python3")
    discoveries = 0
    run_on_node = real.shell.run

    async def run(host: Host, command: str, *, timeout_s: float, stdin: str = "") -> ShellResult:
        nonlocal discoveries
        discoveries += "python3.13" in stdin
        return await run_on_node(host, f"PATH={programs}:$PATH; {command}", timeout_s=timeout_s, stdin=stdin)

    real.shell.run = run  # type: ignore[method-assign]
    runner = real.runner()
    for name, task, expected in (
        ("r1", "ping: {}", 1),
        ("r2", f"raw: mv {programs}/python3.13 {programs}/python3.12", 1),
        ("r3", "ping: {}", 2),
    ):
        (real.tree / "which.yml").write_text(f"- hosts: all\n  gather_facts: false\n  tasks: [{{{task}}}]\n")
        state, _ = await ended(runner, await runner.start(real.request("which.yml", name)))
        assert isinstance(state.result, Ok), state.result
        assert discoveries == expected, name


async def test_a_slot_is_free_again_when_its_run_has_ended(real: AnsibleBackend) -> None:
    runner = real.runner(parallel=1)
    first = await runner.start(real.request("long.yml"))
    await wait_in_loop_until(real.has_work)
    second = asyncio.create_task(runner.start(real.request("ok.yml", "r2")))
    third = asyncio.create_task(runner.start(real.request("ok.yml", "r3")))
    await asyncio.wait([second, third], timeout=0.2)
    assert not (real.runs_dir / "r2").exists()
    assert list(runner.status.waiting) == ["n0"]
    third.cancel()
    await runner.cancel(first)
    assert isinstance((await ended(runner, await second))[0].result, Ok)
    assert real.started_runs() == ["r2"]


async def test_the_trees_own_configuration_is_honoured(real: AnsibleBackend) -> None:
    plugins = real.tree / "plugins"
    plugins.mkdir()
    (plugins / "theirs.py").write_text(
        "from ansible.plugins.callback import CallbackBase\n"
        "class CallbackModule(CallbackBase):\n"
        "    CALLBACK_TYPE, CALLBACK_NAME = 'notification', 'theirs'\n"
        "    def v2_playbook_on_start(self, playbook): self._display.display('theirs was here')\n"
    )
    base = real.directory / "remote"
    (real.tree / "ansible.cfg").write_text(f"[defaults]\ncallback_plugins = plugins\nremote_tmp = {base}\n")
    state, _, _ = await play(
        real,
        "- hosts: all\n  gather_facts: false\n  tasks:\n"
        "    - ansible.builtin.command: echo here\n"
        "    - ansible.builtin.debug: {var: ansible_remote_tmp}\n",
    )
    assert isinstance(state.result, Ok)
    assert "theirs was here" in state.result.output
    assert f'"ansible_remote_tmp": "{base}/rolloutd-run-' in state.result.output
    assert "-r1+" in state.result.output
    assert list(base.iterdir()) == []


@pytest.mark.parametrize("playbook", ["../ok.yml", "/etc/hostname"])
async def test_a_playbook_outside_its_tree_is_refused(real: AnsibleBackend, playbook: str) -> None:
    (real.directory / "ok.yml").write_text("- hosts: all\n")
    runner = real.runner()
    state, _ = await ended(runner, await runner.start(real.request(playbook)))
    assert isinstance(state.result, Failed)
    assert "outside the source" in state.result.text


@pytest.mark.parametrize("run", ["", "../r1", "a b", "a/b", ".hidden"])
async def test_a_run_is_named_by_a_file_name(real: AnsibleBackend, run: str) -> None:
    with pytest.raises(ValueError, match="is not a run id"):
        await real.runner().start(real.request("ok.yml", run))


async def test_clear_touches_no_other_node_of_the_same_process_table(real: AnsibleBackend) -> None:
    runner = real.runner()
    handle = await runner.start(real.request("long.yml"))
    await wait_in_loop_until(real.has_work)
    assert isinstance(
        await runner.clean_up_stale_runs(Host("n1", connection=real.connection), timeout_s=2.0), Ok
    )
    assert real.has_work()
    assert (await runner.get_state(handle)).result is None
    await runner.cancel(handle)


async def test_clear_finds_raw_commands_and_their_children(real: AnsibleBackend) -> None:
    (real.tree / "raw.yml").write_text(
        "- hosts: all\n  gather_facts: false\n  tasks:\n"
        "    - ansible.builtin.raw: trap '' HUP; (trap '' HUP; exec sleep 8642) & wait\n"
    )
    runner = real.runner()
    handle = await runner.start(real.request("raw.yml"))
    await wait_in_loop_until(real.has_work)
    real.kill(handle)
    assert isinstance((await ended(runner, handle))[0].result, Unknown)
    assert real.processes_of(handle) == []
    assert real.has_work()
    cleared = await runner.clean_up_stale_runs(real.host(), timeout_s=2.0)
    assert isinstance(cleared, Ok)
    assert cleared.text.startswith("ended ")
    assert not real.has_work()


async def test_clear_follows_what_outlives_its_marked_parents(real: AnsibleBackend) -> None:
    """A module's child bears no mark; one that minds no TERM is killed, after all who led to it are gone."""
    (real.tree / "stubborn.yml").write_text(
        "- hosts: all\n  gather_facts: false\n  tasks:\n"
        "    - ansible.builtin.command: sh -c 'trap \"\" TERM; exec sleep 8642'\n"
    )
    runner = real.runner()
    handle = await runner.start(real.request("stubborn.yml"))
    await wait_in_loop_until(real.has_work)
    real.kill(handle)
    assert isinstance((await ended(runner, handle))[0].result, Unknown)
    assert isinstance(await runner.clean_up_stale_runs(real.host(), timeout_s=2.0), Ok)
    assert not real.has_work()


async def test_clear_looks_again_for_a_command_that_was_on_its_way(real: AnsibleBackend) -> None:
    """The node starts it between two looks; between them the test holds clear's own sleep."""
    mark = stale_processes.RunMarkers(str(real.runs_dir)).run_marker("n0", "r1")
    runner = real.runner()
    async with asyncio.TaskGroup() as group:
        clearing = group.create_task(runner.clean_up_stale_runs(real.host(), timeout_s=2.0))
        await wait_in_loop_until(lambda: bool(real.commands(b"sleep\x001\x00")))
        (pause,) = real.commands(b"sleep\x001\x00")
        os.kill(pause, signal.SIGSTOP)
        late = group.create_task(real.shell.run(real.host(), f": {mark}; sleep 8642; :", timeout_s=60.0))
        await wait_in_loop_until(real.has_work)
        os.kill(pause, signal.SIGCONT)
        cleared = await clearing
        assert isinstance(cleared, Ok)
        assert cleared.text.startswith("ended ")
        assert not real.has_work()
        await late


async def test_clear_says_when_a_node_cannot_be_asked(real: AnsibleBackend) -> None:
    runner = real.runner()
    real.node.stop()
    cleared = await runner.clean_up_stale_runs(real.host(), timeout_s=2.0)
    assert isinstance(cleared, Failed)
    assert cleared.text.startswith("n0 could not be asked")


TWO_COMMANDS = """
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.raw: "echo first >> {{ rolloutd_test_log }}; sleep 8642"
      ignore_errors: true
    - ansible.builtin.raw: "echo second >> {{ rolloutd_test_log }}"
      ignore_errors: true
    - ansible.builtin.command: "touch {{ rolloutd_test_log }}.third"
"""


async def test_superseded_run_of_another_machine_acts_no_more(
    real: AnsibleBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(older_runs, "INHERITED_TIMEOUT_S", 2.0)
    (real.tree / "two.yml").write_text(TWO_COMMANDS)
    shared = SharedOutput(DirectoryStore(tmp_path / "shared"))
    there = real.runner(tmp_path / "there", machine="a" * 12, marks="db", shared_output=shared)
    here = real.runner(
        tmp_path / "here", machine="b" * 12, marks="db", shared_output=shared, inherited_nodes=["n0"]
    )
    run = there.run_id_here("r1")
    handle = await there.start(real.request("two.yml", run, fence="3.10 db 1000"))
    assert (there.is_elsewhere(handle), here.is_elsewhere(handle)) == (False, True)
    await wait_in_loop_until(lambda: real.started_runs() == ["first"])
    # The first run of this machine on the node ends what the other one began.
    mine = await here.start(real.request("ok.yml", here.run_id_here("r1"), fence="4.1 db 1001"))
    state = await wait_for_end(there, handle)
    assert isinstance(state.result, Failed)
    assert isinstance((await wait_for_end(here, mine)).result, Ok)
    assert real.started_runs() == ["first", mine]
    said = [event async for event in there.read_events(handle)]
    assert said
    assert [event async for event in here.read_events(handle)] == said, "its end is shared"
    assert [event async for event in here.read_events(mine)] != said
    third = real.runner(tmp_path / "third", machine="c" * 12, marks="db", shared_output=shared)
    ended = [event async for event in third.read_events(third.run_id_here("r1"))]
    assert ended == said, "an ended stage names no machine"
    assert {path.name for path in (tmp_path / "shared" / handle).iterdir()} <= {"events.jsonl", "output"}
    assert not (real.directory / "starts.third").exists()
