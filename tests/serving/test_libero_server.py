"""NVIDIA's LIBERO requests over HTTP, on the port of the WebSockets: answers, refusals, bounds,
and others served meanwhile.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import socket
import threading
import time

import numpy as np
import pytest
from PIL import Image
from test_server import TOKEN, ask, dial, get

from helpers.serving import LIBERO, Several, libero_request, observation, until
from helpers.transcripts import exchange_http
from strands_cosmos3.backends.base import BackendInfo
from strands_cosmos3.backends.service import HttpServiceBackend
from strands_cosmos3.errors import ServiceRefusedError
from strands_cosmos3.observe.prompts import libero_client_prompt
from strands_cosmos3.serving import libero
from strands_cosmos3.serving.client import ClientConfig
from strands_cosmos3.serving.codec import Limits
from strands_cosmos3.serving.http_client import HttpPolicyClient
from strands_cosmos3.serving.routes import ServedModel
from strands_cosmos3.serving.served import ServedPolicy
from strands_cosmos3.serving.server import PolicyServer, ServerConfig
from strands_cosmos3.types import ActionChunk

JSON = {"Content-Type": "application/json"}
GOOD = libero.encode_request(libero_request())
MODEL = ServedModel("a server", LIBERO, 0)


def post(port: int, said: object, path: str = "/predict", **headers: str) -> tuple[int, object]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    body = said if isinstance(said, bytes) else json.dumps(said).encode()
    connection.request(
        "POST",
        path,
        body,
        JSON | {name.replace("_", "-"): value for name, value in headers.items()},
    )
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, json.loads(text) if text.startswith("{") else text


def png(height: int, width: int, mode: str = "RGB", kind: str = "PNG") -> str:
    buffer = io.BytesIO()
    Image.new(mode, (width, height)).save(buffer, kind)
    return base64.b64encode(buffer.getvalue()).decode()


def service(port: int, **config) -> HttpServiceBackend:
    client = HttpPolicyClient(ClientConfig("127.0.0.1", port, **config))
    return HttpServiceBackend(client, libero.LIBERO)


def test_our_client_s_request_arrives_and_the_chunk_comes_back(serve):
    backend = Several()
    server = serve(backend, http="libero")
    sent, client = libero_request(), service(server.port)
    chunk = client.infer(sent)
    got = backend.requests[-1]
    assert (got.embodiment.name, got.instruction, got.seed, got.n_rows) == (
        "libero",
        "put the soup in the basket.",
        0,
        16,
    )
    np.testing.assert_array_equal(got.composite, sent.composite)
    np.testing.assert_allclose(chunk.action, Several().infer(sent).action, atol=1e-6)
    left = [0, 51, 255]
    chunks = client.infer_batch([libero_request(left=value) for value in left])
    np.testing.assert_allclose(
        [chunk.action[0, 0] for chunk in chunks], np.array(left) / 255, atol=1e-6
    )
    assert client._client.metadata["raw_action_dim"] == 10
    until(lambda: server.metrics.clients == server.metrics.in_flight == 0)
    assert server.metrics.requests["ok"] == 4
    with dial(server.port) as other:  # the same port
        assert "action" in ask(
            other, observation(**{"observation/image": np.zeros((540, 640, 3), np.uint8)})
        )


def test_a_libero_policy_answers_without_being_told():
    assert ServedPolicy(Several(), "libero").dialect is libero.LIBERO
    assert ServedPolicy(Several(), "droid").dialect is None


def test_a_video_and_own_quantiles_are_sent(serve):
    class Films(Several):
        def infer(self, request):
            if request.embodiment is not LIBERO:
                return super().infer(request)
            video, own = np.full((2, 8, 16, 3), 7, np.uint8), (np.full(10, -2.0), np.full(10, 4.0))
            return ActionChunk(
                np.zeros((16, 10)), request.action_space, LIBERO, video=video, quantiles=own
            )

    _, said = post(serve(Films(), http="libero").port, GOOD)
    np.testing.assert_allclose(said["action"], np.ones((16, 10)))
    assert [libero._from_png(frame, "video")[0, 0, 0] for frame in said["video"]] == [7, 7]


@pytest.mark.parametrize(
    "text", [f"data:image/png;base64,{png(8, 16)}", "\n ".join(png(8, 16)), png(8, 16).rstrip("=")]
)
def test_base64_is_read_as_loosely_as_nvidia_s_server_reads_it(text: str):
    assert libero.decode_request(
        {**GOOD, "image": text, "image_size": 8}, MODEL
    ).composite.shape == (
        8,
        16,
        3,
    )


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "1", "I;16"])
def test_a_png_of_any_kind_becomes_rgb_of_the_wanted_height(mode: str):
    assert libero.decode_request({**GOOD, "image": png(64, 128, mode)}, MODEL).composite.shape == (
        256,
        512,
        3,
    )


def test_a_png_of_sixteen_bits_keeps_its_brightness():
    pixels = np.linspace(0, 2**16 - 1, 64 * 128).reshape(64, 128).astype(np.uint16)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    image = base64.b64encode(buffer.getvalue()).decode()
    got = libero.decode_request({**GOOD, "image": image, "image_size": 64}, MODEL).composite
    np.testing.assert_array_equal(got, np.repeat(pixels[..., None] >> 8, 3, axis=2))


def test_the_server_scales_a_picture_as_pil_does():
    pixels = np.random.default_rng(0).integers(0, 256, (100, 200, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    got = libero.decode_request(
        {**GOOD, "image": base64.b64encode(buffer.getvalue()).decode(), "image_size": 50}, MODEL
    ).composite
    want = np.asarray(Image.fromarray(pixels).resize((100, 50), Image.Resampling.BILINEAR))
    assert np.abs(got.astype(int) - want).max() <= 1


BAD_ITEMS = {
    "no picture": ({"image": None}, "base64"),
    "a JPEG": ({"image": png(8, 8, kind="JPEG")}, "PNG"),
    "not base64": ({"image": "!!!"}, "PNG"),
    "not a picture": ({"image": "AAAA"}, "no PNG's."),
    "not ASCII": ({"image": "\u00e9"}, "PNG"),
    "a PNG that is cut short": ({"image": png(64, 64)[:60]}, "PNG"),
    "a PNG of 1,000 x 1,000": ({"image": png(1_000, 1_000, "1")}, "pixels"),
    "a line of pixels": ({"image": png(1, 5000), "image_size": 1}, "4096"),
    "a height of 4096": ({"image_size": 4096}, "pixels"),
    "a height of 10^30": ({"image_size": 10**30}, "image_size"),
    "a height of true": ({"image_size": True}, "image_size"),
    "a height in words": ({"image_size": "256"}, "image_size"),
    "a prompt of 5000": ({"prompt": "x" * 5000}, "4096"),
    "a blank prompt": ({"prompt": " \n"}, "blank"),
    "a prompt of the views alone": ({"prompt": libero_client_prompt("")}, "blank"),
    "one view alone": ({"image": png(256, 256)}, "side by side"),
    "two views on each other": ({"image": png(256, 128)}, "side by side"),
    "a prompt that is a list": ({"prompt": ["x"]}, "prompt"),
    "another domain": ({"domain_name": "droid\x1b[2J"}, "libero"),
}


@pytest.mark.parametrize("name", BAD_ITEMS)
def test_a_bad_item_is_refused_as_nvidia_s_server_refuses_it(module_server, name: str):
    change, says = BAD_ITEMS[name]
    status, said = post(module_server.port, {**GOOD, **change})
    assert (status, said["action"]) == (200, [])
    assert said["error"].startswith(("InputError: ", "ShapeError: ", "InstructionError: "))
    assert says in said["error"]
    assert said["error"].isprintable()
    status, said = post(module_server.port, {"items": [GOOD, {**GOOD, **change}]}, "/predict_batch")
    assert (status, said["actions"]) == (200, [])
    assert says in said["error"]


@pytest.fixture(scope="module")
def module_server():
    with PolicyServer(
        ServedPolicy(Several(), "droid", http="libero"), ServerConfig(port=0)
    ) as server:
        yield server


def raw(*lines: str, body: bytes = b"{}") -> bytes:
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


START = ("POST /predict HTTP/1.1", "Host: x", "Content-Type: application/json")
REFUSALS = {
    "no length": (raw(*START), 411),
    "chunks": (raw(*START, "Transfer-Encoding: chunked"), 411),
    "a length and chunks": (raw(*START, "Content-Length: 2", "Transfer-Encoding: chunked"), 411),
    "two lengths": (raw(*START, "Content-Length: 2", "Content-Length: 7"), 411),
    "a negative length": (raw(*START, "Content-Length: -1"), 400),
    "a length in words": (raw(*START, "Content-Length: two"), 400),
    "a terabyte": (raw(*START, "Content-Length: 999999999999"), 413),
    "a header without a colon": (raw(*START, "Nonsense", "Content-Length: 2"), 400),
    "a header with a line break": (raw(*START, "A: b\nContent-Length: 2"), 400),
    "a hundred headers": (raw(*START, *("A: b",) * 100, "Content-Length: 2"), 400),
    "a header of 100 kB": (raw(*START, f"A: {'b' * 100_000}", "Content-Length: 2"), 431),
    "HTTP/2": (raw("POST /predict HTTP/2", "Content-Length: 2"), 400),
    "a web page": (raw(*START, "Origin: http://evil.example", "Content-Length: 2"), 403),
    "a form": (raw(START[0], "Content-Type: text/plain", "Content-Length: 2"), 415),
    "another encoding": (raw(*START, "Content-Encoding: gzip", "Content-Length: 2"), 415),
    "another character set": (
        raw(*START[:2], START[2] + "; charset=utf-16", "Content-Length: 2"),
        415,
    ),
    "another method": (raw("PUT /predict HTTP/1.1", *START[1:], "Content-Length: 2"), 405),
    "TRACE": (raw("TRACE / HTTP/1.1", *START[1:], body=b""), 405),
    "an unknown method": (raw("PO ST /predict HTTP/1.1", "Content-Length: 2"), 400),
    "a GET with a body": (raw("GET /predict HTTP/1.1", *START[1:], "Content-Length: 2"), 426),
    "a GET with a header of 100 kB": (
        raw("GET /info HTTP/1.1", f"A: {'b' * 100_000}", body=b""),
        431,
    ),
    "another upgrade": (
        raw("GET /predict HTTP/1.1", "Upgrade: h2c", "Connection: Upgrade", body=b""),
        426,
    ),
    "noise": (bytes(range(256)) * 8 + b"\r\n\r\n", 400),
    "another path": (raw("POST /next_episode HTTP/1.1", *START[1:], "Content-Length: 2"), 404),
    "not JSON": (raw(*START, "Content-Length: 2", body=b"{]"), 400),
    "a list": (raw(*START, "Content-Length: 2", body=b"[]"), 400),
    "not UTF-8": (raw(*START, "Content-Length: 2", body=b"\xff\xfe"), 400),
    "deep": (raw(*START, "Content-Length: 50000", body=b"[" * 50_000), 400),
    "a million values": (
        raw(*START, "Content-Length: 2000000", body=b"[" + b"0," * 999_999 + b"0"),
        400,
    ),
    "no items": (
        raw("POST /predict_batch HTTP/1.1", *START[1:], "Content-Length: 12", body=b'{"items":[]}'),
        400,
    ),
    "items of numbers": (
        raw(
            "POST /predict_batch HTTP/1.1", *START[1:], "Content-Length: 13", body=b'{"items":[7]}'
        ),
        400,
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_bad_request_is_refused_with_its_status(module_server, name: str):
    request, status = REFUSALS[name]
    head, _, body = exchange_http(module_server.port, request).partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status
    assert b"Connection: close" in head
    assert len(body) < 500
    assert b"Traceback" not in body


def test_a_refused_body_is_read_and_dropped_so_that_the_client_reads_the_refusal(module_server):
    size = 8 * 2**20
    said = exchange_http(
        module_server.port,
        raw("PUT /predict HTTP/1.1", f"Content-Length: {size}", body=bytes(size)),
    )
    assert said.startswith(b"HTTP/1.1 405 ")


def test_a_head_request_gets_the_head_only(module_server):
    said = exchange_http(module_server.port, raw("HEAD /healthz HTTP/1.1", "Host: x", body=b""))
    assert said.startswith(b"HTTP/1.1 200 ")
    assert b"Content-Length: 3\r\n" in said
    assert said.endswith(b"\r\n\r\n")


def test_the_first_of_pipelined_requests_is_answered(module_server):
    body = json.dumps(GOOD).encode()
    request = raw(*START, f"Content-Length: {len(body)}", body=body)
    said = exchange_http(module_server.port, request * 3)
    assert said.count(b"HTTP/1.1 ") == 1
    assert said.startswith(b"HTTP/1.1 200 ")


def test_more_items_than_are_answered_are_refused(module_server):
    status, said = post(module_server.port, {"items": [{}] * 65}, "/predict_batch")
    assert (status, said["error"]) == (400, "'items' must be a list of 1 to 64 requests.")


def test_head_and_body_may_come_byte_by_byte_and_after_a_100(module_server):
    body = json.dumps(GOOD).encode()
    head = raw(*START, f"Content-Length: {len(body)}", "Expect: 100-continue", body=b"")
    with socket.create_connection(("127.0.0.1", module_server.port), timeout=10) as connection:
        for i in range(len(head)):
            connection.sendall(head[i : i + 1])
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert connection.recv(12) == b"HTTP/1.1 200"


def test_health_and_info_are_nvidia_s(module_server):
    assert get(module_server.port, "/") == (200, '{"status": "ok"}')
    status, said = get(module_server.port, "/info")
    assert status == 200
    assert set(json.loads(said)) == {
        *(
            "run_name",
            "checkpoint",
            "config_file",
            "config_file_type",
            "guidance",
            "num_steps",
            "fps",
            "seed",
        ),
        *("action_chunk_size", "max_action_dim", "raw_action_dim", "action_stats_path"),
    }
    for path in ("/", "/info"):
        assert get(module_server.port, path, Origin="http://evil.example")[0] == 403
    assert get(module_server.port, "/other")[0] == 426


def test_info_says_the_model_s_digest_seed_and_rows():
    class Known(Several):
        info = BackendInfo(name="known", model_sha256="ab" * 32, chunk_rows=8)

    said = ServedPolicy(Known(), "libero", seed=7).page("/info")
    assert (said["checkpoint"], said["seed"], said["action_chunk_size"]) == ("ab" * 32, 7, 8)
    assert (said["fps"], said["raw_action_dim"], said["max_action_dim"]) == (LIBERO.fps, 10, 64)
    assert said["run_name"].endswith(" known")
    plain = ServedPolicy(Several(), "libero").page("/info")
    assert (plain["checkpoint"], plain["seed"], plain["action_chunk_size"]) == (None, 0, 16)


def test_a_body_may_have_as_many_bytes_as_a_frame():
    most = 2**20
    policy = ServedPolicy(Several(), "libero", limits=Limits(max_bytes=most))
    with PolicyServer(policy, ServerConfig(port=0)) as server:
        body = json.dumps(GOOD).encode().ljust(most)
        assert post(server.port, body)[0] == 200
        status, said = post(server.port, body + b" ")
    assert (status, said) == (413, f"The body has {most + 1} bytes; at most {most} are read.\n")


def test_a_server_without_libero_refuses(serve):
    port = serve().port
    assert post(port, GOOD)[0] == 426
    assert get(port, "/info")[0] == 426


def test_a_token_is_wanted_before_a_body_is_read(serve):
    port = serve(Several(), http="libero", token=TOKEN).port
    assert service(port, token=TOKEN).infer(libero_request()).action.shape == (16, 10)
    with pytest.raises(ServiceRefusedError, match="api_key"):
        service(port).infer(libero_request())
    announced = raw(*START, "Content-Length: 10000000", body=b"")  # never sent
    assert exchange_http(port, announced).startswith(b"HTTP/1.1 401")
    assert get(port, "/info")[0] == 401


def test_slow_bodies_are_cut_off_and_keep_nobody_out(serve):
    server = serve(Several(), http="libero", body_s=2.0, max_clients=16)
    held = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(8)]
    for one in held:
        one.sendall(raw(*START, "Content-Length: 1000", body=b"{"))
    until(lambda: server.metrics.clients == 8)
    assert service(server.port).infer(libero_request()).action.shape == (16, 10)
    assert get(server.port, "/healthz")[0] == 200
    for one in held:
        assert one.recv(12) == b"HTTP/1.1 408"
        one.close()
    until(lambda: server.metrics.clients == 0)


def test_more_clients_than_places_are_turned_away(serve):
    server = serve(Several(), http="libero", max_clients=1)
    with dial(server.port):
        assert post(server.port, GOOD)[0] == 503
    until(lambda: server.metrics.clients == 0)
    assert post(server.port, GOOD)[0] == 200


def test_a_client_that_leaves_is_not_inferred_for(serve):
    gate, begun = threading.Event(), threading.Event()

    def hang(request) -> None:
        if request.embodiment is LIBERO:
            begun.set()
            gate.wait(10)

    server = serve(Several(hang), http="libero")
    waiting = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
    body = json.dumps(GOOD).encode()
    for one in waiting:
        one.sendall(raw(*START, f"Content-Length: {len(body)}", body=body))
        assert begun.wait(10)
    until(lambda: server.metrics.in_flight == 2)
    waiting[1].close()
    until(lambda: server.metrics.requests["abandoned"] == 1)
    assert get(server.port, "/healthz")[0] == 200
    gate.set()
    assert waiting[0].recv(12) == b"HTTP/1.1 200"
    waiting[0].close()
    until(lambda: server.metrics.clients == server.metrics.in_flight == 0)


def test_a_stopping_server_answers_what_it_has_and_takes_no_more(serve):
    gate = threading.Event()
    server = serve(
        Several(lambda request: request.embodiment is LIBERO and gate.wait(10)), http="libero"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as silent:
        answers: list[tuple[int, object]] = []
        thread = threading.Thread(target=lambda: answers.append(post(server.port, GOOD)))
        thread.start()
        until(lambda: server.metrics.in_flight == 1 and server.busy_s > 0)
        server.stop()
        time.sleep(0.1)
        gate.set()
        thread.join(10)
        assert answers[0][0] == 200
        assert silent.recv(1) == b""  # it sent nothing yet


def test_what_must_not_be_sent_is_an_error(serve):
    class Wild(Several):
        def infer(self, request):
            if request.embodiment is not LIBERO:
                return super().infer(request)
            return ActionChunk(np.full((16, 10), np.nan), request.action_space, LIBERO)

    server = serve(Wild(), http="libero")
    status, said = post(server.port, GOOD)
    assert (status, said["action"]) == (200, [])
    assert "finite" in said["error"]
    assert server.metrics.requests["error"] == 1
