"""The console under load: ten thousand nodes in five hundred pools, a thousand events a second.

A replayed fleet speaks at a real socket; the console draws into a real
pseudo-terminal, and what it writes there is read as a terminal would.  An event
is on the screen when the console has drawn its number, or a later one, on the
line at the top; a key is answered when what it asks for is drawn.

    BENCH_CONSOLE_S=300 python -m bench console

Memory is told at each quarter of the run, so that growth is seen; and how long
the console stood ready and had no core, which says how far the waits are the
machine's.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import random
import re
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from rolloutd.control.client import Client, api_path  # noqa: E402
from tests.support.replay_server import ReplayServer  # noqa: E402
from tests.support.replayed_fleet import ReplayedFleet  # noqa: E402

POOLS, PER_POOL = 500, 20
EVENTS_PER_S = 1_000
SECONDS = float(os.environ.get("BENCH_CONSOLE_S", "60"))
WARM_S = 5.0
SIZE = (200, 50)
TICK_S = 0.01
KEY_EVERY_S = 1.0
LIMIT_S = 30.0
AIM_S = {"first screen": 1.0, "event": 0.150, "key": 0.100}
AIM_MIB = 200

SHOWN = re.compile(rb"live (?:\x1b\[[0-9;]*m)+([\d,]+) ")


# -- the fleet, a process of its own -------------------------------------------


def serve_fleet(socket: Path) -> None:
    """Serve a fleet; move it for so many seconds per line of our input, and say when each event was."""
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
        """End the console."""
        self.process.terminate()
        self.process.wait(LIMIT_S)


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
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    return process, ours


def main() -> None:
    """Measure and print."""
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
    screen = ConsoleScreen(command)
    first = screen.wait(b"kernel-x7k2p")
    screen.press(b"\r", b"POOLS")
    screen.wait(b"soak")
    speaker.stdin.write(f"{WARM_S}\n")
    speaker.stdin.flush()
    speaker.stdout.readline()
    memory = [screen.resident_mib()]
    screen.shown.clear()
    drawn, used = screen.drawn, _cpu_s(screen.process.pid)
    speaker.stdin.write(f"{SECONDS}\n")
    speaker.stdin.flush()
    keys = _keys(screen, SECONDS, memory)
    told = speaker.stdout.readline().split()
    time.sleep(1.0)
    late = _latencies(int(told[0]), [float(at) for at in told[1:]], screen.shown)
    at_work, stood = (after - before for after, before in zip(_cpu_s(screen.process.pid), used, strict=True))
    memory.append(screen.resident_mib())
    done = Client(socket).get(api_path("status"))["rollouts"][0]["done"]
    screen.close()
    _print_figures(first, late, keys, memory, at_work / SECONDS, stood / SECONDS)
    print(f"drawn                        {(screen.drawn - drawn) / SECONDS / 1024:8.0f} KiB/s")
    print(f"nodes done at the end        {done:8,}")


def _print_figures(
    first: float, late: list[float], keys: list[float], memory: list[float], at_work: float, state: float
) -> None:
    """Print the figures, for people and as one line of JSON."""
    figures = {
        "bench": "console",
        "seconds": SECONDS,
        "events": len(late),
        "first_screen_s": round(first, 2),
        "event_p50_ms": round(late[len(late) // 2] * 1000),
        "event_p99_ms": round(late[int(len(late) * 0.99)] * 1000),
        "event_most_ms": round(late[-1] * 1000),
        "keys": len(keys),
        "key_p50_ms": round(keys[len(keys) // 2] * 1000),
        "key_most_ms": round(keys[-1] * 1000),
        "memory_mib": [round(each) for each in memory],
        "core_share": round(at_work, 2),
        "stood_share": round(state, 2),
    }
    quarters = " ".join(f"{each:.0f}" for each in memory[1:])
    print(f"first screen                 {first:8.2f} s      (aim {AIM_S['first screen']:.0f})")
    print(f"event to screen      median  {figures['event_p50_ms']:8} ms")
    print(
        f"                     p99     {figures['event_p99_ms']:8} ms     (aim {AIM_S['event'] * 1000:.0f})"
    )
    counted = f"of {len(late):,} events in {SECONDS:.0f} s"
    print(f"                     most    {figures['event_most_ms']:8} ms     {counted}")
    print(f"key to its answer    median  {figures['key_p50_ms']:8} ms")
    print(
        f"                     most    {figures['key_most_ms']:8} ms     of {len(keys)} keys"
        f" (aim {AIM_S['key'] * 1000:.0f})"
    )
    print(f"memory               warm    {memory[0]:8.0f} MiB    (aim {AIM_MIB})")
    print(f"                     then    {quarters} MiB, at each quarter and at the end")
    print(
        f"share of one core            {at_work * 100:8.0f} %      ({state * 100:.0f} % it was kept waiting)"
    )
    print(json.dumps(figures))


def _keys(screen: ConsoleScreen, seconds: float, memory: list[float]) -> list[float]:
    """Open and leave the help once a second, and move in the pools; return the waits.

    Into `memory` goes what the console has at each quarter.
    """
    took: list[float] = []
    start = time.monotonic()
    until = start + seconds - LIMIT_S / 10
    while (began := time.monotonic()) < until:
        took.append(screen.press(b"?", b"DECIDE AND ACT"))
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
    """Return the seconds that the process was at work, and those that its first thread waited for a core."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    stood_ns = int(Path(f"/proc/{process_id}/schedstat").read_text().split()[1])
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), stood_ns / 1e9


if __name__ == "__main__":
    if sys.argv[1:2] == ["--speak"]:
        serve_fleet(Path(sys.argv[2]))
    else:
        main()
