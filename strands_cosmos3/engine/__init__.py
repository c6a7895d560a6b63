"""Cosmos 3 inference in this process: checkpoints, the two towers, packing, sampling, the VAE. torch lives here.

``config`` and ``variants`` need no torch; everything else does. Import the modules themselves.
"""
