"""The metric of the video's error: what a linear decoder of later frames makes of an error of
the latents.
"""

from __future__ import annotations

import torch

from recipes.table_policy.pixel_metric import pixel_metric

C, F, H, W = 6, 3, 2, 3


def drawn(latents: torch.Tensor, decoder: torch.Tensor) -> torch.Tensor:
    """Pixels [n, 3, 4 (F - 1) + 1, 16 H, 16 W] of latents, by a linear decoder [C, 3, 4, 16, 16]
    of later frames.
    """
    blocks = torch.einsum("ncfhw,ckpyx->nkfphywx", latents[:, :, 1:], decoder) + 0.3
    later = blocks.reshape(len(latents), 3, 4 * (F - 1), 16 * H, 16 * W)
    return torch.cat([torch.rand(len(latents), 3, 1, 16 * H, 16 * W), later], dim=2)


def test_it_is_the_error_of_the_pixels_that_depend_on_the_latents():
    torch.manual_seed(0)
    decoder = torch.randn(C, 3, 4, 16, 16) * torch.tensor([5.0, 1.0, 0.1, 0.0, 1.0, 2.0]).view(
        C, 1, 1, 1, 1
    )
    clips = [(latents, drawn(latents, decoder)) for latents in torch.randn(3, 4, C, F, H, W)]
    metric = pixel_metric(iter(clips))
    flat = decoder.flatten(1)
    of_pixels = flat @ flat.T
    expected = 0.3 * torch.eye(C) + 4 * C * of_pixels / of_pixels.trace()
    torch.testing.assert_close(metric @ metric.T, expected, rtol=1e-3, atol=1e-3)
    error = torch.randn(5, C)
    weighed = (error @ metric).square().sum(-1)  # the product on the side that the loss uses
    torch.testing.assert_close(
        weighed, torch.einsum("nc,cd,nd->n", error, expected, error), rtol=1e-3, atol=1e-3
    )


def test_a_direction_that_pixels_do_not_show_keeps_a_small_weight():
    torch.manual_seed(1)
    decoder = torch.randn(C, 3, 4, 16, 16)
    decoder[4] = 0
    latents = torch.randn(8, C, F, H, W)
    metric = pixel_metric([(latents, drawn(latents, decoder))])
    blind = torch.eye(C)[4] @ metric
    assert 0.29 < float(blind.square().sum()) < 0.32
