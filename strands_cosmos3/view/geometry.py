"""A MuJoCo model's visible geoms as triangle meshes, one for each body and colour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
import trimesh
from numpy.typing import NDArray

_HIDDEN_GROUPS = (3, 4, 5)
"""Geom groups of collision geometry, which is not drawn."""
_FACETS = 28  # sides of a cylinder or capsule


@dataclass(frozen=True, eq=False)
class BodyMesh:
    """Triangle mesh of a body's visible surfaces of one colour.

    Args:
        body: Index of the body in the model.
        vertices: [V, 3] in the body's frame, metres.
        faces: [F, 3] vertex indices.
        rgb: Colour, 0..255.
    """

    body: int
    vertices: NDArray[np.float32]
    faces: NDArray[np.uint32]
    rgb: tuple[int, int, int]


def body_meshes(model: mujoco.MjModel) -> list[BodyMesh]:
    """Return all visible geoms, merged by body and colour."""
    parts: dict[tuple[int, tuple[int, int, int]], list[Any]] = {}
    for geom in range(model.ngeom):
        mesh = None if int(model.geom_group[geom]) in _HIDDEN_GROUPS else _mesh(model, geom)
        if mesh is None:
            continue
        T = np.eye(4)
        rotation = np.zeros(9)
        mujoco.mju_quat2Mat(rotation, model.geom_quat[geom])
        T[:3, :3], T[:3, 3] = rotation.reshape(3, 3), model.geom_pos[geom]
        mesh.apply_transform(T)
        parts.setdefault((int(model.geom_bodyid[geom]), _colour(model, geom)), []).append(mesh)
    merged: dict[Any, Any] = {
        key: trimesh.util.concatenate(meshes) for key, meshes in parts.items()
    }
    return [
        BodyMesh(
            body, np.asarray(mesh.vertices, np.float32), np.asarray(mesh.faces, np.uint32), rgb
        )
        for (body, rgb), mesh in merged.items()
    ]


def _colour(model: mujoco.MjModel, geom: int) -> tuple[int, int, int]:
    material = int(model.geom_matid[geom])
    rgb = model.geom_rgba[geom][:3] if material < 0 else model.mat_rgba[material][:3]
    texture = (
        -1 if material < 0 else int(model.mat_texid[material, mujoco.mjtTextureRole.mjTEXROLE_RGB])
    )
    if texture >= 0:
        start, channels = int(model.tex_adr[texture]), int(model.tex_nchannel[texture])
        pixels = int(model.tex_height[texture] * model.tex_width[texture])
        rgb = (
            rgb
            * model.tex_data[start : start + pixels * channels]
            .reshape(pixels, channels)[:, :3]
            .mean(axis=0)
            / 255
        )
    red, green, blue = (int(value) for value in np.round(np.clip(rgb, 0, 1) * 255))
    return red, green, blue


def _mesh(model: mujoco.MjModel, geom: int) -> Any:
    """Return a geom's surface in its own frame, or None if the geom type is not supported."""
    kind, size = int(model.geom_type[geom]), model.geom_size[geom]
    create: Any = trimesh.creation
    if kind == mujoco.mjtGeom.mjGEOM_BOX:
        box = create.box(extents=2 * size)
        box.unmerge_vertices()  # shared vertices would be smooth-shaded
        return box
    if kind == mujoco.mjtGeom.mjGEOM_PLANE:
        return create.box(extents=[2 * size[0], 2 * size[1], 1e-4])
    if kind == mujoco.mjtGeom.mjGEOM_CYLINDER:
        return create.cylinder(radius=size[0], height=2 * size[1], sections=_FACETS)
    if kind == mujoco.mjtGeom.mjGEOM_CAPSULE:
        capsule = create.capsule(radius=size[0], height=2 * size[1], count=[_FACETS, _FACETS])
        # MuJoCo's origin is the centre
        capsule.apply_translation([0, 0, -capsule.bounds.mean(axis=0)[2]])
        return capsule
    if kind in (mujoco.mjtGeom.mjGEOM_SPHERE, mujoco.mjtGeom.mjGEOM_ELLIPSOID):
        ball = create.icosphere(subdivisions=3)
        ball.apply_scale(size if kind == mujoco.mjtGeom.mjGEOM_ELLIPSOID else size[0])
        return ball
    if kind == mujoco.mjtGeom.mjGEOM_MESH:
        mesh_id = int(model.geom_dataid[geom])
        v, n_v = int(model.mesh_vertadr[mesh_id]), int(model.mesh_vertnum[mesh_id])
        f, n_f = int(model.mesh_faceadr[mesh_id]), int(model.mesh_facenum[mesh_id])
        return trimesh.Trimesh(
            model.mesh_vert[v : v + n_v], model.mesh_face[f : f + n_f], process=False
        )
    return None
