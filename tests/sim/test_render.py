"""Off-screen pictures: the choice of OpenGL, what the cameras see, paths, and that a renderer
cleans up.
"""

from __future__ import annotations

import ctypes.util
import os
import signal
import subprocess
import sys
import threading

import mujoco
import numpy as np
import pytest

from strands_cosmos3.errors import (
    RenderError,
    UnknownNameError,
)
from strands_cosmos3.sim import render
from strands_cosmos3.sim.render import BEAUTY, OBSERVATION, Polyline, Quality, Renderer, choose_gl
from strands_cosmos3.sim.scene import Layout
from strands_cosmos3.worlds.table.appearance import Appearance
from strands_cosmos3.worlds.table.scene import TableScene

LAYOUT = Layout(
    ("cube_red", "cube_green", "cube_blue"),
    [[0.45, 0.0], [0.5, -0.15], [0.55, 0.15]],
    [0.3, 0.0, 1.0],
)


@pytest.fixture(scope="module")
def scene() -> TableScene:
    return TableScene()


@pytest.fixture(scope="module")
def data(scene: TableScene) -> mujoco.MjData:
    state = mujoco.MjData(scene.model)
    scene.reset(state, LAYOUT)
    return state


@pytest.fixture(scope="module")
def renderer(scene: TableScene):
    with Renderer(scene.model) as r:
        yield r


def colored(picture: np.ndarray, channel: int) -> np.ndarray:
    """Mask of the pixels where one channel stands far above both others."""
    rest = np.delete(picture.astype(int), channel, axis=2).max(axis=2)
    return picture[..., channel] > rest + 50


@pytest.fixture
def bare_linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.delenv("DISPLAY", raising=False)
    return monkeypatch


def test_choose_gl_prefers_egl_then_osmesa(bare_linux):
    before = dict(os.environ)
    bare_linux.setattr(ctypes.util, "find_library", lambda name: f"lib{name}.so")
    assert choose_gl() == "egl"
    bare_linux.setattr(
        ctypes.util, "find_library", lambda name: "libOSMesa.so" if name == "OSMesa" else None
    )
    assert choose_gl() == "osmesa"
    assert dict(os.environ) == before


def test_choose_gl_without_any_names_the_packages(bare_linux):
    bare_linux.setattr(ctypes.util, "find_library", lambda name: None)
    with pytest.raises(RenderError, match="libegl1 libegl-mesa0 libgl1-mesa-dri"):
        choose_gl()
    bare_linux.setenv("DISPLAY", ":0")
    assert choose_gl() == "glfw"


def test_choose_gl_respects_the_environment(bare_linux):
    bare_linux.setenv("MUJOCO_GL", "OSMesa")
    assert choose_gl() == "osmesa"
    bare_linux.setenv("MUJOCO_GL", "opengl9")
    with pytest.raises(RenderError, match=r"opengl9.*egl, osmesa, glfw"):
        choose_gl()


def test_draws_although_mujoco_was_imported_without_a_backend():
    code = (
        "import os, mujoco, numpy as np\n"
        "from strands_cosmos3.sim.render import Renderer\n"
        'm = mujoco.MjModel.from_xml_string(\'<mujoco><worldbody><light pos="0 0 3"/><geom '
        'size=".5"/>'
        '<camera name="c" pos="0 0 3"/></worldbody></mujoco>\')\n'
        "d = mujoco.MjData(m); mujoco.mj_forward(m, d)\n"
        "assert 'MUJOCO_GL' not in os.environ\n"
        "with Renderer(m, 32, 32) as r: print(r.render(d, 'c').max())\n"
    )
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in ("MUJOCO_GL", "DISPLAY", "PYOPENGL_PLATFORM")
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50


def test_importing_changes_no_environment():
    code = (
        "import os; a = dict(os.environ); import strands_cosmos3.sim.render; assert "
        "dict(os.environ) == a"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_exteriors_see_all_cubes_and_the_bin(scene, data, renderer):
    for camera in ("exterior_1", "exterior_2", "beauty"):
        picture = renderer.render(data, camera)
        assert picture.shape == (180, 320, 3)
        assert picture.dtype == np.uint8
        for channel in range(3):
            mask = colored(picture, channel)
            assert mask.sum() > 15, f"{camera} misses a cube"
    assert not np.array_equal(
        renderer.render(data, "exterior_1"), renderer.render(data, "exterior_2")
    )


def test_pictures_are_upright_and_on_the_right_side(data, renderer):
    left, right = renderer.render(data, "exterior_1"), renderer.render(data, "exterior_2")
    for picture in (left, right):
        assert picture[:10].mean() > picture[-10:, 140:180].mean() - 80
        red_rows = np.argwhere(colored(picture, 0))[:, 0]
        assert red_rows.mean() > 90, "the table is in the lower half"
    column = lambda picture, channel: np.argwhere(colored(picture, channel))[:, 1].mean()  # noqa: E731
    # Seen from the front, +y (blue) is to the right and -y (green) to the left.
    for picture in (left, right):
        assert column(picture, 2) > column(picture, 1)


def project(scene: TableScene, data: mujoco.MjData, camera: str, point_m: np.ndarray) -> np.ndarray:
    """Where a world point falls in the picture: (x, y) in -1..1 of the 16:9 frame, y up."""
    index = scene.model.camera(camera).id
    local = data.cam_xmat[index].reshape(3, 3).T @ (point_m - data.cam_xpos[index])
    half = np.tan(np.deg2rad(scene.model.cam_fovy[index]) / 2)
    return np.array([local[0] / (16 / 9), local[1]]) / (-local[2] * half)


@pytest.mark.parametrize("rig", ["wide", "near"])
@pytest.mark.parametrize("camera", ["exterior_1", "exterior_2", "beauty"])
def test_workspace_gripper_and_bin_are_in_the_frame(rig, camera):
    """The nearer cameras: exterior_2 sees all of it, exterior_1 no bin and no base."""
    scene = TableScene(appearance=Appearance("parquet", rig))
    data = mujoco.MjData(scene.model)
    scene.reset(data, LAYOUT)
    x, y = scene.bin.center_m
    dx, dy = np.array(scene.bin.inner_m) / 2
    bin_corners = [
        (x + a * dx, y + b * dy, z)
        for a in (-1, 1)
        for b in (-1, 1)
        for z in (0, scene.bin.height_m)
    ]
    spawn = [(a, b, z) for a in (0.35, 0.65) for b in (-0.2, 0.2) for z in (0, 0.2)]
    all_of_it = (rig, camera) != ("near", "exterior_1")
    for point in (
        *spawn,
        data.site_xpos[scene.only.tcp_site],
        *(((0, 0, 0), *bin_corners) if all_of_it else ()),
    ):
        assert np.abs(project(scene, data, camera, np.array(point))).max() < 1.0, point


def test_wrist_camera_sees_where_the_fingers_close(scene, data):
    at = project(scene, data, "wrist", data.site_xpos[scene.only.tcp_site])
    assert abs(at[0]) < 1e-9
    assert -1.0 < at[1] < 0.0


def test_wrist_camera_moves_with_the_hand(scene, renderer):
    state = mujoco.MjData(scene.model)
    scene.reset(state, LAYOUT)
    before = renderer.render(state, "wrist")
    state.qpos[scene.arm_qpos[0]] += 0.4
    mujoco.mj_forward(scene.model, state)
    assert np.abs(before.astype(int) - renderer.render(state, "wrist")).mean() > 3


def test_paths_are_drawn_and_do_not_linger(data, renderer):
    path = Polyline(np.linspace([0.3, -0.2, 0.3], [0.6, 0.2, 0.3], 40), (0.0, 1.0, 1.0, 1.0), 0.01)
    clean = renderer.render(data, "exterior_1")
    drawn = renderer.render(data, "exterior_1", [path])
    assert (np.abs(clean.astype(int) - drawn).max(axis=2) > 40).sum() > 100
    np.testing.assert_array_equal(renderer.render(data, "exterior_1"), clean)
    renderer.render(data, "exterior_1", [Polyline(np.random.default_rng(0).normal(size=(5000, 3)))])
    renderer.render(data, "exterior_1", [Polyline(np.array([[0.4, 0, 0.2]]))])


def test_beauty_has_shadows_and_leaves_the_model_as_it_was(scene, data):
    with (
        Renderer(scene.model, quality=Quality(512, 0)) as shaded,
        Renderer(scene.model, quality=OBSERVATION) as plain,
    ):
        darker = plain.render(data, "beauty").astype(int) - shaded.render(data, "beauty")
    assert (darker.max(axis=2) > 15).sum() > 300
    fresh = TableScene().model.vis
    for group, names in {
        "quality": ("shadowsize", "offsamples", "numslices", "numstacks"),
        "global_": ("offwidth", "offheight"),
    }.items():
        for name in names:
            assert getattr(getattr(scene.model.vis, group), name) == getattr(
                getattr(fresh, group), name
            ), name


def test_frames_of_a_model_are_not_in_the_picture():
    xml = """<mujoco><worldbody><camera name="c" pos="0 0 1"/>{}</worldbody></mujoco>"""
    pictures = []
    for site in ("", '<site size=".1" rgba="1 0 0 1" group="1"/>'):
        model = mujoco.MjModel.from_xml_string(xml.format(site))
        data = mujoco.MjData(model)
        mujoco.mj_forward(model, data)
        with Renderer(model) as drawn:
            pictures.append(drawn.render(data, "c"))
    np.testing.assert_array_equal(*pictures)


def test_errors_and_closing(scene, data):
    renderer = Renderer(scene.model, 16, 16)
    with pytest.raises(UnknownNameError, match="exterior_1"):
        renderer.render(data, "exterior")
    renderer.close()
    renderer.close()
    with pytest.raises(RenderError, match="closed"):
        renderer.render(data, "wrist")


def test_a_context_that_a_closed_renderer_left_draws_the_same(scene, data, monkeypatch):
    monkeypatch.setattr(render, "_IDLE", threading.local())
    monkeypatch.setattr(render, "_MOST_IDLE", 1)
    pictures = []
    for quality in (OBSERVATION, BEAUTY, OBSERVATION):
        with Renderer(scene.model, 45, 80, quality) as drawn:
            pictures.append(drawn.render(data, "wrist"))
    np.testing.assert_array_equal(pictures[0], pictures[2])
    assert (pictures[0] != pictures[1]).any()
    backend = choose_gl()
    (left,) = vars(render._IDLE)[backend]
    with Renderer(scene.model, 16, 16), Renderer(scene.model, 16, 16):
        assert vars(render._IDLE)[backend] == []
    assert vars(render._IDLE)[backend] != [left]  # the later one was closed first
    assert left._context is None


@pytest.mark.parametrize("way", ["a new one", "the parent's picture", "the parent's texture"])
def test_a_child_forked_after_a_picture_is_told_to_spawn(scene, data, renderer, way: str):
    renderer.render(data, "wrist")
    ends, begins = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # the fault is to wait for ever
        try:
            if way == "a new one":
                Renderer(scene.model, 16, 16)
            elif way == "the parent's picture":
                renderer.render(data, "wrist")
            else:
                renderer.upload_texture(scene.model.tex(0).name)
        except RenderError as error:
            os.write(begins, str(error).encode())
        finally:
            os._exit(0)
    os.close(begins)
    with os.fdopen(ends) as said:
        assert "use spawn" in said.read()
    os.waitpid(child, 0)
