"""CUDA graphs and compilation: what a machine without a GPU can show of them.

A stub stands for a CUDA graph: it recomputes from the fixed places that are held for it.
``test_gpu.py`` captures real ones.
"""

import shutil
import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from helpers.cosmos3_oracle import Case, request
from helpers.parity import reference, reference_of
from strands_cosmos3.engine.engine import Cosmos3Engine, Stopwatch
from strands_cosmos3.engine.graphs import Graphs
from strands_cosmos3.engine.options import EngineOptions
from strands_cosmos3.errors import ConfigError, InputError
from strands_cosmos3.parallel.config import ParallelConfig

GPU = torch.device("cuda", 1)


class Graph:
    """Replays by running the loop on what is held for it, into the outputs of the capture."""

    graphs: Graphs
    replays = 0

    def replay(self):
        mine = next(c for c in self.graphs._graphs.values() if c.graph is self)
        for held, new in zip(mine.outputs, mine.run(), strict=True):
            held.copy_(new)
        Graph.replays += 1


class Stream:
    def __init__(self, device=None):
        self.device = device

    def wait_stream(self, _):
        pass


@pytest.fixture
def captures(monkeypatch):
    """Calls of torch.cuda so far: the options of each capture, the pools, and the selected
    devices with their threads.
    """
    seen = {"graph": [], "pool": [], "device": []}

    def capture(_, **options):
        seen["graph"].append(options)
        return nullcontext()

    def select(device):
        seen["device"].append((device, threading.get_ident()))
        return nullcontext()

    def pool():
        seen["pool"].append(object())
        return seen["pool"][-1]

    stubs = {
        "CUDAGraph": Graph,
        "Stream": Stream,
        "current_stream": Stream,
        "graph": capture,
        "device": select,
    }
    for name, stub in {
        **stubs,
        "graph_pool_handle": pool,
        "stream": lambda _: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    return seen


@pytest.fixture
def graphed(checkpoints, captures):
    model = Cosmos3Engine.from_pretrained(checkpoints["silu"], dtype=torch.float32)
    model._graphs = Graph.graphs = Graphs(GPU)
    Graph.replays = 0
    return model


def variants(folder):
    asked = request(Case(folder, steps=2))
    longer = torch.arange(100, 300)
    cases = [
        asked,
        replace(asked, guidance_interval=(900, 1001)),
        replace(asked, fps=7.5, domain_id=6),
    ]
    cases += [
        replace(asked, text_ids=asked.text_ids[..., :9] + 1),
        replace(asked, return_video=False),
        asked,
    ]
    return [*cases, replace(asked, neg_text_ids=longer), replace(asked, guidance_scale=1.0)]


def same(found, expected):
    names = [name for name in ("action", "video") if name in expected]
    assert all(torch.equal(found[name], expected[name]) for name in names)


def test_replays_give_the_same_bits(graphed, checkpoints):
    plain = Cosmos3Engine.from_pretrained(checkpoints["silu"], dtype=torch.float32)
    cases = variants(checkpoints["silu"])
    for one in cases:
        same(graphed.step(one), plain.step(one))
    assert Graph.replays == len(cases), "a graph holds all steps"


def test_replays_of_batches_give_the_same_bits(graphed, checkpoints):
    """Requests with prompts, guidance and domains of their own; one graph serves two requests with
    one prompt and with two.
    """
    plain = Cosmos3Engine.from_pretrained(checkpoints["silu"], dtype=torch.float32)
    asked = request(Case(checkpoints["silu"], steps=2))
    other = replace(asked, text_ids=asked.text_ids + 1, seed=5)
    unguided = replace(asked, guidance_scale=1.0, domain_id=6)
    for batch in ([asked, asked], [asked, other], [unguided, asked, other], [other, other]):
        found, expected = graphed.step_batch(batch), plain.step_batch(batch)
        for one, two in zip(found, expected, strict=True):
            same(one, two)
    assert len(graphed._graphs._graphs) == 2, "of two requests and of three"


def test_a_replay_leaves_earlier_answers_alone(graphed, checkpoints):
    asked = request(Case(checkpoints["silu"], steps=3))
    first = graphed.step(asked)
    kept = {name: first[name].clone() for name in ("action", "video")}
    graphed.step(replace(asked, seed=7))
    assert len(graphed._graphs._graphs) == 1
    same(first, kept)


def test_one_graph_serves_prompts_of_a_length_and_all_domains(graphed, captures, checkpoints):
    asked = request(Case(checkpoints["silu"], steps=2))
    for first in (0, 3):
        for domain in (8, 6):
            ids = asked.text_ids[..., first : first + 9]
            graphed.step(replace(asked, text_ids=ids, domain_id=domain, fps=20.0))
    assert len(captures["graph"]) == 1
    graphed.step(replace(asked, text_ids=asked.text_ids[..., :8]))
    graphed.step(replace(asked, return_video=False))
    graphed.step(replace(asked, num_inference_steps=3))
    assert len(captures["graph"]) == 4, "other lengths, a last step of actions alone, other steps"


def test_steps_of_a_graph_are_reported_together(graphed, checkpoints):
    reported = []
    asked = request(Case(checkpoints["silu"], steps=2))
    graphed.step(asked, on_step=lambda *at: reported.append(at))
    assert reported == [(2, 2)]


def test_captures_share_a_pool_and_leave_other_threads_alone(graphed, captures, checkpoints):
    asked = request(Case(checkpoints["silu"], steps=2))
    worker = threading.Thread(
        target=lambda: [graphed.step(one) for one in (asked, replace(asked, guidance_scale=1.0))]
    )
    worker.start()
    worker.join()
    assert len(captures["pool"]) == 1
    assert [options["capture_error_mode"] for options in captures["graph"]] == ["thread_local"] * 2
    assert all(
        options["pool"] is captures["pool"][0] and options["stream"]
        for options in captures["graph"]
    )
    assert set(captures["device"]) == {(GPU, worker.ident)}, "a thread starts with the first GPU"


def test_graphs_are_bounded(graphed, captures, checkpoints):
    asked = request(Case(checkpoints["silu"], steps=1, guidance=1.0))
    for i in range(9):
        graphed.step(replace(asked, action_chunk=3 + i, action_noise=None))
    assert len(graphed._graphs._graphs) == 8
    for rows in (4, 12, 4):
        graphed.step(replace(asked, action_chunk=rows, action_noise=None))
    assert len(captures["graph"]) == 10, "the least recently used one went: not that of four rows"
    graphed.close()
    assert not graphed._graphs._graphs


def test_times_are_those_of_the_engines_device(monkeypatch):
    asked = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            asked.append(stream.device)

        def elapsed_time(self, _):
            return 2.0

    for name, stub in {
        "Event": Event,
        "current_stream": Stream,
        "synchronize": asked.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    clock = Stopwatch(GPU)
    with clock.part("denoise"):
        pass
    assert clock.milliseconds() == {"denoise": 2.0, "total": 2.0}
    assert asked == [GPU] * 3


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("c++") is None, reason="inductor compiles C++, and there is no compiler `c++`"
)
@pytest.mark.parametrize("kind", ["silu", "relu2"])
def test_inductors_code_gives_the_same_actions(kind, checkpoints):
    """With and without guidance, for prompts and chunks of several lengths, and in a batch: as near to
    float64 as helpers/parity.py says.
    """
    options = EngineOptions(compile=True)
    with Cosmos3Engine.from_pretrained(
        checkpoints[kind], dtype=torch.float32, options=options
    ) as model:
        cases = variants(checkpoints[kind])
        known = [reference(checkpoints[kind], one) for one in cases]
        for one, expected in zip(cases, known, strict=True):
            assert expected.share(model.step(one)) <= 1
        found = model.step_batch(cases[:1] + cases[3:4])
        for one, expected in zip(found, known[:1] + known[3:4], strict=True):
            assert expected.share(one) <= 1


def test_compile_asks_for_inductors_code_of_the_layers(checkpoints, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda layer, **options: asked.append(options) or layer)
    model = Cosmos3Engine.from_pretrained(checkpoints["silu"], options=EngineOptions(compile=True))
    expected = {"fullgraph": True, "dynamic": True, "backend": "inductor"}
    assert asked == [expected] * (len(model.transformer.generation.layers) - 1)
    case = Case(checkpoints["silu"], steps=1)
    assert reference_of(case).share(model.step(request(case))) <= 1


def test_options_are_checked_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="cuda_graphs needs a CUDA device"):
        Cosmos3Engine.from_pretrained("nowhere", options=EngineOptions(cuda_graphs=True))
    for degrees in (ParallelConfig(tp_size=2), ParallelConfig(sp_size=2)):
        with pytest.raises(ConfigError, match="the 2 ranks that tp_size and sp_size make"):
            Cosmos3Engine.from_pretrained(
                "nowhere", options=EngineOptions(compile=True), parallel=degrees
            )
    with pytest.raises(InputError, match="text_cache_bytes"):
        EngineOptions(text_cache_bytes=-1)
    with pytest.raises(InputError, match="compile must be"):
        EngineOptions(compile="yes")
