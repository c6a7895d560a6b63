"""What a scene looks like, and that nothing of it reaches the physics."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest

from strands_cosmos3.errors import InputError, UnknownNameError
from strands_cosmos3.sim.render import Renderer
from strands_cosmos3.worlds.table.appearance import TABLES, Appearance, Surface
from strands_cosmos3.worlds.table.scene import TableScene


def view(appearance: Appearance, camera: str = "exterior_1") -> np.ndarray:
    scene = TableScene(appearance=appearance)
    data = mujoco.MjData(scene.model)
    scene.reset(data, scene.sample_layout(np.random.default_rng(3)))
    with Renderer(scene.model, 90, 160) as renderer:
        return renderer.render(data, camera).astype(float)


def red(picture: np.ndarray) -> int:
    return int(((picture[..., 0] > 100) & (picture[..., 1:].max(-1) < 0.5 * picture[..., 0])).sum())


def test_the_near_rig_shows_cubes_several_times_as_large():
    assert red(view(Appearance(rig="near"))) > 2.5 * red(view(Appearance())) > 0


def test_light_and_table_show():
    nominal, dim = view(Appearance(), "wrist"), view(Appearance(light=0.5), "wrist")
    assert 0.4 < dim.mean() / nominal.mean() < 0.65
    means = {
        name: view(Appearance(table=name), "wrist").mean() for name in ("wood", "dark", "white")
    }
    assert means["dark"] < 0.5 * means["wood"] < means["wood"] < means["white"]


def test_the_wrist_camera_moves_in_the_hands_frame():
    offset_m = (0.01, -0.02, 0.005)
    there, here = (
        TableScene(appearance=a).model.cam("wrist")
        for a in (Appearance(wrist_offset_m=offset_m), Appearance())
    )
    np.testing.assert_allclose(there.pos - here.pos, offset_m, atol=1e-12)


def test_physics_are_the_same():
    def played(appearance: Appearance) -> np.ndarray:
        scene = TableScene(appearance=appearance)
        data = mujoco.MjData(scene.model)
        scene.reset(data, scene.sample_layout(np.random.default_rng(0)))
        data.ctrl[scene.arm_actuators[1]] += 0.2
        mujoco.mj_step(scene.model, data, 100)
        return data.qpos

    assert np.array_equal(
        played(Appearance()), played(Appearance("marble", "near", 0.4, (0.0, 0.02, 0.0)))
    )


@pytest.mark.parametrize("name", TABLES)
def test_a_surface_is_a_picture_that_follows_from_its_seed(name):
    surface = TABLES[name]
    texture = surface.texture()
    assert texture.shape == (512, 512, 3)
    assert texture.std() > 1  # a pattern, which the wrist camera can follow
    assert np.array_equal(texture, Surface(*vars(surface).values()).texture())


def test_what_does_not_exist_is_named():
    with pytest.raises(UnknownNameError, match=r"glass.*wood"):
        Appearance(table="glass")
    with pytest.raises(UnknownNameError, match=r"far.*near"):
        Appearance(rig="far")
    with pytest.raises(UnknownNameError, match=r"dots.*planks"):
        Surface("dots")
    for wrong in (
        {"light": 0.0},
        {"light": 11.0},
        {"light": np.nan},
        {"wrist_offset_m": (0.0, 0.0, 1.0)},
    ):
        with pytest.raises(InputError):
            Appearance(**wrong)
    with pytest.raises(InputError):
        Surface(rgb=(1.2, 0.0, 0.0))


def test_an_uploaded_texture_is_drawn():
    scene = TableScene()
    data = mujoco.MjData(scene.model)
    scene.reset(data, scene.sample_layout(np.random.default_rng(3)))
    with Renderer(scene.model, 45, 80) as renderer:
        before = renderer.render(data, "wrist")
        scene.model.tex_data[:] //= 2
        assert np.array_equal(renderer.render(data, "wrist"), before)
        renderer.upload_texture("surface")
        assert renderer.render(data, "wrist").mean() < 0.9 * before.mean()
        with pytest.raises(UnknownNameError, match="wood"):
            renderer.upload_texture("wood")
