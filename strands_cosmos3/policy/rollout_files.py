"""Files of what a policy predicts, for callers that want paths instead of arrays."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from strands_cosmos3.films import VideoWriter, write_wav
from strands_cosmos3.resources import require_creatable
from strands_cosmos3.types import ActionChunk


class RolloutFiles:
    """Writes the predicted video (.mp4) and sound (.wav) of each chunk to a folder, which is made.

    Files are numbered in the order of the calls, from the first number on that is free there.
    ConfigError: the folder cannot be written to.
    """

    def __init__(self, folder: str | Path):
        folder = Path(folder).expanduser()
        require_creatable(folder / "rollout", "rollout_folder")
        self._stems = (folder / f"rollout_{number:06d}" for number in count())

    def write(self, chunk: ActionChunk) -> tuple[str | None, str | None]:
        """Write the files of a chunk; return the paths of its video, which has the sound too, and
        of its sound, or None for what it has not.
        """
        if chunk.video is None and chunk.sound is None:
            return None, None
        files = ((stem.with_suffix(".mp4"), stem.with_suffix(".wav")) for stem in self._stems)
        video, sound = next(pair for pair in files if not any(path.exists() for path in pair))
        if chunk.sound is not None:
            write_wav(sound, chunk.sound)
        if chunk.video is not None:
            assert chunk.fps is not None  # the chunk resolved it
            with VideoWriter(video, chunk.fps) as film:
                if chunk.sound is not None:
                    film.hear(chunk.sound)
                for frame in chunk.video:
                    film.write(frame)
        written = (str(path) if path.exists() else None for path in (video, sound))
        return next(written), next(written)
