"""What a run of a small policy is set to, and the resolution tier that its pictures are of."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from strands_cosmos3.errors import ConfigError
from strands_cosmos3.observe.views import TIERS


@dataclass(frozen=True)
class RunConfig:
    """What is trained, and for how long.

    Args:
        hidden, layers: Of both towers. latent_channels: z. vae_base: Base width of the VAE.
        tier: Resolution tier of the demonstrations.
        vae_steps, vae_clip_steps: Steps of the VAE on pictures, and on clips after them (0 where no video is wanted).
        policy_steps, joint_steps: Steps on frame 0 and actions, and with the future after them.
        vae_batch, vae_clip_batch, policy_batch, joint_batch: Windows a step. joint_pictures: Windows of frame 0, labelled for
            every goal, beside those of whole clips. joint_forward, joint_inverse: Shares of the clips that learn dynamics.
        vae_lr, policy_lr, joint_lr: Learning rates.
        clip_every: Ticks between the beginnings of the clips that are encoded.
        seed: Of weights, order and noise.
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
        """Settings that a run keeps from its start to its end."""
        return {name: value for name, value in asdict(self).items() if not name.endswith("_steps")}

    @classmethod
    def of_joint(cls) -> list[str]:
        """Settings that decide nothing before the joint stage."""
        return [field.name for field in fields(cls) if field.name.startswith("joint_")]


def tier_of(height: int, width: int) -> int:
    """The resolution tier that a picture is a canvas of; the lowest, where there are several.

    Raises:
        ConfigError: There is none; the valid ones are named.
    """
    found = [tier for tier, sizes in TIERS.items() if (height, width) in sizes]
    if not found:
        raise ConfigError(
            f"demonstrations are {height} x {width}, which is no tier's canvas; record them with `demos --tier`, one of "
            f"{', '.join(map(str, TIERS))}."
        )
    return found[0]
