"""A world of your own: a UR5e that pushes a puck into a marked zone.

    cd examples
    strands-cosmos3 rollout --world 14_your_own_world.py:PuckWorld --backend scripted
    strands-cosmos3 evaluate --world 14_your_own_world.py:PuckWorld --backend scripted --seeds 10

A world of simulated arms says four things: what stands on the table (``PuckScene``), when an
episode has succeeded (``PuckJudge``), what its tasks are (``PuckWorld``), and, if there is one, how
an expert solves them (``PuckExpert``). Robots, control, cameras, films, saved states and Gymnasium
come with ``ArmWorld``.
"""

from __future__ import annotations

from collections.abc import Mapping

try:
    import mujoco
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed: pip install -e '.[sim]'") from None
import numpy as np

from strands_cosmos3.actions.decode import encode_chunk
from strands_cosmos3.backends.base import Backend, BackendInfo
from strands_cosmos3.errors import BackendError
from strands_cosmos3.sim.judge import Judge
from strands_cosmos3.sim.scene import Layout, Scene
from strands_cosmos3.sim.scene_builder import add_free_cylinder, add_lights, add_tabletop
from strands_cosmos3.types import ActionChunk, Request
from strands_cosmos3.worlds.arms import ArmWorld
from strands_cosmos3.worlds.world import NOT_VARIED, Task

PUSH = Task("push", "push the puck into the zone", horizon_s=30.0)
ZONE_M = np.array([0.50, 0.0])
ZONE_RADIUS_M, PUCK_RADIUS_M, PUCK_HEIGHT_M = 0.06, 0.035, 0.03


class PuckScene(Scene):
    """A puck that lies somewhere outside a marked zone."""

    def __init__(self, robot, arm=None):
        super().__init__(robot, arm, resting={"puck": PUCK_HEIGHT_M})

    def furnish(self, spec):
        add_lights(spec)
        add_tabletop(spec)
        spec.worldbody.add_geom(
            type=mujoco.mjtGeom.mjGEOM_CYLINDER,
            pos=[*ZONE_M, 0.0],
            size=[ZONE_RADIUS_M, 0.001, 0],
            rgba=[0.2, 0.7, 0.3, 1],
            contype=0,
            conaffinity=0,
        )
        add_free_cylinder(spec, "puck", PUCK_RADIUS_M, PUCK_HEIGHT_M, 0.1, (0.9, 0.4, 0.1))

    def sample_layout(self, rng: np.random.Generator, separation_m: float = 0.0) -> Layout:
        while True:
            layout = super().sample_layout(rng)
            if np.linalg.norm(layout.xy_m[0] - ZONE_M) > ZONE_RADIUS_M + 2 * PUCK_RADIUS_M:
                return layout


class PuckJudge(Judge):
    """The puck lies at rest, with all of it in the zone."""

    def __init__(self, scene: Scene):
        super().__init__(hold_s=0.3)
        self.scene = scene

    def holds(self, data: mujoco.MjData) -> bool:
        puck = self.scene.bodies["puck"]
        off_m = np.linalg.norm(data.xpos[puck.id][:2] - ZONE_M)
        speed_m_s = np.linalg.norm(data.qvel[puck.dof : puck.dof + 3])
        return bool(off_m < ZONE_RADIUS_M - PUCK_RADIUS_M and speed_m_s < 0.01)


class PuckExpert(Backend):
    """Lowers its closed fingers behind the puck and pushes; it starts over when the puck slips
    aside.
    """

    info = BackendInfo(name="scripted", needs_privileged=True, requires_images=False, replan_rows=4)
    behind_m, low_m, high_m, step_m = PUCK_RADIUS_M + 0.05, 0.02, 0.12, 0.012

    def infer(self, request: Request) -> ActionChunk:
        """Return rows from the simulator's state."""
        state = request.privileged
        if state is None or request.T_base_cosmos is None:
            raise BackendError("this expert needs the simulator's state; use it with its world.")
        T_base_tcp = np.linalg.inv(state["base"]) @ state["tcp"]
        T_tcp_cosmos = np.linalg.inv(T_base_tcp) @ request.T_base_cosmos
        T_world_tcp, path = state["tcp"].copy(), [request.T_base_cosmos]
        for _ in range(request.n_rows):
            way = self.target(T_world_tcp[:3, 3], state["puck"][:2, 3]) - T_world_tcp[:3, 3]
            T_world_tcp[:3, 3] += way * min(1.0, self.step_m / max(np.linalg.norm(way), 1e-9))
            path.append(np.linalg.inv(state["base"]) @ T_world_tcp @ T_tcp_cosmos)
        rows = encode_chunk(np.stack(path), np.zeros(request.n_rows), request.embodiment)
        return ActionChunk(rows, request.action_space, request.embodiment, seed=request.seed)

    def target(self, tcp_m: np.ndarray, puck_m: np.ndarray) -> np.ndarray:
        """Return where the fingers should go [3]."""
        forward = (ZONE_M - puck_m) / max(np.linalg.norm(ZONE_M - puck_m), 1e-9)
        off = tcp_m[:2] - puck_m
        along, aside = off @ forward, abs(off[0] * forward[1] - off[1] * forward[0])
        if along < 0 and aside < 0.015 and tcp_m[2] < self.low_m + 0.01:
            return np.array([*(ZONE_M - forward * PUCK_RADIUS_M), self.low_m])
        start = puck_m - forward * self.behind_m
        if np.linalg.norm(tcp_m[:2] - start) < 0.008:
            return np.array([*start, self.low_m])
        return np.array([*(start if tcp_m[2] > self.high_m - 0.02 else tcp_m[:2]), self.high_m])


class PuckWorld(ArmWorld):
    """One task for a UR5e."""

    name, robots = "puck", ("ur5e",)

    def tasks(self, robot=None) -> Mapping[str, Task]:
        return {PUSH.name: PUSH}

    def scene(self, robot, task=None, variation=NOT_VARIED, arm=None) -> Scene:
        return PuckScene(robot, arm)

    def judge(self, task, scene, instruction) -> Judge:
        return PuckJudge(scene)

    def expert(self, robot=None) -> Backend:
        return PuckExpert()
