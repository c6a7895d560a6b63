"""The exponential of twists, for tests that need asymmetric poses."""

import numpy as np
from scipy.linalg import expm


def se3_exp(xi):
    """[..., 6] twists (translation, rotation) -> [..., 4, 4]."""
    xi = np.asarray(xi, dtype=float)
    x, y, z = np.moveaxis(xi[..., 3:], -1, 0)
    X = np.zeros((*xi.shape[:-1], 4, 4))
    X[..., 2, 1], X[..., 0, 2], X[..., 1, 0] = x, y, z
    X[..., :3, :3] -= np.swapaxes(X[..., :3, :3], -1, -2)
    X[..., :3, 3] = xi[..., :3]
    return expm(X)
