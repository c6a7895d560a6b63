"""``strands-cosmos3 infer``: one inference of a checkpoint, written to files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console

from strands_cosmos3.backends.options import ServiceOptions
from strands_cosmos3.checks import finite_array, seed_number
from strands_cosmos3.commands.files import require_apart, require_writable, versions
from strands_cosmos3.commands.progress import progress_bar
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.errors import ConfigError, InputError, ResourceNotFoundError
from strands_cosmos3.extras import needed_by
from strands_cosmos3.films import Sound, VideoWriter, write_wav
from strands_cosmos3.options import option, section
from strands_cosmos3.policy.options import PolicyOptions
from strands_cosmos3.resources import write_json

_DEFAULT_DOMAIN = "droid_lerobot"
_OPTIONS_OF_PROCESSOR = (
    "mode",
    "raw_action_dim",
    "action_stats_path",
    "action_normalization",
    "height",
    "width",
)


@dataclass(frozen=True, kw_only=True)
class InferredOptions(PolicyOptions):
    """The checkpoint."""

    backend: None = option(None, hidden=True)
    chunk_rows: int | None = None
    """Rows of the answer; None is the checkpoint's number, else the embodiment's."""
    replan_rows: int | None = option(None, hidden=True)
    borrow_domain: bool = option(False, hidden=True)
    service: ServiceOptions = section(ServiceOptions, hidden=True)


@dataclass(frozen=True)
class InferCommand:
    """Run a Cosmos 3 checkpoint once and write its actions or its video.

    Modes: actions from a picture (policy), video from actions (forward_dynamics), or actions from a
    video (inverse_dynamics).

    On several processes:

      torchrun --nproc-per-node=8 -m strands_cosmos3 infer --cfg 2 --tp 4 --model ...

    Writes <out>_action.json with shape, dtype and data, <out>.mp4 where a video is decoded, and
    with --sound <out>.wav, which is also the track of the film.
    Options that are not set follow the checkpoint, then the domain. The answer of a policy is a
    valid --action-file for forward_dynamics.
    """

    prompt: str | None = None
    """The task in words; '' is a blank one."""
    image: tuple[Path, ...] = ()
    """One picture, or all views that the embodiment composes, in its order: for DROID wrist,
    exterior_1 and exterior_2.
    """
    video: Path | None = None
    """A clip instead; its first chunk + 1 frames count, at the rate of the rows: it must have as
    many frames a second, or a whole multiple.
    """
    mode: Literal["policy", "forward_dynamics", "inverse_dynamics"] = "policy"
    """What to predict."""
    action_file: Path | None = None
    """Known actions (.json) for forward_dynamics: shape, dtype and data, or action_chunks, or a
    nested list. Their unit is the model's: normalised rows for midtrain, rad for joint_pos.
    """
    action_chunk_index: int = 0
    """Which of a file's action_chunks."""
    state: tuple[float, ...] = ()
    """The state that a checkpoint starts from. joint_pos: seven joint angles in rad and the
    gripper, 1 = open. A midtrain checkpoint with a state row, such as the bundled policy: ten
    numbers, the Cosmos frame's pose in the robot's base (x y z in m, the first two columns of
    its rotation matrix, one after the other) and the gripper, 1 = open, e.g. 0.48 0 0.24 1 0 0 0
    -1 0 1.
    """
    condition_frames: str | None = None
    """Latent frames that are given, e.g. 0,1. The default is 0, and all of them for
    inverse_dynamics.
    """
    domain_name: str | None = None
    """Embodiment by name, or an integer domain id. The default is the checkpoint's, else
    droid_lerobot.
    """
    raw_action_dim: int | None = None
    """Action width; needed with an integer domain id."""
    action_stats_path: str | None = None
    """Statistics for actions in their own units: a domain's name or a .json file. Without, they
    stay normalised.
    """
    action_normalization: Literal["quantile", "quantile_rot", "meanstd", "minmax"] = "quantile"
    """Normalisation that those statistics belong to."""
    height: int | None = None
    """Height of the canvas in pixels, with --width."""
    width: int | None = None
    """Width of the canvas in pixels, with --height."""
    seed: int = 0
    """Seed of the noise; the same on every device."""
    decode_video: bool = False
    """Decode the predicted video; forward_dynamics always does."""
    self_test: bool = False
    """Instead, check that the checkpoint gets the inputs that it was trained on, and that its
    first chunk for a simulated picture has a plausible size and direction. Needs no other option
    but --model; writes <out>_self_test.json.
    """
    out: Path = Path("cosmos3")
    """Beginning of the output files' names."""
    policy: InferredOptions = section(InferredOptions)

    @property
    def extras(self) -> tuple[str, ...]:
        """Extras of the package that it needs."""
        return ("engine", "sim") if self.self_test else ("engine",)

    def run(self) -> int:
        """Run the inference, write the files, and list them."""
        if self.self_test:
            return self._test()
        decode = self.decode_video or self.mode == "forward_dynamics"
        action_path = self._output("_action.json")
        video_path = self._output(".mp4") if decode else None
        sound_path = self._output(".wav") if self.policy.sound else None
        known_rows = self._check()
        console = Console()
        with self._engine(decode, console) as engine:
            processor = self._processor(engine)
            processed = processor.preprocess(
                {
                    "images": self._images(processor),
                    "task": self.prompt,
                    "cond_action": known_rows,
                    "state": list(self.state) or None,
                }
            )
            space = processed.space.name
            meaning = {
                "domain": processed.embodiment.name,
                "action_space": space,
                "scale": "model" if self.action_stats_path is None else "physical",
            }
            if self.action_file is not None:
                _require_meaning(self.action_file, meaning)
            request = self._request(engine, processed)
            with progress_bar(console) as bar:
                row = bar.add_task(
                    f"{self.mode}, {engine.device}", total=request.num_inference_steps
                )
                result = engine.step(
                    request, on_step=lambda done, _: bar.update(row, completed=done)
                )
            engine.parallel_context.barrier()
            if engine.parallel_context.rank > 0:  # rank 0 has the pixels, and it alone writes
                return 0
            answer = processor.postprocess(result, processed)
        rows = answer["action"][0].numpy()
        timing = result["timing"]
        report = {
            "shape": list(rows.shape),
            "dtype": str(rows.dtype),
            "data": rows.tolist(),
            **meaning,
            "seed": self.seed,
            "timing_ms": {part: round(ms, 3) for part, ms in timing.items()},
        }
        write_json(action_path, report)
        columns = f"{len(rows)} rows of {rows.shape[1]} columns"
        console.print(f"wrote {action_path}: {columns}, {space}", soft_wrap=True)
        sound = None
        if sound_path is not None:
            sound = Sound(result["waveform"][0].numpy(), result["sample_rate"])
            write_wav(sound_path, sound)
            heard = f"{sound.duration_s:.3f} s at {sound.rate_hz} Hz"
            console.print(f"wrote {sound_path}: {heard}", soft_wrap=True)
        if video_path is not None:
            from strands_cosmos3.backends.model_input import as_pictures

            with VideoWriter(video_path, processed.fps) as writer:
                if sound is not None:
                    writer.hear(sound)
                for frame in as_pictures(answer["pixels"]):
                    writer.write(frame)
            console.print(f"wrote {video_path}", soft_wrap=True)
        if label := engine.checkpoint.metadata.get("label"):
            console.print(f"the checkpoint says of itself: {label}", soft_wrap=True)
        console.print("  ".join(f"{part} {ms:.0f} ms" for part, ms in timing.items()))
        return 0

    def _output(self, ending: str) -> Path:
        """Return the path of an output file, which can be written and is no input."""
        path = self.out.with_name(self.out.name + ending)
        inputs = {"--action-file": self.action_file, "--video": self.video, "--image": self.image}
        require_apart({"--out": path}, inputs)
        require_writable(path, (path.suffix,), "--out")
        return path

    def _test(self) -> int:
        """Test the checkpoint, print and write the results; return 1 if one failed."""
        path = self._output("_self_test.json")
        from strands_cosmos3.commands import self_test

        checkpoint = str(self.policy.model or embedded_checkpoint())
        console = Console(highlight=False, markup=False)
        with console.status(f"testing {checkpoint}"):
            checks, measured = self_test.run(checkpoint, replace(self.policy, model=None))
        for check in checks:
            console.print(f"{check.state:7} {check.what}: {check.detail}")
        failed = [check.what for check in checks if check.state == "failed"]
        report = {"checkpoint": checkpoint, "checks": [vars(check) for check in checks]}
        write_json(path, {**report, **measured, "versions": versions()})
        verdict = f"failed: {', '.join(failed)}" if failed else "nothing failed"
        console.print(f"{verdict}; wrote {path}", soft_wrap=True)
        return int(bool(failed))

    def _check(self) -> np.ndarray | None:
        """Check the flags; return the rows of the action file."""
        seed_number(self.seed, "--seed")
        _indexes(self.condition_frames)
        if bool(self.image) == (self.video is not None):
            got = "both" if self.image else "neither"
            raise ConfigError(f"give either --image (pictures) or --video (a clip); got {got}.")
        if (self.mode == "forward_dynamics") != (self.action_file is not None):
            raise ConfigError("--action-file belongs to --mode forward_dynamics, which needs it.")
        if self.prompt is None:
            raise ConfigError(
                "--prompt is missing: state the task, e.g. --prompt 'pick up the red cube'."
            )
        pictures = self.image if self.video is None else (self.video,)
        if absent := [repr(str(path)) for path in pictures if not path.is_file()]:
            raise ResourceNotFoundError(f"no picture or video at {', '.join(absent)}.")
        if self.action_file is None:
            return None
        return read_actions(self.action_file, self.action_chunk_index)

    def _engine(self, decode: bool, console: Console) -> Any:
        with needed_by("infer"):
            from strands_cosmos3.backends.devices import resolve_device
            from strands_cosmos3.engine.engine import Cosmos3Engine
        policy = self.policy
        checkpoint = policy.model or embedded_checkpoint()
        with console.status(f"loading {checkpoint}"):
            return Cosmos3Engine.from_pretrained(
                checkpoint,
                device=resolve_device(policy.engine),
                parallel=policy.parallel,
                decode_video=decode,
                options=policy.for_backend.engine,
                action_space=policy.action_space,
            )

    def _processor(self, engine: Any) -> Any:
        from strands_cosmos3.engine.processor import Cosmos3PolicyProcessor

        engine.checkpoint.require_contract(self._stated())
        known = engine.checkpoint.metadata.get("domain")
        domain = self.domain_name or known or _DEFAULT_DOMAIN
        return Cosmos3PolicyProcessor.for_checkpoint(
            engine.checkpoint,
            domain_name=int(domain) if domain.isdigit() else domain,
            cond_frame_indexes=_indexes(self.condition_frames),
            action_chunk_size=self.policy.chunk_rows,
            **self.policy.sampling.of_processor,
            **{name: getattr(self, name) for name in _OPTIONS_OF_PROCESSOR},
        )

    def _stated(self) -> list[str]:
        """Fields of a contract that flags state, and those that rows in the model's scale do
        without.
        """
        flags = {
            "domain": self.domain_name,
            "action_space": self.policy.action_space,
            "chunk": self.policy.chunk_rows,
            "resolution_tier": self.height,
        }
        needless = ("width", "normalization", "statistics", "gripper", "views")
        named = (name for name, value in flags.items() if value is not None)
        return [*needless, *named, *self.policy.sampling.stated]

    def _images(self, processor: Any) -> Any:
        """Return the picture, the views by name, or the frames of the clip."""
        from strands_cosmos3.engine.frames import read_frames

        if self.video is not None:
            return processor.read_film(self.video)
        if len(self.image) == 1:
            return list(self.image)
        embodiment = processor.embodiment
        views = () if embodiment.rig is None else embodiment.rig.views
        if len(self.image) != len(views):
            composed = f", or its views {', '.join(views)}" if views else ""
            raise ConfigError(
                f"--image takes one picture of {embodiment.name!r}{composed}; "
                f"got {len(self.image)}."
            )
        return {name: read_frames(path)[0] for name, path in zip(views, self.image, strict=True)}

    def _request(self, engine: Any, processed: Any) -> Any:
        options = self.policy.sampling
        sampling = engine.checkpoint.resolve_sampling(
            processed.embodiment, processed.space.name, options, processed.mode
        )
        return processed.request(
            sampling, seed=self.seed, use_karras_sigmas=options.karras, sound=self.policy.sound
        )


def read_actions(path: Path, chunk_index: int = 0) -> np.ndarray:
    """Rows [T, D] of an action file: ``{"shape", "dtype", "data"}``, ``{"action_chunks": [rows]}``
    (the one at ``chunk_index``), or a nested list.

    Raises:
        ResourceNotFoundError: It does not exist.
        InputError: It is not JSON, or holds no such rows.
    """
    if not path.is_file():
        raise ResourceNotFoundError(f"--action-file {str(path)!r} does not exist or is not a file.")
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"--action-file {str(path)!r} is not JSON ({error}).") from None
    data = content
    shape = None
    if isinstance(content, dict):
        chunks = content.get("action_chunks", [content.get("data")])
        if not isinstance(chunks, list) or not 0 <= chunk_index < len(chunks):
            raise InputError(
                f"--action-chunk-index {chunk_index}: --action-file {str(path)!r} holds "
                f"{len(chunks) if isinstance(chunks, list) else 'no list of'} chunks, numbered "
                "from 0."
            )
        data = chunks[chunk_index]
        shape = content.get("shape")
    valid = "{shape, dtype, data}, {action_chunks: [rows]}, or a nested list [rows][columns]"
    try:
        rows = finite_array(data, f"--action-file {str(path)!r}", None)
    except InputError as error:
        raise InputError(f"{error} Valid: {valid}.") from None
    rows = rows[0] if rows.ndim == 3 and len(rows) == 1 else rows
    if rows.ndim != 2:
        raise InputError(f"--action-file {str(path)!r} holds no rows of numbers; valid: {valid}.")
    if shape not in (None, [*rows.shape], [1, *rows.shape]):
        raise InputError(
            f"--action-file {str(path)!r} says shape {shape}, its data are {list(rows.shape)}."
        )
    return rows


def _require_meaning(path: Path, meaning: Mapping[str, str]) -> None:
    """Raise ConfigError if an action file that an inference wrote states another meaning of its
    rows than the one as which they are read.
    """
    content = json.loads(path.read_text(encoding="utf-8-sig"))
    stated = content if isinstance(content, dict) and "action_space" in content else {}
    for name, value in meaning.items():
        if stated.get(name, value) != value:
            raise ConfigError(
                f"--action-file {str(path)!r} states {name} {stated[name]!r}, and its rows would "
                f"be read as {value!r}; give the flags with which they were made."
            )


def _indexes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--condition-frames {text!r} must be whole numbers with commas between them, e.g. 0,1."
        ) from None
