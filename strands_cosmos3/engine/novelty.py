"""How unlike the pictures of training a camera picture is.

Shape suffixes: C latent channels, H W latent height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from array_api_compat import array_namespace

from strands_cosmos3.engine.arrays import Array


class NovelPictureWarning(UserWarning):
    """A camera picture is unlike those of the checkpoint's training."""


class Remembered:
    """A function of an array that remembers its latest answer."""

    def __init__(self, function: Callable[[Array], Array]):
        self._function = function
        self._latest: tuple[Array, Array] | None = None

    def __call__(self, argument: Array, again: bool) -> Array:
        """Return the answer, the remembered one if ``again`` and the argument is equal."""
        if not again or self._latest is None or not _equal(argument, self._latest[0]):
            # a copy, since the caller may write the next picture over it
            copy = array_namespace(argument).asarray(argument, copy=True)
            self._latest = copy, self._function(argument)
        return self._latest[1]

    def row(self, argument: Array) -> Array | None:
        """Return the row [1, ...] of the latest answer for a row [1, ...] of its argument; None if
        it has no such row.
        """
        for known, answer in zip(*(self._latest or ((), ())), strict=True):
            if _equal(known, argument[0]):
                return answer[None]
        return None


class Novelty:
    """Dissimilarity of pictures to those of training: the RMS error of their reconstruction,
    divided by a quantile of such errors.

    Above 1 a picture is unusual: 99.9 % of the validation pictures are below.

    Args:
        decoder: The checkpoint's preview decoder, or None if it has none; then nothing is known.
        quantile: The checkpoint's ``novelty_rmse``, for pixels in 0..1, or None if it states none;
            then nothing is known.
    """

    def __init__(self, decoder: Callable[[Array], Array] | None, quantile: float | None):
        self._decoded = None if decoder is None else Remembered(decoder)
        self._quantile = quantile

    def __call__(
        self, pictures: Sequence[Array], latents: Sequence[Array], again: bool
    ) -> list[float]:
        """Return the novelty of each picture, or an empty list if it is not known.

        Args:
            pictures: Pixels [1, 3, frames, height, width] in [-1, 1]; the first frame counts. The
                same tensor is judged once.
            latents: Normalised latents [C, H, W] of the first frames, all of one size; what lies
                beyond them is padding.
            again: Whether the latest ones may come again.
        """
        if self._decoded is None or self._quantile is None:
            return []
        judged = {id(picture): place for place, picture in enumerate(pictures)}
        own = list(judged.values())
        xp = array_namespace(*latents)
        decoded = self._decoded(xp.stack([latents[i] for i in own])[:, :, None], again)
        decoded = xp.astype(xp.clip(decoded, -1, 1), xp.float32, copy=False)
        height, width = decoded.shape[-2:]
        real = xp.concat([pictures[i][:, :, :1, :height, :width] for i in own])
        off = decoded - xp.asarray(real, dtype=decoded.dtype, device=decoded.device)
        errors = xp.sqrt(xp.mean(xp.square(off), axis=(1, 2, 3, 4))) / 2 / self._quantile
        error_of = dict(zip(judged, cast("list[float]", errors.tolist()), strict=True))
        return [error_of[id(picture)] for picture in pictures]

    def decoded(self, latents: Array) -> Array | None:
        """The picture [1, 3, 1, height, width] that the preview decoder made of these latents [1,
        C, 1, H, W], if they were among the latest.
        """
        return None if self._decoded is None else self._decoded.row(latents)


def _equal(one: Array, other: Array) -> bool:
    return one.shape == other.shape and bool((one == other).all())
