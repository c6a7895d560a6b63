"""A thousand malformed calls, over every public function of ``actions``: each is refused by an
error of our own.
"""

import inspect

import numpy as np
import pytest

from strands_cosmos3.actions import arrays, decode, normalization, rotations, stats
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import Cosmos3Error
from strands_cosmos3.types import ActionChunk, PoseTrajectory

DROID = get_embodiment("droid")
DROID_STATS = stats.load_action_stats("droid")
Q01, Q99 = DROID_STATS.q01, DROID_STATS.q99
EYE, EYES = np.eye(4), np.repeat(np.eye(4)[None], 3, axis=0)
DELTA = np.array([0.0, 0, 0, 1, 0, 0, 0, 1, 0])
CHUNK = ActionChunk(np.full((2, 10), 0.1), DROID.action_space("midtrain"), DROID)
JOINTS = ActionChunk(np.full((2, 8), 0.1), DROID.action_space("joint_pos"), DROID)
MOTION = PoseTrajectory(EYES, [0.1, 0.2, 0.3], "cosmos", EYE)
LIBERO = stats.load_action_stats("libero")


class Numbers:
    """An argument that is an array of real numbers; ``wide`` says that its last axis has a fixed
    width.
    """

    def __init__(self, good, wide=True):
        self.good, self.wide = np.asarray(good, dtype=float), wide

    def spoil(self, rng):
        bad = self.good.copy()
        kinds = [
            "nan",
            "inf",
            "huge",
            "empty",
            "string",
            "none",
            "object",
            "complex",
            "text",
            "ragged",
            "scalar",
        ]
        kind = rng.choice([*kinds, "width"] if self.wide else kinds)
        where = tuple(rng.integers(n) for n in bad.shape)
        if kind in ("nan", "inf", "huge"):
            bad[where] = {
                "nan": np.nan,
                "inf": rng.choice([-1, 1]) * np.inf,
                "huge": 10 ** rng.uniform(12, 300),
            }[kind]
            return bad
        if kind == "width":
            return np.concatenate([bad, bad], axis=-1) if rng.random() < 0.5 else bad[..., :-1]
        return {
            "empty": np.zeros((0, *bad.shape[1:])),
            "string": "0.1 0.2",
            "none": None,
            "object": object(),
            "complex": bad + 1j,
            "text": np.full(bad.shape, "x"),
            "ragged": [[0.0], [0.0, 1.0]],
            "scalar": 0.5,
        }[kind]


class Rigid(Numbers):
    """Rigid transforms or rotations: a mirror, a scaling and a shear are malformed too."""

    def spoil(self, rng):
        if rng.random() < 0.6:
            return super().spoil(rng)
        bad = self.good.copy()
        column = rng.integers(3)
        bad[..., :3, column] *= rng.choice([-1.0, 1.01, 0.0])
        return bad


class ByLimb(Rigid):
    """Arrays by the limb's name; the only one, its name or the mapping is malformed."""

    def __init__(self, array):
        self.array, self.good = array, {"arm": array.good}

    def spoil(self, rng):
        kind = rng.integers(6)
        return (
            (None, {}, {"left": self.array.good}, [self.array.good])[kind]
            if kind < 4
            else {"arm": self.array.spoil(rng)}
        )


class OneOf:
    """An argument of a closed set, or of one type."""

    def __init__(self, good, *bad):
        self.good, self.bad = good, (*bad, object(), np.array([1.0, np.nan]), 3.5, {"a": 1})

    def spoil(self, rng):
        return self.bad[rng.integers(len(self.bad))]


def embodiment_argument():
    return OneOf("droid", None, "driod", "", "bridge", "hand_pose", "av", "pusht", 8, np.nan)


def stats_argument():
    names = ("bridge", "driod", "", "fractal", "nowhere.json", "av")
    return OneOf(DROID_STATS, *names, stats.load_action_stats("umi"), LIBERO, 3, Q01)


def method_argument():
    return OneOf("quantile", None, "zscore", "", 3, "meanstd")


CALLS = {
    rotations.rot6d_to_matrix: [Numbers(DELTA[3:])],
    rotations.matrix_to_rot6d: [Rigid(np.eye(3))],
    rotations.quaternion_to_matrix: [Numbers([0, 0, 0, 1])],
    rotations.matrix_to_quaternion: [Rigid(np.eye(3))],
    rotations.euler_xyz_to_matrix: [Numbers([0.1, 0.2, 0.3])],
    rotations.so3_exp: [Numbers([0.1, 0.2, 0.3])],
    rotations.so3_log: [Rigid(np.eye(3))],
    rotations.geodesic_angle: [Rigid(np.eye(3)), Rigid(np.eye(3))],
    rotations.se3: [Rigid(np.eye(3)), Numbers([0.1, 0.2, 0.3])],
    rotations.se3_inverse: [Rigid(EYE)],
    rotations.se3_between: [Rigid(EYE), Rigid(EYES)],
    rotations.interpolate_poses: [
        Rigid(EYES),
        Numbers([0.1, 0.2, 0.3]),
        Numbers([0.15, 0.3], wide=False),
    ],
    stats.load_action_stats: [
        OneOf("droid", None, "driod", "", 3, "av", "nowhere.json", "/", "\0.json", "galbot")
    ],
    stats.stats_for: [embodiment_argument(), stats_argument()],
    stats.stats_of_domain: [
        OneOf(DROID),
        OneOf({"q01": Q01, "q99": Q99}),
        OneOf("droid", "driod", "", "av", 3),
    ],
    stats.normalize_quantile: [Numbers(np.zeros((2, 10))), Numbers(Q01), Numbers(Q99)],
    stats.denormalize_quantile: [Numbers(np.zeros((2, 10))), Numbers(Q01), Numbers(Q99)],
    stats.denormalize_chunk: [
        Numbers(np.zeros((2, 10))),
        embodiment_argument(),
        stats_argument(),
        method_argument(),
    ],
    stats.normalize_chunk: [
        Numbers(np.zeros((2, 10))),
        embodiment_argument(),
        stats_argument(),
        method_argument(),
    ],
    normalization.ActionStats: [
        OneOf("droid_lerobot", None, 3),
        OneOf(
            DROID_STATS.columns,
            None,
            "tx",
            (),
            DROID_STATS.columns[:8],
            (None,) * 10,
            list(DROID_STATS.columns),
        ),
        Numbers(Q01),
        Numbers(Q99),
    ],
    decode.decode_pose_delta: [Numbers(DELTA)],
    decode.encode_pose_delta: [Rigid(EYE)],
    decode.decode_pose_trajectory: [
        Numbers(np.tile(DELTA, (3, 1))),
        Rigid(EYE),
        OneOf("framewise", None, "", "backwards", 3),
    ],
    decode.encode_pose_trajectory: [Rigid(EYES), OneOf("anchored", None, "", "backwards", 3)],
    decode.decode_chunk: [
        OneOf(CHUNK, None, JOINTS, "chunk", CHUNK.action, MOTION),
        Rigid(EYE),
        stats_argument(),
        method_argument(),
    ],
    decode.decode_limbs: [
        OneOf(CHUNK, None, JOINTS, "chunk", CHUNK.action, MOTION),
        ByLimb(Rigid(EYE)),
        stats_argument(),
        method_argument(),
    ],
    decode.encode_limbs: [
        ByLimb(Rigid(EYES)),
        ByLimb(Numbers([0.2, 0.3])),
        embodiment_argument(),
        stats_argument(),
        method_argument(),
    ],
    decode.decode_joint_chunk: [OneOf(JOINTS, None, CHUNK, "chunk", JOINTS.action, MOTION)],
    decode.to_frame: [
        OneOf(
            MOTION, None, CHUNK, EYES, "motion", PoseTrajectory(EYES, [0.1, 0.2, 0.3], "hand", EYE)
        ),
        Rigid(EYE),
        OneOf("hand", None, "", 3),
    ],
    decode.encode_chunk: [
        Rigid(EYES),
        Numbers([0.2, 0.3]),
        embodiment_argument(),
        stats_argument(),
        method_argument(),
    ],
}
CASES = 1000


def public_functions():
    for module in (rotations, stats, decode):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_"):
                yield function


def test_every_public_function_is_covered():
    assert set(public_functions()) <= set(CALLS)
    assert {name for name, _ in inspect.getmembers(arrays, inspect.isfunction)} >= {
        "trailing",
        "rigid",
    }


def test_the_arguments_are_good_before_they_are_spoiled():
    for function, arguments in CALLS.items():
        function(*(argument.good for argument in arguments))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("block", range(10))
def test_malformed_calls_are_refused(block):
    functions = list(CALLS)
    for case in range(block * CASES // 10, (block + 1) * CASES // 10):
        rng = np.random.default_rng(case)
        function = functions[case % len(functions)]
        arguments = CALLS[function]
        target = rng.integers(len(arguments))
        values = [argument.good for argument in arguments]
        values[target] = arguments[target].spoil(rng)
        raised = refusal(function, values)
        assert isinstance(raised, Cosmos3Error), (
            f"case {case}: {function.__name__}, argument {target} = {values[target]!r} gave "
            f"{raised!r}"
        )
        assert str(raised)


def refusal(function, values):
    try:
        return f"no error but {function(*values)!r}"
    except Exception as error:
        return error
