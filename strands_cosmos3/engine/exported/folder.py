"""The folder that an export writes: graphs without weights, and ``export.json``, which says of
which checkpoint they are, and for which shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from os.path import normpath
from pathlib import Path
from typing import Any

from strands_cosmos3.checks import typed_fields
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.formats.detect import open_layout
from strands_cosmos3.engine.variants import existing, locate
from strands_cosmos3.errors import DigestError, InputError, LayoutError
from strands_cosmos3.resources import contained, read_json, sha256, write_json
from strands_cosmos3.tables import as_tuples

FOLDER = "onnx"
"""Where the graphs of a checkpoint lie, seen from its folder, unless told otherwise."""
EXPORT = "export.json"
FORMAT = 1
_REMEDY = "make it with strands-cosmos3 export --model"


@dataclass(frozen=True)
class GraphRecord:
    """A graph in the folder: its file, that one's SHA-256, and the stored names of its weights,
    which all are of one part of the checkpoint (``transformer``, ``vae``, ``preview_decoder``).
    """

    file: str
    sha256: str
    part: str
    weights: tuple[str, ...]

    def __post_init__(self) -> None:
        typed_fields(self)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What ``export.json`` states.

    Args:
        format: Version of this record.
        checkpoint: Path of the checkpoint, seen from the folder.
        sha256: The checkpoint's digest.
        graphs: By their names (:data:`GRAPHS`).
        canvas_hw, content_hw: Height and width of the canvas, in pixels, and of the pictures there.
        clip_frames: Frames of a whole clip: of what inverse dynamics read, and of the longest film.
        rope_frequencies: Angles a position, as torch rounds them.
        template: What stands before and after a caption, without and with the system prompt.
        closing: Ids that follow.
    """

    format: int
    checkpoint: str
    sha256: str
    graphs: Mapping[str, GraphRecord]
    canvas_hw: tuple[int, int]
    content_hw: tuple[int, int]
    clip_frames: int
    rope_frequencies: tuple[float, ...]
    template: tuple[tuple[str, str], tuple[str, str]]
    closing: tuple[int, ...]

    def __post_init__(self) -> None:
        typed_fields(self)

    @classmethod
    def read(cls, folder: Path) -> Exported:
        """Read a folder's record.

        Raises:
            LayoutError: It is missing or damaged, or of another version of this package.
            DigestError: A graph is missing, or its bytes are others than were written.
        """
        path = folder / EXPORT
        beside = folder.resolve().parent  # where an export lies unless told otherwise
        hint = f"{_REMEDY.capitalize()} {beside}."
        values: dict[str, Any] = read_json(path, LayoutError, hint)
        remedy = f"{_REMEDY} {normpath(folder / str(values.get('checkpoint', beside)))}."
        if values.get("format") != FORMAT:
            raise LayoutError(
                f"{path} has format {values.get('format')!r}, and this version reads {FORMAT}; "
                f"{remedy}"
            )
        try:
            graphs = {
                name: GraphRecord(**{key: as_tuples(value) for key, value in graph.items()})
                for name, graph in values["graphs"].items()
            }
            stated: dict[str, Any] = {name: as_tuples(value) for name, value in values.items()}
            record = cls(**{**stated, "graphs": graphs})
        except (AttributeError, KeyError, TypeError, InputError) as error:
            raise LayoutError(f"{path} is damaged ({error}); {remedy}") from None
        for graph in record.graphs.values():
            path = contained(folder / graph.file, folder, "export", LayoutError)
            if not path.is_file() or sha256(path) != graph.sha256:
                raise DigestError(
                    f"{path} is missing, or is not the graph that {EXPORT} records; {remedy}"
                )
        return record

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        write_json(folder / EXPORT, asdict(self))


def exported_folder(model: str | Path) -> tuple[Path, Path]:
    """The folder of the graphs, and the checkpoint, that a name stands for: a checkpoint with
    graphs beside its weights, or a folder of graphs.

    Raises LayoutError if there are none, or the folder's checkpoint is not there.
    """
    path = locate(model)
    if (path / EXPORT).is_file():
        record = Exported.read(path)
        checkpoint = existing(record.checkpoint, path)
        if checkpoint is None:
            raise LayoutError(
                f"{path} holds graphs of {record.checkpoint!r}, which is not there; {_REMEDY} "
                f"CHECKPOINT --out {path}."
            )
        return path, checkpoint
    root = path if path.is_dir() else open_layout(path).root
    folder = root / FOLDER
    if not (folder / EXPORT).is_file():
        raise LayoutError(
            f"{root} has no exported graphs ({folder / EXPORT}); {_REMEDY} {model}, or run it with "
            "--backend native (backend=)."
        )
    return folder, path


def open_exported(
    model: str | Path, action_space: str | None = None
) -> tuple[Path, Exported, Checkpoint]:
    """A folder of graphs, its record, and its checkpoint.

    Raises:
        CheckpointError: There are no graphs, or the checkpoint cannot be opened.
        DigestError: The checkpoint is not the one that was exported.
    """
    folder, path = exported_folder(model)
    record = Exported.read(folder)
    checkpoint = Checkpoint.open(path, action_space=action_space, exported=True)
    if checkpoint.digest != record.sha256:
        raise DigestError(
            f"the graphs in {folder} are of a checkpoint with digest {record.sha256[:12]}, and "
            f"{checkpoint.root} has {checkpoint.digest[:12]}: it was changed since; {_REMEDY} "
            f"{path}."
        )
    return folder, record, checkpoint
