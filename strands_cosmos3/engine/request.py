"""The engine's request, as arrays. Everything that can be checked without weights is checked
here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from array_api_compat import array_namespace

from strands_cosmos3.checks import positive, seed_number, typed, typed_fields, whole_number
from strands_cosmos3.embodiments import MODEL_SPACES, NUM_DOMAINS, Sampling
from strands_cosmos3.engine.arrays import Array
from strands_cosmos3.engine.sequence import SPATIAL_COMPRESSION, TEMPORAL_COMPRESSION
from strands_cosmos3.errors import ActionSpaceError, InputError, NonFiniteError, ShapeError
from strands_cosmos3.types import Mode


@typed()
def pixel_to_latent_shape(frames: int, height: int, width: int) -> tuple[int, int, int]:
    """Latent grid (frames, height, width) of that many pixels: 4 x 16 x 16 compression, first frame
    alone.

    Height and width are those of the picture's content; latents that reach into the padding are not
    counted. Raises InputError if a size is below 1.
    """
    if min(frames, height, width) < 1:
        raise InputError(
            f"a video of {frames} frames of {height} x {width} pixels is empty; every size must "
            "be >= 1."
        )
    rows, columns = (max(n // SPATIAL_COMPRESSION, 1) for n in (height, width))
    return (frames - 1) // TEMPORAL_COMPRESSION + 1, rows, columns


@dataclass(frozen=True, eq=False, kw_only=True)
class Cosmos3ActionRequest:
    """One inference.

    Args:
        text_ids, neg_text_ids: [S] or [1, S] ids of the prompt and, if guidance is not 1, of the
            unconditional branch.
        text_mask, neg_text_mask: 1 where an id counts; None counts all.
        video_shape: Latent grid (F, H, W), see :func:`pixel_to_latent_shape`.
        action_chunk: Rows wanted. raw_action_dim: Used action channels. domain_id: Slot of the
            action heads, 0..31.
        cond_video_pixels: [1, 3, frames, height, width] in [-1, 1]: the given frames on their
            canvas. Only those that clean latent frames need are encoded; a clip that is too short
            repeats its last frame.
        mode: ``policy``, ``forward_dynamics`` or ``inverse_dynamics``.
        action_space: ``midtrain`` or ``joint_pos``, which the answer must be in; None is the
            checkpoint's.
        cond_action: [rows, D] or [1, rows, D] given actions, for forward dynamics, in the model's
            scale; D is raw_action_dim, or the model's action width with zeros above it. Rows
            beyond the chunk are cut; the last one is repeated where there are fewer.
        action_prefix: [rows, D] given first rows of the action sequence. In ``joint_pos`` its first
            row is the state, which comes before the chunk and is not part of the answer. The engine
            checks their number.
        history_rows: Rows of action_prefix that precede the state row (or, without one, the chunk):
            past actions, at temporal positions before it.
        cond_frame_indexes: Latent frames that are given; None is the mode's own: frame 0, or all
            for inverse dynamics.
        fps: Frames and rows a second.
        guidance_scale: ``v = u + g (c - u)``; 1 runs no unconditional pass.
        guidance_interval: Guidance only where lo < timestep < hi; None is at every step.
        flow_shift: Shift of the flow schedule; None is the checkpoint's.
        use_karras_sigmas: None follows the checkpoint, True its Karras schedule, False the native
            flow schedule.
        seed: Seed of the noise: ``numpy.random.RandomState(seed)``, restarted for each modality,
            equal on every device.
        video_noise, action_noise, sound_noise: Noise instead of the seeded one: [1, C, F, H, W];
            [rows, A], the state row included; [C, S] or [1, C, S].
        return_video: Whether all video latents are wanted; without them, and for fewer decoded
            frames, the last step is cheaper.
        decode_frames: Pixel frames that are wanted, from the first on: 9 are the given one and
            those of eight rows. Decoding costs in proportion. None is all if the engine has its
            decoder, else none.
        sound: Whether the sound of the clip is predicted too. It is part of what is denoised, so
            the actions are others than without.
        checked_pixels: ``cond_video_pixels`` once more, where :func:`require_pixels` or another
            request has read them already: requests share a picture by reference, and its values
            are read once. ``dataclasses.replace`` passes it on.

    Raises:
        InputError, ShapeError, NonFiniteError, ActionSpaceError: A field cannot be used.
    """

    text_ids: Array
    video_shape: tuple[int, int, int]
    action_chunk: int
    domain_id: int
    raw_action_dim: int
    cond_video_pixels: Array
    mode: str = Mode.POLICY
    neg_text_ids: Array | None = None
    text_mask: Array | None = None
    neg_text_mask: Array | None = None
    action_space: str | None = None
    cond_action: Array | None = None
    action_prefix: Array | None = None
    history_rows: int = 0
    cond_frame_indexes: Sequence[int] | None = None
    fps: float = 24.0
    num_inference_steps: int = 30
    guidance_scale: float = 1.0
    guidance_interval: tuple[float, float] | None = None
    flow_shift: float | None = None
    use_karras_sigmas: bool | None = None
    seed: int = 0
    video_noise: Array | None = None
    action_noise: Array | None = None
    return_video: bool = True
    decode_frames: int | None = None
    sound: bool = False
    sound_noise: Array | None = None
    checked_pixels: Array | None = None

    @typed()
    def sampled(self, sampling: Sampling, **changes: Any) -> Cosmos3ActionRequest:
        """Return this request with another sampling, and other ``changes``; what ``sampling``
        leaves open stays as it is.
        """
        return replace(self, **fields_of(sampling), **changes)

    @property
    def batch_key(self) -> tuple[object, ...]:
        """Key that requests of one pass have in common
        (``Cosmos3Engine.step_batch``).
        """
        return (
            self.video_shape,
            self.action_chunk + self.history_rows,
            self.num_inference_steps,
            self.flow_shift,
            self.use_karras_sigmas,
            self.sound and self.fps,  # they say how many latents of sound there are
        )

    def __post_init__(self) -> None:
        typed_fields(self)
        seed_number(self.seed)
        object.__setattr__(self, "mode", Mode.parse(self.mode))
        for name in ("action_chunk", "raw_action_dim", "num_inference_steps"):
            whole_number(getattr(self, name), name, 1)
        for name in ("history_rows", "decode_frames"):
            whole_number(getattr(self, name) or 0, name, 0)
        whole_number(self.domain_id, "domain_id", 0, NUM_DOMAINS - 1)
        positive(self.fps, "fps")
        if self.action_space not in (None, *MODEL_SPACES):
            raise ActionSpaceError(
                f"action_space {self.action_space!r} is not one of a checkpoint; "
                f"valid: {', '.join(MODEL_SPACES)}."
            )
        self._check_video()
        self._check_actions()
        if self.guidance_scale != 1 and self.neg_text_ids is None:
            raise InputError(
                f"guidance_scale is {self.guidance_scale}: neg_text_ids are needed; or use scale 1."
            )

    def _check_video(self) -> None:
        if self.checked_pixels is not self.cond_video_pixels:
            object.__setattr__(self, "checked_pixels", require_pixels(self.cond_video_pixels))
        if len(self.video_shape) != 3 or min(self.video_shape) < 1:
            raise ShapeError(
                "video_shape must be three latent sizes (frames, height, width), "
                f"got {self.video_shape}."
            )
        frames = self.video_shape[0]
        wrong = [i for i in self.cond_frame_indexes or () if not 0 <= i < frames]
        if wrong:
            raise InputError(
                f"cond_frame_indexes {wrong} lie outside the {frames} latent "
                f"frames 0..{frames - 1}."
            )
        if self.sound and frames == 1:
            raise InputError(
                "sound lasts as long as the clip, and this one has a single frame; ask for more "
                "frames (policy_frames), or leave sound out."
            )

    def _check_actions(self) -> None:
        for name in ("cond_action", "action_prefix"):
            value = getattr(self, name)
            if value is None:
                continue
            value = value[0] if value.ndim == 3 and value.shape[0] == 1 else value
            if value.ndim != 2 or value.shape[0] < 1 or value.shape[1] < self.raw_action_dim:
                raise ShapeError(
                    f"{name} must be [rows, {self.raw_action_dim} or the model's width], "
                    f"got {list(value.shape)}."
                )
            if not array_namespace(value).isfinite(value).all():
                raise NonFiniteError(f"{name} holds NaN or infinity.")
            if value[:, self.raw_action_dim :].any():
                raise ShapeError(
                    f"{name} has values beyond its raw width "
                    f"{self.raw_action_dim}; they must be zero."
                )
            object.__setattr__(self, name, value)
        if (actions := self.cond_action) is not None:
            object.__setattr__(self, "cond_action", first_of(actions, self.action_chunk, 0))
        if self.mode == Mode.FORWARD_DYNAMICS and self.cond_action is None:
            raise InputError(
                "forward_dynamics predicts what known actions do: cond_action is needed."
            )
        if self.mode != Mode.FORWARD_DYNAMICS and self.cond_action is not None:
            raise InputError(
                f"cond_action is for forward_dynamics, not for {self.mode}; use action_prefix for "
                "known rows."
            )


def fields_of(sampling: Sampling) -> dict[str, Any]:
    """The fields of a request that a sampling sets."""
    fields = {
        "num_inference_steps": sampling.num_steps,
        "guidance_scale": sampling.guidance_scale,
        "guidance_interval": sampling.guidance_interval,
        "flow_shift": sampling.flow_shift,
    }
    return {name: value for name, value in fields.items() if value is not None}


def require_pixels(pixels: Array) -> Array:
    """Return given frames for ``cond_video_pixels``.

    Raises:
        ShapeError: They are not [1, 3, frames, height, width].
        NonFiniteError, InputError: A value is not finite, or far from [-1, 1].
    """
    if pixels.ndim != 5 or pixels.shape[:2] != (1, 3) or 0 in pixels.shape:
        raise ShapeError(
            f"cond_video_pixels must be [1, 3, frames, height, width], got {list(pixels.shape)}."
        )
    largest = float(abs(pixels).max())  # NaN if one is
    if not math.isfinite(largest):
        raise NonFiniteError("cond_video_pixels hold NaN or infinity.")
    if largest > 1.5:  # bicubic resampling overshoots 1 a little
        raise InputError(f"cond_video_pixels reach {largest:.4g}; they must lie in [-1, 1].")
    return pixels


def first_of(values: Array, count: int, axis: int) -> Array:
    """The first rows or frames along an axis; the last one is repeated where there are fewer."""
    xp = array_namespace(values)
    last = values.shape[axis] - 1
    index = [min(i, last) for i in range(count)]
    return xp.take(values, xp.asarray(index, device=values.device), axis=axis)
