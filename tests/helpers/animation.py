"""Make the README's animation, docs/rollout.webp, of a film that `rollout --video` wrote.

strands-cosmos3 rollout --task place --instruction "place the blue cube in the bin" --seed 3 --video
out/place.mp4 cd tests && python -m helpers.animation ../out/place.mp4 ../docs/rollout.webp
"""

from __future__ import annotations

import sys
from pathlib import Path

import av
from PIL import Image

# half of the frames at 20 per second: twice as fast; the last one stays
WIDTH_PX, EVERY, MS, LAST = 768, 2, 50, 30


def main(film: str, picture: str) -> None:
    with av.open(film) as source:
        frames = [
            frame.to_image() for i, frame in enumerate(source.decode(video=0)) if i % EVERY == 0
        ]
    height = round(frames[0].height * WIDTH_PX / frames[0].width)
    small = [frame.resize((WIDTH_PX, height), Image.Resampling.LANCZOS) for frame in frames]
    durations = [MS] * (len(small) - 1) + [MS * LAST]
    small[0].save(
        picture,
        save_all=True,
        append_images=small[1:],
        duration=durations,
        loop=0,
        quality=60,
        method=6,
    )
    print(f"{picture}: {len(small)} frames, {Path(picture).stat().st_size} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
