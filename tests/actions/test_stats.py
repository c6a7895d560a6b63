"""Statistics: the figures of policy-contract section 6, the maps in both directions, and who may
use whose.
"""

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strands_cosmos3.actions.stats import (
    ActionStats,
    denormalize_chunk,
    denormalize_quantile,
    load_action_stats,
    normalize_chunk,
    normalize_quantile,
    stats_for,
)
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.errors import (
    ActionOutOfRangeError,
    ActionSpaceError,
    NonFiniteError,
    ResourceNotFoundError,
    ShapeError,
    StatisticsError,
    UnknownNameError,
)
from strands_cosmos3.resources import resource

WIDTHS = {
    "agibotworld": 29,
    "bridge_orig_lerobot": 10,
    "droid_lerobot": 10,
    "fractal": 10,
    "hand_pose": 57,
    "libero": 10,
    "robomind-franka": 10,
    "robomind-franka-dual": 20,
    "robomind-ur": 10,
    "umi": 10,
}
DROID = load_action_stats("droid")
TOL_EDGE = 1e-9
check = settings(max_examples=150)
z_rows = st.lists(st.floats(-10, 10, allow_nan=False), min_size=10, max_size=10).map(np.array)


def test_all_ten_files_load_and_match_their_embodiment():
    assert {path.stem for path in resource("stats").glob("*.json")} == set(WIDTHS)
    for domain, width in WIDTHS.items():
        stats = load_action_stats(domain)
        assert (stats.domain, stats.width, len(stats.q01)) == (domain, width, width)
        assert stats.columns == get_embodiment(domain).action_space("midtrain").columns
        assert stats_for(domain) is stats


def test_every_file_names_source_and_licence():
    for domain in WIDTHS:
        data = json.loads(resource(f"stats/{domain}.json").read_text())
        assert data["license"] == "OpenMDW-1.1"
        assert "cosmos-framework" in data["source"]
        assert "NVIDIA" in data["copyright"]
        assert resource(f"stats/{data['license_file']}").is_file()


def test_droid_quantiles():
    q01 = [
        -0.014200,
        -0.013416,
        -0.015206,
        0.998459,
        -0.047659,
        -0.034774,
        -0.047609,
        0.998428,
        -0.035553,
        0,
    ]
    q99 = [0.014515, 0.011517, 0.014520, 1, 0.047596, 0.034660, 0.047654, 1, 0.038888, 1]
    np.testing.assert_array_equal(DROID.q01, q01)
    np.testing.assert_array_equal(DROID.q99, q99)
    assert DROID.q01.dtype == np.float64
    with pytest.raises(ValueError, match="read-only"):
        DROID.q01[0] = 0


def test_droid_zeros_are_not_stay():
    a = denormalize_quantile(np.zeros(10), DROID.q01, DROID.q99)
    np.testing.assert_allclose(a[:3], [0.000157, -0.000950, -0.000343], atol=6e-7)
    stay = [0, 0, 0, 1, 0, 0, 0, 1, 0, 0.5]
    expected = [-0.0110, 0.0762, 0.0231, 1, 0.0007, 0.0016, -0.0005, 1, -0.0448, 0]
    np.testing.assert_allclose(normalize_quantile(stay, DROID.q01, DROID.q99), expected, atol=6e-5)


@pytest.mark.parametrize("domain", WIDTHS)
def test_quantiles_become_minus_one_and_one(domain):
    stats = load_action_stats(domain)
    n = stats.normalizer()
    np.testing.assert_allclose(n(stats.q01), -np.ones(stats.width), atol=TOL_EDGE)
    np.testing.assert_allclose(n(stats.q99), np.ones(stats.width), atol=TOL_EDGE)
    np.testing.assert_allclose(n.inverse(-np.ones(stats.width)), stats.q01, atol=1e-12)


@check
@given(z_rows)
def test_round_trips(z):
    for domain in ("droid", "umi", "fractal"):
        a = denormalize_chunk([z], domain)
        np.testing.assert_allclose(normalize_chunk(a, domain), [z], atol=1e-9)
    for method in ("quantile", "quantile_rot", "minmax", "meanstd"):
        n = load_action_stats("libero").normalizer(method)
        np.testing.assert_allclose(n(n.inverse(z)), z, atol=1e-9)


def test_decoding_never_clamps_and_encoding_clamps_on_request():
    beyond = denormalize_quantile(np.full(10, 3.0), DROID.q01, DROID.q99)
    assert (beyond > DROID.q99).all()
    np.testing.assert_allclose(normalize_quantile(beyond, DROID.q01, DROID.q99), 3.0)
    np.testing.assert_array_equal(
        normalize_quantile(beyond, DROID.q01, DROID.q99, clip=True), np.ones(10)
    )
    np.testing.assert_array_equal(
        normalize_quantile(-beyond, DROID.q01, DROID.q99, clip=True)[0], -1.0
    )


def test_leading_axes():
    z = np.random.default_rng(0).uniform(-1, 1, (2, 3, 10))
    a = denormalize_quantile(z, DROID.q01, DROID.q99)
    assert a.shape == (2, 3, 10)
    np.testing.assert_array_equal(a[1, 2], denormalize_quantile(z[1, 2], DROID.q01, DROID.q99))


def test_wild_values_are_refused_and_ten_itself_is_not():
    denormalize_quantile(np.full(10, -10.0), DROID.q01, DROID.q99)
    for wild in (10.001, -11.0, 1e12):
        z = np.zeros((4, 10))
        z[2, 5] = wild
        with pytest.raises(ActionOutOfRangeError, match=r"\[2, 5\]"):
            denormalize_quantile(z, DROID.q01, DROID.q99)
        with pytest.raises(ActionOutOfRangeError, match="r2"):
            denormalize_chunk(z, "droid")
    with pytest.raises(NonFiniteError):
        denormalize_chunk(np.full((1, 10), np.nan), "droid")


def test_statistics_of_another_domain_are_refused_though_as_wide():
    for other in ("bridge", "fractal", "umi", "libero", "robomind-franka"):
        with pytest.raises(StatisticsError, match="droid_lerobot"):
            denormalize_chunk(np.zeros((1, 10)), "droid", load_action_stats(other))
        with pytest.raises(StatisticsError, match="droid_lerobot"):
            stats_for("droid", other)
    renamed = ActionStats("droid_lerobot", DROID.columns[:8], DROID.q01[:8], DROID.q99[:8])
    with pytest.raises(StatisticsError, match="8 columns"):
        stats_for("droid", renamed)


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"q99": -0.5}, "q99 must exceed q01, but in column 1 (b) it is -0.5, against -0.2"),
        ({"std": 0.0}, "std must exceed 0, but in column 1 (b) it is 0, against 0"),
        ({"std": -2.0}, "std must exceed 0, but in column 1 (b) it is -2, against 0"),
        ({"min": 1.0, "max": 0.5}, "max must exceed min, but in column 1 (b) it is 0.5, against 1"),
    ],
)
def test_figures_that_cannot_be_inverted_are_named(figures, said):
    sound = {"q01": -0.2, "q99": 0.4, "std": 0.1, "mean": 0.0, "min": -1.0, "max": 1.0}
    pairs = {name: np.array([sound[name], figures.get(name, sound[name])]) for name in sound}
    with pytest.raises(StatisticsError, match=re.escape(said)):
        ActionStats("droid_lerobot", ("a", "b"), **pairs)


def test_embodiments_without_statistics_say_which_have_some():
    for name in ("av", "camera_pose", "galbot"):
        with pytest.raises(StatisticsError, match="droid_lerobot"):
            load_action_stats(name)
    with pytest.raises(ActionSpaceError, match="not normalised"):
        denormalize_chunk(np.zeros((1, 9)), "av")


def test_rows_of_joint_pos_are_refused_with_both_names():
    with pytest.raises(ActionSpaceError, match=r"joint_pos.*midtrain"):
        denormalize_chunk(np.zeros((1, 8)), "droid")


def test_libero_s_quantile_leaves_rotation_and_quantile_rot_does_not():
    z = np.full((1, 10), 0.3)
    plain, rot = (
        denormalize_chunk(z, "libero"),
        denormalize_chunk(z, "libero", method="quantile_rot"),
    )
    np.testing.assert_allclose(plain[0, 3:9], 0.3)
    assert (np.abs(rot[0, 3:9] - plain[0, 3:9]) > 0.1).all()
    np.testing.assert_array_equal(
        np.delete(plain, range(3, 9), axis=1), np.delete(rot, range(3, 9), axis=1)
    )
    np.testing.assert_allclose(rot[0, 3], 0.3 * (1 - 0.934955) / 2 + (1 + 0.934955) / 2)


def test_flat_files_have_one_kind_of_quantile():
    z = np.full((1, 10), 0.3)
    np.testing.assert_array_equal(
        denormalize_chunk(z, "droid"), denormalize_chunk(z, "droid", method="quantile_rot")
    )


def test_meanstd_and_minmax():
    stats = load_action_stats("libero")
    np.testing.assert_allclose(
        stats.normalizer("meanstd").inverse(np.ones(10)), stats.mean + stats.std
    )
    np.testing.assert_allclose(stats.normalizer("minmax").inverse(np.ones(10)), stats.max)
    np.testing.assert_allclose(stats.normalizer("minmax")(stats.min), -np.ones(10))
    for method in ("meanstd", "minmax"):
        with pytest.raises(StatisticsError, match="quantile"):
            DROID.normalizer(method)
    with pytest.raises(UnknownNameError, match="meanstd"):
        stats.normalizer("zscore")


def test_umi_is_the_first_ten_of_twenty():
    data = json.loads(resource("stats/umi.json").read_text())
    assert len(data["q01"]) == 20
    stats = load_action_stats("umi")
    np.testing.assert_array_equal(stats.q99, data["q99"][:10])
    assert stats.columns[-1] == "width"
    assert stats.q99[9] == 0.096749
    assert data["q99"][19] == 0.085


@pytest.mark.parametrize("name", ["droid", "franka", "droid_lerobot_stats", " DROID_LeRobot "])
def test_names_for_droid(name):
    assert load_action_stats(name).domain == "droid_lerobot"


@pytest.mark.parametrize(
    ("name", "domain"),
    [
        ("agibotworld_beta_lerobot_stats", "agibotworld"),
        ("agibotworld_beta", "agibotworld"),
        ("agibot_gear_gripper", "agibotworld"),
        ("human_hand_pose_lerobot_stats", "hand_pose"),
        ("libero_native_frame_wise_relative_rot6d", "libero"),
        ("robomind_franka_dual_stats", "robomind-franka-dual"),
        ("umi_lerobot_stats", "umi"),
    ],
)
def test_upstream_names(name, domain):
    assert load_action_stats(name).domain == domain


def test_unknown_names_and_files():
    with pytest.raises(UnknownNameError, match="droid"):
        load_action_stats("driod")
    with pytest.raises(ResourceNotFoundError, match=r"nowhere\.json"):
        load_action_stats("nowhere.json")
    with pytest.raises(StatisticsError, match="not of"):
        load_action_stats("droid", domain="umi")


def write(path, data):
    path.write_text(json.dumps(data))
    return path


def test_upstream_files_by_path(tmp_path):
    flat = {"q01": [-1.0] * 10, "q99": [1.0] * 10}
    assert (
        load_action_stats(write(tmp_path / "droid_lerobot_stats.json", flat)).domain
        == "droid_lerobot"
    )
    nameless = write(tmp_path / "mine.json", flat)
    assert load_action_stats(str(nameless), domain="fractal").domain == "fractal"
    with pytest.raises(StatisticsError, match="domain="):
        load_action_stats(nameless)
    with pytest.raises(UnknownNameError):
        load_action_stats(nameless, domain="nowhere")
    with pytest.raises(StatisticsError, match="10 columns"):
        load_action_stats(nameless, domain="hand_pose")
    two_arms = write(
        tmp_path / "umi_lerobot_stats.json", {"q01": [-1.0] * 20, "q99": [1.0] * 10 + [2.0] * 10}
    )
    np.testing.assert_array_equal(load_action_stats(two_arms).q99, np.ones(10))
    with pytest.raises(StatisticsError, match="of 'umi', not of 'droid'"):
        load_action_stats(two_arms, domain="droid")
    blocks = {
        "global": flat,
        "global_raw": {"q01": [0.0] * 10, "q99": [2.0] * 10},
    }
    nested = load_action_stats(write(tmp_path / "blocks.json", blocks), domain="libero")
    np.testing.assert_array_equal(nested.normalizer("quantile").inverse(np.zeros(10)), np.zeros(10))
    np.testing.assert_array_equal(
        nested.normalizer("quantile_rot").inverse(np.zeros(10)), np.ones(10)
    )


def test_own_files_by_path(tmp_path):
    own = json.loads(resource("stats/umi.json").read_text())
    assert load_action_stats(write(tmp_path / "copy.json", own)).width == 10
    with pytest.raises(StatisticsError, match="'umi'"):
        load_action_stats(tmp_path / "copy.json", domain="droid")
    mine = {"schema": 1, "domain": "mine", "columns": ["a", "b"], "q01": [0, 0], "q99": [1, 2]}
    assert load_action_stats(write(tmp_path / "mine.json", mine), domain="mine").columns == (
        "a",
        "b",
    )


@pytest.mark.parametrize(
    "broken",
    [
        {"schema": 2},
        {"domain": 3},
        {"columns": None},
        {"columns": ["a"]},
        {"q01": None},
        {"q01": [0, 2]},
        {"q99": [1, 0]},
        {"q99": [1, 2, 3]},
        {"std": [1, 0]},
        {"min": [0, 0], "max": [1, 0]},
        {"raw": []},
        {"raw": {"q01": [0, 0], "q99": [0, 1]}},
        {"single_arm_columns": 3},
    ],
)
def test_broken_files_are_refused(tmp_path, broken):
    mine = {"schema": 1, "domain": "mine", "columns": ["a", "b"], "q01": [0, 0], "q99": [1, 2]}
    with pytest.raises(StatisticsError):
        load_action_stats(write(tmp_path / "mine.json", {**mine, **broken}))


def test_files_that_are_no_json_objects(tmp_path):
    (tmp_path / "a.json").write_bytes(b"\xff\x00")
    write(tmp_path / "b.json", [1])
    (tmp_path / "c.json").mkdir()
    for name in "abc":
        with pytest.raises(StatisticsError):
            load_action_stats(tmp_path / f"{name}.json")


def test_figures_that_cannot_be_inverted_name_their_column():
    q99 = DROID.q99.copy()
    q99[5] = DROID.q01[5]
    with pytest.raises(StatisticsError, match=r"column 5"):
        normalize_quantile(np.zeros(10), DROID.q01, q99)
    with pytest.raises(StatisticsError, match=r"r2"):
        ActionStats("droid_lerobot", DROID.columns, DROID.q01, q99)
    with pytest.raises(StatisticsError, match="columns"):
        normalize_quantile(np.zeros(10), DROID.q01, DROID.q99[:9])
    with pytest.raises(ShapeError):
        normalize_quantile(np.zeros(8), DROID.q01, DROID.q99)
