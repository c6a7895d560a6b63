"""Off-screen rendering: the choice of OpenGL, the quality of a picture, and paths drawn into it.

The OpenGL context is made here and not by ``mujoco.Renderer``, which takes its backend from the
environment once, at ``import mujoco``. So a backend can be chosen at the first picture, whoever
imported mujoco.
"""

from __future__ import annotations

import copy
import ctypes.util
import importlib
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import F64, known_name
from strands_cosmos3.errors import RenderError
from strands_cosmos3.resources import Closeable

GL_BACKENDS = ("egl", "osmesa", "glfw")
_LIBRARIES = {"egl": "EGL", "osmesa": "OSMesa"}
_REMEDY = (
    "install the Debian packages libegl1 libegl-mesa0 libgl1-mesa-dri and `pip install pyopengl`, "
    f"or set MUJOCO_GL to one of {', '.join(GL_BACKENDS)}."
)
_MAX_GEOMS = 2000
_DRAWERS: set[int] = set()
"""The process that made an OpenGL context, and those that it was forked from after they did."""
_IDLE = threading.local()
"""The OpenGL contexts that closed renderers of a thread left, by backend: a new one compiles its
shaders again, which takes a tenth of a second in software.
"""
_MOST_IDLE = 4


def choose_gl() -> str:
    """Return the OpenGL backend to draw with, without loading it.

    It is ``MUJOCO_GL`` if set, else the first of ``egl`` and ``osmesa`` whose library is
    installed, else ``glfw`` if there is a display. RenderError for another name or no such library;
    the message names the Debian packages.
    """
    name = os.environ.get("MUJOCO_GL", "").lower().strip()
    if name in GL_BACKENDS:
        return name
    if name:
        raise RenderError(f"OpenGL backend {name!r} cannot draw off screen; {_REMEDY}")
    if sys.platform != "linux":
        return "glfw"
    for backend, library in _LIBRARIES.items():
        if ctypes.util.find_library(library):
            return backend
    if os.environ.get("DISPLAY"):
        return "glfw"
    raise RenderError(f"no OpenGL library for drawing without a display; {_REMEDY}")


def _require_unforked() -> None:
    """Raise RenderError in a child that was forked after a picture was drawn: it would wait for
    OpenGL's threads, which its parent kept.
    """
    if _DRAWERS - {os.getpid()}:
        raise RenderError(
            "this process was forked after its parent drew, which OpenGL does not survive; use "
            "spawn, e.g. gymnasium.make_vec(..., 'async', vector_kwargs={'context': 'spawn'})."
        )


def _make_context(backend: str, height: int, width: int) -> Any:
    """Take an idle OpenGL context of that backend, or make one, and make it current."""
    _require_unforked()
    _DRAWERS.add(os.getpid())
    idle = _idle_contexts(backend)
    try:
        module = importlib.import_module(f"mujoco.{backend}")
        context = idle.pop() if idle else module.GLContext(width, height)
        context.make_current()
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        # PyOpenGL and EGL fail in their own ways
        raise RenderError(
            f"OpenGL backend {backend!r} does not start here ({error}); {_REMEDY}"
        ) from error
    return context


def _idle_contexts(backend: str) -> list[Any]:
    return vars(_IDLE).setdefault(backend, [])


@dataclass(frozen=True)
class Quality:
    """Quality of a picture."""

    shadow_px: int = 0  # edge of the shadow map; 0 draws no shadows
    samples: int = 0  # per pixel, for smooth edges; 0 is none
    slices: int = 8  # facets around a cylinder; in software OpenGL they cost more than pixels


OBSERVATION = Quality()
"""For a policy: fast and plain."""
BEAUTY = Quality(shadow_px=1024, samples=4, slices=24)
"""For people: shadows and smooth edges."""


@dataclass(frozen=True, eq=False)
class Polyline:
    """A polyline to draw."""

    points_m: F64  # [n, 3] in the world's frame
    rgba: tuple[float, float, float, float] = (0.98, 0.55, 0.10, 0.9)
    radius_m: float = 0.0025


class Renderer(Closeable):
    """Draws a model's state off screen, ``height`` x ``width`` pixels, with an OpenGL context of
    its own.

    It belongs to the thread that made it. Use it as a context manager, or call :meth:`close`.

    Raises:
        RenderError: OpenGL does not start.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        height: int = 180,
        width: int = 320,
        quality: Quality = OBSERVATION,
    ):
        self._context: Any = None
        self._gpu: Any = None
        self.quality = quality
        self.backend = choose_gl()
        self._model = model
        self._frame = np.empty((height, width, 3), np.uint8)
        self._viewport = mujoco.MjrRect(0, 0, width, height)
        self._scene = mujoco.MjvScene(model, _MAX_GEOMS)
        self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = quality.shadow_px > 0
        self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
        self._option = mujoco.MjvOption()
        self._option.sitegroup[:] = 0  # frames, which a camera does not see
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._context = _make_context(self.backend, height, width)
        self._gpu = self._upload(height, width)
        if self._gpu.offWidth < width or self._gpu.offHeight < height:
            self.close()
            raise RenderError(
                f"this OpenGL gives no {width} x {height} pixels to draw into; ask "
                "for a smaller picture."
            )

    def _upload(self, height: int, width: int) -> mujoco.MjrContext:
        """Upload the model to the GPU. MuJoCo reads the quality from the model: a copy has it."""
        model = copy.copy(self._model)
        look = model.vis.quality
        size = model.vis.global_
        look.shadowsize = self.quality.shadow_px
        look.offsamples = self.quality.samples
        look.numslices = self.quality.slices
        look.numstacks = self.quality.slices // 2
        size.offwidth = width
        size.offheight = height
        gpu = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, gpu)
        return gpu

    def render(
        self, data: mujoco.MjData, camera: str, paths: Sequence[Polyline] = ()
    ) -> NDArray[np.uint8]:
        """Draw a forwarded state as a new array [H, W, 3] uint8.

        Raises:
            UnknownNameError, RenderError: No such camera; the renderer was closed.
        """
        model = self._model
        names = [model.camera(i).name for i in range(model.ncam)]
        self._camera.fixedcamid = self._index("camera", camera, names)
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(
            model, data, self._option, None, self._camera, everything, self._scene
        )
        for path in paths:
            _draw(self._scene, path)
        self._context.make_current()
        mujoco.mjr_render(self._viewport, self._scene, self._gpu)
        mujoco.mjr_readPixels(self._frame, None, self._viewport, self._gpu)
        return np.ascontiguousarray(self._frame[::-1])

    def upload_texture(self, name: str) -> None:
        """Draw with the model's present pixels of a texture from now on; errors as for
        :meth:`render`.
        """
        names = [self._model.tex(i).name for i in range(self._model.ntex)]
        index = self._index("texture", name, names)
        self._context.make_current()
        mujoco.mjr_uploadTexture(self._model, self._gpu, index)

    def _index(self, kind: str, name: str, names: list[str]) -> int:
        """The index of a name among those of the model's cameras or textures."""
        _require_unforked()
        if self._gpu is None:
            raise RenderError("this renderer is closed; make another.")
        known_name(name, kind, names)
        return names.index(name)

    def close(self) -> None:
        """Free the GPU's memory and leave the context; closing twice is harmless."""
        if self._gpu is not None:
            self._context.make_current()
            self._gpu.free()
        if self._context is not None:
            idle = _idle_contexts(self.backend)
            # those of other backends have a size
            if self.backend == "egl" and len(idle) < _MOST_IDLE:
                idle.append(self._context)
            else:
                self._context.free()
        self._gpu = self._context = None


def _draw(scene: mujoco.MjvScene, path: Polyline) -> None:
    """Append a path's segments to the scene, thinned to the number of geoms that are left."""
    n_segments = min(len(path.points_m) - 1, scene.maxgeom - scene.ngeom)
    places = np.linspace(0, len(path.points_m) - 1, n_segments + 1).round().astype(int)
    capsule = mujoco.mjtGeom.mjGEOM_CAPSULE
    rgba = np.array(path.rgba, np.float32)
    for start, end in pairwise(path.points_m[places]):
        geom = scene.geoms[scene.ngeom]
        mujoco.mjv_initGeom(geom, capsule, np.zeros(3), np.zeros(3), np.zeros(9), rgba)
        mujoco.mjv_connector(geom, capsule, path.radius_m, start, end)
        geom.emission = 0.4
        geom.category = mujoco.mjtCatBit.mjCAT_DECOR  # no shadow
        scene.ngeom += 1
