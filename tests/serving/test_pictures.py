"""Views travel as they were seen, as JPEG where both sides agree; other peers notice nothing."""

from __future__ import annotations

import io
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from websockets.sync.client import connect as dial

from helpers.serving import DROID, Echo, observation, request
from strands_cosmos3.backends.base import BackendInfo
from strands_cosmos3.backends.options import ServiceOptions
from strands_cosmos3.backends.service import ServiceBackend, service_backend
from strands_cosmos3.errors import (
    ConfigError,
    InputError,
    ServiceRefusedError,
    ShapeError,
    UnknownNameError,
    WireFormatError,
)
from strands_cosmos3.observe.views import compose, compose_for_tier, letterbox
from strands_cosmos3.policy import Cosmos3Policy
from strands_cosmos3.serving import jpeg, wire
from strands_cosmos3.serving.client import ClientConfig, PolicyClient
from strands_cosmos3.serving.codec import decode, encode
from strands_cosmos3.serving.jpeg import decode_jpeg, encode_jpeg
from strands_cosmos3.serving.wire import (
    COMPOSITE,
    PICTURES,
    PICTURES_HEADER,
    ROBOLAB,
    encode_request,
)
from strands_cosmos3.worlds.arms import Robot

RIG = DROID.rig
assert RIG is not None


def scene(height: int = 180, width: int = 320, seed: int = 0) -> np.ndarray:
    """Soft shapes of many colours, as a camera sees them, and a cube with sharp edges."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 255, (6, 8, 3), dtype=np.uint8))
    picture = np.array(coarse.resize((width, height), Image.Resampling.BICUBIC))
    picture[height // 3 : height // 2, width // 3 : width // 2] = (220, 30, 20)
    return picture


VIEWS = {view: scene(seed=i) for i, view in enumerate(RIG.views)}


class Seeing(Echo):
    """Composes for a model of tier 256, whose canvas is smaller than the composite."""

    info = BackendInfo(name="seeing")

    def compose(self, views, rig):
        return compose_for_tier(views, rig, 256)


@pytest.fixture
def ask(serve):
    """ask(backend, **config): our client's exchange with our server; the backend."""
    services: list[ServiceBackend] = []

    def exchange(images=VIEWS, **config: Any) -> ServiceBackend:
        service = ServiceBackend(PolicyClient(ClientConfig("127.0.0.1", server.port, **config)))
        services.append(service)
        service.infer(request(images=images))
        return service

    backend = Seeing()
    server = serve(backend)
    yield SimpleNamespace(exchange=exchange, backend=backend, server=server)
    for service in services:
        service.close()


def frame(pictures: wire.Encoding | None, images=VIEWS) -> bytes:
    return encode(encode_request(request(images=images), ROBOLAB, "", 1, pictures=pictures))


def test_raw_views_arrive_as_seen_and_compose_to_what_the_model_would_see_here(ask):
    ask.exchange(pictures="raw")
    seen = ask.backend.requests[-1]
    for view, picture in VIEWS.items():
        np.testing.assert_array_equal(seen.images[view], picture)
    np.testing.assert_array_equal(seen.composite, ask.backend.compose(VIEWS, RIG))
    # which enlarged views do not, so that the comparison can fail
    enlarged = {view: letterbox(picture, RIG.view_hw) for view, picture in VIEWS.items()}
    assert (ask.backend.compose(enlarged, RIG) != seen.composite).any()
    assert len(frame("raw")) <= 530_000
    assert len(frame(None)) > 2_000_000


def test_jpeg_is_what_both_agree_on_by_default(ask):
    service = ask.exchange()
    assert service._client.metadata[PICTURES] == "jpeg"
    seen = ask.backend.requests[-1]
    for view, picture in VIEWS.items():
        np.testing.assert_array_equal(seen.images[view], decode_jpeg(encode_jpeg(picture), view))
        off = np.abs(seen.images[view].astype(int) - picture)
        assert off.mean() < 0.8  # at quality 90 it is 0.9
        assert off.max() < 80
    assert len(frame("jpeg")) <= 90_000


def test_a_client_that_does_not_ask_gets_the_metadata_of_before(serve):
    server = serve()
    for asked, told in (((), None), (("jpeg",), "jpeg"), (("raw",), "raw"), (("webp",), None)):
        headers = [(PICTURES_HEADER, encoding) for encoding in asked]
        with dial(f"ws://127.0.0.1:{server.port}", additional_headers=headers) as peer:
            expected = {"cosmos3/action_space": "joint_pos"} | ({PICTURES: told} if told else {})
            assert decode(peer.recv()) == expected


@pytest.mark.parametrize("told", [None, "webp", ["jpeg"], 1])
def test_a_server_that_does_not_agree_gets_the_requests_of_before(told):
    metadata = {} if told is None else {PICTURES: told}
    assert wire.agreed_pictures(metadata) is None
    message = decode(frame(wire.agreed_pictures(metadata)))
    for view, key in zip(RIG.views, RIG.wire_names, strict=True):
        np.testing.assert_array_equal(message[key], letterbox(VIEWS[view], RIG.view_hw))


def test_letterboxed_views_of_another_client_are_answered_as_before(serve):
    backend = Echo()
    backend.info = BackendInfo(name="echo")
    server = serve(backend)
    with dial(f"ws://127.0.0.1:{server.port}") as peer:
        peer.recv()
        peer.send(frame(None))
        assert "action" in decode(peer.recv())
    np.testing.assert_array_equal(backend.requests[-1].composite, compose(VIEWS, RIG))


def test_what_was_agreed_with_one_server_is_not_sent_to_the_next(serve):
    """The first request to each is encoded before its metadata are known."""
    backend = Seeing()
    server = serve(backend)
    service = ServiceBackend(PolicyClient(ClientConfig("127.0.0.1", server.port)))
    service.infer(request(images=VIEWS))
    assert backend.requests[-1].images["wrist"].shape == (180, 320, 3)
    told = server._front.policy.metadata
    server._front.policy.metadata = lambda session: {
        key: value for key, value in told(session).items() if key != PICTURES
    }
    service.close()
    service.infer(request(images=VIEWS))
    assert backend.requests[-1].images["wrist"].shape == (*RIG.view_hw, 3)
    service.close()


@pytest.mark.parametrize("hw", [(8, 200), (1200, 1000), (180, 321)])
def test_views_that_a_server_may_not_read_are_letterboxed(ask, hw):
    """It refuses fewer than 16 pixels, more than 2^20 in a JPEG, and for the composition
    ``framework`` widths that have no half.
    """
    images = VIEWS | {"wrist": scene(*hw)}
    for encoding in ("raw", "jpeg"):
        ask.exchange(images, pictures=encoding)
        seen = ask.backend.requests[-1].images
        assert seen["wrist"].shape == (*RIG.view_hw, 3)
        assert seen["exterior_1"].shape == (180, 320, 3)
    ask.exchange(VIEWS | {"wrist": scene(1024, 1024)})
    assert ask.backend.requests[-1].images["wrist"].shape == (1024, 1024, 3)


def test_a_composite_is_sent_as_jpeg_too_unless_it_is_too_large():
    for picture, kind in ((scene(540, 640), bytes), (scene(1100, 1000), np.ndarray)):
        asked = request(images={}, composite=picture)
        message = encode_request(asked, ROBOLAB, "", 1, pictures="jpeg")
        assert isinstance(message[COMPOSITE], kind)


@pytest.mark.parametrize("side", ["client", "server"])
def test_without_pillow_views_are_sent_raw(ask, monkeypatch, side):
    monkeypatch.setattr(wire, "has_jpeg", lambda: False)
    if side == "server":  # which then answers a client that has it
        monkeypatch.setattr(PolicyClient, "_introduction", {PICTURES_HEADER: "jpeg"})
    service = ask.exchange()
    assert service._client.metadata[PICTURES] == "raw"
    np.testing.assert_array_equal(ask.backend.requests[-1].images["wrist"], VIEWS["wrist"])


def test_the_option_reaches_the_client_and_is_refused_where_nobody_reads_it():
    made = service_backend(ServiceOptions(pictures="raw"), None, None)
    assert made._client.config.pictures == "raw"
    with pytest.raises(UnknownNameError, match="encoding of pictures"):
        ClientConfig(pictures="webp")
    with pytest.raises(ConfigError, match="'libero' sends PNG"):
        service_backend(ServiceOptions(dialect="libero", pictures="raw"), None, None)


def as_jpeg(picture: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, "JPEG", **options)
    return file.getvalue()


def resized_header(file: bytes, height: int, width: int) -> bytes:
    """The same file, whose header states another size."""
    at = file.index(b"\xff\xc0") + 5
    return file[:at] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + file[at + 4 :]


SOUND = encode_jpeg(VIEWS["wrist"])
AT_SIZE = SOUND.index(b"\xff\xc0\0\x11")
RGB = Image.fromarray(VIEWS["wrist"])
BAD = {
    "a bomb": (resized_header(SOUND, 65_000, 65_000), "65000 x 65000 pixels; at most 1048576"),
    "just too large": (resized_header(SOUND, 1025, 1024), "1025 x 1024 pixels"),
    "no rows": (resized_header(SOUND, 0, 320), "empty, or truncated"),
    "cut in its header": (SOUND[:100], "header is truncated"),
    "cut in its pixels": (SOUND[: len(SOUND) // 2], "empty, or truncated"),
    "a start alone": (b"\xff\xd8", "header is truncated"),
    "nothing": (b"", "no JPEG"),
    "a PNG": (b"\x89PNG\r\n\x1a\n" + bytes(100), "no JPEG"),
    "grey": (as_jpeg(RGB.convert("L")), "segment 0xc0 that is not read"),
    "four colours": (as_jpeg(RGB.convert("CMYK")), "segment 0xee that is not read"),
    "progressive": (as_jpeg(RGB, progressive=True), "segment 0xc2 that is not read"),
    "with metadata": (as_jpeg(RGB, exif=b"Exif\0\0"), "segment 0xe1 that is not read"),
    "one colour of its scan": (SOUND.replace(b"\xff\xda\0\x0c\x03", b"\xff\xda\0\x0c\x01"), "0xda"),
    "two sizes": (
        SOUND[:AT_SIZE] + SOUND[AT_SIZE : AT_SIZE + 19] + SOUND[AT_SIZE:],
        "segment 0xc0",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_jpeg_that_is_not_as_it_should_be_is_refused_by_its_header(what, monkeypatch):
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(Image, "open", opened)
    file, said = BAD[what]
    with pytest.raises(InputError, match=said) as refused:
        decode_jpeg(file, "'observation/image'")
    assert isinstance(refused.value, (WireFormatError, ShapeError))
    assert "'observation/image'" in str(refused.value)


def test_a_header_says_enough():
    assert jpeg._size(SOUND, "it") == (180, 320)
    np.testing.assert_array_equal(decode_jpeg(SOUND, "it").shape, (180, 320, 3))
    without_tables = SOUND[:2] + SOUND[SOUND.index(b"\xff\xc0") :]
    with pytest.raises(WireFormatError, match="it is a damaged JPEG"):
        decode_jpeg(without_tables, "it")


def test_a_bad_jpeg_is_one_requests_error_and_bytes_elsewhere_are_ignored(serve):
    backend = Seeing()
    server = serve(backend)
    url = f"ws://127.0.0.1:{server.port}"
    with dial(url) as peer:
        peer.recv()
        peer.send(encode(observation(**{COMPOSITE: BAD["a bomb"][0]})))
        assert "ShapeError: 'observation/image' is a JPEG of 65000 x 65000" in peer.recv()
    with dial(url) as peer:
        peer.recv()
        sound = {COMPOSITE: encode_jpeg(scene(540, 640)), "observation/other": b"\xff\xd8"}
        peer.send(encode(observation(**sound)))
        assert "action" in decode(peer.recv())
    assert backend.requests[-1].composite.shape == (540, 640, 3)


def test_a_jpeg_of_too_few_pixels_is_refused_as_raw_ones_are(ask):
    client = PolicyClient(ClientConfig("127.0.0.1", ask.server.port))
    tiny = observation(**{COMPOSITE: encode_jpeg(scene(8, 200))})
    with pytest.raises(ServiceRefusedError, match="at least 16 x 16"):
        client.exchange(tiny, lambda reply: wire.decode_reply(reply, request(), 1))


def test_a_rollouts_pictures_are_encoded_on_its_worker_and_not_in_a_tick(serve, monkeypatch):
    """Rendering and the ticks are the main thread's, as OpenGL wants it."""
    threads = []

    def encoded(picture: np.ndarray) -> bytes:
        threads.append(threading.current_thread().name)
        return encode_jpeg(picture)

    monkeypatch.setattr(wire, "encode_jpeg", encoded)
    backend = Echo()
    backend.info = BackendInfo(name="echo")
    port = serve(backend).port
    with Cosmos3Policy("droid", "panda", host="127.0.0.1", port=port) as policy:
        Robot("panda").run_policy(policy=policy, instruction="wait", duration=0.2)
    assert len(backend.requests) > 1
    assert backend.requests[-1].images["wrist"].shape == (180, 320, 3)
    assert len(threads) == 3 * (len(backend.requests) - 1)  # the first one warmed the server up
    assert set(threads) == {"planner"}
