"""Options of a training run, and the resolution tier of its pictures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from recipes.random_checkpoint import FactorySizes
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.observe.views import TIERS


@dataclass(frozen=True)
class RunConfig:
    """Options of a training run. Steps, windows per step (``_batch``) and learning rates are
    given by stage.
    """

    # width of both towers: a token's noise, which the answer needs, passes beside its content
    hidden: int = 192
    layers: int = 4
    latent_channels: int = 48
    # side of a vision token, in latents of 16 pixels; dynamics need tokens of one
    latent_patch: int = 1
    # base of the rotary positions of a fresh model: with 5,000,000 columns look alike
    rope_theta: float = 100.0
    vae_base: int = 32  # base width of the VAE's encoder
    vae_decoder_base: int = 32
    vae_patch: int = 4  # width of the patches of pixels that the VAE begins with
    vae_steps: int = 1000  # of the VAE's encoder, on pictures and clips
    vae_decoder_steps: int = 800  # then of its decoder
    policy_steps: int = 600  # on frame 0 and actions
    joint_steps: int = 3200  # then with the future
    preview_steps: int = 1000  # of the preview decoder, on clips; 0 exports none
    # of the VAE's decoder at the end, on predicted clips; 0 leaves it as it is
    decoder_steps: int = 400
    vae_batch: int = 24  # frames per step, or one longer clip
    policy_batch: int = 160
    joint_batch: int = 40
    preview_batch: int = 4
    decoder_batch: int = 4  # clips
    # windows of frame 0 per step of the joint stage, labelled for every goal
    joint_pictures: int = 80
    joint_forward: float = 0.4  # fraction of the clips that train forward dynamics
    joint_inverse: float = 0.5
    # of the error of forward dynamics' video; its gradient is then as inverse dynamics'
    joint_forward_weight: float = 1.0
    video: float = 0.04  # weight of the error of a policy's video; the actions' is 1
    # both dynamics start at the given frame and at rows of zeros instead of noise
    dynamics_from_frame: bool = True
    end_points: float = 0.15  # weight of the error of where inverse dynamics end
    # longest action prefix, which half of a policy's windows have; 0: none, which succeeds more
    # often
    prefix_rows: int = 0
    # weight of the error of every goal's rows, read from a picture's tokens
    auxiliary: float = 1.0
    # of vectors and of what is at the ends of a network; matrices have 10 times as much, with Muon
    vae_lr: float = 2e-3
    policy_lr: float = 2e-3
    policy_matrix_lr: float = 0.02
    joint_lr: float = 2e-3
    joint_matrix_lr: float = 0.02
    # fraction of the steps, at the end, in which its rates decay: the video's loss falls with them
    joint_decay: float = 0.8
    # of the matrices of both; without it they grow, and hidden states drown a token's noise
    matrix_decay: float = 0.1
    preview_lr: float = 1e-3
    clip_every: int = 1  # ticks between the starts of clips
    # draws of windows per step of the policy and joint stages, whose gradients are averaged
    accumulate: int = 1
    seed: int = 0
    gate: bool = True  # whether training stops if the VAE loses colours

    @property
    def sizes(self) -> FactorySizes:
        """Sizes of the policy: 4 heads of width 32, 2 of keys, MLPs three times as wide as all
        heads, 32 action columns.
        """
        return FactorySizes(
            *(self.hidden, self.layers, 4, 2, 32, 384, self.latent_channels),
            shards=1,
            action_dim=32,
            latent_patch=self.latent_patch,
            rope_theta=self.rope_theta,
        )

    @property
    def fixed(self) -> dict[str, Any]:
        """Options that cannot change during a run."""
        return {
            name: value
            for name, value in asdict(self).items()
            if not name.endswith("_steps") and name != "gate"
        }


def tier_of(height: int, width: int) -> int:
    """Return the lowest resolution tier that has a canvas of this size, or raise ConfigError."""
    for tier, sizes in TIERS.items():
        if (height, width) in sizes:
            return tier
    raise ConfigError(
        f"demonstrations are {height} x {width}, which is not a canvas of any tier; record them "
        f"with `demos --tier`, one of {', '.join(map(str, TIERS))}."
    )
