"""Ports: one Protocol per external system of the daemon.

The daemon and the drivers import ports and no adapter; adapters import ports and never the daemon.  A port's
fake and its real adapters pass the same contract suite.  Instants are epoch seconds, durations seconds.
"""

from machines.model.step_record import Busy as Busy
from machines.model.step_record import Failed as Failed
from machines.model.step_record import Ok as Ok
from machines.model.step_record import StepResult as StepResult
from machines.model.step_record import Unknown as Unknown
from rolloutd.ports.artifacts import *
from rolloutd.ports.context import *
from rolloutd.ports.host_variables import *
from rolloutd.ports.leadership import *
from rolloutd.ports.node_guard import *
from rolloutd.ports.nodes import *
from rolloutd.ports.preparation import *
from rolloutd.ports.runs import *
from rolloutd.ports.sources import *
from rolloutd.ports.steps import *
from rolloutd.ports.store import *
from rolloutd.ports.types import *
