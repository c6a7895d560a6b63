"""How well a checkpoint's VAE lets forward dynamics do: later frames predicted with the
simulation's own geometry.

    python benchmarks/dynamics_bound.py --clips 16                # the bundled checkpoint; about 12
    s a clip python benchmarks/dynamics_bound.py --clips 16 --model CHECKPOINT

Each pixel of a later frame is taken from where the same point of the same body was in the first
frame, by depth, poses and segmentation, which no model is given. What the first frame does not show
gets the mean colour of its geom there, which a model may guess better. A decoder that was trained
on predictions may do better, too. The clips are 17 frames of the scripted expert on the nominal
table, two an episode, with the cubes anywhere; PSNR in dB, mean over clips.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import map_coordinates

from recipes.vae_training import load_vae
from strands_cosmos3 import Robot
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.embodiments import DROID_RIG
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.observe.views import CanvasComposite, canvas_composite
from strands_cosmos3.sim.film import VIEW_HW
from strands_cosmos3.training.windows import latent_columns, to_pixels

TIER, ROWS, TICKS_PER_ROW, CONTROL_HZ = 128, 16, 4, 60.0
NAMES = (
    "repeating the first frame",
    "the true clip through the VAE",
    "geometry",
    "geometry through the VAE",
)
# change of a channel, of the range 0..1, from which a pixel counts as moving, as in `evaluate
# --clips`
_MOVES = 0.1
# a point is seen in the first frame if its depth there agrees within 10 mm and 5 %
_NEAR = 0.01, 0.05


@dataclass(frozen=True, eq=False)
class View:
    """What a camera sees in a state, and where it and the bodies are."""

    colours: NDArray[np.uint8]  # [H, W, 3]
    depth_m: NDArray[np.float64]  # [H, W]
    geom: NDArray[np.int64]  # [H, W], -1 where there is none
    body: NDArray[np.int64]  # [H, W]
    p_body: NDArray[np.float64]  # [bodies, 3] in the world
    R_body: NDArray[np.float64]  # [bodies, 3, 3]
    p_camera: NDArray[np.float64]
    R_camera: NDArray[np.float64]  # columns: right, up, backwards


def view(renderer: mujoco.Renderer, model: Any, data: Any, camera: str) -> View:
    """Render one camera."""
    renderer.update_scene(data, camera=camera)
    colours = renderer.render()
    renderer.enable_depth_rendering()
    depth_m = renderer.render().astype(np.float64)
    renderer.disable_depth_rendering()
    renderer.enable_segmentation_rendering()
    ids, kinds = np.moveaxis(renderer.render().astype(np.int64), -1, 0)
    renderer.disable_segmentation_rendering()
    geom = np.where(kinds == mujoco.mjtObj.mjOBJ_GEOM, ids, -1)
    body = np.where(geom >= 0, model.geom_bodyid[np.maximum(geom, 0)], 0)
    at = data.camera(camera)
    bodies = data.xpos.copy(), data.xmat.reshape(-1, 3, 3).copy()
    return View(
        colours.copy(), depth_m, geom, body, *bodies, at.xpos.copy(), at.xmat.reshape(3, 3).copy()
    )


def moved(first: View, later: View, fovy_deg: float) -> NDArray[np.uint8]:
    """Return the later picture [H, W, 3], made of the first one's colours."""
    H, W = first.depth_m.shape
    focal_px = 0.5 * H / np.tan(np.deg2rad(fovy_deg) / 2)
    x, y = np.meshgrid(np.arange(W) + 0.5 - W / 2, np.arange(H) + 0.5 - H / 2)
    seen = np.stack([x / focal_px, -y / focal_px, -np.ones_like(x)], -1) * later.depth_m[..., None]
    in_world = seen @ later.R_camera.T + later.p_camera
    in_body = np.einsum(
        "hwji,hwj->hwi", later.R_body[later.body], in_world - later.p_body[later.body]
    )
    then = np.einsum("hwij,hwj->hwi", first.R_body[later.body], in_body) + first.p_body[later.body]
    point = (then - first.p_camera) @ first.R_camera
    depth_m = -point[..., 2]
    ahead = np.maximum(depth_m, 1e-6)
    column, row = (
        point[..., 0] / ahead * focal_px + W / 2,
        -point[..., 1] / ahead * focal_px + H / 2,
    )
    known = (depth_m > 1e-3) & (column > 0) & (column < W) & (row > 0) & (row < H)
    at = np.clip(row.astype(int), 0, H - 1), np.clip(column.astype(int), 0, W - 1)
    known &= (np.abs(first.depth_m[at] - depth_m) < _NEAR[0] + _NEAR[1] * depth_m) & (
        first.geom[at] == later.geom
    )
    where = [np.clip(row - 0.5, 0, H - 1), np.clip(column - 0.5, 0, W - 1)]
    taken = np.stack(
        [map_coordinates(first.colours[..., c].astype(float), where, order=1) for c in range(3)], -1
    )
    for geom in np.unique(later.geom[~known]):
        its = first.geom == geom
        taken[~known & (later.geom == geom)] = (
            first.colours[its if its.any() else slice(None)].reshape(-1, 3).mean(0)
        )
    return np.clip(taken + 0.5, 0, 255).astype(np.uint8)


def states(robot: Robot, seed: int) -> NDArray[np.float64]:
    """Return the joint positions [ticks, nq] of an episode of the scripted expert, one for each
    row.
    """
    found: list[NDArray[np.float64]] = []
    task = ("reach", "pick", "place")[seed % 3]
    how = {
        "policy_config": {"embodiment": "droid", "backend": "scripted"},
        "control_frequency": CONTROL_HZ,
        "duration": 8.0,
    }
    robot.run_policy(
        task=task, seed=seed, on_tick=lambda at: found.append(np.array(at.data.qpos)), **how
    )
    return np.stack(found[::TICKS_PER_ROW])


@torch.no_grad()
def clip_errors(
    vae: Any,
    canvas: CanvasComposite,
    renderer: mujoco.Renderer,
    model: Any,
    cameras: tuple[str, ...],
    path: NDArray[np.float64],
) -> list[float]:
    """Return squared errors of all and of moving pixels for each of :data:`NAMES`, of later
    frames [rows + 1, nq].
    """
    data, first, true, predicted = mujoco.MjData(model), list[View](), [], []
    for q in path:
        data.qpos[:] = q
        mujoco.mj_forward(model, data)
        seen = [view(renderer, model, data, camera) for camera in cameras]
        first = first or seen
        true.append(canvas.padded([one.colours for one in seen]))
        made = [
            moved(a, b, float(model.camera(name).fovy[0]))
            for a, b, name in zip(first, seen, cameras, strict=True)
        ]
        predicted.append(canvas.padded(made))
    width = 16 * latent_columns(true[0].shape[:2])

    def drawn(pixels: torch.Tensor) -> torch.Tensor:
        return vae.decode(vae.encode(pixels).latent_dist.mode()).sample.clamp(-1, 1)

    clips = [to_pixels(np.stack(frames)[None]) for frames in (true, predicted)]
    truth, *others = (
        (clip[..., :width] + 1) / 2
        for clip in (clips[0], drawn(clips[0]), clips[1], drawn(clips[1]))
    )
    still = truth[:, :, :1].expand_as(truth)
    moves = ((truth - still).abs() > _MOVES)[:, :, 1:]
    off = [(made - truth).square()[:, :, 1:] for made in (still, *others)]
    return [float(number) for error in off for number in (error.mean(), error[moves].mean())]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clips", type=int, default=16)
    parser.add_argument("--model", type=Path, default=embedded_checkpoint())
    options = parser.parse_args()
    vae = load_vae(Checkpoint.open(options.model)).eval().requires_grad_(False)
    canvas = canvas_composite(DROID_RIG, (VIEW_HW,) * 3, TIER)
    errors: list[list[float]] = []
    for seed in range(-(-options.clips // 2)):
        robot = Robot("panda")
        path, model, cameras = (
            states(robot, 1_000_000 + seed),
            robot.scene.model,
            robot.scene.view_names,
        )
        with mujoco.Renderer(model, *VIEW_HW) as renderer:
            for start in np.linspace(0, len(path) - ROWS - 1, 4).astype(int)[1:3]:
                errors.append(
                    clip_errors(
                        vae, canvas, renderer, model, cameras, path[start : start + ROWS + 1]
                    )
                )
                print(f"clip {len(errors)} of {options.clips}", flush=True)
    db = -10 * np.nanmean(np.log10(errors), axis=0)
    print(f"\n{len(errors)} clips, dB (above the repeated frame)      all pixels    moving pixels")
    for name, whole, moving in zip(NAMES, db[::2], db[1::2], strict=True):
        print(
            f"{name:<42} {whole:5.1f} ({whole - db[0]:+.1f})    {moving:5.1f} "
            f"({moving - db[1]:+.1f})"
        )


if __name__ == "__main__":
    main()
