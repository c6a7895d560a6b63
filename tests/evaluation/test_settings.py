"""Options and TOML: the same evaluation from either, and contradictions refused before anything
starts.
"""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from strands_cosmos3.engine.options import EngineOptions
from strands_cosmos3.errors import ConfigError, InputError, ResourceNotFoundError, UnknownNameError
from strands_cosmos3.evaluation.evaluate import default_workers
from strands_cosmos3.evaluation.plan import Condition, PolicyVariation
from strands_cosmos3.evaluation.policy_settings import PolicySettings
from strands_cosmos3.evaluation.settings import Settings, digest_of, make_settings, read_options
from strands_cosmos3.fleet.topology import Topology
from strands_cosmos3.parallel.config import ParallelConfig
from strands_cosmos3.robots.catalogue import get_robot, write_robot
from strands_cosmos3.robots.spec import Workspace
from strands_cosmos3.worlds.table.world import TableVariation

TOML = """
num_gpus = 8
tasks = ["reach", "pick"]
seeds = 20
episode_timeout = 600
out = "run"
conditions = ["plain", "swapped", {name = "dark", images = "blank"}]

[model]
path = "some/checkpoint"
tp = 2
num_steps = 4
"""


def test_toml_and_options_mean_the_same(tmp_path):
    file = tmp_path / "e.toml"
    file.write_text(TOML)
    options = read_options(file)
    assert options["out"] == "run"
    settings = make_settings(options)
    assert settings.topology.replicas == 4
    assert settings.episode_timeout == 600
    assert settings.policy.model == "some/checkpoint"
    assert settings.conditions[2] == Condition(
        "dark", PolicyVariation(images="blank"), TableVariation()
    )
    given = {
        "num_gpus": 8,
        "tp": 2,
        "tasks": "reach,pick",
        "seeds": 20,
        "episode_timeout": 600.0,
        "model": "some/checkpoint",
        "num_steps": 4,
    }
    same = make_settings(
        {**given, "conditions": ["plain", "swapped", {"name": "dark", "images": "blank"}]}
    )
    assert same == settings


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("num_gpu = 8", UnknownNameError, "num_gpus"),
        ("[model]\ntp_size = 2", UnknownNameError, "tp"),
        (
            "num_gpus = 8\ntotal_shard = 3\n[model]\npath='c'\ntp = 2",
            ConfigError,
            "contradicts",
        ),
        ("num_gpus = 7\n[model]\npath='c'\ntp = 2", ConfigError, "does not divide"),
        ("tp = 2\n[model]\npath='c'\ntp = 2", ConfigError, "again in"),
        ("seeds = ", ConfigError, "cannot be read as TOML"),
        ("conditions = 3", ConfigError, "short forms"),
        ("tasks = 'reach, pick'\nseeds = '5'", InputError, "seeds must be a whole number"),
        ("resume = 'yes'", InputError, "resume in .*e.toml must be True or False"),
        ("model = 3", InputError, r"\[model\] in .*e.toml must be dict"),
        ("model = [1]", InputError, r"\[model\] in .*e.toml must be dict"),
        ("model = true", InputError, r"\[model\] in .*e.toml must be dict"),
        ("backend = 'zz'", UnknownNameError, "unknown backend in .*e.toml 'zz'"),
        ("[model]\nbackend = 1", UnknownNameError, "unknown backend in .*e.toml 1"),
        ("seeds = 99999999999999999999", InputError, "seeds must be .* from 1 to 1000000"),
        ("clips = 1000001", InputError, "clips must be .* from 0 to 1000000"),
        ("out = 3", InputError, "out in .*e.toml must be a string"),
        ("address = 1.5", InputError, "address in .*e.toml must be a string"),
    ],
)
def test_toml_that_cannot_be(tmp_path, text, error, says):
    file = tmp_path / "e.toml"
    file.write_text(text)
    with pytest.raises(error, match=says):
        make_settings(read_options(file))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ResourceNotFoundError, match="nothing"):
        read_options(tmp_path / "nothing.toml")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tasks": "reach,juggle"}, "juggle"),
        ({"tasks": "reach,reach"}, "each once"),
        ({"seeds": 0}, "seeds"),
        ({"workers": 0}, "workers"),
        ({"duration": float("nan")}, "duration"),
        ({"episode_timeout": 0.0}, "episode_timeout must be"),
        ({"episode_timeout": float("inf")}, "episode_timeout must be"),
        ({"episode_timeout": "10 min"}, "episode_timeout must be"),
        ({"control_frequency": 70.0}, "600 Hz"),
        ({"backend": "native"}, "checkpoint"),
        ({"backend": "scripted", "model": "c"}, "checkpoint"),
        ({"num_steps": 4}, "num_steps"),
        ({"port": 8000}, "service"),
        ({"compile": True}, "compile belongs to backend native"),
        ({"model": "c", "text_cache_bytes": -1}, "text_cache_bytes"),
        ({"model": "c", "total_shard": 1, "cuda_graphs": True}, "cuda_graphs needs a CUDA device"),
        ({"model": "c", "num_gpus": 2, "tp": 2, "compile": True}, "the 2 ranks"),
        ({"num_gpus": 2}, "replicas run backend 'native'"),
        ({"model": "c", "num_gpus": 2, "device": "cuda"}, "num_gpus decides where"),
        ({"model": "c", "num_gpus": 2, "cfg": 2, "guidance_scale": 1}, "no second pass"),
        ({"conditions": "blank"}, "uses no images"),
        ({"clips": 4}, "dynamics are evaluated with backend 'native'"),
        ({"clips": -1}, "clips"),
        ({"conditions": "steps=4"}, "no denoising steps"),
        ({"conditions": "plain,"}, "''"),
        ({"replan_rows": 0}, "replan_rows"),
        (
            {"instruction": "grab the {a} cube", "tasks": "reach,pick"},
            "one instruction cannot ask for",
        ),
        ({"instruction": "grab the {c} cube", "tasks": "pick"}, "cannot be filled in"),
        ({"instruction": "be nice", "tasks": "pick"}, "none of the verbs"),
        ({"world": "shelf"}, "module:name"),
        ({"robot": 5}, "robot is a name"),
    ],
)
def test_contradictions_are_refused(options, says):
    with pytest.raises((ConfigError, UnknownNameError, InputError), match=says):
        make_settings(options)


def test_identity_is_what_decides_a_result_and_nothing_else():
    base = make_settings({"tasks": "reach", "seeds": 3})
    first = base.plan()[0]
    for other in (
        {"seeds": 9},
        {"workers": 3},
        {"episode_timeout": 9},
        {"films": 0},
        {"tasks": "pick,reach"},
        {"conditions": "plain,swapped"},
    ):
        assert make_settings({"tasks": "reach", "seeds": 3, **other}).identity(
            first
        ) == base.identity(first), other
    for other in ({"duration": 5.0}, {"control_frequency": 100.0}, {"replan_rows": 4}):
        assert make_settings({"tasks": "reach", **other}).identity(first) != base.identity(first), (
            other
        )
    model = make_settings({"tasks": "reach", "model": "c", "num_gpus": 4, "tp": 2})
    more = make_settings({"tasks": "reach", "model": "c", "num_gpus": 8, "tp": 2})
    wider = make_settings({"tasks": "reach", "model": "c", "num_gpus": 4, "tp": 4})
    assert model.identity(first) == more.identity(first) != wider.identity(first)
    assert len({digest_of(base.identity(a)) for a in base.plan()}) == 3


def test_options_of_the_engine_reach_it_and_count_where_they_change_rounding(tmp_path):
    file = tmp_path / "e.toml"
    file.write_text("[model]\npath = 'c'\noffload_text = true\ncompile = true")
    settings, plain = make_settings(read_options(file)), make_settings({"model": "c"})
    assert settings.policy.engine == EngineOptions(offload_text=True, compile=True)
    assert settings.to_dict()["policy"]["offload_text"] is True
    first = plain.plan()[0]
    kept = make_settings({"model": "c", "offload_text": True, "text_cache_bytes": 0})
    assert settings.identity(first) != plain.identity(first) == kept.identity(first)
    assert "compile" not in plain.identity(first)["policy"]


def test_the_engine_that_is_used_is_part_of_an_identity():
    native, onnx = (make_settings({"model": "c", "backend": name}) for name in ("native", "onnx"))
    first = native.plan()[0]
    assert onnx.identity(first) != native.identity(first)
    assert onnx.identity(first)["policy"]["backend"] == "onnx"


def test_the_token_is_never_written():
    settings = make_settings({"backend": "service", "tasks": "reach"}, token="secret")
    assert settings.policy.service.api_key == "secret"
    assert "secret" not in json.dumps(settings.to_dict()) + json.dumps(
        settings.identity(settings.plan()[0])
    ) + repr(settings)


def test_workers_where_nobody_said_how_many():
    def workers(cores, **options):
        return default_workers(make_settings({"tasks": "reach", **options}), cores)

    assert workers(8) == 8
    assert workers(8, seeds=3) == 3
    assert workers(8, model="c", tp=2) == 4, "four for a replica"
    assert workers(4, model="c", tp=2) == 2, "ranks on the CPU have cores of their own"
    assert workers(2, model="c", tp=2) == 1
    assert workers(64, model="c", num_gpus=8, tp=2) == 16


def test_degrees_stand_in_the_policy_alone():
    """What was asked of ranks and what is placed cannot differ."""
    policy = PolicySettings(backend="native", model="c", parallel=ParallelConfig(4, 2))
    settings = Settings(policy, ("reach",), seeds=1, num_gpus=16)
    assert settings.topology == Topology(policy.parallel, 16)
    assert (settings.topology.replicas, settings.topology.ranks) == (2, 16)
    with pytest.raises(ConfigError, match="12 does not divide into replicas of tp=4 x cfg=2 = 8"):
        replace(settings, num_gpus=12)
    assert not any("topology" in field.name for field in fields(Settings))


def test_the_folder_states_degrees_and_replicas():
    settings = make_settings({"tasks": "reach", "model": "c", "num_gpus": 8, "tp": 2, "cfg": 2})
    written = settings.to_dict()
    assert written["topology"] == {
        "num_gpus": 8,
        "tp_size": 2,
        "cfg_size": 2,
        "total_shard": None,
        "replicas": 2,
    }
    assert "num_gpus" not in written
    assert "total_shard" not in written
    identity = settings.identity(settings.plan()[0])
    assert (identity["tp_size"], identity["cfg_size"], identity["on_gpu"]) == (2, 2, True)
    assert identity["policy"].keys().isdisjoint({"tp", "cfg", "sp"})
    assert "sp_size" not in identity
    shared = make_settings({"tasks": "reach", "model": "c", "num_gpus": 8, "tp": 2, "sp": 2})
    assert (shared.to_dict()["topology"]["sp_size"], shared.topology.replicas) == (2, 2)
    identity = shared.identity(shared.plan()[0])
    assert identity["sp_size"] == 2
    assert identity["policy"].keys().isdisjoint({"tp", "cfg", "sp"})


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A robot in a file: a UR5e whose cubes lie in a smaller field."""
    file = tmp_path / "mine.toml"
    workspace = Workspace((0.42, 0.58), (-0.13, 0.13))
    file.write_text(write_robot(replace(get_robot("ur5e"), name="mine", workspace=workspace)))
    return file


def test_another_robots_episodes_are_others(own: Path):
    def digest(**options):
        settings = make_settings({"tasks": "reach", **options})
        return digest_of(settings.identity(settings.plan()[0]))

    panda, ur5e, mine = digest(), digest(robot="ur5e"), digest(robot=str(own))
    assert len({panda, ur5e, mine}) == 3
    assert digest(robot="franka") == digest(robot="panda") == panda
    other = own.with_name("other.toml")
    other.write_text(own.read_text().replace("0.58", "0.57"))
    assert digest(robot=str(other)) not in (panda, ur5e, mine)
    assert digest(robot="xarm7", borrow_domain=True) != digest(robot="xarm7")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"robot": "ur5e", "conditions": "plain,light=2+camera=2"}, "wrist.*camera_top"),
        ({"robot": "dual_panda", "conditions": "camera=2"}, "wrist camera.*front, left, right"),
        ({"robot": "dual_panda", "conditions": "cubes=30"}, "change cubes"),
        ({"robot": "dual_panda", "conditions": "close"}, "change cubes"),
        ({"robot": "dual_panda", "conditions": "crowded"}, "change cubes"),
        ({"robot": "dual_panda", "conditions": "swapped"}, "one bar"),
        ({"robot": "dual_panda", "conditions": "paraphrased"}, "one bar"),
        ({"robot": "dual_panda", "tasks": "reach"}, "'reach'.*lift_bar"),
        ({"robot": "ur5e", "tasks": "lift_bar"}, "lift_bar.*stack"),
        ({"robot": "ur6"}, "'ur6'.*ur5e"),
        ({"robot": "openarm"}, "'openarm'.*openarm_left"),
        ({"robot": "xarm7", "model": "c"}, "no domain for robot 'xarm7'.*--borrow-domain"),
    ],
)
def test_what_a_robot_cannot_do_is_refused_by_name(options, says):
    with pytest.raises((ConfigError, UnknownNameError, InputError), match=says):
        make_settings(options)
