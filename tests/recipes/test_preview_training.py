"""The loss of the decoder of films."""

import torch

from recipes.table_policy.preview import fresh_preview, preview_loss


def test_the_loss_falls_and_weighs_what_moves():
    decoder, generator = fresh_preview(4), torch.Generator().manual_seed(2)
    latents = torch.randn(2, 4, 2, 2, 2, generator=generator)
    pixels = torch.zeros(2, 3, 5, 32, 32)
    pixels[:, :, 1:, :, :16] = 0.5  # the left half moves
    optimizer = torch.optim.Adam(decoder.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        loss, metrics = preview_loss(decoder, latents, pixels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(metrics["loss"])
    assert losses[-1] < losses[0] / 2

    class Off(torch.nn.Module):
        def __init__(self, half):
            super().__init__()
            self.half = half

        def forward(self, _):
            out = pixels.clone()
            out[:, :, 1:, :, self.half] += 0.2
            return out

    assert (
        preview_loss(Off(slice(0, 16)), latents, pixels)[0]
        > 3 * preview_loss(Off(slice(16, 32)), latents, pixels)[0]
    )
