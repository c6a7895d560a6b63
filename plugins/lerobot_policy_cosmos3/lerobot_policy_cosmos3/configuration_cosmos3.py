"""The configuration of the policy type ``cosmos3``: which checkpoint runs, and what it reads and
answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature, PreTrainedConfig
from lerobot.optim import AdamWConfig
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE

from strands_cosmos3.errors import ConfigError

BUNDLED = "bundled"
VIEWS = ("wrist", "exterior_1", "exterior_2")
# seven joint angles [rad] and the open fraction of the gripper, in states and in actions
_ARM = (8,)
_NO_TRAINING = (
    "this plugin runs policies; train them with `strands-cosmos3 train` and "
    "name the result as model."
)


def _inputs() -> dict[str, PolicyFeature]:
    picture = PolicyFeature(FeatureType.VISUAL, (3, 180, 320))
    return {
        OBS_STATE: PolicyFeature(FeatureType.STATE, _ARM),
        **{f"{OBS_IMAGES}.{view}": picture for view in VIEWS},
    }


@PreTrainedConfig.register_subclass("cosmos3")
@dataclass
class Cosmos3Config(PreTrainedConfig):
    """Cosmos 3 that drives a Franka Panda.

    Args:
        input_features: ``observation.state`` (8: seven joint angles [rad], open fraction of the
            gripper) and the pictures ``observation.images.wrist``, ``.exterior_1`` and
            ``.exterior_2``. LeRobot's policy server resizes pictures to the shapes given here.
        output_features: ``action`` (8, as the state): joint angles and the open fraction.
        model: ``"bundled"``, a checkpoint's folder, or its repository on the Hugging Face hub.
        embodiment: Name of the embodiment, e.g. ``"droid"``.
        fps: Rate of the loop that applies the actions; None is the checkpoint's own, 15 Hz for
            DROID.
        n_action_steps: Actions that ``select_action`` takes from a chunk; None is the checkpoint's
            own number.
        seed: Noise seed; each chunk of an episode uses the next one.
        options: Further options of ``strands_cosmos3.policy.options.PolicyOptions`` by name, e.g.
            ``{"num_steps": 2, "policy_frames": 1}``.
    """

    input_features: dict[str, PolicyFeature] | None = field(default_factory=_inputs)
    output_features: dict[str, PolicyFeature] | None = field(
        default_factory=lambda: {ACTION: PolicyFeature(FeatureType.ACTION, _ARM)}
    )
    normalization_mapping: dict[str, NormalizationMode] = field(
        default_factory=lambda: dict.fromkeys(
            ("STATE", "VISUAL", "ACTION"), NormalizationMode.IDENTITY
        )
    )
    model: str = BUNDLED
    embodiment: str = "droid"
    fps: float | None = None
    n_action_steps: int | None = None
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def validate_features(self) -> None:
        """Raise ConfigError unless state and action are the arm's eight numbers and the three
        pictures are there.
        """
        for name, feature in ((OBS_STATE, self.robot_state_feature), (ACTION, self.action_feature)):
            if feature is None or tuple(feature.shape) != _ARM:
                found = None if feature is None else tuple(feature.shape)
                raise ConfigError(
                    f"{name} has shape {found}; valid: {_ARM}, seven joint angles [rad] and an "
                    "open fraction."
                )
        if missing := [
            key for view in VIEWS if (key := f"{OBS_IMAGES}.{view}") not in self.image_features
        ]:
            have = ", ".join(self.image_features) or "nothing"
            raise ConfigError(
                f"no pictures {', '.join(missing)}; there are: {have}. Name the cameras so, or "
                "use rename_map."
            )

    @property
    def observation_delta_indices(self) -> None:
        """None: one observation, the present one."""

    @property
    def action_delta_indices(self) -> None:
        """None: no actions are read from data sets."""

    @property
    def reward_delta_indices(self) -> None:
        """None."""

    def get_optimizer_preset(self) -> AdamWConfig:
        """Raise ConfigError: this plugin does not train."""
        raise ConfigError(_NO_TRAINING)

    def get_scheduler_preset(self) -> None:
        """None: this plugin does not train."""
