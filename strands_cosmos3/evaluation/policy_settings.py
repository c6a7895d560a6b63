"""Options of the policy that is evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from strands_cosmos3.options import changed_options, option, options_of
from strands_cosmos3.policy.options import PolicyOptions

EVALUATED_BACKENDS = ("scripted", "native", "onnx", "diffusers", "service", "python")


@dataclass(frozen=True, kw_only=True)
class PolicySettings(PolicyOptions):
    """The policy that is evaluated."""

    backend: (  # pyright: ignore[reportIncompatibleVariableOverride]
        Literal["scripted", "native", "onnx", "diffusers", "service", "python"] | None
    ) = None
    """Source of actions: a checkpoint that sees camera images (native, onnx, as which the bundled
    one runs by default where ONNX Runtime is installed, or diffusers), the scripted expert, which
    reads the simulator's state and solves our tasks and libero_object, a policy server (service),
    or an object (python).
    """
    policy: str | None = option(None, "python")
    """For python: module:name of a class or function without arguments; what it makes has
    get_actions_sync.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the options that are set, by name, for JSON; without the token."""
        return {
            "backend": self.backend,
            "model": self.model,
            **{
                name: value
                for name, value in changed_options(self).items()
                if name in POLICY_OPTIONS
            },
        }


POLICY_OPTIONS = tuple(
    name for name, option in options_of(PolicySettings).items() if not option.hidden
)
"""Names of the options that a TOML file and the command line may have."""
