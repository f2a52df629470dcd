"""What plans may say, and which functions create the adapters."""

from rolloutd.plugin import Capability, CheckParams, Field, Params, Registration, TemplateText


class IsolatorParams(Params):
    """Takes the node out of service by a flag file on it."""

    path: TemplateText = Field(description="The flag file; while it exists, the node gets no traffic.")


class HealthParams(CheckParams):
    """The node has no file that says that it is sick."""

    path: TemplateText = Field(description="The file that a sick node has; its first line says why.")


ISOLATOR = Registration("rolloutd_flagfile.adapters:create_isolator", IsolatorParams)
CHECK = Registration(
    "rolloutd_flagfile.adapters:create_check", HealthParams, frozenset({Capability.JUDGES_LIVENESS})
)
