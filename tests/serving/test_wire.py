"""What messages mean: both directions are inverses, grippers flip once, and wrong rows raise an
error that names them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.serving import DROID, JOINT_POS, MIDTRAIN, POSE_ABS, Echo, T, picture, request
from strands_cosmos3.actions.rotations import se3, so3_exp
from strands_cosmos3.embodiments import get_embodiment, list_embodiments
from strands_cosmos3.errors import (
    ActionSpaceError,
    BackendError,
    InputError,
    ObservationError,
    ServiceChunkError,
    ServiceRefusedError,
    ServiceUnreadableError,
    UnknownNameError,
)
from strands_cosmos3.serving import wire
from strands_cosmos3.serving.codec import decode, encode
from strands_cosmos3.types import ActionChunk, Request


@pytest.mark.parametrize("dialect", wire.DIALECTS)
@pytest.mark.parametrize("space", [JOINT_POS, MIDTRAIN])
def test_a_request_arrives_as_it_was_sent(dialect, space):
    sent = request(space)
    message = decode(encode(wire.encode_request(sent, wire.get_dialect(dialect), "s", 3)))
    got = wire.decode_request(message, DROID, space, images=True, seed=9, t_motion_s=2.5)
    assert (got.instruction, got.seed, got.t_motion_s, got.n_rows) == (
        sent.instruction,
        9,
        2.5,
        sent.n_rows,
    )
    assert got.gripper == pytest.approx(0.2)
    assert message["observation/gripper_position"] == pytest.approx(0.8)
    if space is JOINT_POS:
        np.testing.assert_allclose(got.q_rad, sent.q_rad, atol=1e-7)
        assert got.T_base_cosmos is None
    else:
        np.testing.assert_allclose(got.T_base_cosmos, T, atol=1e-6)
    for view in DROID.rig.views:
        assert got.images[view].shape == (360, 640, 3)
        assert (got.images[view] == sent.images[view][0, 0, 0]).all()
    assert got.composite.shape == (540, 640, 3)
    assert [int(got.composite[y, x, 0]) for y, x in ((100, 300), (450, 100), (450, 500))] == [
        100,
        101,
        102,
    ]


def test_views_are_letterboxed_before_they_are_sent():
    square = {view: picture(100, 100) for view in DROID.rig.views}
    message = wire.encode_request(request(images=square), wire.ROBOLAB, "s", 1)
    for key in DROID.rig.wire_names:
        assert message[key].shape == (360, 640, 3)
        assert message[key][180, 320, 0] == 100
        assert message[key][180, 10, 0] == 0


def test_the_quaternion_on_the_wire_is_x_y_z_w():
    quarter_about_z = se3(so3_exp(np.array([0, 0, np.pi / 2])), np.zeros(3))
    message = wire.encode_request(
        request(MIDTRAIN, limb_poses={"arm": quarter_about_z}), wire.ROBOLAB, "s", 1
    )
    np.testing.assert_allclose(
        message["observation/eef_quat"], [0, 0, np.sqrt(0.5), np.sqrt(0.5)], atol=1e-7
    )


def test_dialects_differ_as_documented():
    keys = {
        name: set(wire.encode_request(request(), dialect, "s", 1))
        for name, dialect in wire.DIALECTS.items()
    }
    assert (
        keys["robolab"]
        == keys["openpi"]
        > {"prompt", "cosmos3/request_id", "observation/exterior_image_2_left"}
    )
    assert {"endpoint", "session_id", "observation/exterior_image_2_left"} < keys["vllm-omni"]
    assert {"endpoint", "session_id", "observation/exterior_image_0_left"} < keys["roboarena"]
    assert not any(key.startswith("cosmos3/") for key in keys["vllm-omni"] | keys["roboarena"])
    with pytest.raises(UnknownNameError, match="roboarena"):
        wire.get_dialect("klingon")


def test_any_rig_s_own_names_travel_to_roboarena():
    two = replace(
        DROID.rig,
        views=DROID.rig.views[:2],
        wire_names=DROID.rig.wire_names[:2],
        boxes=DROID.rig.boxes[:2],
    )
    named = replace(DROID.rig, wire_names=("observation/front", "observation/l", "observation/r"))
    for rig, exterior in ((two, "observation/exterior_image_0_left"), (named, "observation/r")):
        embodiment = replace(DROID, rig=rig)
        views = {view: picture(100, 100) for view in rig.views}
        sent = replace(request(images=views), embodiment=embodiment)
        message = wire.encode_request(sent, wire.get_dialect("roboarena"), "s", 1)
        assert exterior in message
        read = wire.decode_request(message, embodiment, JOINT_POS, images=True)
        assert set(read.images) == set(rig.views)
    with pytest.raises(InputError, match="one of boxes for each view"):
        replace(DROID.rig, views=DROID.rig.views[:2])


def test_the_simulator_s_state_is_never_sent():
    message = wire.encode_request(
        request(privileged={"cube_red": np.full((4, 4), 7.0)}), wire.ROBOLAB, "s", 1
    )
    assert not any("cube" in key or "privileged" in key for key in message)


def test_a_composite_is_sent_where_there_are_no_views():
    message = wire.encode_request(
        request(images={}, composite=picture(540, 640)), wire.ROBOLAB, "s", 1
    )
    assert message["observation/image"].shape == (540, 640, 3)


@pytest.mark.parametrize(
    ("space", "missing"), [(JOINT_POS, {"q_rad": None}), (MIDTRAIN, {"limb_poses": {}})]
)
def test_a_request_without_its_state_is_not_sent(space, missing):
    with pytest.raises(BackendError, match="requires"):
        wire.encode_request(request(space, **missing), wire.ROBOLAB, "s", 1)


@given(st.floats(0, 1), st.integers(1, 40))
@settings(max_examples=30)
def test_joint_rows_come_back_as_they_were_answered(gripper, n):
    rows = np.column_stack([np.random.default_rng(n).uniform(-2, 2, (n, 7)), np.full(n, gripper)])
    sent = wire.encode_rows(ActionChunk(rows, JOINT_POS, DROID), request())
    np.testing.assert_allclose(sent[:, 7], 1 - gripper, atol=1e-6)
    back = wire.decode_reply({"action": sent}, request(), 1)
    np.testing.assert_allclose(back.action, rows, atol=1e-6)
    assert back.action_space is JOINT_POS


@pytest.mark.parametrize("asked", [MIDTRAIN, POSE_ABS])
def test_pose_rows_come_back_as_absolute_poses(asked):
    rows = np.array([[0.4, 0.1, 0.3, 0.5, -0.5, 0.5, 0.5, 0.2]])
    sent = wire.encode_rows(ActionChunk(rows, POSE_ABS, DROID), request(asked))
    back = wire.decode_reply({"actions": sent}, request(asked), 1)
    assert back.action_space is POSE_ABS
    np.testing.assert_allclose(back.action, rows, atol=1e-6)
    assert sent[0, 7] == pytest.approx(0.8)


def good(**more):
    return {"action": np.zeros((4, 8), np.float32), **more}


@pytest.mark.parametrize(
    "reply",
    [
        good(),
        {"actions": good()["action"]},
        good()["action"],
        good(server_timing={"infer_ms": 5.0}),
    ],
)
def test_every_dialect_s_reply_is_a_chunk(reply):
    chunk = wire.decode_reply(reply, request(), 1)
    assert chunk.action.shape == (4, 8)
    assert chunk.action[0, 7] == 1.0  # zero is open on the wire


TRACEBACK = "Traceback (most recent call last):\n  File secret\nValueError: bad prompt"


def with_value(value: float, column: int = 3) -> np.ndarray:
    rows = np.zeros((4, 8))
    rows[2, column] = value
    return rows


@pytest.mark.parametrize(
    ("space", "column", "value", "says"),
    [
        (JOINT_POS, 1, -30.0, r"\[2, 1\] \(joint_1\) is -30; .* 12\.57 rad .* degrees"),
        (JOINT_POS, 6, 13.0, "not in degrees"),
        (JOINT_POS, 0, 1e30, "not in degrees"),
        (JOINT_POS, 7, 255.0, r"\(gripper\) is 255; it must be within 2 of zero"),
        (JOINT_POS, 7, -3.0, r"\(gripper\) is -3"),
        (POSE_ABS, 2, 310.0, r"\(z\) is 310; .* 10 m .* not in millimetres"),
        (POSE_ABS, 0, -41.0, "not in millimetres"),
        (POSE_ABS, 7, 85.0, r"\(gripper\) is 85"),
    ],
)
def test_rows_of_another_unit_are_refused(space, column, value, says):
    rows = with_value(value, column)
    if space is POSE_ABS:
        rows[:, 3] = 1.0
    with pytest.raises(ServiceChunkError, match=says):
        wire.decode_reply({"action": rows}, request(space), 1)


@pytest.mark.parametrize("name", ["bridge", "fractal", "umi"])
@pytest.mark.parametrize("value", [11.0, -1e4, 1e300])
def test_wild_rows_in_own_columns_are_refused(name, value):
    asked = bare_request(get_embodiment(name))
    rows = np.zeros((3, asked.action_space.width))
    rows[1, 4] = value
    with pytest.raises(ServiceChunkError, match="rows are not"):
        wire.decode_reply({"action": rows}, asked, 1)


@pytest.mark.parametrize("gripper", [-1.0, -0.3, 1.4, 2.0])
def test_a_gripper_that_a_model_overshot_is_clipped(gripper):
    chunk = wire.decode_reply({"action": with_value(gripper, 7)}, request(), 1)
    assert chunk.action[2, 7] == (gripper < 0)


@pytest.mark.parametrize(
    ("reply", "error", "says"),
    [
        ({"type": "error", "message": "out of memory"}, ServiceRefusedError, "out of memory"),
        (
            TRACEBACK,
            ServiceRefusedError,
            "ValueError: bad prompt",
        ),
        ({"action": with_value(np.nan)}, ServiceChunkError, r"action\[2, 3\] \(joint_3\) is nan"),
        ({"action": with_value(-np.inf)}, ServiceChunkError, "inf"),
        ({"action": np.full((4, 8), -(2**63))}, ServiceChunkError, r"\(joint_0\) is -9\.22"),
        ({"action": np.zeros((4, 7))}, ServiceChunkError, "another action space"),
        ({"action": np.zeros((4, 10))}, ServiceChunkError, r"\[4, 10\]"),
        ({"action": np.zeros(8)}, ServiceChunkError, r"\[8\]"),
        ({"action": np.zeros((1, 4, 8))}, ServiceChunkError, r"\[1, 4, 8\]"),
        ({"action": np.zeros((0, 8))}, ServiceChunkError, r"\[0, 8\]"),
        ({"action": np.zeros((2000, 8))}, ServiceChunkError, r"2000, 8\].*\[1\.\.1024, 8\]"),
        ({"action": np.zeros((4, 8), bool)}, ServiceChunkError, "bool"),
        ({"action": np.zeros((4, 8), np.uint8)}, ServiceChunkError, "uint8 .* float or signed"),
        ({"action": [[0.0] * 8]}, ServiceUnreadableError, "no array"),
        ({"status": "reset successful"}, ServiceUnreadableError, "status"),
        (None, ServiceUnreadableError, "no keys"),
        ([1], ServiceUnreadableError, "no keys"),
        (good(**{"cosmos3/request_id": 2}), ServiceUnreadableError, "request 2, not to 1"),
    ],
)
def test_wrong_replies_are_refused_by_name(reply, error, says):
    with pytest.raises(error, match=says) as caught:
        wire.decode_reply(reply, request(), 1)
    assert "secret" not in str(caught.value)


def test_joint_angles_are_not_taken_for_poses():
    with pytest.raises(ServiceChunkError, match="not quaternions"):
        wire.decode_reply(good(), request(MIDTRAIN), 1)


def test_rows_of_another_meaning_are_not_sent():
    with pytest.raises(ActionSpaceError, match="midtrain"):
        wire.encode_rows(Echo().infer(request()), request(MIDTRAIN))


def test_an_embodiment_without_columns_is_named():
    with pytest.raises(ActionSpaceError, match="no_action"):
        wire.wire_space(get_embodiment("no_action"), None)


@pytest.mark.parametrize("name", ["umi", "av", "bridge", "libero", "robotwin"])
def test_other_domains_travel_in_their_own_columns(name):
    embodiment = get_embodiment(name)
    space = embodiment.action_space()
    asked = Request(
        embodiment=embodiment,
        action_space=space,
        instruction="go",
        n_rows=4,
        q_rad=None,
        gripper=0.5,
    )
    message = wire.encode_request(asked, wire.ROBOLAB, "s", 1)
    assert wire.JOINTS not in message
    assert wire.POSITION not in message
    read = wire.decode_request(message, embodiment, space, images=False)
    rows = np.linspace(-0.9, 0.9, 4 * space.width).reshape(4, space.width)
    chunk = ActionChunk(rows, space, embodiment, fps=10)
    got = (
        wire.decode_reply({"action": wire.encode_rows(chunk, read)}, asked, 1)
        if embodiment.fps
        else None
    )
    if got is not None:
        np.testing.assert_allclose(got.action, rows, atol=1e-6)
        assert got.action_space == space


def bare_request(embodiment) -> Request:
    """One without a state."""
    space = embodiment.action_space()
    return Request(embodiment, space, "", n_rows=12, q_rad=None, gripper=0.5)


def test_quantiles_of_a_checkpoint_travel_with_its_own_columns():
    """As lists; an array is what earlier servers of ours send."""
    asked = bare_request(get_embodiment("umi"))
    rows, figures = np.zeros((2, 10)), (-np.ones(10), np.linspace(1, 2, 10))
    chunk = ActionChunk(rows, asked.action_space, asked.embodiment, quantiles=figures)
    sent = decode(encode(wire.encode_reply(chunk, asked, {}, (1.0, None), bare=False)))
    for reply in (sent, sent | {wire.QUANTILES: np.stack(figures)}):
        np.testing.assert_array_equal(wire.decode_reply(reply, asked, 1).quantiles, figures)
    for wrong in (np.zeros(3), [[0.0] * 10], [[0.0] * 10, ["x"] * 10], {"q01": [0.0] * 10}):
        with pytest.raises(ServiceUnreadableError, match="quantiles"):
            wire.decode_reply({**sent, wire.QUANTILES: wrong}, asked, 1)


def sliced(reply: object, step: int) -> object:
    """What openpi-client 0.1.2's ActionChunkBroker answers at a step: every array's row, at any
    depth.
    """
    if isinstance(reply, Mapping):
        return {key: sliced(value, step) for key, value in reply.items()}
    if isinstance(reply, list | tuple):
        return [sliced(value, step) for value in reply]
    return reply[step, ...] if isinstance(reply, np.ndarray) else reply


@pytest.mark.parametrize("name", list_embodiments())
def test_every_array_of_a_reply_is_a_row_for_each_step(name):
    embodiment = get_embodiment(name)
    if not embodiment.action_space().columns:
        with pytest.raises(ActionSpaceError, match=name):
            wire.wire_space(embodiment, None)
        return
    names = [limb.name for limb in embodiment.limbs]
    asked = replace(bare_request(embodiment), limb_poses=dict.fromkeys(names, T))
    columns = np.linspace(-0.9, 0.9, asked.action_space.width)
    rows = columns + np.linspace(0.0, 0.1, 12)[:, None]
    own = (-np.ones_like(rows[0]), np.ones_like(rows[0]))
    chunk = ActionChunk(rows, asked.action_space, embodiment, fps=10, quantiles=own)
    message = {wire.REQUEST_ID: np.int64(7)}
    reply = decode(encode(wire.encode_reply(chunk, asked, message, (1.0, 2.0), bare=False)))
    for step in range(12):
        np.testing.assert_array_equal(sliced(reply, step)["actions"], reply["actions"][step])


@pytest.mark.parametrize(
    ("video", "shape"),
    [
        (np.ones((5, 4, 6, 3), np.uint8), (5, 4, 6, 3)),
        (np.ones((1, 5, 4, 6, 3), np.uint8), (5, 4, 6, 3)),
        (np.ones((5, 4, 6, 3), np.float32), None),
        (np.ones((4, 6, 3), np.uint8), None),
        (np.ones((1, 5000, 2, 3), np.uint8), None),
        ("mp4", None),
        (None, None),
    ],
)
def test_a_reply_may_hold_a_video(video, shape):
    got = wire.decode_reply(good(video=video), request(), 1).video
    assert (None if got is None else got.shape) == shape


PICTURE = np.zeros((224, 224, 3), np.uint8)
OF_DROID = {
    "observation/exterior_image_1_left": PICTURE,
    "observation/wrist_image_left": PICTURE,
    "observation/joint_position": np.zeros(7),
    "observation/gripper_position": np.zeros(1),
    "prompt": "pick up the fork",
}
ONE_CAMERA = {k: v for k, v in OF_DROID.items() if "exterior" not in k}
OF_LIBERO = {
    "observation/image": PICTURE,
    "observation/wrist_image": PICTURE,
    "observation/state": np.zeros(8),
    "prompt": "pick up the soup",
}
OF_ALOHA = {"state": np.zeros(14), "images": {"cam_high": PICTURE}, "prompt": "uncap the pen"}


@pytest.mark.parametrize(
    ("message", "space", "lacking"),
    [
        (OF_DROID, MIDTRAIN, ("eef_quat", "eef_pos")),
        (OF_LIBERO, MIDTRAIN, ("eef_quat", "eef_pos", "gripper_position")),
        (OF_LIBERO, JOINT_POS, ("joint_position", "gripper_position")),
        (OF_ALOHA, JOINT_POS, ("joint_position", "gripper_position")),
        (OF_DROID, JOINT_POS, ("exterior_image_2_left",)),
        (ONE_CAMERA, JOINT_POS, ("exterior_image_1_left", "exterior_image_2_left")),
        ({"prompt": "lift"}, JOINT_POS, ("joint_position", "gripper_position")),
    ],
)
def test_a_plain_openpi_request_gets_the_names_of_all_keys_to_add(message, space, lacking):
    listed = " and ".join(f"'observation/{name}'" for name in lacking)
    with pytest.raises(ObservationError, match=f"lacks {listed}; it has: "):
        wire.decode_request(message, DROID, space, images=True)


def test_the_other_action_space_is_answered_with_the_remedy():
    joints = wire.encode_request(request(), wire.ROBOLAB, "s", 1)
    with pytest.raises(
        ObservationError,
        match=r"lacks 'observation/eef_quat'.*speaks midtrain: add 'observation/eef_quat' \(\[4\], "
        r"x y z w\), 'observation/eef_pos' \(\[3\], m\)\.$",
    ):
        wire.decode_request(joints, DROID, MIDTRAIN, images=False)
    pose = wire.encode_request(request(MIDTRAIN), wire.ROBOLAB, "s", 1)
    with pytest.raises(
        ObservationError,
        match=r"lacks 'observation/joint_position'.*speaks joint_pos: add .* \(\[7\], rad\)\.$",
    ):
        wire.decode_request(pose, DROID, JOINT_POS, images=False)


@pytest.mark.parametrize("space", [JOINT_POS, MIDTRAIN])
@pytest.mark.parametrize(
    "wrong",
    [
        {wire.GRIPPER: None},
        {wire.JOINTS: None, wire.QUATERNION: None, wire.GRIPPER: None},
        {wire.JOINTS: np.full(7, 90.0), wire.POSITION: np.full(3, 400.0)},
        {wire.GRIPPER: 255.0},
        {wire.PROMPT: "   "},
        {wire.COMPOSITE: np.zeros((8, 8, 3), np.uint8)},
        {wire.SEED: -1},
    ],
)
def test_remedies_name_keys_of_the_request_and_no_option_of_ours(space, wrong):
    """Whoever reads them has a client of another project, and may not have started the server."""
    asked = request(space, images={}, composite=picture())
    message = wire.encode_request(asked, wire.ROBOLAB, "s", 1) | wrong
    message = {key: value for key, value in message.items() if value is not None}
    with pytest.raises(InputError) as caught:
        wire.decode_request(message, DROID, space, images=True)
    assert any(repr(key) in str(caught.value) for key in wrong)
    assert not re.search(r"--[a-z]|\b[a-z_]+=", str(caught.value))


@pytest.mark.parametrize(
    ("hw", "doubtful"),
    [
        ((224, 224), True),
        ((480, 640), True),
        ((360, 640), True),
        ((1080, 1920), True),
        ((540, 640), False),
        ((270, 320), False),
        ((720, 640), False),
        ((336, 224), False),
    ],
)
def test_a_composite_of_one_cameras_shape_is_remarked(hw, doubtful):
    message = {**OF_DROID, wire.COMPOSITE: np.zeros((*hw, 3), np.uint8)}
    for key in [key for key in message if key.endswith("_left")]:
        del message[key]
    remark = wire.doubtful_composite(wire.decode_request(message, DROID, JOINT_POS, images=True))
    assert bool(remark) == doubtful
    if remark:
        assert f"is {hw[0]} x {hw[1]}, the shape of one camera" in remark
        assert "wrist, exterior_1, exterior_2 composed into 540 x 640" in remark


@pytest.mark.parametrize(("name", "outer", "wrist"), [
    ("droid_lerobot", 2, True), ("robomind-franka-dual", 3, False), ("umi", 0, False),
])  # fmt: skip
def test_a_connection_to_vllm_omnis_path_says_which_cameras_a_rig_has(name, outer, wrist):
    embodiment = get_embodiment(name)
    space = embodiment.action_space()
    metadata = wire.encode_metadata(embodiment, space, None, vllm=True)
    assert metadata["n_external_cameras"] == outer
    assert metadata["needs_wrist_camera"] is wrist
