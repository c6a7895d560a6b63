"""What only LIBERO's simulator knows: the extent of every object. Experts read it, policies must
not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from strands_cosmos3.actions.kernels import assemble, from_scipy
from strands_cosmos3.checks import F64
from strands_cosmos3.environments.libero_world import LiberoWorld

TCP = "tcp"
"""Key of the pose [4, 4] of the point between the fingers in the world; every other key is an
object's extent [2, 3].
"""


def privileged(world: LiberoWorld) -> dict[str, F64]:
    """Return the pose of the hand and the lowest and highest corner [2, 3] in m of every
    object's collision geoms.
    """
    from scipy.spatial.transform import Rotation

    R = from_scipy(Rotation.from_quat(world.observed["robot0_eef_quat"][None]), ())
    simulation = world.simulation
    extents = {
        name: _extent(simulation, body.root_body) for name, body in simulation.objects_dict.items()
    }
    return {TCP: assemble(R, world.observed["robot0_eef_pos"]), **extents}


def _extent(simulation: Any, root_body: str) -> F64:
    model, data = simulation.sim.model._model, simulation.sim.data._data
    root = simulation.sim.model.body_name2id(root_body)
    geoms = np.flatnonzero(
        (model.body_rootid[model.geom_bodyid] == root) & (model.geom_contype > 0)
    )
    R = data.geom_xmat[geoms].reshape(-1, 3, 3)
    boxes = model.geom_aabb[geoms]
    centre = data.geom_xpos[geoms] + np.einsum("gij,gj->gi", R, boxes[:, :3])
    reach = np.einsum("gij,gj->gi", np.abs(R), boxes[:, 3:])
    return np.array([(centre - reach).min(axis=0), (centre + reach).max(axis=0)])
