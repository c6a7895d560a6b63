"""Cosmos 3 inference: checkpoints, both towers, packing, sampling, the VAE. ``config`` and
``variants`` import no torch.
"""
