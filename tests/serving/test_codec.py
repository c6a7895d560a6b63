"""The codec: what goes in comes out, and nothing that comes from the network can crash it or
fill the memory.
"""

from __future__ import annotations

import contextlib
import random
import tracemalloc

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn

from strands_cosmos3.errors import WireFormatError
from strands_cosmos3.serving.codec import DEFAULT_LIMITS, Limits, UnsupportedArray, decode, encode

DTYPES = ("|u1", "<i4", "<i8", "<f4", "<f8", "|b1")
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda name: stn.arrays(
        np.dtype(name), stn.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4)
    )
)
# of one to four bytes in UTF-8; hypothesis takes seconds to list all characters
LETTERS = 'aZ09 _/\0\n"\\\x7fé߿ࠀ漢￿🤖'
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(LETTERS, max_size=20),
    st.binary(max_size=20),
    ARRAYS,
)
MESSAGES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(LETTERS, max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
ROOMY = Limits(max_depth=40)


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray | np.generic):
        return (
            type(a) is type(b)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.tobytes() == b.tobytes()
        )  # type: ignore[attr-defined]
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


@given(MESSAGES)
def test_what_is_encoded_decodes_to_itself(message):
    assert same(decode(encode(message), ROOMY), message)


@given(st.sampled_from(DTYPES), st.integers(0, 1))
def test_numpy_scalars_keep_their_type(name, value):
    scalar = np.dtype(name).type(value)
    back = decode(encode({"x": scalar}))["x"]
    assert back == scalar
    # numpy's float64 is a float, and travels as one
    assert type(back) is type(scalar) or isinstance(scalar, float)


def test_arrays_of_any_memory_layout_come_back_whole():
    picture = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    for array in (picture[:, ::-1], picture.T, np.asfortranarray(picture), picture.astype(">i4")):
        np.testing.assert_array_equal(decode(encode(array)), array)


def test_decoded_arrays_are_read_only():
    with pytest.raises(ValueError, match="read-only"):
        decode(encode(np.zeros(3)))[0] = 1


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_refused_by_name(frame):
    with contextlib.suppress(WireFormatError):
        decode(frame)


def request() -> bytes:
    return encode(
        {
            "prompt": "pick",
            "observation/joint_position": np.zeros(7),
            "nested": {"a": [1, "b", None]},
            "n": np.int64(3),
        }
    )


@given(st.data())
@settings(max_examples=300)
def test_a_message_with_flipped_bytes_decodes_or_is_refused(data):
    frame = bytearray(request())
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireFormatError):
        decode(bytes(frame))


@pytest.mark.parametrize("cut", range(0, len(request()), 7))
def test_a_message_that_is_cut_short_is_refused(cut):
    with pytest.raises(WireFormatError, match="truncated"):
        decode(request()[:cut])


def array(dtype: object = "<f4", shape: object = (2,), data: object = bytes(8)) -> bytes:
    return msgpack.packb(
        {"a": {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}}
    )


def nested(depth: int) -> object:
    return [nested(depth - 1)] if depth else 0


@pytest.mark.parametrize(
    "dtype",
    [
        "|O",
        "O8",
        "|V8",
        "|V0",
        "|S0",
        "<U2",
        ">f4",
        "<f2",
        "<u2",
        "<c8",
        "<M8[s]",
        "<f4,<f4",
        "",
        "x" * 99,
    ],
)
def test_an_array_of_another_dtype_is_never_built(dtype):
    """It is dropped where nobody reads it (tests/serving/test_wire.py), and named where somebody
    does.
    """
    scalar = msgpack.packb({"a": {b"__npgeneric__": True, b"dtype": dtype, b"data": 1}})
    for frame in (array(dtype), scalar):
        assert decode(frame) == {"a": UnsupportedArray(dtype[:40])}
        with pytest.raises(WireFormatError, match="are not supported"):
            decode(frame, strict=True)
    assert "uint8" in str(UnsupportedArray(dtype))


def test_arrays_are_copied_for_who_writes_to_them():
    frame = encode({"a": np.zeros(3), "b": np.zeros(0)})
    for array_ in decode(frame, writable=True).values():
        array_ += 1
    np.testing.assert_array_equal(decode(frame)["a"], np.zeros(3))


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (array(b"<f4"), "dtype"),
        (array(None), "dtype"),
        (array(["<f4"]), "dtype"),
        (array(shape=(3,)), "12 bytes, got 8 bytes"),
        (array(shape=(2**62, 2**62)), "got 8 bytes"),
        (array(shape=(-2,)), "shape"),
        (array(shape=(-1, -2)), "shape"),
        (array(shape=(2.0,)), "shape"),
        (array(shape=(True, 2)), "shape"),
        (array(shape=7), "shape"),
        (array(shape=(1, 1, 1, 1, 1, 2)), "6 dimensions"),
        (array(data="12345678"), "got str"),
        (array(data=[1.0, 2.0]), "got list"),
        (msgpack.packb({"a": {b"__ndarray__": True}}), "dtype"),
        (
            msgpack.packb({"a": {b"__npgeneric__": True, b"dtype": "<i4", b"data": 2**40}}),
            "cannot hold",
        ),
        (msgpack.packb({"a": {b"__npgeneric__": True, b"dtype": "<f4", b"data": "1"}}), "number"),
        (msgpack.packb({1: 2}), "key"),
        (msgpack.packb(msgpack.ExtType(3, b"x")), "extension"),
        (msgpack.packb(msgpack.Timestamp(1)), "extension"),
        (msgpack.packb(nested(9)), "deeper than 8"),
        (msgpack.packb({str(i): i for i in range(65)}), "65 keys"),
        (msgpack.packb([0] * 5000), "4096 values"),
        (b"\xdd\xff\xff\xff\xff", "truncated"),
        (b"\xdf\xff\xff\xff\xff", "keys"),
        (b"\xc6\xff\xff\xff\xff", "truncated"),
        (b"\xdb\xff\xff\xff\xff", "bytes of text"),
        (msgpack.packb(["a" * 40_000] * 7), "bytes of text"),
        (b"\xc1", "extension"),
        (b"", "truncated"),
        (b"\x00\x00", "ends after 1"),
        (b"\xa2\xff\xfe", "utf-8"),
        (b"\x81\x80\x00", "cannot be decoded"),
        (bytes(17 * 2**20), "at most"),
    ],
)
def test_what_must_not_pass_is_refused_by_name(frame, says):
    with pytest.raises(WireFormatError, match=says.replace("|", r"\|").replace("(", r"\(")):
        decode(frame)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        2**70,
        np.array([object()]),
        np.zeros(2, np.float16),
        np.zeros(2, "S3"),
        np.zeros(2, complex),
        np.complex64(1),
        np.zeros((1,) * 6),
        np.zeros(17 * 2**20, np.uint8),
    ],
)
def test_what_has_no_form_is_not_sent(value):
    with pytest.raises(WireFormatError):
        encode({"x": value})


def test_the_limits_are_the_deepest_and_widest_that_pass():
    assert decode(msgpack.packb(nested(8))) == nested(8)
    assert len(decode(msgpack.packb({str(i): i for i in range(64)}))) == 64
    assert len(decode(encode([0] * 4095))) == 4095


def peak_over(frame: bytes) -> float:
    """Peak memory of decoding, the frame's own included, in frames."""
    tracemalloc.start()
    try:
        decode(frame)
    except WireFormatError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return (len(frame) + peak) / len(frame)


@pytest.mark.parametrize(
    "frame",
    [
        encode({"image": np.zeros((540, 640, 3), np.uint8)}),
        encode({"image": np.zeros(15 * 2**20, np.uint8)}),
        msgpack.packb([None] * 2**20),
        msgpack.packb([{}] * 2**20),
        msgpack.packb(["a"] * 2**20),
        b"\x91" * 2**20,
        b"\xdd\x00\x00\xff\xff" * 2**18,
        msgpack.packb("é" * 2**20),
        msgpack.packb(["a" * 60_000 + "\U0001f600"] * 40),
        encode([b"x" * 2**18 for _ in range(8)]),
    ],
    ids=[
        "picture",
        "large",
        "nils",
        "maps",
        "texts",
        "deep",
        "promises",
        "utf8",
        "emoji",
        "binaries",
    ],
)
def test_decoding_takes_at_most_three_times_the_frame(frame):
    assert peak_over(frame) <= 3.0


def test_a_bounded_fuzz_finds_neither_a_crash_nor_a_memory_hog():
    rng = random.Random(0)
    seeds = [
        request(),
        array(),
        encode({"action": np.zeros((32, 8), np.float32)}),
        msgpack.packb(nested(7)),
    ]
    tracemalloc.start()
    for _ in range(6_000):
        frame = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 6)):
            place = rng.randrange(len(frame))
            match rng.randrange(4):
                case 0:
                    frame[place] = rng.randrange(256)
                case 1:
                    frame[place:place] = rng.randbytes(rng.randint(1, 4))
                case 2:
                    del frame[place : place + rng.randint(1, 8)]
                    frame = frame or bytearray(1)
                case _:
                    frame[place] = rng.choice((0xC6, 0xDD, 0xDF, 0xDB, 0x9F, 0x8F, 0xC9, 0xFF))
        with contextlib.suppress(WireFormatError):
            decode(bytes(frame))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # frames are below 2 KiB; nothing may be allocated because a header promises more
    assert peak < 2**20


def test_the_limits_leave_room_for_the_largest_honest_request():
    frame = encode({f"observation/{i}": np.zeros((720, 1280, 3), np.uint8) for i in range(3)})
    assert len(frame) < DEFAULT_LIMITS.max_bytes
