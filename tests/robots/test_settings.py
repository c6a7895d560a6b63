"""What the file of a robot's model states of a simulation, or by default, does not reach a scene."""

from __future__ import annotations

from dataclasses import replace

import mujoco
import numpy as np
import pytest

from strands_cosmos3.cli import main
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.resources import resource
from strands_cosmos3.robots.catalogue import get_robot, write_robot
from strands_cosmos3.robots.inspection import inspect_model
from strands_cosmos3.robots.model import load_robot
from strands_cosmos3.robots.spec import Camera, ModelPart
from strands_cosmos3.worlds.table.scene import TableScene

UR5E = get_robot("ur5e")
TEXT = resource("assets/ur5e.xml").read_text()
OPTION = '<option timestep="0.0016666666666666668" integrator="implicitfast" cone="elliptic" impratio="20"/>'
_OF_GEOMS = ("contype", "conaffinity", "condim", "friction", "margin", "gap", "solref", "solimp")
_OF_GEOMS += ("rgba", "group", "priority", "solmix", "pos", "quat", "size")


def edited(folder, *edits, **changes):
    """The UR5e with a model of its own: old and new texts, each old one occurs."""
    text = TEXT
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    (folder / "arm.xml").write_text(text)
    return replace(UR5E, name="mine", model=(ModelPart(str(folder / "arm.xml")),), **changes)


def fields(struct):
    """The numbers of MuJoCo's options or statistics."""
    names = [name for name in dir(struct) if not name.startswith("_")]
    values = {name: getattr(struct, name) for name in names}
    return {name: np.array(value) for name, value in values.items() if not callable(value)}


def of_scene(scene):
    """What a scene adds to its robot, as compiled."""
    model = scene.model
    geoms = np.flatnonzero(~np.isin(model.body_rootid[model.geom_bodyid], [*scene.robot_roots]))
    bodies = [body.id for body in scene.bodies.values()]
    found = {name: getattr(model, f"geom_{name}")[geoms] for name in _OF_GEOMS}
    dofs = [body.dof for body in scene.bodies.values()]
    found |= {name: getattr(model, name)[dofs] for name in ("dof_damping", "dof_armature")}
    found["cam_resolution"] = model.cam_resolution[
        [model.camera(name).id for name in ("wrist", "camera_top")]
    ]
    found |= {name: getattr(model, name)[bodies] for name in ("body_mass", "body_inertia")}
    for kind, names, of in (
        ("camera", ("wrist", "camera_top"), ("fovy", "ipd", "pos", "quat")),
        ("light", ("key", "fill"), ("diffuse", "ambient", "castshadow", "cutoff")),
        ("material", ("bin", "cube_red", "surface"), ("rgba", "specular", "reflectance")),
    ):
        for field in of:
            views = [getattr(model, kind)(name) for name in names]
            found[f"{kind} {field}"] = np.array([getattr(view, field) for view in views])
    return found


@pytest.mark.parametrize(
    "option",
    [
        '<option solver="PGS" tolerance="1e-2" jacobian="dense" noslip_iterations="7" timestep=".01"/>',
        '<option gravity="0 0 -1.62" wind="3 0 0" density="1.2" viscosity="2e-5" ccd_iterations="3"/>',
        '<option impratio="1" cone="pyramidal" o_margin=".01"><flag gravity="disable" override="enable"/></option>',
        f'{OPTION}<size memory="20M"/><statistic extent="7" meaninertia="3"/><visual><map znear="1"/></visual>',
    ],
)
def test_a_scenes_physics_are_its_own(tmp_path, option):
    robot = edited(tmp_path, (OPTION, option))
    own, usual = TableScene(robot=robot).model, TableScene(robot=UR5E).model
    for group in ("opt", "stat"):
        expected = fields(getattr(usual, group))
        for name, value in fields(getattr(own, group)).items():
            np.testing.assert_array_equal(value, expected[name], err_msg=name)
    assert own.vis.map.znear == usual.vis.map.znear
    assert load_robot(robot).opt.iterations == mujoco.MjSpec().option.iterations
    np.testing.assert_array_equal(load_robot(robot, simulated=True).opt.gravity, [0, 0, -9.81])


@pytest.mark.parametrize(
    "default",
    [
        '<geom rgba="0 1 0 .2" margin=".004" gap=".002" solmix="9" priority="3"/>'
        '<material specular="1" reflectance=".8"/>',
        '<geom contype="4" conaffinity="8" condim="1" density="9000" friction=".01 0 0"/>'
        '<joint damping="30" armature="2" frictionloss="4"/>',
        '<geom type="sphere" group="4" material="dark" mass="3"/><light castshadow="false" cutoff="3"/>'
        '<camera resolution="9 9" ipd=".5" fovy="11"/><site group="5"/>',
    ],
)
def test_the_defaults_of_an_arm_are_the_arms(tmp_path, default):
    robot = edited(tmp_path, ("<default>", f"<default>{default}"))
    expected = of_scene(TableScene(robot=UR5E))
    for name, value in of_scene(TableScene(robot=robot)).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.parametrize(
    "settings",
    ['settotalmass="12"', 'boundmass=".4" boundinertia=".01"', 'discardvisual="true"'],
)
def test_an_arms_compiler_settings_are_the_arms(tmp_path, settings):
    robot = edited(tmp_path, ("<compiler", f"<compiler {settings}"))
    scene = TableScene(robot=robot)
    expected = of_scene(TableScene(robot=UR5E))
    for name, value in of_scene(scene).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    alone = mujoco.MjModel.from_xml_path(robot.model[0].file)
    for body in range(1, alone.nbody):
        name = alone.body(body).name
        assert scene.model.body(name).mass == pytest.approx(alone.body_mass[body])
        np.testing.assert_allclose(scene.model.body(name).inertia, alone.body_inertia[body])


def test_stated_inertias_that_the_file_ignores_are_ignored_of_the_arm_alone(tmp_path):
    ignored = ("<compiler", '<compiler inertiafromgeom="true" boundmass="0.01"')
    robot = edited(tmp_path, ('inertiafromgeom="false"', ""), ignored)
    scene = TableScene(robot=robot)
    assert scene.model.body("cube_red").mass == pytest.approx(0.06)
    alone = mujoco.MjModel.from_xml_path(robot.model[0].file)
    arm = alone.body("forearm_link")
    assert scene.model.body(arm.name).mass == pytest.approx(arm.mass)


def test_inspect_names_what_a_scene_does_not_take_over(tmp_path, capsys):
    stated = (
        '<option iterations="2" wind="0 1 0"><flag contact="disable"/></option><size njmax="9"/>'
    )
    robot = edited(tmp_path, (OPTION, stated))
    said = "not taken over: disableflags 16, iterations 2, wind [0. 1. 0.], size njmax."
    assert said in " ".join(inspect_model(robot.model[0].file)[1])
    (tmp_path / "arm.toml").write_text(write_robot(robot))
    assert main(["robot", "inspect", str(tmp_path / "arm.toml")]) == 0
    assert said in capsys.readouterr().out
    (tmp_path / "plain.toml").write_text(write_robot(UR5E))
    assert main(["robot", "inspect", str(tmp_path / "plain.toml")]) == 0
    assert "taken over" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("added", "kind", "name"),
    [
        ('<body name="bin"><geom size=".1"/></body>', "body", "bin"),
        ('<geom name="bin_left" size=".1"/>', "geom", "bin_left"),
        ('<light name="fill"/>', "light", "fill"),
        (
            '<body name="b" pos="0 0 3"><freejoint name="cube_blue"/><inertial pos="0 0 0" mass="1" diaginertia="1 1 1"/></body>',
            "joint",
            "cube_blue",
        ),
    ],
)
def test_a_name_that_the_scene_has_is_refused_with_what_mends_it(
    tmp_path, capsys, added, kind, name
):
    robot = edited(tmp_path, ("</worldbody>", f"{added}</worldbody>"))
    with pytest.raises(ConfigError, match=f"its model has a {kind} '{name}'.*Rename it"):
        TableScene(robot=robot)
    (tmp_path / "arm.toml").write_text(write_robot(robot))
    assert main(["robot", "inspect", str(tmp_path / "arm.toml")]) == 1
    assert f"its model has a {kind} {name!r}" in capsys.readouterr().out
    if kind == "body":  # the other remedy
        parts = (replace(robot.model[0], without=(name,)),)
        assert TableScene(robot=replace(robot, model=parts)).model.body(name).id
    (tmp_path / "arm.xml").write_text(
        (tmp_path / "arm.xml").read_text().replace(f'name="{name}"', 'name="my_own"')
    )
    assert main(["robot", "inspect", str(tmp_path / "arm.toml")]) == 0


@pytest.mark.parametrize("name", ["wrist", "camera_top", "beauty"])
def test_a_camera_of_the_model_gives_way_to_one_of_its_name(tmp_path, name):
    body = "</worldbody>", f'<camera name="{name}" pos="0 0 9" fovy="7"/></worldbody>'
    wrist = Camera("wrist", "tool0", (0.1, 0.0, 0.0), (0.0, 0.0, 0.3), 50.0)
    scene = TableScene(robot=edited(tmp_path, body, cameras=(wrist,)))
    usual = TableScene(robot=replace(UR5E, cameras=(wrist,)))
    assert scene.model.ncam == usual.model.ncam
    for field in ("fovy", "pos", "quat", "bodyid"):
        np.testing.assert_array_equal(
            getattr(scene.model.camera(name), field), getattr(usual.model.camera(name), field)
        )
