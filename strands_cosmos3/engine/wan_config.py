"""The fields of ``vae/config.json``, read and validated. Unknown ones are ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from strands_cosmos3.checks import typed_fields
from strands_cosmos3.engine.computed import require_computed
from strands_cosmos3.engine.sequence import SPATIAL_COMPRESSION, TEMPORAL_COMPRESSION
from strands_cosmos3.errors import InputError, LayoutError
from strands_cosmos3.resources import shown
from strands_cosmos3.tables import as_tuples


@dataclass(frozen=True)
class WanConfig:
    """The fields of ``vae/config.json`` that describe the network."""

    base_dim: int
    decoder_base_dim: int
    z_dim: int
    in_channels: int
    out_channels: int
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temporal_downsample: tuple[bool, ...] = (False, True, True)
    patch_size: int = 1
    latent_frames: tuple[tuple[tuple[float, ...], ...], ...] = ()
    """(mean, std) [z_dim] each of the normalised latents of frames 0, 1, ... of a clip; the last
    is that of later ones too.
    """

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> WanConfig:
        """Read a released config.

        Raises:
            LayoutError: It does not describe a residual Wan VAE with 4 x 16 x 16 compression.
        """
        stated = {name: value for name, value in data.items() if value is not None}
        stated["temporal_downsample"] = stated.get("temperal_downsample", cls.temporal_downsample)
        try:
            stated.setdefault("decoder_base_dim", stated["base_dim"])
            stated["latent_frames"] = [
                [each["mean"], each["std"]] for each in stated.get("latent_frames", ())
            ]
            names = [field.name for field in fields(cls) if field.name in stated]
            config = cls(**{name: as_tuples(stated[name]) for name in names})
            typed_fields(config)
        except (TypeError, KeyError, InputError) as error:
            raise LayoutError(
                f"vae/config.json does not describe a Wan VAE ({shown(error)}); download it again."
            ) from None
        config._require_bounds()
        # not residual is diffusers' default
        require_computed("vae/config.json", {"is_residual": False, **data}, config)
        if (
            len(config.temporal_downsample) != len(config.dim_mult) - 1
            or min(config.dim_mult, default=0) < 1
        ):
            raise LayoutError(
                "vae/config.json: temperal_downsample must have one value fewer than dim_mult."
            )
        scales = (config.latents_mean, config.latents_std), *config.latent_frames
        if not all(len(values) == config.z_dim for scale in scales for values in scale):
            raise LayoutError(
                "vae/config.json: latents_mean, latents_std and every latent_frames must have "
                f"z_dim = {config.z_dim} values."
            )
        scales = data.get("scale_factor_temporal", 4), data.get("scale_factor_spatial", 8)
        built = (
            2 ** sum(config.temporal_downsample),
            config.patch_size * 2 ** (len(config.dim_mult) - 1),
        )
        if not scales == built == (TEMPORAL_COMPRESSION, SPATIAL_COMPRESSION):
            raise LayoutError(
                f"vae/config.json compresses (time, space) by {built} and states {shown(scales)}; "
                "Cosmos 3 needs (4, 16)."
            )
        return config

    def _require_bounds(self) -> None:
        """Raise LayoutError for sizes that no VAE has, before anything is built of them, and for
        an unusable scale.
        """
        sizes = {name: size for name, size in vars(self).items() if isinstance(size, int)}
        sizes |= {
            "len(dim_mult)": len(self.dim_mult),
            "max(dim_mult)": max(self.dim_mult, default=1),
        }
        for name, size in sizes.items():
            largest = 4096 if name.endswith(("dim", "channels")) else 16
            if not 0 < size <= largest:
                raise LayoutError(
                    f"vae/config.json: {name} is {size}; it must be "
                    f"1..{largest}. Download it again."
                )
        for mean, std in ((self.latents_mean, self.latents_std), *self.latent_frames):
            if not all(map(math.isfinite, mean)) or not all(0 < value < math.inf for value in std):
                raise LayoutError(
                    "vae/config.json: latents_mean must be finite, latents_std above zero, and "
                    "latent_frames likewise."
                )
