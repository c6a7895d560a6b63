"""One engine on two machines, which are network namespaces with addresses of their own."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.environments import network_namespace
from helpers.machines import ADDRESSES, Machines, inside
from helpers.options import backend_options
from recipes.random_checkpoint import write_checkpoint
from strands_cosmos3.backends import make_backend
from strands_cosmos3.backends.service import ServiceBackend
from strands_cosmos3.cli import main
from strands_cosmos3.embodiments import get_embodiment
from strands_cosmos3.engine.checkpoint import Checkpoint
from strands_cosmos3.errors import ConfigError
from strands_cosmos3.parallel.launched import watch_machines
from strands_cosmos3.serving.client import ClientConfig, PolicyClient
from strands_cosmos3.serving.served import ServedPolicy
from strands_cosmos3.serving.server import PolicyServer, ServerConfig
from strands_cosmos3.types import Request

DROID = get_embodiment("droid")
ENDED_S = 10
NAMES = [f"rank {node} (node {node}, {address})" for node, address in enumerate(ADDRESSES)]


@pytest.fixture(scope="module")
def machines():
    network_namespace()
    with Machines() as made:
        yield made


@pytest.fixture(scope="module")
def asked(checkpoints, tmp_path_factory):
    """A command line without degrees, output and number of steps."""
    picture = tmp_path_factory.mktemp("machines") / "picture.png"
    pixels = np.random.RandomState(0).randint(0, 256, (96, 128, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(picture)
    asked = ["infer", "--model", checkpoints["nano"], "--image", str(picture), "--prompt", "cup"]
    return [*asked, "--domain-name", "droid_lerobot", "--image-size", "256", "--device", "cpu"]


def rows(path):
    return np.array(json.loads(path.read_text())["data"])


def end_of(machines, processes, lost, how):
    """Lose a machine; returns how long the other's process lived on, and its status."""
    if how == "killed":
        processes[lost].kill()
    else:
        machines.plug(lost, "down")
    lost_at = time.monotonic()
    status = processes[1 - lost].wait(60)
    return time.monotonic() - lost_at, status


def wait_for(condition, process):
    deadline = time.monotonic() + 300
    while not (found := condition()):
        assert process.poll() is None, process.said
        assert time.monotonic() < deadline, process.said
        time.sleep(0.05)
    return found


LOSSES = [
    ("killed", 1),
    *(pytest.param(*loss, marks=pytest.mark.slow) for loss in (("killed", 0), ("unplugged", 0))),
    ("unplugged", 1),
]


@pytest.mark.parametrize(("how", "lost"), LOSSES)
def test_a_lost_machine_ends_the_other_and_a_second_start_works(
    machines, asked, tmp_path, how, lost
):
    many = [*asked, "--cfg", "2", "--guidance-scale", "4"]
    outs = [(*many, "--out", tmp_path / f"out{node}") for node in range(2)]
    log = tmp_path / "lost"
    processes = machines.start(log, *((*out, "--num-steps", "900") for out in outs))
    wait_for(log.with_name("lost.working").exists, processes[0])
    lived_s, status = end_of(machines, processes, lost, how)
    print(f"{how}: the other machine's process ended after {lived_s:.1f} s")
    assert lived_s < ENDED_S
    assert status == 1
    lines = [line for line in processes[1 - lost].said.splitlines() if "strands" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"strands-cosmos3: lost {NAMES[lost]}: it failed")
    assert lines[0].endswith("start the command again on every machine.")
    assert not list(tmp_path.glob("out*")), "nothing was written"

    machines.plug(lost)
    processes[lost].wait(60)
    if how == "unplugged":
        return
    log = tmp_path / "again"
    again = machines.start(log, *((*out, "--num-steps", "2") for out in outs), again=True)
    assert [process.wait() for process in again] == [0, 0], again[0].said + again[1].said
    assert again[0].said.count("wrote") == 1
    assert not again[1].said.strip(), "rank 0 alone speaks"
    assert [path.name for path in tmp_path.glob("out*")] == ["out0_action.json"]
    one = [*asked, "--guidance-scale", "4", "--num-steps", "2", "--out", str(tmp_path / "one")]
    assert main(one) == 0
    alone, both = rows(tmp_path / "one_action.json"), rows(tmp_path / "out0_action.json")
    np.testing.assert_allclose(both, alone, rtol=0, atol=5e-5)


def torchrun(machines, node, log, *arguments):
    """The real one, with two ranks on a machine."""
    command = ["ip", "netns", "exec", machines.names[node], sys.executable]
    command += ["-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"]
    command += ["--nproc-per-node=2", f"--master-addr={ADDRESSES[0]}", "--master-port=29400"]
    command += ["-m", "strands_cosmos3", *map(str, arguments)]
    with log.open("w") as printed:
        return subprocess.Popen(
            command,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )


def members(process):
    """The processes that torchrun started, and itself."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [*map(int, children), process.pid]


@pytest.mark.slow
def test_torchrun_on_two_machines_with_two_ranks_each(machines, asked, tmp_path):
    many = [*asked, "--cfg", "2", "--tp", "2", "--guidance-scale", "4"]
    logs = [tmp_path / f"log{node}" for node in range(2)]

    def start(steps):
        return [
            torchrun(machines, n, logs[n], *many, "--num-steps", steps, "--out", tmp_path / f"o{n}")
            for n in range(2)
        ]

    processes = start(2)
    assert [process.wait(300) for process in processes] == [0, 0], logs[0].read_text()
    assert logs[0].read_text().count("wrote") == 1
    assert "wrote" not in logs[1].read_text()
    assert [path.name for path in tmp_path.glob("o?_*")] == ["o0_action.json"]
    one = [*asked, "--guidance-scale", "4", "--num-steps", "2", "--out", str(tmp_path / "one")]
    assert main(one) == 0
    alone, both = rows(tmp_path / "one_action.json"), rows(tmp_path / "o0_action.json")
    np.testing.assert_allclose(both, alone, rtol=0, atol=5e-5)

    processes = start(900)
    wait_for(lambda: "1/900" in logs[0].read_text(), processes[0])
    ranks = members(processes[0])[:2]
    for pid in members(processes[1]):
        os.kill(pid, signal.SIGKILL)
    lost_at = time.monotonic()
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < lost_at + 60
        time.sleep(0.05)
    lived_s = time.monotonic() - lost_at
    print(f"torchrun: the other machine's ranks ended after {lived_s:.1f} s")
    assert lived_s < ENDED_S
    assert processes[0].wait(60) == 1
    assert logs[0].read_text().count("strands-cosmos3: lost rank ") == 1
    assert f"(node 1, {ADDRESSES[1]})" in logs[0].read_text()


def test_different_checkpoints_are_refused_before_loading(machines, asked, checkpoints, tmp_path):
    """Also before a machine finds out by itself that its weights are damaged."""
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoints["nano"], damaged)
    weights = next((damaged / "transformer").glob("*.safetensors"))
    with weights.open("r+b") as file:
        file.seek(-9, 2)
        file.write(b"\x01")
    commands = [[*asked, "--tp", "2", "--out", tmp_path / f"out{node}"] for node in range(2)]
    commands[1][commands[1].index(checkpoints["nano"])] = damaged
    processes = machines.start(tmp_path / "log", *commands)
    assert [process.wait() for process in processes] == [1, 1]
    digests = [Checkpoint.open(Path(path)).digest[:12] for path in (checkpoints["nano"], damaged)]
    for process in processes:
        assert process.said == (
            "strands-cosmos3: the checkpoint is not the same on all machines (SHA-256 of node 0, "
            f"1 ...: {', '.join(digests)}); copy one machine's to the others."
        )


def test_one_machine_s_usage_error_ends_the_other(machines, asked, tmp_path):
    commands = [[*asked, "--tp", "2", "--out", tmp_path / f"out{node}"] for node in range(2)]
    processes = machines.start(tmp_path / "log", commands[0], [*commands[1], "--nonsense"])
    assert [process.wait() for process in processes] == [1, 2]
    assert "--nonsense" in processes[1].said
    assert processes[0].said.startswith(f"strands-cosmos3: lost {NAMES[1]}: it failed and says why")


def test_a_wrong_product_is_said_with_the_line_for_these_machines(machines, asked, tmp_path):
    command = [*asked, "--tp", "4", "--out", tmp_path / "out"]
    processes = machines.start(tmp_path / "log", command, command)
    assert processes[0].wait() == 2
    assert processes[1].wait() in (1, 2), "it says so too, or that it lost the other"
    assert (
        "tp=4 x cfg=1 needs 4 processes, but there are 2 processes. Start them with: "
        "torchrun --nnodes=2 --nproc-per-node=2 -m strands_cosmos3"
    ) in processes[0].said


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_without_a_meeting_point_the_remedy_is_said(monkeypatch, missing):
    told = {"TORCHELASTIC_RUN_ID": "tests", "RANK": "1", "WORLD_SIZE": "2"}
    told |= {"LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}
    for name, value in (told | {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(ConfigError, match=f"{missing} expected.*--master-addr, the address of"):
        watch_machines()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A command line of a server, without degrees."""
    folder = tmp_path_factory.mktemp("served") / "joint"
    checkpoint = write_checkpoint(folder, action_space="joint_pos")
    serve = ["serve", "--model", checkpoint, "--num-steps", "1", "--image-size", "256"]
    return [*serve, "--device", "cpu", "--port", "0"]


def ask(port, seeds):
    """The server's rows for several seeds."""
    service = ServiceBackend(PolicyClient(ClientConfig("127.0.0.1", port)))
    views = {view: np.zeros((360, 640, 3), np.uint8) for view in DROID.rig.views}
    space = DROID.spaces["joint_pos"]
    questions = [
        Request(DROID, space, "pick", 32, np.zeros(7), 0.8, images=views, seed=seed)
        for seed in seeds
    ]
    answers = [service.infer(question).action for question in questions]
    service.close()
    return answers


def served_port(process):
    address = r"serving distributed for droid on ws://127.0.0.1:(\d+)"
    return int(wait_for(lambda: re.search(address, process.said), process)[1])


@pytest.mark.slow
def test_rank_0_serves_and_stops_all_and_a_lost_machine_ends_it(machines, served, tmp_path):
    command = [*served, "--cfg", "2", "--guidance-scale", "3"]
    processes = machines.start(tmp_path / "log", command, command)
    port = served_port(processes[0])
    both = inside(machines.names[0], lambda: ask(port, (1, 2)))
    os.kill(processes[1].pid, signal.SIGTERM)  # it follows until rank 0 stops
    os.kill(processes[0].pid, signal.SIGTERM)
    assert [process.wait(60) for process in processes] == [0, 0], processes[0].said
    assert not processes[1].said.strip(), "rank 0 alone speaks"
    assert processes[0].said.endswith("stopped")

    quick = backend_options(device="cpu", num_steps=1, guidance_scale=3.0, image_size=256)
    alone = ServedPolicy(make_backend("native", served[2], quick), "droid")
    with PolicyServer(alone, ServerConfig(port=0)) as server:
        np.testing.assert_allclose(both, ask(server.port, (1, 2)), rtol=0, atol=5e-5)

    again = machines.start(tmp_path / "log", command, command, again=True)
    served_port(again[0])
    lived_s, status = end_of(machines, again, 1, "killed")
    assert lived_s < ENDED_S
    assert status == 1
    assert again[0].said.count(f"strands-cosmos3: lost {NAMES[1]}: ") == 1


def test_an_engine_of_several_machines_has_no_replicas(machines, served, tmp_path):
    command = [*served, "--tp", "2", "--replicas", "2"]
    processes = machines.start(tmp_path / "log", command, command)
    assert processes[0].wait() == 2
    assert processes[1].wait() in (1, 2), "it says so too, or that it lost the other"
    assert "--replicas must be" in processes[0].said
