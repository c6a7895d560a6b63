"""Who may import whom, and where the heavy libraries may be: docs/architecture.md, enforced by
reading the imports.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
from pathlib import Path

import pytest

from strands_cosmos3.tables import packaged_worlds

PACKAGE = Path(__file__).resolve().parents[1] / "strands_cosmos3"
BASE = {
    "errors",
    "extras",
    "checks",
    "collision",
    "options",
    "resources",
    "tables",
    "embodiments",
    "types",
    "input_monitor",
    "monitors",
    "language",
    "embedded",
}
BASE |= {"__init__", "digests", "episode_summary", "films", "snapshots"}
SIMULATED = BASE | {
    "actions",
    "robots",
    "control",
    "datasets",
    "observe",
    "backends",
    "policy",
    "sim",
}
MAY_IMPORT = {
    "errors": set(),
    "extras": {"errors", "tables"},
    "resources": {"errors"},
    "checks": {"errors"},
    "digests": {"errors", "resources"},
    "options": {"errors"},
    "tables": {"errors", "resources"},
    "embedded": {"errors", "resources"},
    "language": {"errors", "resources", "tables"},
    "embodiments": {"checks", "errors", "options", "tables"},
    "collision": {"checks", "errors"},
    "episode_summary": set(),
    "snapshots": set(),
    "films": {"checks", "errors", "extras", "resources"},
    "input_monitor": {"snapshots", "types"},
    "monitors": {"errors", "input_monitor", "types"},
    "types": {"checks", "collision", "embodiments", "episode_summary", "errors", "films"},
    # on first use
    "__init__": {
        "extras",
        "embodiments",
        "actions",
        "control",
        "engine",
        "parallel",
        "policy",
        "reasoner",
        "worlds",
    },
    "actions": BASE,
    "robots": BASE,
    "observe": BASE | {"robots"},
    "control": BASE | {"actions", "robots"},
    "engine": BASE | {"actions", "observe"},
    "reasoner": BASE | {"actions", "observe", "engine"},
    "parallel": BASE | {"actions", "observe", "engine"},
    "fleet": BASE | {"engine", "parallel"},
    "serving": BASE | {"actions", "observe", "fleet"},
    "datasets": BASE | {"actions"},
    "backends": BASE | {"actions", "datasets", "observe", "engine", "parallel", "serving"},
    "serving.ray_app": BASE | {"serving", "fleet", "backends", "policy", "parallel"},
    "policy": BASE | {"backends", "observe", "robots", "control", "engine", "parallel"},
    "sim": BASE | {"actions", "robots", "control", "datasets", "observe", "backends", "policy"},
    "view": SIMULATED | {"worlds"},
    "worlds": SIMULATED,
    "environments": SIMULATED | {"worlds"},
    "evaluation": SIMULATED | {"engine", "reasoner", "parallel", "fleet", "worlds"},
    "training": SIMULATED | {"engine", "parallel", "fleet", "environments", "evaluation", "worlds"},
    "commands": BASE
    | {
        "actions",
        "robots",
        "control",
        "datasets",
        "observe",
        "engine",
        "reasoner",
        "parallel",
        "serving",
        "serving.ray_app",
        "backends",
        "policy",
        "sim",
    }
    | {"view", "environments", "evaluation", "training", "worlds"},
    "cli": BASE | {"commands", "parallel"},  # parallel: only how a rank exits
    "__main__": {"cli"},
}
"""Package -> packages it may import, beside itself."""
HEAVY = {
    "torch": {"engine", "reasoner", "parallel", "training", "backends", "commands"},
    "diffusers": {"backends", "engine"},
    "transformers": {"engine", "reasoner"},
    "tokenizers": {"engine"},
    "onnx": {"engine"},
    "onnxruntime": {"engine"},
    "llguidance": {"reasoner"},
    "jinja2": {"reasoner"},
    "array_api_compat": {"engine"},
    "safetensors": {"engine", "parallel", "training"},
    "huggingface_hub": {"engine", "reasoner", "commands"},
    "mujoco": {"robots", "control", "sim", "worlds", "view", "commands"},
    "mink": {"control"},
    "qpsolvers": {"control"},
    "av": {"films", "engine", "datasets"},
    "PIL": {"sim", "engine", "reasoner", "backends", "serving"},
    "matplotlib": {"sim"},
    "pyarrow": {"datasets"},
    "viser": {"view"},
    "trimesh": {"view"},
    "ray": {"fleet", "serving.ray_app"},
    "gymnasium": {"environments", "worlds"},
    "libero": {"worlds"},
    "strands_robots": set(),  # policy/providers.py loads it by its name
    "peft": {"training"},
    "msgpack": {"serving"},
    "starlette": {"serving.ray_app"},
    "websockets": {"serving", "serving.ray_app", "view"},
    "tyro": {"commands", "cli"},
    "rich": {"commands"},
}
"""Library -> the packages that import it, and no others may."""


ROOMS = {("serving", "ray_app"): "serving.ray_app"}
"""Folders that are packages of their own here: Ray Serve's application makes backends, which import
serving.
"""


def package_of(path: Path) -> str:
    first, *rest = path.relative_to(PACKAGE).parts
    return ROOMS.get((first, *rest[:1]), first.removesuffix(".py"))


@functools.cache  # four tests read the whole package
def nodes(source: str) -> list[ast.AST]:
    """Every node of a file's syntax."""
    return list(ast.walk(ast.parse(source)))


@pytest.fixture(scope="module", autouse=True)
def forgotten():
    """Half a million nodes are not kept for the tests of other modules."""
    yield
    nodes.cache_clear()


def imported(path: Path) -> list[str]:
    """Every module that a file imports, at its top or inside its functions."""
    names = []
    for node in nodes(path.read_text()):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the package's name"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


FILES = sorted(PACKAGE.rglob("*.py"))


WORLDS = tuple(f"worlds.{name}" for name in packaged_worlds())
NAME_WORLDS = ("commands",)
"""Elsewhere, outside their own folders, only ``worlds/worlds.toml`` names the worlds."""


def importers(files: list[Path], library: str) -> set[str]:
    """The packages that import a library."""
    return {
        package_of(path)
        for path in files
        if any(name.partition(".")[0] == library for name in imported(path))
    }


@pytest.mark.parametrize("library", HEAVY)
def test_no_package_may_import_what_it_does_not(library):
    """A permission that nobody uses hides a dependency that nobody needs."""
    assert importers(FILES, library) == HEAVY[library]


def test_of_the_engine_only_the_decoder_of_sound_is_diffusers():
    """Its pipeline is the oracle of the tests, and one backend; an engine made of it proves
    nothing.
    """
    files = [path for path in FILES if package_of(path) == "engine"]
    named = [path.name for path in files if importers([path], "diffusers")]
    assert named == ["sound.py"]


WITHOUT_TORCH = (
    "arrays",
    "checkpoint",
    "computed",
    "config",
    "denoising",
    "exported.engine",
    "exported.folder",
    "exported.sessions",
    "exported.tokens",
    "formats.contract",
    "formats.detect",
    "formats.layout",
    "frames",
    "inference",
    "latents",
    "mapped_file",
    "metadata",
    "novelty",
    "options",
    "precision",
    "processor",
    "request",
    "sampler",
    "sequence",
    "text_cache",
    "token_worker",
    "tokens",
    "variants",
    "wan_config",
    "weight_files",
)
"""Files of engine/ that a backend without torch uses."""


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_what_surrounds_the_network_does_not_import_torch(name):
    """At its top; what is imported for type checkers alone stands inside an ``if``."""
    tree = ast.parse((PACKAGE / f"engine/{name.replace('.', '/')}.py").read_text())
    at_top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [getattr(node, "module", None) or node.names[0].name for node in at_top]
    engine = "strands_cosmos3.engine."
    house = {n.removeprefix(engine) for n in names if n.startswith(engine)}
    assert house <= {*WITHOUT_TORCH}
    assert not [n for n in names if n.partition(".")[0] == "torch"]


def test_imports_follow_the_architecture():
    wrong = []
    for path in FILES:
        package, inside = package_of(path), ".".join(path.relative_to(PACKAGE).parts)
        assert package in MAY_IMPORT, (
            f"{package} is a new package: add it here and to docs/architecture.md"
        )
        for name in imported(path):
            top, _, rest = name.partition(".")
            allowed = package in HEAVY.get(top, {package})
            if top == "strands_cosmos3" and rest:
                first, *deeper = rest.split(".")
                other = ROOMS.get((first, *deeper[:1]), first)
                # `from strands_cosmos3 import __version__`
                other = other if other in MAY_IMPORT else "__init__"
                world = next((w for w in WORLDS if rest.startswith(f"{w}.")), inside)
                in_world = inside.startswith(world) or package in NAME_WORLDS
                allowed = other in {package, *MAY_IMPORT[package]} and in_world
            wrong += [] if allowed else [f"{path.relative_to(PACKAGE)} imports {name}"]
    assert not wrong


def test_no_string_names_a_world_outside_its_folder():
    """Code that imports a world by its name knows it, too; docstrings may say what there is."""
    for path in FILES:
        inside = ".".join(path.relative_to(PACKAGE).parts)
        strings = [
            node.value
            for node in nodes(path.read_text())
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        for world in WORLDS:
            if not inside.startswith(f"{world}.") and package_of(path) not in NAME_WORLDS:
                pattern = rf"(strands_cosmos3\.)?{re.escape(world)}(\.\w+)*(:\w+)?"
                assert not any(re.fullmatch(pattern, text) for text in strings), path


def test_packages_form_no_cycle():
    seen: set[str] = set()
    while len(seen) < len(MAY_IMPORT):
        ready = [
            package
            for package, may in MAY_IMPORT.items()
            if package not in seen and may - BASE <= seen
        ]
        assert ready, f"a cycle among {set(MAY_IMPORT) - seen}"
        seen |= set(ready)


def circles(root: Path) -> set[frozenset[str]]:
    """Groups of a package's files that import each other, in functions and under TYPE_CHECKING
    too.
    """
    files = {
        ".".join((root.name, *path.relative_to(root).with_suffix("").parts)): path
        for path in root.rglob("*.py")
    }
    reached = {name: {other for full in imported(path) for other in (full, full.rpartition(".")[0]) if other in files}
               for name, path in files.items()}  # fmt: skip
    for via in files:
        for name in files:
            if via in reached[name]:
                reached[name] |= reached[via]
    groups = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in files
    }
    return {
        frozenset(name.removeprefix(f"{root.name}.") for name in group) for group in groups if group
    }


def test_files_form_no_circle():
    found = circles(PACKAGE)
    assert not found, f"files import each other: {sorted(map(sorted, found))}"


def test_the_check_sees_a_circle(tmp_path: Path):
    for name, text in {
        "a": "from house import b",
        "b": "def f():\n    from house.c import x",
        "c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import house.a",
        "d": "import house.a",
    }.items():
        path = tmp_path / "house" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert circles(tmp_path / "house") == {frozenset("abc")}


def test_the_check_sees_a_forbidden_import(tmp_path: Path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    import torch\n    from strands_cosmos3.sim import scene\n")
    assert imported(bad) == ["torch", "strands_cosmos3.sim.scene"]


def test_the_functions_on_the_way_from_an_observation_to_a_torque_exist():
    page = (PACKAGE.parent / "docs/architecture.md").read_text()
    section = page[
        page.index("## From an observation to a torque") : page.index("## Over a socket")
    ]
    named = re.findall(r"`((?:sim|policy|backends|control|actions|robots)(?:\.\w+){2,})`", section)
    assert len(named) > 20
    assert len(set(named)) == len(named), "each function is named once"
    for name in named:
        package, module, *attributes = name.split(".")
        functools.reduce(
            getattr, attributes, importlib.import_module(f"strands_cosmos3.{package}.{module}")
        )


def test_the_files_of_the_ten_changes_exist():
    root = PACKAGE.parent
    page = (root / "docs/architecture.md").read_text()
    section = page[page.index("## Ten changes") : page.index("## Five error figures")]
    paths = {
        path
        for path in re.findall(r"`([\w./]+)`", section)
        if re.search(r"/$|\.(py|toml|md)$", path) and path != "model.xml"
    }
    assert len(paths) > 40
    elsewhere = ("tests/", "docs/", "examples/", "recipes/", "assets/")
    for path in paths:
        assert ((root if path.startswith(elsewhere) else PACKAGE) / path).exists(), path
    assert re.findall(r"### (\d+)\.", section) == [str(number) for number in range(1, 11)]


def test_no_broad_except_but_at_the_seams():
    broad = []
    for path in FILES:
        for node in nodes(path.read_text()):
            if isinstance(node, ast.ExceptHandler) and (
                node.type is None
                or (
                    isinstance(node.type, ast.Name)
                    and node.type.id in ("Exception", "BaseException")
                )
            ):
                broad.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    # Fetching a model and a foreign tokenizer fail in their own ways; a served backend, a policy on
    # the worker and a job
    # may raise anything; a rank's group decides for all ranks; Ray fails to start in its own ways;
    # under torchrun a rank ends
    # with a status, whatever was raised.
    seams = {
        "robots/model.py",
        "engine/token_worker.py",
        "serving/served.py",
        "serving/worker.py",
        "control/loop.py",
        "parallel/rank.py",
        "fleet/cluster.py",
        "cli.py",
    }
    assert {name.split(":")[0] for name in broad} <= seams, broad
    assert len(broad) <= len(seams), broad


PROBED = ("backends", "policy", "sim", "evaluation", "view", "commands")
PROBES = {
    "backends/replay.py": "a recording's file is anything at all",
    "commands/doctor.py": "a library of any version",
    "evaluation/policies.py": "ConditionedPolicy, the one place that adapts a policy of another "
    "make",
    "evaluation/report.py": "a checkpoint.json is anything at all",
    "policy/providers.py": "strands-robots' module, of whatever version",
    "sim/render.py": "PyOpenGL fails with an AttributeError where a library is missing",
}


def probes(source: str) -> list[int]:
    """Lines that ask an object whether it has a member: getattr or hasattr by a literal name,
    and except AttributeError.
    """
    found = []
    for node in nodes(source):
        called = (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr")
        )
        if called and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            found.append(node.lineno)
        if (
            isinstance(node, ast.ExceptHandler)
            and node.type is not None
            and "AttributeError" in ast.unparse(node.type)
        ):
            found.append(node.lineno)
    return found


def test_backends_and_policies_are_not_probed():
    """What callers rely on is declared in ``Backend`` and ``Policy``."""
    for path in (path for path in FILES if package_of(path) in PROBED):
        name = str(path.relative_to(PACKAGE))
        assert name in PROBES or not probes(path.read_text()), (
            f"{name} probes an object's members; declare them instead"
        )
    assert probes("getattr(b, 'modes', ())\nhasattr(b, 'cancel')\ntry: b.cancel()\nexcept "
                  "(AttributeError, OSError): ...") == [
        1, 2, 4
    ]  # fmt: skip


def branches_on_names(source: str, names: set[str]) -> list[int]:
    """Lines that compare something with the name of a robot or limb: what differs between robots
    is data.
    """
    found = []
    for node in nodes(source):
        compared = (
            node
            if isinstance(node, ast.Compare)
            else node.pattern
            if isinstance(node, ast.match_case)
            else None
        )
        if compared is None:
            continue
        texts = {
            leaf.value
            for leaf in ast.walk(compared)
            if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)
        }
        found += [compared.lineno] if texts & names else []
    return found


def test_no_code_branches_on_a_robot_s_name():
    """A robot's or limb's name is looked up in a table and never compared. ``model_path`` names
    the packaged file.
    """
    from helpers.robot_motions import BUNDLED_ROBOTS
    from strands_cosmos3.robots.catalogue import packaged_robots

    names = {
        *packaged_robots(),
        "franka",
        *(limb.name for name in BUNDLED_ROBOTS for limb in packaged_robots()[name].limbs),
    }
    for path in FILES:
        found = branches_on_names(path.read_text(), names)
        allowed = 1 if path.relative_to(PACKAGE) == Path("robots/model.py") else 0
        assert len(found) <= allowed, (
            f"{path} compares with the name of a robot or limb: lines {found}"
        )
    assert branches_on_names(
        "if robot == 'ur5e': ...\nx = robot.name in ('panda', 'b')", names
    ) == [1, 2]
    assert branches_on_names("match robot:\n    case 'ur5e': ...", names) == [2]
    assert branches_on_names("robot = ROBOTS['ur5e']", names) == []
