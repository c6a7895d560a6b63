"""vLLM-Omni's policy endpoint as its source has it, without a model: it echoes joint angles and
gripper.

Written from vllm-project/vllm-omni, ``vllm_omni/entrypoints/openpi/connection.py`` @14490817
(frames, sessions, reset, errors, idle close) and ``serving.py`` @0a2c9512 (seed,
``sampling_params``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
from websockets.asyncio.server import ServerConnection
from websockets.protocol import State

from helpers.transcripts import listening

PATH = "/v1/realtime/robot/openpi"
CONFIG = {
    "image_resolution": [540, 640],
    "n_external_cameras": 2,
    "needs_wrist_camera": True,
    "needs_stereo_camera": False,
    "needs_session_id": True,
    "action_space": "joint_position",
}


@dataclass
class FakeVllmOmni:
    """``asked``: what each request asked the engine for."""

    config: dict[str, Any] = field(default_factory=lambda: dict(CONFIG))
    asked: list[dict[str, Any]] = field(default_factory=list)
    connections: int = 0

    async def __call__(self, client: ServerConnection) -> None:
        assert client.request is not None
        if client.request.path != PATH:
            await client.close(1008, "Robot policy not available")
            return
        self.connections += 1
        self._client, self._loop = client, asyncio.get_running_loop()
        session, calls = None, 0
        await client.send(pack(self.config))
        async for frame in client:
            if isinstance(frame, str):
                continue
            try:
                said = unpack(frame)
                if said.pop("endpoint", "infer") == "reset":
                    session, calls = None, 0
                    await client.send(pack({"status": "reset successful"}))
                    continue
                name = str(said.get("session_id") or session or "default")
                calls = 1 if name != session else calls + 1
                session = name
                await client.send(pack(self.infer(said, session, calls <= 1)))
            except Exception:
                await client.send(pack({"type": "error", "message": "Internal inference error"}))

    def close_idle(self) -> None:
        """Do what the server does after 30 s without a request; the close has been sent on return."""
        asyncio.run_coroutine_threadsafe(self._send_close(), self._loop).result(10)

    async def _send_close(self) -> None:
        self._closing = asyncio.create_task(self._client.close(1000))  # it awaits the answer
        while self._client.state is State.OPEN:
            await asyncio.sleep(0)

    def infer(self, said: dict[str, Any], session: str, reset: bool) -> np.ndarray:
        seed, sampling = said.pop("seed", None), said.get("sampling_params") or {}
        steps = sampling.get("num_inference_steps", 4)
        self.asked.append(
            {
                "session": session,
                "reset": reset,
                "seed": None if seed is None else int(seed),
                "steps": steps,
            }
        )
        if said["prompt"] == "fail":
            raise ValueError
        rows = np.zeros((32, 8), np.float32)
        rows[:, :7] = said["observation/joint_position"] + 0.01 * np.arange(32)[:, None]
        rows[:, 7] = said["observation/gripper_position"]
        assert {
            said[f"observation/{view}_left"].shape for view in ("wrist_image", "exterior_image_1")
        } == {(360, 640, 3)}
        return rows


def pack(value: object) -> bytes:
    def array(a: np.ndarray) -> dict[bytes, Any]:
        return {
            b"__ndarray__": True,
            b"data": a.tobytes(),
            b"dtype": a.dtype.str,
            b"shape": a.shape,
        }

    return msgpack.packb(value, default=array)


def unpack(frame: bytes) -> dict[str, Any]:
    def array(value: dict[Any, Any]) -> Any:
        if not value.get(b"__ndarray__"):
            return value
        return np.frombuffer(value[b"data"], np.dtype(value[b"dtype"])).reshape(value[b"shape"])

    return msgpack.unpackb(frame, object_hook=array, strict_map_key=False)


@contextmanager
def vllm_omni(**config: Any) -> Iterator[tuple[int, FakeVllmOmni]]:
    """Serve in a thread; the port and the server."""
    fake = FakeVllmOmni(**config)
    with listening(fake) as port:
        yield port, fake
