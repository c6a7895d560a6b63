"""A Cosmos 3 checkpoint behind the wire answers as it does in this process."""

from __future__ import annotations

import os
import signal
from contextlib import closing

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from helpers.serving import DROID, observation, until

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from helpers.options import backend_options  # noqa: E402
from recipes.random_checkpoint import write_checkpoint  # noqa: E402
from strands_cosmos3.actions.decode import decode_chunk  # noqa: E402
from strands_cosmos3.actions.rotations import quaternion_to_matrix, se3, so3_exp  # noqa: E402
from strands_cosmos3.backends import make_backend  # noqa: E402
from strands_cosmos3.backends.distributed import replicas  # noqa: E402
from strands_cosmos3.backends.service import ServiceBackend  # noqa: E402
from strands_cosmos3.cli import main  # noqa: E402
from strands_cosmos3.engine.engine import Cosmos3Engine  # noqa: E402
from strands_cosmos3.errors import ConfigError  # noqa: E402
from strands_cosmos3.parallel.group import RankTimeouts  # noqa: E402
from strands_cosmos3.parallel.rank_engine import RankGroupEngine  # noqa: E402
from strands_cosmos3.serving.client import ClientConfig, PolicyClient  # noqa: E402
from strands_cosmos3.serving.codec import decode, encode  # noqa: E402
from strands_cosmos3.serving.server import PolicyServer  # noqa: E402
from strands_cosmos3.types import Request  # noqa: E402

QUICK = backend_options(device="cpu", num_steps=2, guidance_scale=3.0, image_size=256)
T = se3(so3_exp(np.array([0.3, 2.5, -0.4])), np.array([0.4, -0.1, 0.3]))


@pytest.mark.parametrize("space", ["joint_pos", "midtrain"])
def test_a_served_checkpoint_answers_as_the_one_in_this_process(serve, tmp_path, space: str):
    native = make_backend("native", write_checkpoint(tmp_path / space, action_space=space), QUICK)
    rng = np.random.default_rng(0)
    views = {view: rng.integers(0, 256, (360, 640, 3), dtype=np.uint8) for view in DROID.rig.views}
    state = {
        "q_rad": np.linspace(-0.5, 0.5, 7).astype(np.float32),
        "gripper": 0.25,
        "limb_poses": {"arm": T},
        "seed": 5,
    }
    asked = {
        "embodiment": DROID,
        "action_space": DROID.spaces[space],
        "instruction": "pick up the red cube",
    }
    here = native.infer(
        Request(
            **asked,
            n_rows=DROID.chunk_rows(space),
            **state,
            composite=native.compose(views, DROID.rig),
        )
    )
    port = serve(native, action_space=space).port
    service = ServiceBackend(PolicyClient(ClientConfig("127.0.0.1", port, pictures="raw")))
    there = service.infer(Request(**asked, n_rows=DROID.chunk_rows(space), **state, images=views))
    service.close()
    if space == "joint_pos":
        np.testing.assert_allclose(there.action[:, :7], here.action[:, :7], atol=1e-5)
        np.testing.assert_allclose(there.action[:, 7], np.clip(here.action[:, 7], 0, 1), atol=1e-5)
    else:
        poses = decode_chunk(here, T)
        np.testing.assert_allclose(there.action[:, :3], poses.T_base_frame[:, :3, 3], atol=1e-5)
        np.testing.assert_allclose(
            quaternion_to_matrix(there.action[:, 3:7]), poses.T_base_frame[:, :3, :3], atol=1e-5
        )
        np.testing.assert_allclose(there.action[:, 7], poses.gripper, atol=1e-5)
    native.close()


@pytest.mark.parametrize(
    ("flags", "backend"),
    [
        ((), "native"),  # one process of its own
        (("--replicas", "2"), "native"),
        (("--replicas", "0"), "native"),  # in the server's process
        (("--backend", "distributed"), "distributed"),
        (("--tp", "2"), "distributed"),
    ],
)
def test_metrics_name_the_backend_that_was_asked_for(tmp_path, monkeypatch, flags, backend):
    said: list[str] = []

    def end(server: PolicyServer, ready: object):
        said.append(server.metrics.text())
        raise ConfigError("not started")

    monkeypatch.setattr(PolicyServer, "run", end)
    in_process = lambda model, *_: Cosmos3Engine.from_pretrained(model, device="cpu")  # noqa: E731
    monkeypatch.setattr(RankGroupEngine, "from_pretrained", in_process)
    folder = write_checkpoint(tmp_path / "tiny", action_space="joint_pos")
    command = ["serve", "--model", str(folder), "--device", "cpu", "--port", "0", *flags]
    assert main(command) == 2
    assert f'backend="{backend}"' in said[0]


def test_a_killed_inference_process_costs_one_request_and_is_replaced(
    serve, tmp_path, who_came_to_the_end_of_python
):
    """The other one, once closed, leaves without the end of Python, where gloo's threads might
    abort it.
    """
    patient = RankTimeouts(silent_s=60.0)  # the machine may be busy
    (backend,) = replicas(
        1,
        write_checkpoint(tmp_path / "tiny", action_space="joint_pos"),
        backend_options(device="cpu", num_steps=1, guidance_scale=1.0, image_size=256),
        timeouts=patient,
    )
    server = serve(backend)
    address = f"ws://127.0.0.1:{server.port}"
    message = encode(
        observation(**{name: np.zeros((90, 160, 3), np.uint8) for name in DROID.rig.wire_names})
    )
    with closing(backend), connect(address) as unlucky, connect(address) as other:
        assert (
            decode(unlucky.recv(timeout=10))
            == decode(other.recv(timeout=10))
            == {
                "cosmos3/action_space": "joint_pos",
                "cosmos3/model_sha256": backend.model_sha256,
            }
        )
        pid = backend.engine.ranks.handles[0].pid
        os.kill(pid, signal.SIGSTOP)  # so that it cannot answer before it is killed
        unlucky.send(message)
        until(lambda: server.busy_s > 1.5)
        os.kill(pid, signal.SIGKILL)
        assert unlucky.recv(timeout=20).startswith("RankLostError: rank 0")
        with pytest.raises(ConnectionClosed):
            unlucky.recv(timeout=5)
        other.send(message)  # answered by a new process
        assert decode(other.recv(timeout=120))["action"].shape == (32, 8)
        replacement = backend.engine.ranks.handles[0].pid
    assert backend.engine.ranks.starts == 2
    with pytest.raises(ProcessLookupError):
        os.kill(replacement, 0)
    assert replacement not in who_came_to_the_end_of_python()
