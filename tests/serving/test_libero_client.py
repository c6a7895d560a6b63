"""Our client of NVIDIA's LIBERO server: what it sends and reads, and every fault in its typed
error.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from helpers.fake_libero import RAW, REPLIES, STATUS, VIDEO, Server, libero_server
from helpers.faulty_service import held
from helpers.options import backend_options
from helpers.serving import libero_request, request, until
from strands_cosmos3 import load_action_stats
from strands_cosmos3.actions.stats import denormalize_chunk
from strands_cosmos3.backends import make_backend
from strands_cosmos3.backends.service import HttpServiceBackend
from strands_cosmos3.errors import (
    BackendError,
    ConfigError,
    ServiceChunkError,
    ServiceClosedError,
    ServiceRefusedError,
    ServiceTimeoutError,
    ServiceUnavailableError,
    ServiceUnreadableError,
)
from strands_cosmos3.policy.cosmos3 import Cosmos3Policy
from strands_cosmos3.serving.client import ClientConfig, PolicyClient
from strands_cosmos3.serving.http_client import HttpPolicyClient
from strands_cosmos3.serving.libero import LIBERO

pytestmark = pytest.mark.usefixtures("few_collected")
PROMPT = (
    "put the soup in the basket. This video contains concatenated views from multiple camera "
    "perspectives. The left half shows "
    "the third-person view; the right half shows the wrist-mounted camera."
)
ERRORS = {
    **dict.fromkeys(REPLIES, ServiceChunkError),
    **dict.fromkeys(("nothing", "no_list", "a_list", "many_values"), ServiceUnreadableError),
    **dict.fromkeys(("error", "wordy"), ServiceRefusedError),
    **dict.fromkeys(RAW, ServiceUnreadableError),
    **dict.fromkeys(STATUS, ServiceRefusedError),
    **dict.fromkeys(
        ("not_found", "crashed", "not_http", "endless_header", "oversize", "other_width"),
        ServiceUnreadableError,
    ),
    **dict.fromkeys(("hang", "drip"), ServiceTimeoutError),
    **dict.fromkeys(("cut", "hang_up"), ServiceClosedError),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with libero_server() as started:
        yield started


def service(port: int, fault: str = "", **config) -> HttpServiceBackend:
    address = f"http://127.0.0.1:{port}/{fault}"
    client = HttpPolicyClient(ClientConfig(address, **config), sleep=lambda s: None)
    return HttpServiceBackend(client, LIBERO)


def test_a_request_and_its_chunk_mean_what_nvidia_s_server_means(server: Server):
    options = backend_options(
        host="127.0.0.1", port=server.server_port, api_key="a-token", dialect="libero"
    )
    backend = make_backend("service", options=options)
    chunk = backend.infer(libero_request(left=51))
    path, said, token = server.asked[-1]
    assert (path, token) == ("/predict", "Api-Key a-token")
    assert {key: said[key] for key in said if key != "image"} == {
        "prompt": PROMPT,
        "domain_name": "libero",
        "image_size": 256,
    }
    rows = denormalize_chunk(chunk.action, "libero", None, "quantile_rot")
    np.testing.assert_allclose(
        rows, [[0.1 * 51 / 255, 0.1 * 90 / 255, 0, 1, 0, 0, 0, 1, 0, 1]] * 16, atol=1e-9
    )
    raw = load_action_stats("libero").raw
    np.testing.assert_allclose(
        chunk.action[0, 9], 2 * (1 - raw.q01[9]) / (raw.q99[9] - raw.q01[9]) - 1
    )
    assert (chunk.action_space.name, chunk.seed) == ("midtrain", 3)
    np.testing.assert_array_equal(chunk.video, VIDEO)
    backend.close()


def test_a_policy_calls_such_a_server(server: Server):
    picture = np.full((256, 512, 3), 51, np.uint8)
    with Cosmos3Policy(
        "libero", host="127.0.0.1", port=server.server_port, options={"dialect": "libero"}
    ) as policy:
        steps = policy.get_actions_sync({"image": picture}, "put the soup in the basket")
    rows = denormalize_chunk(
        [list(step.values()) for step in steps], "libero", None, "quantile_rot"
    )
    np.testing.assert_allclose(rows[:, :2], [[0.02, 0.02]] * 16, atol=1e-9)


def test_a_batch_is_one_request_and_keeps_its_order(server: Server):
    backend = service(server.server_port)
    chunks = backend.infer_batch([libero_request(left=value) for value in (0, 51, 102)])
    path, said, _ = server.asked[-1]
    assert (path, len(said["items"])) == ("/predict_batch", 3)
    for i, chunk in enumerate(chunks):
        rows = denormalize_chunk(chunk.action, "libero", None, "quantile_rot")
        np.testing.assert_allclose(
            rows[:, [0, 2]], [[0.1 * 51 * i / 255, 0.01 * i]] * 16, atol=1e-9
        )
        assert chunk.video is None
    assert backend.counters["dials"] == 2  # one for /info


@pytest.mark.parametrize("fault", ERRORS)
def test_a_fault_ends_in_its_error_and_leaves_nothing(server: Server, fault: str):
    before = held()
    config = {"read_s": 0.4} if ERRORS[fault] is ServiceTimeoutError else {"read_s": 20.0}
    backend = service(
        server.server_port,
        fault,
        max_reply_bytes=150_000 if fault == "oversize" else 2**21,
        **config,
    )
    started = time.monotonic()
    with pytest.raises(ERRORS[fault]) as caught:
        backend.infer(libero_request())
    assert type(caught.value) is ERRORS[fault]
    assert time.monotonic() - started < 10.0
    assert len(str(caught.value)) < 1400
    assert str(caught.value).isprintable()
    backend.close()
    until(lambda: held() <= before)  # the server's own threads end, too


def test_a_server_without_info_is_called_all_the_same(server: Server):
    assert service(server.server_port, "no_info").infer(libero_request()).action.shape == (16, 10)


def test_the_server_s_error_is_named(server: Server):
    with pytest.raises(ServiceRefusedError, match="no such luck"):
        service(server.server_port).infer(libero_request(prompt="fail"))


def test_cancelling_ends_a_request_under_way(server: Server):
    backend = service(server.server_port, "hang", read_s=20.0)
    timer = threading.Timer(0.2, backend.cancel)
    timer.start()
    started = time.monotonic()
    with pytest.raises(ServiceClosedError, match="on this side"):
        backend.infer(libero_request())
    assert time.monotonic() - started < 1.5
    timer.join()


def test_nobody_there_is_unavailable():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    pauses: list[float] = []
    client = HttpPolicyClient(ClientConfig("127.0.0.1", port, attempts=3), sleep=pauses.append)
    backend = HttpServiceBackend(client, LIBERO)
    with pytest.raises(ServiceUnavailableError, match=r"3 attempts.* serve --http libero --port"):
        backend.infer(libero_request())
    assert pauses == [0.1, 0.2]


def test_another_embodiment_and_a_request_without_a_picture_are_refused_before_anything_is_dialled():
    backend = service(9)
    for asked, says in ((request(), "libero"), (libero_request(composite=None), "picture")):
        with pytest.raises(BackendError, match=says):
            backend.infer(asked)
    assert not any(backend.counters.values())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"host": "ws://a", "dialect": "libero"}, "https://"),
        ({"client": PolicyClient(), "dialect": "libero"}, "HttpPolicyClient"),
        ({"client": HttpPolicyClient()}, "PolicyClient"),
        ({"host": "http://a"}, "wss://"),
    ],
)
def test_a_client_or_an_address_of_another_protocol_is_refused(
    options: dict[str, object], says: str
):
    with pytest.raises(ConfigError, match=says):
        make_backend("service", options=backend_options(**options))
