"""JPEG pictures on the wire: written at quality 95, with colours of half the width.

What is read is untrusted. Its header is checked before anything is decoded: a picture of three
colours in one baseline scan, as common encoders write it, of at most :data:`MAX_PIXELS`. A header
is thus enough to know what decoding takes; progressive files and files of several scans, which cost
a pass over the picture for every few bytes, are refused.
"""

from __future__ import annotations

from importlib.util import find_spec
from io import BytesIO

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.errors import ShapeError, WireFormatError

QUALITY = 95
MAX_PIXELS = 2**20
"""Of one picture. Five such ones, as raw pixels, fit into a frame of 16 MiB."""
_START, _END = b"\xff\xd8", b"\xff\xd9"
_BASELINE, _SCAN = 0xC0, 0xDA
_EIGHT_BITS, _THREE_COLOURS = b"\x08", b"\x03"
_TABLES = (0xE0, 0xDB, 0xC4, 0xDD, 0xFE)  # JFIF, quantisation, Huffman, restarts, comment


def has_jpeg() -> bool:
    """Return whether this installation reads and writes JPEG."""
    return find_spec("PIL") is not None


def encode_jpeg(picture: NDArray[np.uint8]) -> bytes:
    """Return a picture [H, W, 3] as JPEG."""
    from PIL import Image

    file = BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=QUALITY, subsampling="4:2:2")
    return file.getvalue()


def decode_jpeg(file: bytes, name: str) -> NDArray[np.uint8]:
    """Return the picture [H, W, 3] in a JPEG file, which errors call ``name``.

    Raises:
        ShapeError: It has more than :data:`MAX_PIXELS`, and was not decoded.
        WireFormatError: It is no JPEG file, is truncated, or of another kind than the module says.
    """
    height, width = _size(file, name)
    if height * width > MAX_PIXELS:
        raise ShapeError(
            f"{name} is a JPEG of {height} x {width} pixels; at most {MAX_PIXELS} are decoded. "
            "Send a smaller picture."
        )
    from PIL import Image

    try:
        with Image.open(BytesIO(file), formats=("JPEG",)) as image:
            return np.asarray(image)
    except (OSError, SyntaxError, ValueError) as error:
        raise WireFormatError(f"{name} is a damaged JPEG: {error}.") from None


def _size(file: bytes, name: str) -> tuple[int, int]:
    """Height and width that the header states; WireFormatError unless the whole file is as the
    module says.
    """
    if not file.startswith(_START):
        raise WireFormatError(f"{name} holds bytes that are no JPEG; send one, or uint8 [H, W, 3].")
    size: tuple[int, int] | None = None
    at = len(_START)
    while True:
        head = file[at : at + 4]
        length = int.from_bytes(head[2:], "big")
        segment = file[at + 4 : at + 2 + length]
        if len(head) < 4 or head[0] != 0xFF or length < 2 or len(segment) != length - 2:
            raise WireFormatError(f"{name} is a JPEG whose header is truncated or damaged.")
        marker = head[1]
        at += 2 + length
        is_size = marker == _BASELINE and size is None
        if is_size and (segment[:1], segment[5:6]) == (_EIGHT_BITS, _THREE_COLOURS):
            size = int.from_bytes(segment[1:3], "big"), int.from_bytes(segment[3:5], "big")
        elif marker == _SCAN and size is not None and segment[:1] == _THREE_COLOURS:
            break
        elif marker not in _TABLES:
            raise WireFormatError(
                f"{name} is a JPEG with a segment 0x{marker:02x} that is not read; of JPEG only "
                "pictures of three colours in one baseline scan, without metadata, are."
            )
    if 0 in size or not file.endswith(_END):
        raise WireFormatError(f"{name} is a JPEG that is empty, or truncated.")
    return size
