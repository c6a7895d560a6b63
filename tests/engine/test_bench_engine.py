"""The benchmark compares like with like; how fast it is is nobody's promise here."""

import pytest

from strands_cosmos3.bench import bundled
from strands_cosmos3.bench.bfloat16 import compare
from strands_cosmos3.bench.engine import SETTINGS, measure
from strands_cosmos3.engine.factory import FactorySizes


def test_the_bench_runs_and_both_sides_agree():
    said = []
    figures = measure("256", steps=2, repeats=1, sizes=FactorySizes(), progress=said.append)
    assert figures["generation_tokens"] == 266
    assert figures["largest_action_difference"] < 2e-4
    assert set(figures["cpu_s"]) == {"native", "native_cold", "pipeline_latent", "pipeline_decoded"}
    assert figures["cpu_s"]["pipeline_latent"] < figures["cpu_s"]["pipeline_decoded"]
    assert said


def test_the_targets_are_the_projects():
    assert [(s.target_decoded, s.target_latent) for s in SETTINGS.values()] == [
        (2.4, 1.45),
        (4.5, 2.4),
    ]


@pytest.mark.slow
def test_the_part_about_the_bundled_policy():
    figures = bundled.measure(repeats=1, progress=lambda _: None)
    assert figures["film"]["frames"] == 9, "the given frame and one for each of eight rows"
    assert set(figures["film"]["chunk_cpu_ms"]) == {"without", "shown", "all"}
    assert set(figures["batch"]["cpu_ms"]) == {"one", "one_by_one", "together", "candidates"}
    assert set(figures["compose"]) == {"320x180", "640x360"}


def test_both_dtypes_answer_the_same_request():
    figures = compare("256", FactorySizes(), 2, 2, lambda _: None)
    assert set(figures["cpu_s"]) == {"float32", "bfloat16"}
    assert len(figures["ratio_each"]) == 2
    assert 0 < figures["largest_action_difference"] < figures["actions_rms"]


def test_few_episodes_show_nothing():
    """Exact binomial bounds: 28 episodes without a loss leave 10 % possible, 29 do not."""
    from strands_cosmos3.bench.bfloat16 import MARGIN, most_lost

    assert most_lost(0, 28) > MARGIN > most_lost(0, 29)
    assert most_lost(0, 4) > 0.5
    assert most_lost(3, 3) == 1.0
    assert 1 - most_lost(0, 10) == pytest.approx(0.05**0.1)
