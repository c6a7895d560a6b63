"""A MuJoCo model's visible geoms as triangle meshes, one for each body and colour."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
import trimesh

from strands_cosmos3.actions.rotations import quaternion_to_matrix, se3

_HIDDEN_GROUPS = (3, 4, 5)
"""Geom groups of collision geometry, which is not drawn."""
_FACETS = 28  # sides of a cylinder or capsule


def body_meshes(model: mujoco.MjModel) -> dict[tuple[int, tuple[int, int, int]], Any]:
    """Return the triangle meshes of all visible geoms in their body's frame [m], merged by body
    and colour (0..255).
    """
    parts: dict[tuple[int, tuple[int, int, int]], list[Any]] = {}
    for geom in range(model.ngeom):
        mesh = None if int(model.geom_group[geom]) in _HIDDEN_GROUPS else _mesh(model, geom)
        if mesh is None:
            continue
        rotation = quaternion_to_matrix(np.roll(model.geom_quat[geom], -1))
        mesh.apply_transform(se3(rotation, model.geom_pos[geom]))
        parts.setdefault((int(model.geom_bodyid[geom]), _colour(model, geom)), []).append(mesh)
    return {part: trimesh.util.concatenate(meshes) for part, meshes in parts.items()}


def _colour(model: mujoco.MjModel, geom: int) -> tuple[int, int, int]:
    material = int(model.geom_matid[geom])
    if material < 0:
        rgb = model.geom_rgba[geom][:3]
        texture = -1
    else:
        rgb = model.mat_rgba[material][:3]
        texture = int(model.mat_texid[material, mujoco.mjtTextureRole.mjTEXROLE_RGB])
    if texture >= 0:
        rgb = rgb * model.tex(texture).data[..., :3].mean(axis=(0, 1)) / 255
    return tuple(np.round(np.clip(rgb, 0, 1) * 255).astype(int).tolist())


def _mesh(model: mujoco.MjModel, geom: int) -> Any:
    """Return a geom's surface in its own frame, or None if the geom type is not supported."""
    shape = mujoco.mjtGeom(int(model.geom_type[geom]))
    size = model.geom_size[geom]
    create: Any = trimesh.creation
    match shape.name.removeprefix("mjGEOM_"):
        case "BOX":
            mesh = create.box(extents=2 * size)
            mesh.unmerge_vertices()  # shared vertices would be smooth-shaded
        case "PLANE":
            mesh = create.box(extents=[2 * size[0], 2 * size[1], 1e-4])
        case "CYLINDER":
            mesh = create.cylinder(radius=size[0], height=2 * size[1], sections=_FACETS)
        case "CAPSULE":
            mesh = create.capsule(radius=size[0], height=2 * size[1], count=[_FACETS, _FACETS])
            # MuJoCo's origin is the centre
            mesh.apply_translation([0, 0, -mesh.bounds.mean(axis=0)[2]])
        case "SPHERE" | "ELLIPSOID" as round_shape:
            mesh = create.icosphere(subdivisions=3)
            mesh.apply_scale(size if round_shape == "ELLIPSOID" else size[0])
        case "MESH":
            asset = model.mesh(int(model.geom_dataid[geom]))
            (v,), (n_v,), (f,), (n_f,) = asset.vertadr, asset.vertnum, asset.faceadr, asset.facenum
            mesh = trimesh.Trimesh(
                model.mesh_vert[v : v + n_v], model.mesh_face[f : f + n_f], process=False
            )
        case _:
            return None
    return mesh
