"""``strands-cosmos3 infer``: files in, files out."""

import json
from functools import partial

import numpy as np
import pytest
from PIL import Image

from strands_cosmos3.cli import main
from strands_cosmos3.commands.infer import read_actions
from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.embodiments import Sampling, get_embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.errors import InputError


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("picture") / "view.png"
    pixels = np.random.RandomState(0).randint(0, 256, (96, 128, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture(scope="module")
def command(checkpoints, picture):
    """A function that runs infer: two steps, answers at ``out``, and what else is said."""

    def run(out, *extra, image=True):
        shown = ["--image", str(picture)] if image else []
        model = ["--model", str(checkpoints["silu"]), "--image-size", "128", "--device", "cpu"]
        asked = ["--prompt", "pick up the red cube", "--num-steps", "2", *shown]
        return main(["infer", *model, *asked, "--out", str(out), *extra])

    return run


@pytest.fixture
def infer(command, tmp_path):
    return partial(command, tmp_path / "o")


@pytest.fixture(scope="module")
def plain(command, tmp_path_factory):
    """The file that infer writes where nothing else is said."""
    folder = tmp_path_factory.mktemp("plain")
    assert command(folder / "o") == 0
    assert not (folder / "o.mp4").exists()
    return folder / "o_action.json"


def read(tmp_path):
    return json.loads((tmp_path / "o_action.json").read_text())


def test_policy(plain):
    found = read(plain.parent)
    assert (found["shape"], found["dtype"]) == ([16, 10], "float64")
    assert np.array(found["data"]).shape == (16, 10)
    assert (found["domain"], found["action_space"], found["scale"]) == (
        "droid_lerobot",
        "midtrain",
        "model",
    )
    assert {"encode", "text", "denoise", "total"} <= set(found["timing_ms"])


def test_a_policys_answer_is_forward_dynamics_question(infer, plain, tmp_path):
    """No change of scale on the way: what comes out goes back in and is echoed."""
    droid = ("--action-stats-path", "droid")
    assert infer(*droid) == 0
    physical = (tmp_path / "o_action.json").rename(tmp_path / "physical.json")
    for answer, stats, scale in ((plain, (), "model"), (physical, droid, "physical")):
        assert infer("--mode", "forward_dynamics", "--action-file", str(answer), *stats) == 0
        expected = json.loads(answer.read_text())
        assert expected["scale"] == scale
        np.testing.assert_allclose(read(tmp_path)["data"], expected["data"], atol=1e-6)
        assert (tmp_path / "o.mp4").stat().st_size > 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("domain", "umi"), ("action_space", "joint_pos"), ("scale", "physical"), ("scale", 3)],
)
def test_an_answer_of_another_meaning_is_refused(infer, plain, tmp_path, capsys, name, value):
    path = tmp_path / "answer.json"
    path.write_text(json.dumps(read(plain.parent) | {name: value}))
    assert infer("--mode", "forward_dynamics", "--action-file", str(path)) == 2
    assert f"states {name} {value!r}, and its rows would be read as" in capsys.readouterr().err
    assert not (tmp_path / "o_action.json").exists()


def test_action_files(infer, tmp_path):
    path = tmp_path / "a.json"
    rows = [[0.1] * 10, [0.2] * 10]
    for content in ({"action_chunks": [rows]}, [rows], rows):
        path.write_text(json.dumps(content))
        assert read_actions(path).tolist() == rows
    assert infer("--mode", "forward_dynamics", "--action-file", str(path)) == 0
    np.testing.assert_allclose(read(tmp_path)["data"], [rows[0], *[rows[1]] * 15], atol=1e-6)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([[True] + [0.5] * 9], "it holds True or False"),
        ({"data": [[0.5] * 9 + [False]], "dtype": "float32"}, "it holds True or False"),
        ({"action_chunks": [[[True] * 10]]}, "dtype bool"),
        ([["0.5"] * 10], "dtype <U3"),
        ([0.5] * 10, "no rows of numbers"),
        ({"rows": [[0.5] * 10]}, "got NoneType"),
        ([[0.5] * 10, [0.5] * 9], "inhomogeneous"),
    ],
    ids=str,
)
def test_action_files_without_rows_of_numbers(tmp_path, content, says):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=f"{says}.*valid|{says}.*Valid: .shape"):
        read_actions(path)


def test_one_of_several_chunks_of_an_action_file(infer, tmp_path):
    path, chunks = tmp_path / "a.json", [[[float(i)] * 10] * 2 for i in range(3)]
    path.write_text(json.dumps({"action_chunks": chunks}))
    known = ("--mode", "forward_dynamics", "--action-file", str(path))
    assert infer(*known, "--action-chunk-index", "1") == 0
    assert read(tmp_path)["data"] == [[1.0] * 10] * 16
    for i in (0, 1, 2):
        assert read_actions(path, i).tolist() == chunks[i]
    for i in (3, -1):
        with pytest.raises(InputError, match=rf"chunk-index {i}: .* holds 3 chunks, numbered"):
            read_actions(path, i)
    for other in (7, {"0": 1}, "x"):
        path.write_text(json.dumps({"action_chunks": other}))
        with pytest.raises(InputError, match="no list of chunks"):
            read_actions(path)


def test_inverse_dynamics_from_a_film(infer, tmp_path):
    from strands_cosmos3.films import VideoWriter

    film = tmp_path / "clip.mp4"
    with VideoWriter(film, 15) as writer:
        for i in range(6):  # shorter than a chunk: the last frame counts on
            writer.write(np.full((96, 128, 3), 40 * i, np.uint8))
    assert infer("--mode", "inverse_dynamics", "--video", str(film), image=False) == 0
    assert read(tmp_path)["shape"] == [16, 10]
    assert (
        infer(
            "--mode",
            "inverse_dynamics",
            "--video",
            str(film),
            "--condition-frames",
            "0,1",
            image=False,
        )
        == 0
    )


def test_a_film_is_read_at_the_domain_s_rate(infer, tmp_path, capsys):
    """30 frames a second are six for each row of bridge, and no whole number for libero."""
    from strands_cosmos3.films import VideoWriter

    film = tmp_path / "clip.mp4"
    with VideoWriter(film, 30) as writer:
        for i in range(40):
            writer.write(np.full((96, 128, 3), 5 * i, np.uint8))
    asked = ("--mode", "inverse_dynamics", "--video", str(film))
    assert infer(*asked, "--domain-name", "bridge_orig_lerobot", image=False) == 0
    assert infer(*asked, "--domain-name", "libero", image=False) == 2
    assert "of 20 frames a second, or of a whole multiple" in capsys.readouterr().err
    # one frame alone has no rate
    one = ("--video", str(film), "--domain-name", "libero")
    assert infer(*one, image=False) == 0


def test_options_reach_the_sampler(infer, plain, tmp_path):
    answers = [read(plain.parent)["data"]]
    for extra in (
        ("--seed", "1"),
        ("--guidance-scale", "3"),
        ("--flow-shift", "2"),
        ("--use-karras-sigmas", "checkpoint"),
    ):
        assert infer(*extra) == 0
        answers.append(read(tmp_path)["data"])
    assert len({json.dumps(answer) for answer in answers}) == len(answers)


def test_integer_domain_and_canvas(infer, tmp_path):
    canvas = ("--height", "96", "--width", "128", "--fps", "10", "--chunk-rows", "4")
    assert infer("--domain-name", "20", "--raw-action-dim", "7", *canvas) == 0
    assert read(tmp_path)["shape"] == [4, 7]


def test_views_are_those_of_the_embodiment(infer, picture, tmp_path, capsys):
    views = ["--image", str(picture), str(picture)]
    for domain, said in (
        ("droid", "of 'droid_lerobot', or its views wrist, exterior_1, exterior_2; got 2"),
        ("libero", "of 'libero'; got 2"),
    ):
        assert infer(*views, "--domain-name", domain, image=False) == 2
        assert f"--image takes one picture {said}" in " ".join(capsys.readouterr().err.split())
    for domain in ("droid_lerobot", "robomind-franka-dual"):
        assert infer(*views, str(picture), "--domain-name", domain, image=False) == 0
        assert read(tmp_path)["domain"] == domain


def test_joint_pos(joint_checkpoint, picture, tmp_path):
    options = [
        "--image",
        str(picture),
        "--prompt",
        "x",
        "--num-steps",
        "1",
        "--image-size",
        "128",
        "--out",
        str(tmp_path / "o"),
    ]
    state = ["--state", "0", "0", "0", "-2", "0", "2", "0.7", "0.2"]
    assert main(["infer", "--model", str(joint_checkpoint), *options, *state]) == 0
    assert (read(tmp_path)["shape"], read(tmp_path)["action_space"]) == ([32, 8], "joint_pos")
    assert main(["infer", "--model", str(joint_checkpoint), *options]) == 2


STATE = ["--state", "0.5", "0", "0.4", "1", "0", "0", "0", "-1", "0", "1"]


def test_the_bundled_checkpoint_is_the_default(picture, tmp_path, capsys):
    """It starts from a state row, and says so where it is missing."""
    options = [
        "infer",
        "--image",
        str(picture),
        "--prompt",
        "reach the red cube",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "o"),
    ]
    assert main([*options, *STATE, "--num-steps", "1"]) == 0
    bundled = read(tmp_path)
    assert (bundled["domain"], bundled["action_space"]) == ("droid_lerobot", "midtrain")
    assert main([*options, *STATE, "--num-steps", "1", "--model", str(embedded_checkpoint())]) == 0
    assert read(tmp_path)["data"] == bundled["data"]
    capsys.readouterr()
    assert main(options) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "lacks 'state' (--state)" in said
    assert "10 numbers, x_m, y_m, z_m, r0, r1, r2, r3, r4, r5, gripper (1 = open)" in said
    assert main([*options, "--state", "0", "0"]) == 2
    assert "10 values" in " ".join(capsys.readouterr().err.split())


def test_the_help_names_the_state(capsys):
    with pytest.raises(SystemExit):
        main(["infer", "--help"])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "ten numbers" in said
    assert "None is the bundled policy" in said


def test_a_blank_prompt(infer, plain, tmp_path):
    assert infer("--prompt", "") == 0
    assert read(tmp_path)["data"] != read(plain.parent)["data"]


def test_a_missing_prompt(checkpoints, picture, capsys):
    assert main(["infer", "--model", str(checkpoints["silu"]), "--image", str(picture)]) == 2
    assert "--prompt is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--video", "x.mp4"], "got both"),
        (["--mode", "forward_dynamics"], "--action-file"),
        (["--action-file", "a.json"], "forward_dynamics"),
        (["--mode", "forward_dynamics", "--action-file", "/no/such.json"], "/no/such.json"),
        (["--condition-frames", "zero"], "0,1"),
        (["--domain-name", "mars"], "droid_lerobot"),
        (["--domain-name", "8"], "raw_action_dim"),
        (["--height", "96"], "both"),
        (["--action-stats-path", "umi"], "umi"),
        (["--out", "/proc/nowhere/o"], "/proc/nowhere"),
    ],
)
def test_bad_usage(infer, capsys, extra, said):
    assert infer(*extra) == 2
    assert said in capsys.readouterr().err


def test_a_value_that_is_out_of_range_is_named(infer, capsys):
    with pytest.raises(SystemExit) as stop:
        infer("--num-steps", "0")
    assert stop.value.code == 2
    assert "num_steps must be at least 1, got 0" in capsys.readouterr().err


def test_bad_action_files(infer, tmp_path, capsys):
    path = tmp_path / "a.json"
    for content in (
        "[]",
        '{"data": "x"}',
        '{"shape": [3, 10], "data": [[0]]}',
        '{"shape": 3, "data": [[0]]}',
        "[[1, 2], [3]]",
        "7",
        "{",
    ):
        path.write_text(content)
        with pytest.raises(InputError, match="--action-file"):
            read_actions(path)
    assert infer("--mode", "forward_dynamics", "--action-file", str(path)) == 2
    assert "--action-file" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_a_failure_and_not_bad_usage(tmp_path, picture):
    (tmp_path / "c").mkdir()
    assert (
        main(["infer", "--model", str(tmp_path / "c"), "--image", str(picture), "--prompt", "x"])
        == 1
    )


@pytest.mark.parametrize(
    ("extra", "wanted"),
    [((), (3, 1.0, 5.0)), (("--num-steps", "2", "--flow-shift", "3"), (2, 1.0, 3.0))],
)
def test_the_checkpoints_own_sampling_is_the_default(picture, tmp_path, monkeypatch, extra, wanted):
    """The bundled checkpoint records 3 steps and a shift of 5; a backend samples it the same
    way.
    """
    asked, step = [], Cosmos3Engine.step

    def noted(engine, request, *arguments, **options):
        asked.append(request)
        return step(engine, request, *arguments, **options)

    monkeypatch.setattr(Cosmos3Engine, "step", noted)
    options = [
        "--image",
        str(picture),
        "--prompt",
        "reach the red cube",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "o"),
    ]
    state = ["--state", "0.5", "0", "0.4", "1", "0", "0", "0", "1", "0", "1"]
    assert main(["infer", "--model", str(embedded_checkpoint()), *options, *state, *extra]) == 0
    (request,) = asked
    assert (request.num_inference_steps, request.guidance_scale, request.flow_shift) == wanted
    assert request.use_karras_sigmas is False
    found = Checkpoint.open(embedded_checkpoint()).resolve_sampling(
        get_embodiment("droid"), "midtrain", Sampling()
    )
    assert found == Sampling(3, 1.0, 5.0)
