"""The console under load: ten thousand nodes in five hundred pools, a thousand events a second.

A replayed fleet speaks at a real socket; the console draws into a real
pseudo-terminal, and what it writes there is read as a terminal would.  An event
is on the screen when the console has drawn its number, or a later one, on the
line at the top; a key is answered when what it asks for is drawn.

    BENCH_CONSOLE_S=300 python -m bench console

The figures include the memory at each quarter of the run, the CPU time of an event
and of a key, and how long the console waited for a core: waits that the machine caused.
Both child processes end with this one, also if it is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import random
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tests.support.replay_server import ReplayServer  # noqa: E402
from tests.support.replayed_fleet import ReplayedFleet  # noqa: E402

POOLS, PER_POOL = 500, 20
EVENTS_PER_S = 1_000
SECONDS = float(os.environ.get("BENCH_CONSOLE_S", "60"))
WARM_S = 5.0
SIZE = (200, 50)
TICK_S = 0.01
KEY_EVERY_S = 0.5
QUIET_KEYS = 40
LIMIT_S = 60.0
"""How long anything may take on a loaded machine before the measurement fails."""

AIM_S = {"first screen": 1.0, "event": 0.150, "key": 0.150}
AIM_MIB = 200

SHOWN = re.compile(rb"live (?:\x1b\[[0-9;]*m)+([\d,]+) ")


# -- the fleet, a process of its own -------------------------------------------


def serve_fleet(socket: Path) -> None:
    """Serve a fleet; move it for the seconds of each input line, then print when each event was written."""
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    fleet = ReplayedFleet(pools=POOLS, per_pool=PER_POOL, at=time.time())
    fleet.open_gates |= {("start", ""), ("continue", "canary")}
    fleet.state = "running"
    voice = ReplayServer(fleet, socket)
    print("ready", flush=True)
    mover = FleetMover(fleet)
    for line in sys.stdin:
        first, sent = fleet.seq + 1, mover.move_for(voice, float(line))
        print(first, *(f"{at:.6f}" for at in sent), flush=True)
    voice.close()


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


class FleetMover:
    """Walks nodes through their phases, over and over."""

    def __init__(self, fleet: ReplayedFleet) -> None:
        self._fleet = fleet
        self._names = list(fleet.nodes)
        self._chance = random.Random(7)

    def move_for(self, server: ReplayServer, seconds: float) -> list[float]:
        """Write events evenly and return when each was written (monotonic)."""
        sent: list[float] = []
        began = time.monotonic()
        progressed = began
        while (now := time.monotonic()) < began + seconds:
            for _ in range(int((now - began) * EVENTS_PER_S) - len(sent)):
                self._fleet.at = time.time()
                self._move()
                sent.append(time.monotonic())
            if now - progressed > 0.2:
                progressed = now
                server.push_progress()
            time.sleep(TICK_S)
        return sent

    def _move(self) -> None:
        name = self._chance.choice(self._names)
        match self._fleet.nodes[name]["phase"]:
            case "pending" if len(self._fleet.in_progress) < POOLS:
                self._fleet.move(name, "isolating")
            case "isolating":
                self._fleet.move(name, "maintaining")
            case "maintaining":
                self._fleet.move(name, "verifying")
            case "verifying":
                self._fleet.move(name, "done", outcome="changed")
            case _:
                busy = next(iter(self._fleet.in_progress), None)
                if busy is None:
                    self._fleet.reset_node(name)
                    self._fleet.move(name, "isolating")
                else:
                    self._forward(busy)

    def _forward(self, name: str) -> None:
        after = {"isolating": "maintaining", "maintaining": "verifying"}
        phase = self._fleet.nodes[name]["phase"]
        if phase in after:
            self._fleet.move(name, after[phase])
        else:
            self._fleet.move(name, "done", outcome="changed")


# -- the console in a terminal --------------------------------------------------


class ConsoleScreen:
    """Reads what the console draws, as fast as it draws it, and notes when what was first seen."""

    def __init__(self, command: list[str]) -> None:
        self.began = time.monotonic()
        self.process, self._fd = _spawn(command)
        self.shown: list[tuple[float, int]] = []
        self.drawn = 0
        self._text = b""
        self._waits: list[tuple[bytes, threading.Event]] = []
        self._seen_at = 0.0
        threading.Thread(target=self._read, daemon=True).start()

    def press(self, key: bytes, answer: bytes) -> float:
        """Press a key and return the seconds until its answer was drawn."""
        seen = threading.Event()
        self._waits = [(answer, seen)]
        began = time.monotonic()
        os.write(self._fd, key)
        if not seen.wait(LIMIT_S):
            raise SystemExit(f"no {answer!r} after {key!r}")
        return self._seen_at - began

    def wait(self, answer: bytes) -> float:
        """Wait until something is drawn; return the seconds since the console was started."""
        seen = threading.Event()
        self._waits = [(answer, seen)]
        if answer in self._text:
            seen.set()
        if not seen.wait(LIMIT_S):
            raise SystemExit(f"{answer!r} never appeared: {self._text[-2000:]!r}")
        return (self._seen_at or time.monotonic()) - self.began

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self._fd, 1 << 16)
            except OSError:
                return
            now = time.monotonic()
            self.drawn += len(chunk)
            self._text = (self._text + chunk)[-200_000:]
            for found in SHOWN.finditer(self._text[-len(chunk) - 64 :]):
                self.shown.append((now, int(found[1].replace(b",", b""))))
            for answer, seen in self._waits:
                if answer in self._text[-len(chunk) - len(answer) :] and not seen.is_set():
                    self._seen_at = now
                    seen.set()

    def resident_mib(self) -> float:
        """Return the memory of the console's process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]

    def close(self) -> None:
        """End the console, by force if it does not end by itself."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LIMIT_S / 10)
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


def _spawn(command: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", SIZE[1], SIZE[0], 0, 0))
    environment = {
        **os.environ,
        "TERM": "xterm-256color",
        "COLORTERM": "truecolor",
        "PYTHONPATH": str(HERE.parent),
    }
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(theirs)
    return process, ours


def _take_terminal() -> None:
    """Make the terminal the console's own: the kernel hangs the console up when this process ends."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def main() -> None:
    """Measure and print."""
    # An interrupt from outside must pass the `finally` below like any other exit.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="rb-") as base:
        socket = Path(base) / "s"
        words = [sys.executable, __file__, "--speak", str(socket)]
        speaker = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert speaker.stdin is not None
            assert speaker.stdout is not None
            speaker.stdout.readline()
            _measure(socket, speaker)
        finally:
            speaker.kill()
            speaker.wait()


def _measure(socket: Path, speaker: subprocess.Popen[str]) -> None:
    assert speaker.stdin is not None
    assert speaker.stdout is not None
    command = [sys.executable, "-P", "-m", "rolloutd.cli", "--socket", str(socket), "tui", "--theme", "dark"]
    with _console(command) as screen:
        first = screen.wait(b"kernel-x7k2p")
        screen.press(b"\r", b"POOLS")
        screen.wait(b"soak")
        _move_fleet(speaker, WARM_S)
        speaker.stdout.readline()
        key_cpu = _quiet_key_cpu(screen)
        memory = [screen.resident_mib()]
        screen.shown.clear()
        drawn, used = screen.drawn, _cpu_s(screen.process.pid)
        _move_fleet(speaker, SECONDS)
        keys = _keys(screen, SECONDS, memory)
        written = speaker.stdout.readline().split()
        time.sleep(1.0)
        late = _latencies(int(written[0]), [float(at) for at in written[1:]], screen.shown)
        cpu = [after - before for after, before in zip(_cpu_s(screen.process.pid), used, strict=True)]
        memory.append(screen.resident_mib())
        figures = _figures(first, late, keys, memory, cpu)
        figures |= {"key_cpu_ms": round(key_cpu * 1000, 1)}
        figures |= {"drawn_kib_s": round((screen.drawn - drawn) / SECONDS / 1024)}
    _print_figures(figures)


@contextmanager
def _console(command: list[str]) -> Iterator[ConsoleScreen]:
    screen = ConsoleScreen(command)
    try:
        yield screen
    finally:
        screen.close()


def _move_fleet(speaker: subprocess.Popen[str], seconds: float) -> None:
    assert speaker.stdin is not None
    speaker.stdin.write(f"{seconds}\n")
    speaker.stdin.flush()


def _quiet_key_cpu(screen: ConsoleScreen) -> float:
    """Return the console's CPU seconds for a key while no event comes."""
    before, _ = _cpu_s(screen.process.pid)
    for _ in range(QUIET_KEYS // 2):
        screen.press(b"?", b"ON THIS PAGE")
        screen.press(b"\x7f", b"digest")
    return (_cpu_s(screen.process.pid)[0] - before) / QUIET_KEYS


def _figures(
    first: float, late: list[float], keys: list[float], memory: list[float], cpu: list[float]
) -> dict[str, Any]:
    """Return the figures; `cpu` are the seconds at work and those spent waiting for a core."""
    return {
        "bench": "console",
        "seconds": SECONDS,
        "events": len(late),
        "first_screen_s": round(first, 2),
        "event_p50_ms": _percentile_ms(late, 0.5),
        "event_p99_ms": _percentile_ms(late, 0.99),
        "event_max_ms": _percentile_ms(late, 1.0),
        "keys": len(keys),
        "key_p50_ms": _percentile_ms(keys, 0.5),
        "key_p99_ms": _percentile_ms(keys, 0.99),
        "key_max_ms": _percentile_ms(keys, 1.0),
        "memory_mib": [round(each) for each in memory],
        "event_cpu_us": round(cpu[0] / max(1, len(late)) * 1e6),
        "core_share": round(cpu[0] / SECONDS, 2),
        "waited_share": round(cpu[1] / SECONDS, 2),
    }


def _percentile_ms(in_order: list[float], part: float) -> int:
    return round(in_order[min(int(len(in_order) * part), len(in_order) - 1)] * 1000)


def _print_figures(figures: dict[str, Any]) -> None:
    """Print the figures, for people and as one line of JSON."""
    warm, *then = figures["memory_mib"]
    print(f"first screen        {figures['first_screen_s']:8.2f} s     (aim {AIM_S['first screen']:.0f})")
    for kind in ("event", "key"):
        aim = AIM_S[kind] * 1000
        p50, p99, longest = (figures[f"{kind}_{name}_ms"] for name in ("p50", "p99", "max"))
        count = f"{figures[f'{kind}s']:,} (aim {aim:.0f})"
        print(f"{kind:<5} to screen     {p99:8} ms    p99 of {count}, median {p50}, max {longest}")
    print(f"memory              {warm:8} MiB   when warm (aim {AIM_MIB}), then {' '.join(map(str, then))}")
    print(f"CPU of an event     {figures['event_cpu_us']:8} us    {figures['core_share']:.0%} of a core")
    print(f"CPU of a key        {figures['key_cpu_ms']:8} ms    while no event comes")
    print(
        f"waited for a core   {figures['waited_share']:8.0%}       of the time, because the machine was busy"
    )
    print(json.dumps(figures))


def _keys(screen: ConsoleScreen, seconds: float, memory: list[float]) -> list[float]:
    """Open and leave the help, and move in the pools; return the waits in order.

    `memory` gets the console's memory at each quarter.
    """
    took: list[float] = []
    start = time.monotonic()
    until = start + seconds - LIMIT_S / 10
    while (began := time.monotonic()) < until:
        took.append(screen.press(b"?", b"ON THIS PAGE"))
        took.append(screen.press(b"\x7f", b"digest"))
        os.write(screen._fd, b"\t\x1b[6~")
        if time.monotonic() >= start + len(memory) * seconds / 4:
            memory.append(screen.resident_mib())
        time.sleep(max(0.0, KEY_EVERY_S - (time.monotonic() - began)))
    return sorted(took)


def _latencies(first: int, sent: list[float], shown: list[tuple[float, int]]) -> list[float]:
    found: list[float] = []
    place = 0
    for number, at in enumerate(sent):
        while place < len(shown) and shown[place][1] < first + number:
            place += 1
        if place < len(shown):
            found.append(max(0.0, shown[place][0] - at))
    if len(found) < len(sent) * 0.99:
        raise SystemExit(f"only {len(found)} of {len(sent)} events were ever shown")
    return sorted(found)


def _cpu_s(process_id: int) -> tuple[float, float]:
    """Return the CPU seconds of the process, and the seconds that its first thread waited for a core."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    waited_ns = int(Path(f"/proc/{process_id}/schedstat").read_text().split()[1])
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), waited_ns / 1e9


if __name__ == "__main__":
    if sys.argv[1:2] == ["--speak"]:
        serve_fleet(Path(sys.argv[2]))
    else:
        main()
