"""From pictures, captions and actions to the engine's arrays, and back. ``observe`` composes
pictures and captions.

Each call resolves mode and domain anew, with everything that follows from them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from array_api_compat import array_namespace, is_torch_array

from strands_cosmos3.actions.stats import ActionStats, Affine, Method, load_action_stats
from strands_cosmos3.checks import finite_array, typed, whole_number
from strands_cosmos3.embodiments import (
    MODEL_GRIPPER,
    POSE9,
    ActionSpace,
    CameraRig,
    Embodiment,
    GripperConvention,
    Sampling,
    get_embodiment,
    raw_embodiment,
)
from strands_cosmos3.engine.arrays import Array
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.frames import compose_views, read_clip, read_frames
from strands_cosmos3.engine.metadata import STATE_COLUMNS, StateRow
from strands_cosmos3.engine.request import (
    Cosmos3ActionRequest,
    pixel_to_latent_shape,
    require_pixels,
)
from strands_cosmos3.engine.sequence import TEMPORAL_COMPRESSION
from strands_cosmos3.engine.tokens import PromptTokenizer, Tokens
from strands_cosmos3.errors import (
    ActionSpaceError,
    ConfigError,
    InputError,
    ShapeError,
    StatisticsError,
)
from strands_cosmos3.observe.prompts import compose_prompt, view_point
from strands_cosmos3.observe.views import (
    Composition,
    canvas_hw,
    to_canvas,
)
from strands_cosmos3.types import Mode

if TYPE_CHECKING:
    import torch

DEFAULT_TIER = 480
_AS_THEY_ARE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, eq=False, kw_only=True)
class CallSettings:
    """Settings that follow from one call, the processor's options and the domain."""

    mode: Mode
    embodiment: Embodiment
    space: ActionSpace
    raw_action_dim: int
    action_chunk: int
    fps: float
    view: str


@dataclass(frozen=True, eq=False)
class Clip:
    """Given frames on their canvas, which requests share by reference.

    Args:
        pixels: [1, 3, frames, height, width] in [-1, 1].
        content_hw: Height and width of the picture, at the canvas' top left.

    Raises:
        NonFiniteError, InputError: A pixel is not finite, or far from [-1, 1].
    """

    pixels: Array
    content_hw: tuple[int, int]

    def __post_init__(self) -> None:
        require_pixels(self.pixels)


@dataclass(frozen=True, eq=False, kw_only=True)
class ProcessedInput(CallSettings):
    """The result of :meth:`Cosmos3PolicyProcessor.preprocess`.

    Args:
        engine_request: The request, with 30 steps, seed 0 and no guidance.
        video_shape: (frames, height, width) in pixels, of the whole clip and of the picture's
            content; the engine's request has the latent grid.
        prompt: The caption that was tokenised.
    """

    engine_request: Cosmos3ActionRequest
    video_shape: tuple[int, int, int]
    prompt: str

    @property
    def text_ids(self) -> Array:
        """[1, S] ids of the prompt."""
        return self.engine_request.text_ids

    @property
    def text_mask(self) -> Array | None:
        """[1, S] ones."""
        return self.engine_request.text_mask

    @property
    def neg_text_ids(self) -> Array | None:
        """[1, S] ids of the unconditional branch's prompt."""
        return self.engine_request.neg_text_ids

    @property
    def neg_text_mask(self) -> Array | None:
        """[1, S] ones."""
        return self.engine_request.neg_text_mask

    @property
    def pixel_values(self) -> Array:
        """[1, 3, frames, height, width] in [-1, 1]: the given frames on their canvas."""
        return self.engine_request.cond_video_pixels

    @property
    def cond_action(self) -> Array | None:
        """[1, chunk, action_dim] given actions in the model's scale, or None."""
        rows = self.engine_request.cond_action
        return None if rows is None else rows[None]

    @property
    def action_prefix(self) -> Array | None:
        """[rows, action_dim] given first rows of the sequence: state and bound rows, or None."""
        return self.engine_request.action_prefix

    @property
    def cond_frame_indexes(self) -> Sequence[int] | None:
        """Latent frames that are given; None is the mode's own."""
        return self.engine_request.cond_frame_indexes

    @property
    def domain_id(self) -> int:
        """The domain's slot of the action heads."""
        return self.embodiment.domain_id

    def request(self, sampling: Sampling | None = None, **changes: Any) -> Cosmos3ActionRequest:
        """Return the engine's request with a sampling, and other ``changes`` of its fields."""
        return self.engine_request.sampled(sampling or Sampling(), **changes)


class Cosmos3PolicyProcessor:
    """Makes requests of what a caller holds, and answers of what the engine returns. None follows
    from the domain.

    Args:
        tokenizer_name_or_path: The checkpoint's ``text_tokenizer/``, or what reads prompts instead.
        height, width: Canvas in pixels, multiples of 16; both, or neither for the tier
            ``image_size``.
        num_frames: Frames of the clip; it must be action_chunk_size + 1.
        mode: ``policy``, ``forward_dynamics`` or ``inverse_dynamics``.
        domain_name, domain_id: An embodiment by name, or an integer domain id; either argument
            takes both.
        raw_action_dim: Used action channels; needed with an integer domain id.
        action_chunk_size: Rows of an answer. fps: Their rate.
        image_size: NVIDIA's name of the resolution tier: 256, 480, 704 or 720 (128 for this
            project's small checkpoints); ``canvas_hw`` has its pixels for each aspect ratio.
        prompt_format: ``json`` or ``plain``. view_point: ``ego_view``, ``third_person_view``,
            ``wrist_view``, ``concat_view``, ``top_down_2d_view`` or ``video_game_view``.
        use_system_prompt: Whether diffusers' system prompt precedes both captions.
        negative_prompt: Caption of the unconditional branch, as it stands.
        composition: ``letterbox``, or ``framework``: cosmos-framework's server, see :mod:`.frames`.
        history_length: Rows of the state that each call gives, the present one last; the others are
            past ones.
        cond_frame_indexes: Latent frames that are given; None is the mode's own.
        device, params_dtype: Of the tensors that are made; actions and states stay in float32.
            Device ``numpy`` makes arrays of NumPy, without torch; dtype None is float32.
        action_dim: The model's action width. action_space: ``midtrain`` or ``joint_pos``.
        action_stats_path: Statistics that rows are (de-)normalised with: a domain's name, a file,
            or ``ActionStats``.
        action_normalization: ``quantile``, ``quantile_rot``, ``meanstd`` or ``minmax``.
        gripper: How the caller's ``joint_pos`` states and rows express the gripper; the model's is
            1 = open.
        state_row: Scale of a ``midtrain`` checkpoint's state row, if it has one.
        policy_frames: Frames of a policy's clip, 1 + a multiple of 4; None is the chunk's rows + 1,
            1 answers actions without a video.
        prefix_rows: Longest ``action_prefix`` of a call; one of fewer rows than the chunk in any
            case.
        append_metadata: PhyAI's; it must be unset.

    Raises:
        ConfigError, InputError, UnknownNameError: Options contradict each other or name what does
            not exist.
        StatisticsError, ActionSpaceError: The statistics do not fit the domain, or the rows are not
            normalised ones.
    """

    @typed()
    def __init__(
        self,
        tokenizer_name_or_path: str | Path | Tokens,
        *,
        height: int | None = None,
        width: int | None = None,
        num_frames: int | None = None,
        mode: str = Mode.POLICY,
        domain_name: str | int | None = None,
        domain_id: str | int | None = None,
        raw_action_dim: int | None = None,
        action_chunk_size: int | None = None,
        fps: float | None = None,
        image_size: int | None = None,
        prompt_format: str = "json",
        view_point: str | None = None,
        use_system_prompt: bool = False,
        negative_prompt: str = "",
        composition: Composition = "letterbox",
        history_length: int = 1,
        cond_frame_indexes: Sequence[int] | None = None,
        device: str | torch.device = "cpu",
        params_dtype: torch.dtype | None = None,
        action_dim: int = 64,
        action_space: str | None = None,
        action_stats_path: str | Path | ActionStats | None = None,
        action_normalization: Method = "quantile",
        gripper: GripperConvention = MODEL_GRIPPER,
        state_row: StateRow | None = None,
        policy_frames: int | None = None,
        prefix_rows: int = 256,
        append_metadata: bool | None = None,
    ):
        if append_metadata is not None:
            raise ConfigError(
                "append_metadata: captions always state duration, rate and size; leave it out."
            )
        if (height is None) != (width is None):
            raise ConfigError(
                f"height={height}, width={width}: give both for a canvas of your own, or neither."
            )
        self._canvas = None if height is None or width is None else (height, width)
        indexes = None if cond_frame_indexes is None else tuple(cond_frame_indexes)
        if indexes is not None and (not indexes or len(set(indexes)) < len(indexes)):
            raise InputError(
                f"cond_frame_indexes {indexes}: name at least one frame, and none twice; or leave "
                "it unset."
            )
        self._tier = DEFAULT_TIER if image_size is None else image_size
        if num_frames is not None and action_chunk_size is None:
            action_chunk_size = num_frames - 1
        self._options = (action_chunk_size, num_frames, fps, view_point)
        self._domain = (_only_domain(domain_name, domain_id), raw_action_dim)
        self._mode = Mode.parse(mode)
        self._space = action_space
        self._prompt_format = prompt_format
        self._negative = negative_prompt
        self._system_prompt = use_system_prompt
        self._composition: Composition = composition
        # views are composed at the size of the tier's canvas, but not of a caller's own
        self._composed_tier = self._tier if self._canvas is None else None
        self._history = whole_number(history_length, "history_length", 1) - 1
        self._frame_indexes = indexes
        self._on_device = _maker(device, params_dtype)
        self._action_dim = action_dim
        self._gripper = gripper
        self._state_row = state_row
        self._policy_frames = policy_frames
        self._prefix_rows = prefix_rows
        self._method: Method = action_normalization
        self._stats = action_stats_path
        self._tokens = (
            PromptTokenizer(tokenizer_name_or_path)
            if isinstance(tokenizer_name_or_path, str | Path)
            else tokenizer_name_or_path
        )
        self._last: CallSettings | None = None
        if self._domain[0] is not None:
            self._affine(self.settings())

    @classmethod
    @typed()
    def for_checkpoint(
        cls, checkpoint: Checkpoint, tokens: Tokens | None = None, **options: Any
    ) -> Cosmos3PolicyProcessor:
        """A processor with a checkpoint's tokenizer (or ``tokens``), action space, prompt format
        and tier; ``options`` win.
        """
        metadata = checkpoint.metadata
        overrides = {name: value for name, value in options.items() if value is not None}
        defaults = {
            "prompt_format": metadata.get("prompt_format", checkpoint.variant.prompt_format),
            "image_size": metadata.get("resolution_tier"),
            "composition": checkpoint.composition,
            "use_system_prompt": checkpoint.use_system_prompt,
            "domain_name": metadata.get("domain"),
            "action_dim": checkpoint.config.action_dim,
            "state_row": checkpoint.state_row,
            "policy_frames": next(iter(checkpoint.policy_frames), None),
            "prefix_rows": checkpoint.prefix_rows,
            "action_chunk_size": metadata.get("chunk"),
            "fps": metadata.get("fps"),
        }
        if "action_space" not in overrides:
            defaults["action_space"] = checkpoint.require_space()
        frames = overrides.get("policy_frames")
        if frames is not None and frames not in checkpoint.policy_frames:
            trained = " or ".join(map(str, checkpoint.policy_frames))
            raise ConfigError(
                f"policy_frames {frames}: this checkpoint was trained to answer with "
                f"{trained or 'rows + 1 alone, the default'}, as far as it says. If it was "
                f"fine-tuned with {frames}, state policy_frames = {frames} in its contract file, "
                f"as strands-cosmos3 checkpoint contract {checkpoint.root} --policy-frames "
                f"{frames} --out NAME.toml does, and pass that file as the checkpoint. To "
                f"fine-tune it so: train --policy-frames {frames}."
            )
        if "domain_id" in overrides:
            defaults.pop("domain_name")
        return cls(tokens or checkpoint.layout.tokenizer, **{**defaults, **overrides})

    @property
    def embodiment(self) -> Embodiment:
        """The embodiment of the inputs."""
        return self.settings().embodiment

    @property
    def num_frames(self) -> int:
        """Frames of a clip: rows + 1."""
        return self.settings().action_chunk + 1

    @typed()
    def read_film(self, path: str | Path, mode: str | None = None) -> np.ndarray:
        """The frames [F, H, W, 3] uint8 of a film that :meth:`preprocess` reads in a mode, one for
        each row; errors as :func:`~strands_cosmos3.engine.frames.read_clip`.
        """
        call = self.settings(mode)
        return read_clip(path, self._frames_read(call), call.fps)

    @typed()
    def compose(self, views: Mapping[str, Any], rig: CameraRig) -> np.ndarray:
        """The picture [H, W, 3] uint8 that :meth:`preprocess` makes of a rig's views; errors as
        :func:`compose_views`.
        """
        return compose_views(views, rig, self._composition, self._composed_tier)

    @typed()
    def preprocess(self, raw_input: Mapping[str, Any]) -> ProcessedInput:
        """Tensors for one call.

        Args:
            raw_input: ``images`` (see :func:`read_frames`; views by name are composed), ``task`` or
                ``prompt`` (a string, which may be blank, or a list whose first counts),
                ``cond_action`` or ``action`` (forward dynamics; in the units that
                :meth:`postprocess` returns), ``state`` ([q1..q7, gripper] for ``joint_pos``; for a
                ``midtrain`` checkpoint with a state row, pose9 of the Cosmos frame in the base and
                the open fraction; or [rows, columns] of these, of which the last ``history_length``
                count), ``action_prefix`` (rows in those that the arm is bound to execute meanwhile:
                the answer begins with them), and for this call alone ``mode``, ``domain_name`` or
                ``domain_id``; ``caption`` is a prompt taken as it stands, an empty one too.

        Raises:
            InputError: A field is missing, unknown or contradicts the mode.
            ShapeError, NonFiniteError, ResourceNotFoundError, ObservationError: Images or actions
                cannot be used.
        """
        if unknown := [str(name) for name in raw_input if name not in _KNOWN]:
            raise InputError(
                f"unknown input fields: {', '.join(unknown)}; valid: {', '.join(_KNOWN)}."
            )
        call = self.settings(
            raw_input.get("mode"),
            _only_domain(raw_input.get("domain_name"), raw_input.get("domain_id")),
        )
        clip = self.clip(call, _first_of(raw_input, ("images",), "'images'")[1])
        if raw_input.get("caption") is None:
            task = _text(raw_input, ("task", "prompt"), "'task' or 'prompt'")
            caption = self.caption(call, clip, task)
        else:
            caption = _text(raw_input, ("caption",), "'caption'")
        actions = raw_input.get("cond_action")
        request = self.request(
            call,
            clip,
            caption,
            state=raw_input.get("state"),
            cond_action=raw_input.get("action") if actions is None else actions,
            action_prefix=raw_input.get("action_prefix"),
        )
        self._last = call
        return ProcessedInput(
            **vars(call),
            engine_request=request,
            video_shape=(self._clip_frames(call), *clip.content_hw),
            prompt=caption,
        )

    @typed()
    def settings(self, mode: str | None = None, domain: str | int | None = None) -> CallSettings:
        """What follows from a call's own mode and domain; None is the processor's.

        Raises:
            ConfigError: No domain, or rows or a frame rate that cannot be.
            UnknownNameError, ActionSpaceError: No such mode or domain, or not in this action space.
            InputError: A domain id without its raw width.
        """
        own, width = self._domain
        if domain is None:
            domain = own
        else:
            width = width if isinstance(domain, int) else None
        if domain is None:
            raise ConfigError(
                "no domain: pass domain_name, e.g. 'droid_lerobot', or an integer domain_id."
            )
        embodiment = _embodiment(domain, width)
        space = embodiment.action_space(self._space)
        chunk, frames, fps, view = self._options
        chunk = embodiment.chunk_rows(space.name) if chunk is None else chunk
        if chunk < 1 or (frames is not None and frames != chunk + 1):
            raise ConfigError(
                f"num_frames={frames} and action_chunk_size={chunk}: frames are rows + 1, rows at "
                "least 1."
            )
        clip = self._policy_frames
        if clip is not None and (clip % TEMPORAL_COMPRESSION != 1 or not 1 <= clip <= chunk + 1):
            raise ConfigError(
                f"policy_frames {clip}: a policy's clip has 1 + a multiple of "
                f"{TEMPORAL_COMPRESSION} frames, at most rows + 1 = {chunk + 1}."
            )
        fps = fps if fps is not None else embodiment.fps
        if fps is None or not 0 < fps < float("inf"):
            raise ConfigError(
                f"fps is {fps}, and that of domain {embodiment.name!r} is {embodiment.fps}; pass "
                "fps above zero."
            )
        width = space.width if width is None else width
        if not 1 <= width <= self._action_dim:
            raise ConfigError(
                f"raw_action_dim is {width}; it must be 1..{self._action_dim}, the model's width."
            )
        return CallSettings(
            mode=self._mode if mode is None else Mode.parse(mode),
            embodiment=embodiment,
            space=space,
            raw_action_dim=width,
            action_chunk=chunk,
            fps=fps,
            view=view_point(view or embodiment.view_point or "ego"),
        )

    @typed()
    def clip(self, call: CallSettings, images: Any) -> Clip:
        """The frames of pictures (see :func:`read_frames`; views by name are composed) that a call
        gives, on their canvas.

        Raises:
            InputError, ShapeError, NonFiniteError, ResourceNotFoundError, ObservationError: Images
                cannot be used, or are fewer than the mode or ``cond_frame_indexes`` needs.
        """
        frames = read_frames(images, call.embodiment.rig, self._composition, self._composed_tier)
        if call.mode is Mode.INVERSE_DYNAMICS and len(frames) == 1:
            raise InputError(
                "inverse_dynamics explains a motion: images must hold more than one frame."
            )
        indexes = self._frame_indexes
        if len(frames) == 1 and indexes not in (None, (0,)):
            raise InputError(
                f"cond_frame_indexes {indexes} with a single picture: only frame 0 is known."
            )
        height, width = frames.shape[1:3]
        hw = self._canvas or canvas_hw(height, width, self._tier)
        canvas = to_canvas(frames[: self._frames_read(call)], hw)
        pixels = np.ascontiguousarray(canvas.frames.transpose(3, 0, 1, 2)[None])
        return Clip(self._on_device(pixels, True), canvas.content_hw)

    @typed()
    def caption(self, call: CallSettings, clip: Clip, task: str) -> str:
        """The caption around a task, which may be blank."""
        height, width = clip.pixels.shape[-2:]
        rig = call.embodiment.rig
        return compose_prompt(
            task,
            prompt_format=self._prompt_format,
            view=call.view,
            num_frames=call.action_chunk + 1,
            fps=call.fps,
            canvas_hw=(height, width),
            layout=rig.layout if rig is not None and call.view == "concat" else "",
        )

    @typed()
    def request(
        self,
        call: CallSettings,
        clip: Clip,
        caption: str,
        *,
        state: Any = None,
        cond_action: Any = None,
        action_prefix: Any = None,
        sampled: Mapping[str, Any] = _AS_THEY_ARE,
    ) -> Cosmos3ActionRequest:
        """The engine's request, with 30 steps, seed 0 and no guidance where ``sampled``, some of
        its fields, does not say otherwise; rows as :meth:`preprocess`'s.

        Raises:
            InputError, ShapeError, NonFiniteError: Rows cannot be used, or contradict the mode.
        """
        ids, negative = (
            self._tokens.ids(text, self._system_prompt) for text in (caption, self._negative)
        )
        return Cosmos3ActionRequest(
            text_ids=self._on_device(ids),
            text_mask=self._on_device(np.ones_like(ids)),
            neg_text_ids=self._on_device(negative),
            neg_text_mask=self._on_device(np.ones_like(negative)),
            cond_video_pixels=clip.pixels,
            checked_pixels=clip.pixels,
            video_shape=pixel_to_latent_shape(self._clip_frames(call), *clip.content_hw),
            mode=call.mode,
            domain_id=call.embodiment.domain_id,
            action_space=call.space.name,
            action_chunk=call.action_chunk,
            raw_action_dim=call.raw_action_dim,
            fps=call.fps,
            cond_action=self._given_action(cond_action, call),
            action_prefix=self._prefix(state, action_prefix, call),
            cond_frame_indexes=self._frame_indexes,
            history_rows=self._history,
            **sampled,
        )

    @typed()
    def postprocess(
        self, result: Array | Mapping[str, Any], processed: ProcessedInput | None = None
    ) -> dict[str, Any]:
        """What a caller can use: actions at their raw width, in their own units where statistics
        are known.

        Args:
            result: The engine's answer, or its ``action`` alone.
            processed: The input it answers; None is the last one that this processor made.

        Returns:
            ``action`` [1, chunk, raw_action_dim] float64 (rotation columns vary by a thousandth
            around 1: float32 would not survive the way back), and ``pixels`` in [0, 1], if any.
            Without statistics, actions keep the model's scale.

        Raises:
            InputError: No ``action`` in the result, or nothing was preprocessed yet.
            ShapeError, ActionOutOfRangeError: The action is narrower than the domain's, or beyond
                |z| = 10.
        """
        call = processed or self._last or self.settings()
        answer = {"action": result} if isinstance(result, Array) else dict(result)
        if not isinstance(answer.get("action"), Array):
            raise InputError(
                f"the result holds no tensor `action`; it has: {', '.join(answer) or 'nothing'}."
            )
        given = answer["action"]
        action = _on_host(given)
        if action.ndim == 2:
            action = action[None]
        if action.ndim != 3 or action.shape[-1] < call.raw_action_dim:
            raise ShapeError(
                f"action must be [1, T, >= {call.raw_action_dim}], got {list(action.shape)}."
            )
        rows = action[..., : call.raw_action_dim].astype(np.float64)
        affine = self._affine(call)
        if affine is not None:
            rows = affine.inverse(rows)
        elif call.space.state_row:
            rows[..., -1] = self._gripper.from_fraction(rows[..., -1])
        return {**answer, "action": array_namespace(given).asarray(rows)}

    def _frames_read(self, call: CallSettings) -> int:
        """How many frames are read, from the first on."""
        if self._frame_indexes is not None:
            return max(0, *self._frame_indexes) * TEMPORAL_COMPRESSION + 1
        return call.action_chunk + 1 if call.mode is Mode.INVERSE_DYNAMICS else 1

    def _clip_frames(self, call: CallSettings) -> int:
        """How many frames the whole clip has, the predicted ones included."""
        if call.mode is Mode.POLICY and self._policy_frames is not None:
            return self._policy_frames
        return call.action_chunk + 1

    def _affine(self, call: CallSettings) -> Affine | None:
        if self._stats is None:
            return None
        if call.space.state_row or not call.space.normalized:
            raise ActionSpaceError(
                f"{call.space.name!r} rows of {call.embodiment.name!r} are raw; they must not be "
                "de-normalised. Statistics belong to 'midtrain' rows: leave "
                "action_stats_path unset."
            )
        if isinstance(self._stats, str | Path):
            self._stats = load_action_stats(self._stats, call.embodiment.stats)
        stats = self._stats
        if call.embodiment.stats != stats.domain or call.raw_action_dim != stats.width:
            raise StatisticsError(
                f"statistics of {stats.domain!r} ({stats.width} columns) do not fit "
                f"{call.embodiment.name!r} ({call.raw_action_dim} columns, "
                f"statistics {call.embodiment.stats!r})."
            )
        return stats.normalizer(self._method)

    def _given_action(self, actions: Any, call: CallSettings) -> Array | None:
        if actions is None:
            return None
        rows = _rows(actions, "cond_action")
        width = call.raw_action_dim
        if rows.shape[1] == self._action_dim and not rows[:, width:].any():
            rows = rows[:, :width]
        if rows.shape[1] != width:
            raise ShapeError(
                f"cond_action has {rows.shape[1]} columns, {call.embodiment.name!r} has {width}."
            )
        return self._padded(self._in_model_units(rows, call))

    def _in_model_units(self, rows: np.ndarray, call: CallSettings) -> np.ndarray:
        affine = self._affine(call)
        if affine is not None:
            return affine(rows)
        if not call.space.state_row:
            moves = [i for i, name in enumerate(call.space.columns) if name in POSE9[:3]]
            if call.space.normalized and 0 < np.abs(rows[:, moves]).max(initial=0) < _SMALLEST_MOVE:
                warnings.warn(
                    f"every translation of the given rows is below {_SMALLEST_MOVE} of the model's "
                    "scale, as raw metres are: they must be normalised; give metres "
                    "with action_stats_path.",
                    stacklevel=2,
                )
            return rows
        return np.concatenate([rows[:, :-1], self._gripper.to_fraction(rows[:, -1:])], axis=1)

    def _prefix(self, given: Any, bound: Any, call: CallSettings) -> Array | None:
        """The rows of the action sequence that are given: the state, if any, and what is bound
        to be executed.
        """
        state = self._state(given, call)
        if bound is None:
            return state
        rows = _rows(bound, "action_prefix")
        longest = min(call.action_chunk - 1, self._prefix_rows)
        if call.mode is not Mode.POLICY or rows.shape[1] != call.raw_action_dim:
            raise InputError(
                f"action_prefix must be rows of {call.raw_action_dim} columns, in mode 'policy'; "
                f"got {list(rows.shape)} in mode {str(call.mode)!r}."
            )
        if len(rows) > longest:
            raise InputError(
                f"action_prefix has {len(rows)} rows; this checkpoint takes {longest or 'none'} of "
                f"a chunk of {call.action_chunk} rows: only as many as it declares (prefix_rows)."
            )
        action_prefix = self._padded(self._in_model_units(rows, call))
        if state is None:
            return action_prefix
        return array_namespace(state).concat([state, action_prefix])

    def _state(self, given: Any, call: CallSettings) -> Array | None:
        if not call.space.state_row and self._state_row is None:
            if given is not None or self._history:
                raise InputError(
                    f"a state is for 'joint_pos' checkpoints; this one answers {call.space.name!r}."
                )
            return None
        scale = None if call.space.state_row else self._state_row
        columns = call.space.columns if scale is None else STATE_COLUMNS
        listed = ", ".join(columns)
        if given is None:
            raise InputError(
                "the input lacks 'state' (--state), with which this checkpoint's sequence starts: "
                f"{len(columns)} numbers, {listed}."
            )
        state = np.atleast_2d(finite_array(given, "state", None))
        if len(state) <= self._history:
            raise InputError(
                f"history_length is {self._history + 1}, and `state` has {len(state)} rows."
            )
        state = state[-self._history - 1 :]
        if state.shape[1:] != (len(columns),):
            raise ShapeError(
                f"state must have {len(columns)} values ({listed}), got {state.shape[-1]}."
            )
        if (largest := np.abs(state).max()) > _LARGEST_STATE:
            raise InputError(
                f"state reaches {largest:g}, where {_LARGEST_STATE:g} is the most: metres, rad, "
                "and a gripper's open fraction."
            )
        return self._padded(
            self._in_model_units(state, call) if scale is None else scale.scaled(state)
        )

    def _padded(self, rows: np.ndarray) -> Array:
        padded = np.zeros((len(rows), self._action_dim), np.float32)
        padded[:, : rows.shape[1]] = rows
        return self._on_device(padded)


def _maker(device: str | torch.device, dtype: torch.dtype | None) -> Callable[..., Array]:
    """Return what makes an array of a processor's kind of one of NumPy, where asked in its dtype.
    Only tensors need torch.
    """
    if device == "numpy":
        return lambda array, as_dtype=False: array
    import torch

    from strands_cosmos3.engine.preflight import torch_device

    where = torch_device(device)

    def made(array: np.ndarray, as_dtype: bool = False) -> Array:
        return torch.from_numpy(array).to(where, dtype if as_dtype else None)

    return made


def _on_host(array: Array) -> np.ndarray:
    """An array in float32 of NumPy."""
    if is_torch_array(array):
        array = array.detach().float().cpu().numpy()
    return np.asarray(array, np.float32)


_SMALLEST_MOVE = 0.01
_LARGEST_STATE = 10.0
_KNOWN = (
    "images",
    "task",
    "prompt",
    "cond_action",
    "action",
    "action_prefix",
    "state",
    "mode",
    "domain_name",
    "domain_id",
    "caption",
)


def _first_of(raw: Mapping[str, Any], names: Sequence[str], needed: str) -> tuple[str, Any]:
    """The first of these fields that is given, and its value; InputError if none is."""
    given = [name for name in raw if raw[name] is not None]
    for name in names:
        if name in given:
            return name, raw[name]
    raise InputError(f"the input lacks {needed}; it has: {', '.join(given) or 'nothing'}.")


def _text(raw: Mapping[str, Any], names: Sequence[str], needed: str) -> str:
    """The first of these fields that is given: a string, or a list whose first counts."""
    name, value = _first_of(raw, names, needed)
    value = value[0] if isinstance(value, list | tuple) and value else value
    if not isinstance(value, str):
        raise InputError(f"the {name} must be a string or a list of strings, got {value!r}.")
    return value


def _embodiment(domain: str | int, width: int | None) -> Embodiment:
    if isinstance(domain, int):
        if width is None:
            raise InputError(
                f"domain id {domain} does not tell its raw width; pass raw_action_dim, or a "
                "domain name."
            )
        return raw_embodiment(domain, width)
    return get_embodiment(domain)


def _only_domain(name: str | int | None, number: str | int | None) -> str | int | None:
    """The domain that two arguments name, either of which may be None; ConfigError if they name
    two.
    """
    if name is None or number is None:
        return number if name is None else name
    first, second = (
        value if isinstance(value, int) else get_embodiment(value).domain_id
        for value in (name, number)
    )
    if first != second:
        raise ConfigError(
            f"domain_name={name!r} and domain_id={number!r} are different "
            f"domains ({first}, {second})."
        )
    return name


def _rows(value: Any, name: str) -> np.ndarray:
    """Rows of numbers [rows, columns] in float64."""
    if is_torch_array(value):
        value = value.detach().cpu()
    rows = finite_array(value, f"rows of {name}", None)
    rows = rows[0] if rows.ndim == 3 and len(rows) == 1 else rows
    if rows.ndim != 2:
        raise ShapeError(
            f"{name} must be [rows, columns] (a leading 1 is allowed), got {list(rows.shape)}."
        )
    return rows
