"""Validation without a simulator: chunks predicted in one step from pure noise, compared in
metres and degrees.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from strands_cosmos3.actions.decode import decode_pose_trajectory
from strands_cosmos3.actions.rotations import geodesic_angle
from strands_cosmos3.actions.stats import denormalize_chunk
from strands_cosmos3.checks import F64
from strands_cosmos3.engine.sequence import patchify
from strands_cosmos3.training.flow import TrainedPolicy, read_prompts, rope_of, velocity
from strands_cosmos3.training.matching import discretize_timestep
from strands_cosmos3.training.windows import Batch, layout_of


@dataclass(frozen=True)
class ChunkErrors:
    """Errors of predicted chunks; the end point is where the arm would go."""

    mse: float  # of normalised rows
    end_mm: float  # median distance between the ends of predicted and true chunks
    end_deg: float  # median angle between them
    moved_mm: float  # median distance that the true chunks cover, for comparison
    grasp: float  # fraction of rows whose gripper command is on the right side of one half


@torch.no_grad()
def predict_rows(
    policy: TrainedPolicy, batch: Batch, noise: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the chunks [B, rows, 10] that one step from pure noise gives, for windows of a
    single picture.
    """
    config = policy.transformer.config
    B, _, frames, H, W = batch.latents.shape
    layout = layout_of((H, W), frames, range(frames), 1, patch=config.latent_patch_size)
    vision = torch.stack([patchify(latent, config.latent_patch_size) for latent in batch.latents])
    rows, width = batch.rows.shape[1:]
    action = torch.zeros(B, rows + 1, config.action_dim)
    if noise is None:
        noise = torch.randn(B, rows, width, generator=torch.Generator().manual_seed(0))
    action[:, 1:, :width] = noise
    assert batch.state is not None
    action[:, 0, : batch.state.shape[1]] = batch.state
    noisy = torch.zeros(B, layout.tokens, 1)
    noisy[:, layout.vision_tokens + 1 :] = 1
    memory = read_prompts(policy.transformer, batch.prompts).select(batch.prompt)
    rope = rope_of(layout, config, memory.lengths, vision)
    _, v = velocity(
        policy,
        vision,
        action,
        discretize_timestep(torch.ones(B)),
        noisy,
        rope,
        memory,
        layout.vision_tokens,
    )
    return action[:, 1:, :width] - v[:, 1:, :width]


def chunk_errors(predicted: torch.Tensor, true: torch.Tensor) -> ChunkErrors:
    """Compare chunks [B, rows, 10] in the model's scale."""
    ends = [_ends(rows) for rows in (predicted, true)]
    apart = np.linalg.norm(ends[0][:, :3, 3] - ends[1][:, :3, 3], axis=1)
    angle = geodesic_angle(ends[0][:, :3, :3], ends[1][:, :3, :3])
    return ChunkErrors(
        float((predicted - true).square().mean()),
        float(np.median(apart) * 1e3),
        float(np.degrees(np.median(angle))),
        float(np.median(np.linalg.norm(ends[1][:, :3, 3], axis=1)) * 1e3),
        float(((predicted[..., 9] > 0) == (true[..., 9] > 0)).float().mean()),
    )


def _ends(rows: torch.Tensor) -> F64:
    """Return the end poses [B, 4, 4] of chunks in the frame of their starts."""
    metres = denormalize_chunk(
        rows.double().numpy().clip(-9, 9).reshape(-1, rows.shape[-1]), "droid_lerobot"
    )
    return np.stack(
        [
            decode_pose_trajectory(chunk[:, :9], np.eye(4))[-1]
            for chunk in metres.reshape(rows.shape)
        ]
    )
