#!/usr/bin/env bash
# PyAV 18.1.0 resamples an audio frame without a time stamp, and muxing what comes of it fails for
# some lengths and works for others.
#
# A frame that AudioFrame.from_ndarray made has no pts. An AAC stream of 48 kHz takes one of 8 kHz
# and resamples it in silence. For about a tenth of the lengths between 1,000 and 9,000 samples the
# container then refuses a packet with EINVAL ("Invalid argument"), which names the file and not the
# time stamps. With pts = 0 and time_base = 1/8000 every length works.
#
# It matters to whoever writes a film's track from an array: the failure depends on how long the
# sound is. The script exits with 1 if no length fails without a time stamp.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --disable-pip-version-check av==18.1.0 numpy 2>&1 | grep -v WARNING || true
"$folder/env/bin/python" - "$folder/f.mp4" <<'PY'
import sys
from fractions import Fraction

import av
import numpy as np

print("PyAV", av.__version__)


def mux(length, stamped):
    with av.open(sys.argv[1], "w") as out:
        stream = out.add_stream("aac", rate=48000)
        stream.layout = "stereo"
        silence = np.zeros((2, length), np.float32)
        frame = av.AudioFrame.from_ndarray(silence, format="fltp", layout="stereo")
        frame.sample_rate = 8000
        if stamped:
            frame.pts, frame.time_base = 0, Fraction(1, 8000)
        for packet in (*stream.encode(frame), *stream.encode(None)):
            out.mux(packet)


lengths, failed = range(1000, 9000, 67), {}
for stamped in (False, True):
    failed[stamped] = []
    for length in lengths:
        try:
            mux(length, stamped)
        except av.error.ArgumentError:
            failed[stamped].append(length)
    named = "with" if stamped else "without"
    print(f"{named} a time stamp {len(failed[stamped])} of {len(lengths)} lengths fail")
raise SystemExit(0 if failed[False] and not failed[True] else 1)
PY
