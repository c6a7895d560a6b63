"""Real processes: the backend that owns them, what happens when one dies, stops, or loses its
leader; torchrun.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers import rank_cases as cases
from helpers.options import backend_options
from helpers.parity import asked_of, reference
from strands_cosmos3.backends import make_backend
from strands_cosmos3.cli import main
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.errors import (
    ConfigError,
    InputError,
    LayoutError,
    RankLostError,
    RanksError,
    RankSilentError,
)
from strands_cosmos3.parallel.config import ParallelConfig
from strands_cosmos3.parallel.payload import encode_requests
from strands_cosmos3.types import Request

DROID = get_embodiment("droid")
LIMIT_S = 15
FOREVER = 900


def question(**changes):
    picture = np.random.RandomState(0).randint(0, 256, (144, 176, 3), dtype=np.uint8)
    fields = {"composite": picture, "seed": 3, **changes}
    return Request(
        DROID, DROID.action_space(), "pick up the red cube", 8, np.zeros(7), 0.8, **fields
    )


def options(parallel=None):
    quick = backend_options(device="cpu", num_steps=2, guidance_scale=3.0, image_size=256)
    return quick if parallel is None else replace(quick, parallel=parallel)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_gone(pids, limit_s=LIMIT_S):
    deadline = time.monotonic() + limit_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def links_of(pid):
    """What a process's descriptors point to; some are closed while one looks."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            yield os.readlink(descriptor)


def listening(pids=None):
    """(port, socket) of everything that listens on this machine, or of what some processes own
    of it.
    """
    tables = "".join(Path(f"/proc/net/{table}").read_text() for table in ("tcp", "tcp6"))
    fields = [line.split() for line in tables.splitlines()]
    found = {(int(row[1].rsplit(":", 1)[1], 16), row[9]) for row in fields if row[3] == "0A"}
    if pids is None:
        return found
    links = [link for pid in pids for link in links_of(pid)]
    return {(port, inode) for port, inode in found if f"socket:[{inode}]" in links}


def strike(engine, sent, rank):
    """Send a signal to a rank in the middle of a step; returns the error, and how long after the
    signal it came.
    """
    pids = [handle.pid for handle in engine.ranks.handles]
    sent_at, ports = [], listening(pids)
    assert ports, "ranks of several processes listen for each other"

    def on_step(done, _):
        if done == 3:
            sent_at.append(time.monotonic())
            os.kill(pids[rank], sent)

    with pytest.raises(RanksError, match=f"rank {rank}") as caught:
        engine.step(cases.question(steps=FOREVER), on_step=on_step)
    took = time.monotonic() - sent_at[0]
    assert not any(map(alive, pids)), "ranks are gone before the error is raised"
    assert not ports & listening(), "a port is still taken"
    assert "the next call starts them again" in str(caught.value)
    print(f"{sent.name}: typed error and every process gone after {took:.1f} s")
    return caught.value


def test_the_backend_s_life(checkpoints, monkeypatch):
    """It answers as one process does, many times, each as near to float64 as helpers/parity.py
    says; a rank that is stopped ends all.
    """
    folder = checkpoints["nano"]
    alone = make_backend("native", folder, options())
    many = make_backend("distributed", folder, options(ParallelConfig(tp_size=2)))
    assert many.info == replace(alone.info, name="distributed")
    assert many.info.action_space == "midtrain"
    asked = asked_of(alone.engine, monkeypatch)
    for seed in (3, 4):
        answers = alone.infer(question(seed=seed)), many.infer(question(seed=seed))
        known = reference(folder, asked[-1])
        assert all(known.share({"action": found.action}) <= 1 for found in answers)
        found = answers[1]
        assert {"encode_ms", "denoise_ms", "total_ms"} <= set(found.timing)
    with pytest.raises(InputError, match="num_inference_steps"):  # every rank refuses, and lives on
        many.engine.step(cases.question(steps=1001))
    assert isinstance(strike(many.engine, signal.SIGSTOP, 1), RankSilentError)
    many.close()
    many.close()
    with pytest.raises(ConfigError, match="closed"):
        many.infer(question())


@pytest.mark.slow  # serving/test_served_models.py and evaluation/test_replica.py kill one each
def test_killed_ranks_are_started_again(checkpoints, who_came_to_the_end_of_python, monkeypatch):
    """The next call starts others; closed ranks leave without the end of Python, where gloo's
    threads might abort them.
    """
    folder = checkpoints["nano"]
    many = make_backend("distributed", folder, options(ParallelConfig(tp_size=2)))
    assert isinstance(strike(many.engine, signal.SIGKILL, 1), RankLostError)
    alone = make_backend("native", folder, options())
    asked = asked_of(alone.engine, monkeypatch)
    alone.infer(question())
    found = many.infer(question()).action
    assert reference(folder, asked[0]).share({"action": found}) <= 1
    ranks = [handle.pid for handle in many.engine.ranks.handles]
    many.close()
    assert not any(map(alive, ranks))
    assert not set(ranks) & set(who_came_to_the_end_of_python())


LEADER = """
import json, sys, tempfile, time
from dataclasses import asdict
from strands_cosmos3.parallel.config import ParallelConfig, RankOptions
from strands_cosmos3.parallel.rank import RankProcess
common = {"checkpoint": sys.argv[1], "parallel": asdict(ParallelConfig(2)), "options": asdict(RankOptions(threads=1))}
common["init_method"] = f"file://{tempfile.mkdtemp()}/ranks"
ranks = [RankProcess(rank, 8.0) for rank in range(2)]
for number, rank in enumerate(ranks):
    rank.send({**common, "rank": number})
print(*[rank.pid for rank in ranks], "torch" in sys.modules, flush=True)
for rank in ranks:
    while not any(status.kind == "ready" for status in rank.statuses(1.0)):
        pass
for rank in ranks:
    rank.submit(open(sys.argv[2], "rb").read())
while not any(status.progress > 2 for status in ranks[0].statuses(1.0)):
    pass
print("working", flush=True)
time.sleep(600)
"""


def test_ranks_do_not_outlive_their_leader(checkpoints, tmp_path):
    """Killed with its ranks in the middle of a step; leading needs no torch."""
    (tmp_path / "request").write_bytes(encode_requests([cases.question(steps=FOREVER)]))
    command = [sys.executable, "-c", LEADER, checkpoints["nano"], str(tmp_path / "request")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as leader:
        first, second, torch_loaded = leader.stdout.readline().split()
        pids = [int(first), int(second)]
        assert torch_loaded == "False"
        assert leader.stdout.readline().strip() == "working"
        leader.kill()
    assert wait_gone(pids)


def test_nothing_is_started_for_what_cannot_work(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ConfigError, match="valid: 1, 2, 4, 8"):
        make_backend("distributed", checkpoints["nano"], options(ParallelConfig(tp_size=3)))
    with pytest.raises(LayoutError):
        make_backend("distributed", tmp_path, options(ParallelConfig(tp_size=2)))
    with pytest.raises(ConfigError, match="belongs to backend distributed, not to native"):
        make_backend("native", checkpoints["nano"], options(ParallelConfig(tp_size=2)))
    with pytest.raises(ConfigError, match="one each"):
        make_backend(
            "distributed",
            checkpoints["nano"],
            backend_options(device="cuda:0", tp=2),
        )


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "observation.png"
    Image.fromarray(np.random.RandomState(0).randint(0, 256, (96, 128, 3), dtype=np.uint8)).save(
        path
    )
    return path


def start_torchrun(count, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={count}",
    ]
    command += ["-m", "strands_cosmos3", "infer", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def torchrun(count, *arguments):
    process = start_torchrun(count, *arguments)
    said, cried = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, said, cried)


def common(checkpoint, picture, out):
    return [
        *(
            "--model",
            checkpoint,
            "--image",
            str(picture),
            "--prompt",
            "robot picks up the cup",
        ),
        *(
            "--domain-name",
            "droid_lerobot",
            "--out",
            str(out),
            "--image-size",
            "256",
            "--num-steps",
            "2",
            "--device",
            "cpu",
        ),
    ]


def compare_with_one_process(arguments, folder, many, one):
    """The answer in ``many`` with that of one process without the flags that split it: both as near
    to float64 as helpers/parity.py says.
    """
    with pytest.MonkeyPatch.context() as patch:
        asked = asked_of(Cosmos3Engine, patch)
        assert main(["infer", *arguments, "--out", str(one)]) == 0
    known = reference(folder, asked[0])
    for path in (many, one):
        found = json.loads(path.with_name(f"{path.name}_action.json").read_text())
        assert found["scale"] == "model"
        assert known.share({"action": found["data"]}) <= 1


@pytest.fixture
def infer_arguments(checkpoints, picture, tmp_path):
    shared = common(checkpoints["nano"], picture, tmp_path / "many")
    return [*shared, "--guidance-scale", "4.0"]


def test_two_ranks_infer(infer_arguments, checkpoints, tmp_path, harness):
    """Forked ranks have what torchrun tells its own, and import nothing."""
    arguments = ["infer", "--cfg", "2", *infer_arguments, "--decode-video"]
    answers = harness.group(2, joined=False).run("command", arguments=arguments)
    assert [(status, said.count("wrote")) for status, said, _ in answers] == [(0, 2), (0, 0)]
    folder = checkpoints["nano"]
    compare_with_one_process(infer_arguments, folder, tmp_path / "many", tmp_path / "one")
    assert (tmp_path / "many.mp4").stat().st_size > 0


@pytest.mark.slow
def test_torchrun_infer(infer_arguments, checkpoints, tmp_path, who_came_to_the_end_of_python):
    done = torchrun(2, "--cfg", "2", *infer_arguments, "--decode-video")
    assert done.returncode == 0, done.stderr
    ended = who_came_to_the_end_of_python().values()
    assert any(line.startswith("no rank") for line in ended), "torchrun itself did"
    ranks = [
        line for line in ended if not line.startswith("no rank") and " -m strands_cosmos3 " in line
    ]
    assert not ranks, "gloo's threads might have aborted them there"
    assert done.stdout.count("wrote") == 2, "rank 0 alone speaks"
    folder = checkpoints["nano"]
    compare_with_one_process(infer_arguments, folder, tmp_path / "many", tmp_path / "one")
    assert (tmp_path / "many.mp4").stat().st_size > 0


def test_a_wrong_product_is_said_once_before_loading(capsys, tmp_path, picture):
    assert (
        main(
            ["infer", "--tp", "4", "--cfg", "2", *common("nowhere/at-all", picture, tmp_path / "o")]
        )
        == 2
    )
    assert (
        "torchrun --nproc-per-node=8 -m strands_cosmos3 infer --tp=4 --cfg=2"
        in capsys.readouterr().err
    )


NEEDS_FOUR = (
    "needs 4 processes, but there are 2 processes. Start them with: torchrun --nproc-per-node=4"
)


def test_a_wrong_product_is_said_by_one_rank(picture, tmp_path, harness):
    asked = ["infer", "--tp", "4", *common("nowhere/at-all", picture, tmp_path / "o")]
    answers = harness.group(2, joined=False).run("command", arguments=asked)
    assert all(status != 0 for status, _, _ in answers)
    assert [cried.count(NEEDS_FOUR) for _, _, cried in answers] == [1, 0]


@pytest.mark.slow
def test_a_wrong_product_under_torchrun_is_said_by_one_rank(picture, tmp_path):
    done = torchrun(2, "--tp", "4", *common("nowhere/at-all", picture, tmp_path / "o"))
    assert done.returncode == 1
    assert done.stderr.count(NEEDS_FOUR) == 1


def ranks_of(process):
    return [
        int(pid)
        for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_torchrun_ends_all_where_one_is_killed_and_on_ctrl_c(checkpoints, picture, tmp_path, sent):
    process = start_torchrun(
        2,
        "--tp",
        "2",
        *common(checkpoints["nano"], picture, tmp_path / "o"),
        "--num-steps",
        str(FOREVER),
    )
    try:
        deadline = time.monotonic() + 300
        while len(ranks := ranks_of(process)) < 2 or not (ports := listening(ranks)):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        if sent == signal.SIGKILL:
            os.kill(ranks[1], sent)
        else:
            os.killpg(process.pid, sent)
        cried = process.communicate(timeout=300)[1]
    finally:
        for left in ranks_of(process) if process.poll() is None else []:
            os.kill(left, signal.SIGKILL)
        process.kill()
    assert process.returncode not in (0, -signal.SIGKILL), "torchrun itself says that it failed"
    assert "SIGABRT" not in cried
    assert "RuntimeError: [" not in cried, "gloo's own error is not shown"
    assert not any(map(alive, ranks))
    assert not ports & listening()
    assert not list(tmp_path.glob("o[._]*")), "nothing was written"


@pytest.mark.slow
def test_every_example_of_the_multi_gpu_page(checkpoints, picture, tmp_path):
    """With our program's name, and fewer steps on a small canvas."""
    from strands_cosmos3.films import VideoWriter

    film = tmp_path / "obs.mp4"
    with VideoWriter(film, 15) as writer:
        for i in range(17):
            writer.write(np.full((96, 128, 3), 12 * i, np.uint8))
    actions = tmp_path / "action.json"
    actions.write_text(json.dumps([[0.1] * 10] * 16))
    shared = common(checkpoints["nano"], picture, tmp_path / "x")
    no_image = [*shared[:2], *shared[4:]]
    examples = [
        (4, ["--tp", "4", *shared]),
        (8, ["--cfg", "2", "--tp", "4", "--guidance-scale", "4.0", *shared]),
        (4, ["--tp", "4", *shared, "--mode", "forward_dynamics", "--action-file", str(actions)]),
        (
            4,
            [
                "--tp",
                "4",
                *no_image,
                "--video",
                str(film),
                "--mode",
                "inverse_dynamics",
                "--condition-frames",
                "0,1",
            ],
        ),
    ]
    for i, (count, arguments) in enumerate(examples):
        out = tmp_path / f"example{i}"
        arguments[arguments.index("--out") + 1] = str(out)
        done = torchrun(count, *arguments)
        assert done.returncode == 0, done.stderr
        one = tmp_path / f"one{i}"
        single = [part for part in arguments if part not in ("--tp", "--cfg")]
        single = single[1 if "--cfg" not in arguments else 2 :]
        at = single.index("--out")
        compare_with_one_process([*single[:at], *single[at + 2 :]], checkpoints["nano"], out, one)
        assert out.with_name(f"{out.name}.mp4").exists() == ("forward_dynamics" in arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "error"), [(signal.SIGKILL, RankLostError), (signal.SIGSTOP, RankSilentError)]
)
def test_eight_ranks_end_together(checkpoints, sent, error):
    backend = make_backend("distributed", checkpoints["nano"], options(ParallelConfig(4, 2)))
    assert isinstance(strike(backend.engine, sent, 5), error)
    backend.close()


@pytest.mark.slow
def test_rollout(checkpoints, tmp_path):
    out = tmp_path / "figures.json"
    arguments = [
        "--backend",
        "distributed",
        "--model",
        checkpoints["nano"],
        "--tp",
        "2",
        "--num-steps",
        "2",
        "--device",
        "cpu",
    ]
    status = main(
        ["rollout", "--task", "pick", *arguments, "--duration", "1.0", "--json", str(out)]
    )
    assert status in (0, 1)  # random weights pick nothing up
    assert json.loads(out.read_text())["episodes"][0]["steps"]["total"] > 0


@pytest.mark.slow
def test_serve(tmp_path):
    from recipes.random_checkpoint import write_checkpoint
    from strands_cosmos3.backends.service import ServiceBackend
    from strands_cosmos3.serving.client import ClientConfig, PolicyClient

    checkpoint = write_checkpoint(tmp_path / "joint", action_space="joint_pos")
    command = [
        sys.executable,
        "-m",
        "strands_cosmos3",
        "serve",
        "--model",
        str(checkpoint),
        "--tp",
        "2",
        "--cfg",
        "2",
    ]
    command += ["--num-steps", "1", "--device", "cpu", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            said = server.stdout.readline()
            assert "serving distributed" in said
            service = ServiceBackend(
                PolicyClient(ClientConfig("127.0.0.1", int(said.split("127.0.0.1:")[1].split()[0])))
            )
            views = {view: np.zeros((360, 640, 3), np.uint8) for view in DROID.rig.views}
            asked = Request(
                DROID, DROID.spaces["joint_pos"], "pick", 32, np.zeros(7), 0.8, images=views, seed=1
            )
            assert service.infer(asked).action.shape == (32, 8)
            service.close()
            ranks = [
                int(pid)
                for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children")
                .read_text()
                .split()
            ]
            assert len(ranks) == 4
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0
        finally:
            server.kill()
    assert wait_gone(ranks)
