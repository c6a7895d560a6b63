"""The book-keeping of CUDA graphs, with a graph that recomputes from its own fixed places: no GPU captured one here."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from helpers.cosmos3_oracle import Case, engine, request
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.graphs import VelocityRunner


class Graph:
    """Replays by running the model on what the runner holds for it, into the outputs of the capture."""

    runner: VelocityRunner
    replays = 0

    def replay(self):
        mine = next(c for c in self.runner._graphs.values() if c.graph is self)
        fresh = mine.run()
        for held, new in zip(mine.outputs, fresh, strict=True):
            held.copy_(new)
        Graph.replays += 1


class Stream:
    def wait_stream(self, _):
        pass


@pytest.fixture
def graphed(checkpoints, monkeypatch):
    model = Cosmos3Engine.from_pretrained(checkpoints["silu"], dtype=torch.float32)
    model._runner = Graph.runner = VelocityRunner(model.transformer, capture=True)
    Graph.replays = 0
    for name, stub in {"CUDAGraph": Graph, "Stream": Stream, "current_stream": Stream}.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(torch.cuda, "graph", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    return model


def test_replays_give_the_same_bits(graphed, checkpoints):
    plain = engine(checkpoints["silu"], torch.float32)
    asked = request(Case(checkpoints["silu"], steps=3))
    variants = [asked, replace(asked, guidance_interval=(900, 1001)), replace(asked, fps=7.5), replace(asked, domain_id=6)]
    variants += [replace(asked, text_ids=asked.text_ids + 1), replace(asked, cond_frame_indexes=(0, 1)), asked]
    for one in variants:
        found, expected = graphed.step(one), plain.step(one)
        assert torch.equal(found["action"], expected["action"])
        assert torch.equal(found["video"], expected["video"])
    assert Graph.replays == 3 * len(variants)


def test_graphs_are_reused_and_bounded(graphed, checkpoints):
    asked = request(Case(checkpoints["silu"], steps=4))
    graphed.step(asked)
    assert len(graphed._runner._graphs) == 1, "one shape, one pair of prompts"
    for i in range(10):
        graphed.step(replace(asked, text_ids=asked.text_ids + i))
    assert len(graphed._runner._graphs) == 8
    graphed.close()
    assert not graphed._runner._graphs
