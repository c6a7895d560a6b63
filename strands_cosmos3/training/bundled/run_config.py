"""Options of a training run, and the resolution tier of its pictures."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from strands_cosmos3.errors import ConfigError
from strands_cosmos3.observe.views import TIERS


@dataclass(frozen=True)
class RunConfig:
    """Options of a training run.

    Args:
        hidden, layers: Width and number of layers of both towers.
        latent_channels, vae_base: Latent channels and base width of the VAE.
        tier: Resolution tier of the demonstrations.
        vae_steps, vae_clip_steps: Steps of the VAE on pictures and then on clips (0 without video).
        policy_steps, joint_steps: Steps on frame 0 and actions, and then with the future.
        vae_batch, vae_clip_batch, policy_batch, joint_batch: Windows per step.
        joint_pictures: Windows of frame 0 per step of the joint stage, labelled for every goal.
        joint_forward, joint_inverse: Fractions of the clips that train forward and inverse dynamics.
        vae_lr, policy_lr, joint_lr: Learning rates.
        clip_every: Ticks between the first ticks of encoded clips.
        seed: Seed of weights, order and noise.
    """

    hidden: int = 128
    layers: int = 4
    latent_channels: int = 48
    vae_base: int = 12
    tier: int = 128
    vae_steps: int = 4000
    vae_clip_steps: int = 1500
    policy_steps: int = 16000
    joint_steps: int = 12000
    vae_batch: int = 8
    vae_clip_batch: int = 1
    policy_batch: int = 64
    joint_batch: int = 32
    joint_pictures: int = 16
    joint_forward: float = 0.25
    joint_inverse: float = 0.4
    vae_lr: float = 2e-3
    policy_lr: float = 2e-3
    joint_lr: float = 1e-3
    clip_every: int = 4
    seed: int = 0

    @property
    def fixed(self) -> dict[str, Any]:
        """Options that cannot change during a run."""
        return {name: value for name, value in asdict(self).items() if not name.endswith("_steps")}

    @classmethod
    def of_joint(cls) -> list[str]:
        """Return the names of options that only the joint stage reads."""
        return [field.name for field in fields(cls) if field.name.startswith("joint_")]


def tier_of(height: int, width: int) -> int:
    """Return the lowest resolution tier that has a canvas of this size.

    Raises:
        ConfigError: No tier has one; the message lists the tiers.
    """
    for tier, sizes in TIERS.items():
        if (height, width) in sizes:
            return tier
    raise ConfigError(
        f"demonstrations are {height} x {width}, which is not a canvas of any tier; record them with `demos --tier`, one of "
        f"{', '.join(map(str, TIERS))}."
    )
