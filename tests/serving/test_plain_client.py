"""The client of docs/wire.md, which needs nothing of this package."""

from __future__ import annotations

import numpy as np
import pytest
from websockets.sync.client import connect

from helpers.code_blocks import blocks
from helpers.spy import Spy
from strands_cosmos3.serving.codec import decode, encode

(CLIENT,) = (block.code for block in blocks() if "test_plain_client.py" in str(block.reason))


def run(port: int, code: str = CLIENT) -> dict:
    names: dict = {}
    exec(compile(code.replace("8000", str(port)), "docs/wire.md", "exec"), names)
    return names


def test_it_is_as_short_as_the_page_says_and_needs_no_package_of_ours():
    assert sum(bool(line.strip()) for line in CLIENT.splitlines()) == 15
    assert "strands_cosmos3" not in CLIENT


def test_it_reads_the_rows_that_the_server_sends(serve):
    backend = Spy(rows=16)
    port = serve(backend, action_space="midtrain").port
    names = run(port)
    assert names["metadata"]["cosmos3/action_space"] == "midtrain"
    asked = backend.requests[-1]
    assert (asked.instruction, asked.gripper) == ("lift the red cube", 1.0)
    assert asked.composite.shape == (540, 640, 3)
    with connect(f"ws://127.0.0.1:{port}") as server:
        server.recv()
        server.send(encode(names["asked"]))
        expected = decode(server.recv())["action"]
    assert (names["rows"].shape, names["rows"].dtype) == ((16, 8), np.float32)
    np.testing.assert_array_equal(names["rows"], expected)


@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3).T, np.float32(0.5), np.zeros(1)])
def test_arrays_are_packed_as_our_codec_packs_them(serve, array):
    """Those that are not contiguous in memory, and scalars, too."""
    names = run(serve(Spy(), action_space="midtrain").port)
    import msgpack

    got = decode(msgpack.packb({"x": array}, default=names["pack"]))["x"]
    np.testing.assert_array_equal(got, array)


def test_it_shows_what_the_server_finds_wrong(serve):
    lacking = "\n".join(line for line in CLIENT.splitlines() if "eef_quat" not in line)
    rows = run(serve(Spy(), action_space="midtrain").port, lacking)["rows"]
    assert "lacks 'observation/eef_quat'" in rows
