"""The smallest working new kind of node and of prepare stage, for `make touches`."""

from __future__ import annotations

from typing import Final

from tests.docs.touch_parts import Part

PREPARE_KIND: Final = Part(
    "a prepare kind",
    (
        ("machines/model/preparation.py", '    INSTALL = "install"\n', '    PRECHECK = "precheck"\n'),
        (
            "rolloutd/planfile/prepare.py",
            '"Nodes at once, after the first canary."\n    )\n',
            '''

class Precheck(_NodeStage):
    """Run a playbook that only looks, on all nodes in service at once."""

    playbook: Playbook = Field(description="Playbook, a path inside the source.")
    max_parallel: int = Field(default=100, ge=1, le=MAX_PREPARE_PARALLEL, description="Nodes at once.")
''',
        ),
        (
            "rolloutd/planfile/prepare.py",
            'description="Run a playbook on each node in service.")\n',
            '    precheck: Precheck = Field(default=ABSENT, description="Run a playbook that only looks.")\n',
        ),
    ),
    """
import asyncio, tempfile
from pathlib import Path
from machines.model.decision import Prepare
from machines.scheduler.decide import decide
from tests.rolloutd.control_environment import control_environment
from tests.rolloutd.preparation_environment import Fleet, plan_with, prepare_all
async def main(directory):
    async with control_environment(directory) as inside:
        rollout = await inside.start(text=plan_with("look").replace("{install:", "{precheck:"))
        assert len(decide(inside.state.index, inside.clock.now()).of(Prepare)) == 4
        await prepare_all(inside, fleet := Fleet())
        assert len(fleet.runs) == 4
        rows = await inside.state.store.load_preparations(rollout)
        assert [row.state.value for row in rows] == ["done"] * 4
with tempfile.TemporaryDirectory() as directory:
    asyncio.run(main(Path(directory)))
""",
)

NODE_KIND: Final = Part(
    "a node kind",
    (
        ("machines/model/node.py", '    KUBERNETES = "kubernetes"\n', '    SWITCH = "switch"\n'),
        (
            "pyproject.toml",
            '[project.entry-points."rolloutd.inventories"]\n',
            'switches = "rolloutd.adapters.switches:INVENTORY"\n',
        ),
    ),
    """
import asyncio, tempfile, tomllib
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from machines.model.preparation import selector_labels
from machines.model.selector import parse_selector
from rolloutd.engine.background.inventory_merge import merge_inventories
from rolloutd.plugin import Registration
from tests.machines.builders import index_of, submit
groups = tomllib.loads(Path("pyproject.toml").read_text())["project"]["entry-points"]
registration = resolve_name(groups["rolloutd.inventories"]["switches"])
assert isinstance(registration, Registration)
with tempfile.TemporaryDirectory() as directory:
    (Path(directory) / "list").write_text("sw1 team-a\\n")
    context = SimpleNamespace(params={"file": f"{directory}/list"})
    found = asyncio.run(resolve_name(registration.factory)(context).refresh())
(node,) = merge_inventories(found).nodes.values()
assert parse_selector("kind=switch").matches(selector_labels(node))
index = index_of([node])
submit(index, "R")
assert [target.node for target in index.targets("R")] == ["sw1"]
""",
    {
        "rolloutd/adapters/switches.py": '''"""An inventory of switches, by name and team in a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rolloutd.errors import SourceFailed
from rolloutd.plugin import NodeKind, Params, Registration
from rolloutd.ports import DiscoveredNode, AdapterContext


class SwitchesParams(Params):
    """Switches from a list."""

    file: str


class SwitchInventory:
    source = "switches"

    def __init__(self, context: AdapterContext) -> None:
        self._file = Path(str(context.params["file"]))

    async def refresh(self) -> Sequence[DiscoveredNode]:
        try:
            lines = [line.split() for line in self._file.read_text().splitlines()]
        except OSError as error:
            raise SourceFailed(str(error)) from error
        return [DiscoveredNode(name, self.source, NodeKind.SWITCH, {"team": team}) for name, team in lines]


INVENTORY = Registration("rolloutd.adapters.switches:SwitchInventory", SwitchesParams)
''',
    },
)
