"""openpi-client's own msgpack_numpy: `write` puts sample messages on stdout, `check` reads them
back from stdin.
"""

import sys

import numpy as np
from openpi_client import msgpack_numpy

SAMPLES = [
    {"prompt": "é", "n": 3, "x": 0.5, "none": None, "yes": True, "list": [1, "a", {"b": b"c"}]},
    {
        name: np.arange(24).reshape(2, 3, 4).astype(name)
        for name in ("u1", "i4", "i8", "f4", "f8", "?")
    },
    {"scalars": [np.float32(0.1), np.int64(7), np.uint8(3), np.bool_(True), np.float64(0.25)]},
    {
        "none": np.zeros((0, 8), np.float32),
        "point": np.array(3.5),
        "view": np.arange(12).reshape(3, 4)[:, ::2],
    },
]
if sys.argv[1] == "write":
    sys.stdout.buffer.write(
        msgpack_numpy.packb([msgpack_numpy.packb(sample) for sample in SAMPLES])
    )
else:
    for sample, frame in zip(SAMPLES, msgpack_numpy.unpackb(sys.stdin.buffer.read()), strict=True):
        back = msgpack_numpy.unpackb(frame)
        assert repr(back) == repr(msgpack_numpy.unpackb(msgpack_numpy.packb(sample))), (
            back,
            sample,
        )
    print("same")
