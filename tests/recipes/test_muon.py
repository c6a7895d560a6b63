"""Muon's steps."""

import numpy as np
import pytest
import torch
from torch import nn

from recipes import muon
from recipes.muon import Muon, muon_and_adamw, orthogonal
from strands_cosmos3.training.loop import Loop, TrainLoopConfig


@pytest.mark.parametrize(
    ("lower", "most"), [(False, 0.02), (True, 0.05)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("shape", [(24, 24), (12, 60), (60, 12)])
def test_every_singular_value_becomes_about_one_and_directions_stay(
    shape, lower, most, monkeypatch
):
    monkeypatch.setattr(muon, "fast_bfloat16", lambda *_, **__: lower)
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    made = orthogonal(matrix)
    assert torch.linalg.svdvals(made).min() > 0.6
    assert torch.linalg.svdvals(made).max() < 1.25
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.T @ made @ vh.T  # diagonal where the directions are kept
    assert (inner - torch.diag(inner.diagonal())).abs().max() < most
    assert made.dtype == torch.float32


def test_a_step_is_nesterov_momentum_made_orthogonal():
    """A kernel is a matrix with a row for each output channel; with more rows than columns it
    moves further.
    """
    generator = torch.Generator().manual_seed(0)
    kernel = nn.Parameter(torch.randn(40, 2, 1, 3, 3, generator=generator))
    start, momentum = kernel.detach().clone(), torch.zeros(40, 18)
    optimizer = Muon([kernel], lr=0.1)
    expected = start.flatten(1)
    for _ in range(2):
        kernel.grad = torch.randn(kernel.shape, generator=generator)
        flat = kernel.grad.flatten(1)
        momentum = 0.95 * momentum + 0.05 * flat
        expected = expected - 0.1 * (40 / 18) ** 0.5 * orthogonal(0.05 * flat + 0.95 * momentum)
        optimizer.step()
    torch.testing.assert_close(kernel.detach().flatten(1), expected)


def test_weight_decay_bounds_what_steps_add():
    """Each step takes ``lr weight_decay`` of a matrix away, before it adds."""
    matrix = nn.Parameter(torch.full((6, 6), 3.0))
    optimizer = Muon([matrix], lr=0.1, weight_decay=0.5)
    matrix.grad = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    expected = 3.0 * (1 - 0.1 * 0.5) - 0.1 * orthogonal(
        0.05 * 0.95 * matrix.grad + 0.05 * matrix.grad
    )
    optimizer.step()
    torch.testing.assert_close(matrix.detach(), expected)


def test_matrices_of_one_shape_move_as_each_does_alone():
    """They are made orthogonal together: each gets its own step, and one without a gradient
    stays.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = (6, 4), (4, 6), (6, 4), (6, 2, 2), (6, 4)
    starts, gradients = (
        [torch.randn(shape, generator=generator) for shape in shapes] for _ in range(2)
    )

    def moved(*which: int) -> list[torch.Tensor]:
        matrices = [nn.Parameter(starts[i].clone()) for i in which]
        for i, matrix in zip(which, matrices, strict=True):
            matrix.grad = gradients[i] if i < 4 else None
        Muon(matrices, lr=0.1).step()
        return [matrix.detach() for matrix in matrices]

    together = moved(*range(5))
    for i, matrix in enumerate(together):
        torch.testing.assert_close(matrix, *moved(i))
    assert torch.equal(together[4], starts[4])
    assert not torch.allclose(together[0] - starts[0], together[2] - starts[2])


class _Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.inner, self.proj_out = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)


def test_matrices_between_the_ends_take_muon_and_resume_to_the_bit(tmp_path):
    def loop(folder, steps=6):
        torch.manual_seed(0)
        model = _Small()

        def loss(step):
            x = torch.from_numpy(np.random.default_rng(step).normal(size=(16, 4))).float()
            made = model.proj_out(torch.relu(model.inner(model.embed(x))))
            value = (made - x[:, :2]).square().mean()
            return value, {"loss": value.item()}

        config = TrainLoopConfig(steps, 0.01, 1)
        return Loop(model, loss, config, folder, muon_and_adamw(0.05, 0.1))

    whole = loop(tmp_path / "whole")
    assert [
        sorted(p.shape for group in o.param_groups for p in group["params"])
        for o in whole.optimizers
    ] == [
        sorted([(8, 4), (8,), (8,), (2, 8), (2,)]),
        [(8, 8)],
    ]
    assert [group["weight_decay"] for group in whole.optimizers[1].param_groups] == [0.1]
    whole.run()
    half = loop(tmp_path / "half")
    half.run(until=3)
    again = loop(tmp_path / "half")
    assert again.step == 3
    again.run()
    for name, p in whole.model.state_dict().items():
        torch.testing.assert_close(again.model.state_dict()[name], p, rtol=0, atol=0, msg=name)
