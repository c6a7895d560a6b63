"""Cosmos 3 inference: checkpoints, the two towers, packing, sampling, the VAE.

``config`` and ``variants`` do not import torch. Import the modules themselves.
"""
