"""Options and TOML: the same evaluation from either, and contradictions refused before anything
starts.
"""

import json

import pytest

from strands_cosmos3.engine.options import EngineOptions
from strands_cosmos3.errors import ConfigError, InputError, ResourceNotFoundError, UnknownNameError
from strands_cosmos3.evaluation.evaluate import default_workers
from strands_cosmos3.evaluation.perturbations import Perturbation
from strands_cosmos3.evaluation.settings import make_settings, read_toml

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
    options = read_toml(file)
    assert options["out"] == "run"
    settings = make_settings(options)
    assert settings.topology.replicas == 4
    assert settings.episode_timeout == 600
    assert settings.policy.model == "some/checkpoint"
    assert settings.conditions[2] == Perturbation("dark", images="blank")
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
        ("seeds = ", ConfigError, "not TOML"),
        ("conditions = 3", ConfigError, "short forms"),
        ("tasks = 'reach, pick'\nseeds = '5'", ConfigError, "seeds"),
    ],
)
def test_toml_that_cannot_be(tmp_path, text, error, says):
    file = tmp_path / "e.toml"
    file.write_text(text)
    with pytest.raises(error, match=says):
        make_settings(read_toml(file))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ResourceNotFoundError, match="nothing"):
        read_toml(tmp_path / "nothing.toml")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tasks": "reach,juggle"}, "juggle"),
        ({"tasks": "reach,reach"}, "each once"),
        ({"seeds": 0}, "seeds"),
        ({"workers": 0}, "workers"),
        ({"duration": float("nan")}, "duration"),
        ({"episode_timeout": 0.0}, "episode_timeout is 0.0"),
        ({"episode_timeout": float("inf")}, "episode_timeout is inf"),
        ({"episode_timeout": "10 min"}, "episode_timeout is '10 min'"),
        ({"control_frequency": 70.0}, "600 Hz"),
        ({"backend": "native"}, "checkpoint"),
        ({"backend": "scripted", "model": "c"}, "checkpoint"),
        ({"num_steps": 4}, "num_steps"),
        ({"port": 8000}, "service"),
        ({"compile": True}, "compile belongs to backend native"),
        ({"model": "c", "text_cache_bytes": -1}, "text_cache_bytes"),
        ({"model": "c", "total_shard": 1, "cuda_graphs": True}, "cuda_graphs needs a CUDA device"),
        ({"model": "c", "num_gpus": 2, "tp": 2, "compile": True}, "tp_size=2"),
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
        ({"instruction": "grab the {c} cube", "tasks": "pick"}, "cannot be judged"),
        ({"instruction": "be nice", "tasks": "pick"}, "cannot be judged"),
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
        assert make_settings({"tasks": "reach", "seeds": 3, **other}).digest(first) == base.digest(
            first
        ), other
    for other in ({"duration": 5.0}, {"control_frequency": 100.0}, {"replan_rows": 4}):
        assert make_settings({"tasks": "reach", **other}).digest(first) != base.digest(first), other
    model = make_settings({"tasks": "reach", "model": "c", "num_gpus": 4, "tp": 2})
    more = make_settings({"tasks": "reach", "model": "c", "num_gpus": 8, "tp": 2})
    wider = make_settings({"tasks": "reach", "model": "c", "num_gpus": 4, "tp": 4})
    assert model.digest(first) == more.digest(first) != wider.digest(first)
    assert len({base.digest(a) for a in base.plan()}) == 3


def test_options_of_the_engine_reach_it_and_count_where_they_change_rounding(tmp_path):
    file = tmp_path / "e.toml"
    file.write_text("[model]\npath = 'c'\noffload_text = true\ncompile = true")
    settings, plain = make_settings(read_toml(file)), make_settings({"model": "c"})
    assert settings.policy.engine == EngineOptions(offload_text=True, compile=True)
    assert settings.to_dict()["policy"]["offload_text"] is True
    first = plain.plan()[0]
    kept = make_settings({"model": "c", "offload_text": True, "text_cache_bytes": 0})
    assert settings.digest(first) != plain.digest(first) == kept.digest(first)
    assert "compile" not in plain.identity(first)["policy"]


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
