"""strands-robots 0.5.3 as the host: its own ``Robot(...).run_policy`` drives the embedded Panda
with our policy.

It wants Python 3.12 and mujoco < 4, so it lives in an environment of its own, made once in pytest's
cache (`.pytest_cache/d/strands`). What is asserted was read from MuJoCo's state in that process
(`hosts/rollout.py`) and is compared with a motion known in closed form, or with a recorded DROID
episode; nothing of the policy has a say in it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.environments import ROOT, strands_robots
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.backends.replay import Recording, load_recording
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.robots.model import panda_path
from strands_cosmos3.robots.panda import HOME_Q, dh_forward
from strands_cosmos3.serving.served import ServedPolicy
from strands_cosmos3.serving.server import PolicyServer, ServerConfig
from strands_cosmos3.types import ActionChunk, Request

pytestmark = pytest.mark.peers

EPISODE = ROOT / "tests/assets/droid_episode_48330.json"
T_HAND_COSMOS = get_embodiment("droid").tool_frame.T_parent_cosmos
VIEWS = ("wrist", "exterior_1", "exterior_2")
DURATION_S = 4.0


def sway(t_s: Any) -> np.ndarray:
    """[..., 7] a motion that starts and ends at rest: up to 0.24 m/s and 40 degrees a second at
    the hand.
    """
    phase = np.clip(np.asarray(t_s, dtype=np.float64) / DURATION_S, 0.0, 1.0)
    along = 10 * phase**3 - 15 * phase**4 + 6 * phase**5
    reach = np.array([0.55, 0.25, -0.3, 0.35, 0.2, -0.3, 0.5])
    return HOME_Q + reach * np.sin(np.pi * along)[..., None] + 0.2 * along[..., None]


def squeeze(t_s: Any) -> np.ndarray:
    """Open, then a quarter open, then closed: values that neither a flip nor a wrong unit leaves
    as they are.
    """
    return np.select([np.asarray(t_s) < 1.0, np.asarray(t_s) < 2.5], [1.0, 0.25], 0.0)


class Sway(Backend):
    """Joint rows of that motion, by the motion's clock: row i is for ``i / 15`` seconds after
    the observation.
    """

    info = BackendInfo(name="sway")

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def infer(self, request: Request) -> ActionChunk:
        self.requests.append(request)
        due_s = request.t_motion_s + np.arange(request.n_rows) / 15
        return ActionChunk(
            np.column_stack((sway(due_s), squeeze(due_s))), request.action_space, request.embodiment
        )


@dataclass
class Seen:
    """What the host's process measured after every control step."""

    text: str
    t_s: np.ndarray
    T_hand: np.ndarray
    finger_m: np.ndarray
    ctrl: np.ndarray
    commanded: np.ndarray

    def against(self, T_intended, name: str) -> tuple[float, float, float]:
        """Largest distance to the intended path [mm], to the intended place at the same time
        [mm], and angle [degrees].
        """
        fine = T_intended(np.linspace(0.0, float(self.t_s[-1]), 4000))
        away = np.linalg.norm(self.T_hand[:, None, :3, 3] - fine[None, :, :3, 3], axis=2)
        at = T_intended(self.t_s)
        late = np.linalg.norm(self.T_hand[:, :3, 3] - at[:, :3, 3], axis=1)
        trace = np.einsum("nij,nij->n", self.T_hand[:, :3, :3], at[:, :3, :3])
        angle = np.rad2deg(np.arccos(np.clip((trace - 1) / 2, -1, 1)))
        path = away.min(axis=1) * 1e3
        print(
            f"\n{name}: path mean {path.mean():.2f} max {path.max():.2f} mm, at the same time "
            f"mean {late.mean() * 1e3:.2f} "
            f"max {late.max() * 1e3:.2f} mm, {angle.max():.2f} degrees; {len(self.t_s)} steps"
        )
        return float(path.max()), float(late.max() * 1e3), float(angle.max())


@pytest.fixture(scope="session")
def host(pytestconfig: pytest.Config) -> str:
    """Python of the host's environment."""
    return strands_robots(pytestconfig)


def run(host: str, script: str, *arguments: object) -> list[Any]:
    command = [host, str(ROOT / "tests/policy/hosts" / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def job(
    way: str,
    config: dict[str, Any],
    q_start=HOME_Q,
    cameras=(),
    duration=DURATION_S,
    instruction="follow",
) -> dict[str, Any]:
    given = {
        "way": way,
        "model": str(panda_path()),
        "config": config,
        "cameras": cameras,
        "q_start": list(map(float, q_start)),
    }
    return given | {"run": {"duration": duration, "instruction": instruction}}


@pytest.fixture
def drive(host: str, tmp_path: Path):
    """drive(*jobs): what the host's process measured, or the text of its refusal, for each."""

    def start(*jobs: dict[str, Any]) -> list[Any]:
        (tmp_path / "jobs.json").write_text(json.dumps(jobs))
        told = run(host, "rollout.py", tmp_path / "jobs.json")
        assert len(told) == len(jobs)
        assert not any(answer["torch"] for answer in told)
        assert {answer["versions"][0] for answer in told} == {"0.5.3"}
        return [
            seen_by(answer, wanted["run"]["duration"])
            for answer, wanted in zip(told, jobs, strict=True)
        ]

    return start


def seen_by(told: dict[str, Any], duration: float) -> Any:
    if told["status"] == "error":
        return told["text"]
    rows = np.array(told["rows"])
    assert len(rows) == round(duration * 50)
    T = np.tile(np.eye(4), (len(rows), 1, 1))
    T[:, :3, 3], T[:, :3, :3] = rows[:, 1:4], rows[:, 4:13].reshape(-1, 3, 3)
    return Seen(told["text"], rows[:, 0], T, rows[:, 13], rows[:, 14], rows[:, 15])


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    t_s = np.arange(round(DURATION_S * 15) + 1) / 15
    path = tmp_path_factory.mktemp("recording") / "sway.npz"
    Recording(dh_forward(sway(t_s)) @ T_HAND_COSMOS, squeeze(t_s), 15.0, sway(0.0)).save_npz(path)
    return path


def follows(seen: Any, name: str) -> None:
    """Within 5 mm of the path, and of the place at each time; turned as it should be; the
    gripper's way is the fingers'.
    """
    assert isinstance(seen, Seen), seen
    path_mm, late_mm, degrees = seen.against(lambda t_s: dh_forward(sway(t_s)), name)
    assert path_mm < 5
    assert late_mm < 5
    assert degrees < 2
    for at_s, finger_m in ((0.9, 0.04), (2.4, 0.01), (3.9, 0.0)):
        assert seen.finger_m[np.searchsorted(seen.t_s, at_s)] == pytest.approx(
            finger_m, abs=2e-3
        ), at_s


def test_the_contract_is_strands_robots_own(host: str):
    """Members, signatures, defaults and refusals of its ABC, read from it; and what its registry
    makes of our names.
    """
    (told,) = run(host, "contract.py")
    assert told["missing"] == []
    assert told["differ"] == {}
    assert not told["is_a_policy_before"]
    assert told["registered"] == ["strands_cosmos3"]
    assert told["is_a_policy"]
    assert told["by_our_name"] == "strands_cosmos3"
    assert told["by_default"] == ["service", 32, 32]
    assert told["cosmos3"] == "strands_robots"  # its own, unless told otherwise
    assert told["registered_over"] == ["strands_cosmos3", "cosmos3"]
    assert told["cosmos3_over"] == told["cosmos3_again"] == "strands_cosmos3"
    # docs/strands.md says so: addresses never reach the registry
    assert told["address_over"] == "strands_robots"
    assert "'port'" in told["misspelt"]


def test_a_policy_object_replays_a_recording(drive, recording: Path):
    config = {"embodiment": "droid", "robot": "panda", "backend": "replay", "model": str(recording)}
    bare = {**config, "options": {"servo_lead": False}}
    overlapping = job("object", config)
    overlapping["run"]["async_rtc"] = True
    seen, lagging, overlapped = drive(job("object", config), job("object", bare), overlapping)
    follows(seen, "replay, policy_object=")
    follows(overlapped, "the same, async_rtc=True")
    assert "does not read the instruction" in seen.text
    assert "a recorded motion" in seen.text
    # the open fraction, as this host's engine takes it: not the metres it observes
    assert seen.commanded.max() == 1.0
    assert seen.ctrl.max() == 255.0
    path_mm, late_mm, _ = lagging.against(
        lambda t_s: dh_forward(sway(t_s)), "the same, servo_lead=False"
    )
    assert path_mm < 5
    assert late_mm > 10  # the bare servos are a tenth of a second behind, on the same path


def test_sockets(drive, recording: Path):
    """Our server in a process of its own replays a recording; one in this process speaks the
    released servers' joint angles.

    Cameras by name and by mapping; the instruction reaches the server word for word; a camera that
    is not there is named before the server is dialled.
    """
    backend = Sway()
    command = [
        sys.executable,
        "-m",
        "strands_cosmos3.cli",
        "serve",
        "--trajectory",
        str(recording),
        "--port",
        "0",
    ]
    droid = {"embodiment": "droid", "robot": "panda"}
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
        PolicyServer(ServedPolicy(backend, "droid", "joint_pos"), ServerConfig(port=0)) as server,
    ):
        try:
            assert process.stdout is not None
            found = re.search(r"ws://127\.0\.0\.1:(\d+)", process.stdout.readline())
            assert found
            others = ("front", "left", "right")
            mapped = {
                **droid,
                "observation_mapping": dict(zip(VIEWS, others, strict=True)),
                "port": server.port,
            }
            joints, unseen, privileged, poses = drive(
                job("name", mapped, cameras=others, instruction="pick up the red cube"),
                job("name", mapped, cameras=("front", "left")),
                job("name", {**droid, "backend": "scripted"}),
                job(
                    "builtin",
                    {**droid, "port": int(found[1]), "action_space": "midtrain"},
                    cameras=VIEWS,
                ),
            )
        finally:
            process.kill()
    follows(joints, "joint_pos service, policy_provider='strands_cosmos3'")
    asked = [
        request for request in backend.requests if request.instruction == "pick up the red cube"
    ]
    assert len(asked) == 2  # 32 rows are 2.07 s
    # what the fingers did, and not its opposite
    assert asked[1].gripper == pytest.approx(0.25, abs=0.05)
    assert [request.privileged for request in asked] == [None, None]
    assert all(name in unseen for name in ("'right'", "'exterior_2'", "front, "))
    assert len(backend.requests) == 3  # the warm-up and those two
    assert "strands_cosmos3.Robot" in privileged
    follows(poses, "midtrain service, policy_provider='cosmos3'")


def test_a_recorded_droid_episode(drive):
    episode = load_recording(EPISODE)
    config = {"embodiment": "droid", "robot": "panda", "backend": "replay", "model": str(EPISODE)}
    (seen,) = drive(
        job("object", config, episode.q_start_rad, duration=np.floor(episode.duration_s * 50) / 50)
    )
    T_cosmos_hand = np.linalg.inv(T_HAND_COSMOS)
    path_mm, late_mm, degrees = seen.against(
        lambda t_s: episode.at(t_s)[0] @ T_cosmos_hand, "DROID episode"
    )
    assert path_mm < 5
    assert late_mm < 5
    assert degrees < 2
    open_fraction = seen.finger_m / 0.04
    assert open_fraction[:100].min() > 0.95
    assert open_fraction[-1] < 0.05


def test_eval_policy_resets_to_the_home_keyframe(host: str, recording: Path):
    """Two episodes, each from home. Without the keyframe its reset puts joint 4 out of range,
    and the error says so.
    """
    (told,) = run(host, "evaluate.py", panda_path(), recording, "home")
    assert told["status"] == "success", told["text"]
    for steps in np.array(told["rows"]).reshape(2, 150, -1):
        assert np.abs(steps[0, 1:8] - HOME_Q).max() < 0.02
        intended = dh_forward(sway((np.arange(150) + 1) / 50))[:, :3, 3]
        assert np.linalg.norm(steps[:, 8:] - intended, axis=1).max() < 5e-3
        assert np.linalg.norm(steps[:, 8:] - steps[0, 8:], axis=1).max() > 0.2
    (told,) = run(host, "evaluate.py", panda_path(), recording)
    assert "joint 4 of 7 is at 0.0000 rad, outside its range [-3.0718, -0.0698]" in told["text"]
