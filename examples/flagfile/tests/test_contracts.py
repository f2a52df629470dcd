"""The isolator and the check pass the suites that rolloutd ships."""

from contextlib import asynccontextmanager

from rolloutd_flagfile.adapters import FlagFileIsolator, HealthCheck
from rolloutd_flagfile.registration import ISOLATOR

from rolloutd.contracts import CheckContract, IsolatorContract, LocalShell, SystemClock
from rolloutd.ports import Host


class Backend:
    def __init__(self, directory):
        self.file = directory / "flag"
        self.host, self.params, self.clock = Host("n1"), {"path": str(self.file)}, SystemClock()
        self.isolator, self.check = FlagFileIsolator(LocalShell()), HealthCheck(LocalShell())

    async def is_isolated(self):
        return self.file.exists()

    async def isolate_from_outside(self):
        self.file.touch()

    async def break_node(self):
        self.file.write_text("disk full\n")

    async def repair_node(self):
        self.file.unlink()

    async def state(self):
        return self.file.exists()


@asynccontextmanager
async def open_backend(self, directory):
    yield Backend(directory)


class TestIsolator(IsolatorContract):
    registration, open_backend = ISOLATOR, open_backend


class TestCheck(CheckContract):
    open_backend = open_backend
