"""Transcripts of peers that are not on PyPI: clients of RoboLab, IsaacLab-Arena and NVIDIA call
our server, ours NVIDIA's.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from helpers.serving import JOINT_POS, MIDTRAIN, Echo, Several, T, request
from helpers.transcripts import (
    Transcript,
    assert_same,
    replay_client,
    replay_http_client,
    replay_server,
)
from strands_cosmos3 import load_action_stats
from strands_cosmos3.actions.rotations import quaternion_to_matrix
from strands_cosmos3.backends.base import BackendInfo
from strands_cosmos3.backends.service import ServiceBackend
from strands_cosmos3.errors import ServiceRefusedError
from strands_cosmos3.serving.client import ClientConfig, PolicyClient

ROBOLAB, ARENA, LIBERO = ("robolab-cosmos3", "robolab-dreamzero"), "arena-cosmos3", "libero-eval"
CLIENTS, SERVERS = (*ROBOLAB, ARENA), ("framework-joint_pos", "framework-midtrain")


def echo() -> Echo:
    backend = Echo()
    backend.info = BackendInfo(name="echo")
    return backend


def call(port: int, space: str) -> None:
    """What our client asks of NVIDIA's server, and what it makes of the replies
    (peers/framework_serves.py has the model).
    """
    service = ServiceBackend(PolicyClient(ClientConfig("127.0.0.1", port)), action_space=space)
    given = request(MIDTRAIN if space == "midtrain" else JOINT_POS)
    steps = 0.01 * np.arange(1, 33)
    for gripper in (0.2, 0.5):
        chunk = service.infer(replace(given, gripper=gripper))
        if space == "midtrain":
            np.testing.assert_allclose(
                chunk.action[:, :3],
                T[:3, 3] + (T[:3, :3] @ np.outer(np.ones(3), steps)).T,
                atol=1e-5,
            )
            turned = quaternion_to_matrix(chunk.action[:, 3:7])
            np.testing.assert_allclose(turned, np.broadcast_to(T[:3, :3], (32, 3, 3)), atol=1e-5)
            np.testing.assert_allclose(chunk.action[:, 7], gripper, atol=1e-6)
        else:
            np.testing.assert_allclose(chunk.action[:, :7], given.q_rad + steps[:, None], atol=1e-6)
            np.testing.assert_allclose(chunk.action[:, 7], gripper + steps, atol=1e-6)
        assert chunk.video is not None
        assert chunk.video.shape == (2, 9, 10, 3)
        # wrist, left, right
        np.testing.assert_allclose(chunk.video[0, [0, 8, 8], [0, 0, 9], 0], (100, 101, 102), atol=1)
        assert not chunk.video[1].any()
    with pytest.raises(ServiceRefusedError, match="ValueError: no such luck"):
        service.infer(replace(given, instruction="fail"))
    service.close()


@pytest.mark.parametrize("name", CLIENTS)
def test_our_server_answers_a_recorded_client_as_it_did(serve, name: str):
    transcript, backend = Transcript.load(name), echo()
    answers = replay_client(transcript, serve(backend).port)
    assert_same(answers, transcript.sent_by("server"))
    require_understood(backend, answers, bare="dreamzero" in name)


def test_one_server_answers_all_recorded_clients_at_once(serve):
    server = serve(Several(), http="libero")
    replays = [(name, replay_client) for name in CLIENTS] + [(LIBERO, replay_http_client)]
    with ThreadPoolExecutor() as pool:
        answers = {
            name: pool.submit(replay, Transcript.load(name), server.port)
            for name, replay in replays
        }
    for name, answer in answers.items():
        ignored = ("run_name",)  # our version
        assert_same(answer.result(), Transcript.load(name).sent_by("server"), ignored)
    require_libero_understood(answers[LIBERO].result())


def require_libero_understood(answers: list) -> None:
    """Health, what is served, two chunks, no other path, a batch, a refusal: as the peer's
    program asks for them.
    """
    asked, said = zip(*(answer.values() for answer in answers), strict=True)
    assert asked == (b"200", b"200", b"200", b"200", b"404", b"200", b"200")
    assert (said[0], said[1]["raw_action_dim"], said[1]["action_chunk_size"]) == (
        {"status": "ok"},
        10,
        16,
    )
    stats = load_action_stats("libero").raw
    for step, rows in enumerate((said[2]["action"], said[3]["action"], *said[5]["actions"])):
        # the bar is an eighth by a quarter of the left half
        bright = (255 * 1 / 32 + (40 + step % 2) * 31 / 32) / 255
        z = np.tile(np.linspace(-0.5, 0.5, 10), (16, 1))
        z[:, 0] = bright + 0.01 * np.arange(16)
        np.testing.assert_allclose(
            rows, (z + 1) / 2 * (stats.q99 - stats.q01) + stats.q01, atol=1e-6
        )
    assert said[6]["action"] == []
    assert "'domain_name' must be 'libero', got 'nowhere'" in said[6]["error"]


def require_understood(backend: Echo, answers: list, bare: bool) -> None:
    """Both requests were read as the peer means them. ``answers``: metadata, two chunks (with
    resets if bare), a refusal.
    """
    for step, asked in enumerate(backend.requests[-2:]):
        assert asked.q_rad is not None
        np.testing.assert_allclose(asked.q_rad, np.arange(7) / 10 + step, atol=1e-6)
        assert asked.gripper == pytest.approx(0.75)  # the peers send how far it is closed
        # wrist, left, right
        np.testing.assert_array_equal(
            asked.composite[[200, 500, 500], [300, 200, 500], 0], (30, 60, 90)
        )
        # each bar at the top left of its view
        assert (asked.composite[[10, 365, 365], [10, 10, 330]] > 240).all()
    rows = np.concatenate([*(backend.requests[-1].q_rad + 0.03,), [0.25]])
    chunk = answers[3] if bare else answers[2]["action"]
    np.testing.assert_allclose(chunk[3], rows, atol=1e-6)
    assert answers[-1] == "InputError: 'prompt' has 5000 characters; at most 4096 are read."


@pytest.mark.parametrize("name", SERVERS)
def test_our_client_asks_and_reads_a_recorded_server_as_it_did(name: str):
    transcript = Transcript.load(name)
    with replay_server(transcript) as (port, heard):
        call(port, name.removeprefix("framework-"))
    assert_same(heard, transcript.sent_by("client"))
