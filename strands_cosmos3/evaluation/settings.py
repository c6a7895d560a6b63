"""Settings of an evaluation, from options or TOML, and the part of them that determines an
episode's result.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from strands_cosmos3.checks import instance_of, seed_number
from strands_cosmos3.errors import ConfigError, ResourceNotFoundError, UnknownNameError
from strands_cosmos3.evaluation.libero_plan import (
    LIBERO_TASKS,
    libero_options,
    libero_policy,
    plan_libero,
    require_libero,
)
from strands_cosmos3.evaluation.perturbations import Perturbation, distinct, parse_conditions
from strands_cosmos3.evaluation.plan import TABLE, Assignment, goal_instruction, make_plan
from strands_cosmos3.evaluation.policy_settings import (
    EVALUATED_BACKENDS,
    POLICY_OPTIONS,
    PolicySettings,
)
from strands_cosmos3.evaluation.robots import (
    absolute,
    embodiment_of,
    evaluated_robot,
    identity_of,
    require_conditions,
    tasks_of,
)
from strands_cosmos3.evaluation.topology import Topology
from strands_cosmos3.options import MODEL_BACKENDS, require_heeded, with_options
from strands_cosmos3.parallel.config import ParallelConfig
from strands_cosmos3.policy.preflight import borrowed
from strands_cosmos3.robots.catalogue import PANDA
from strands_cosmos3.sim.episode import physics_steps_per_tick
from strands_cosmos3.worlds.libero.protocol import get_protocol
from strands_cosmos3.worlds.table.grammar import parse_instruction


@dataclass(frozen=True)
class Settings:
    """An evaluation: ``seeds`` episodes of each task and condition. A condition is a row of the
    report.

    Args:
        seed: The evaluation's seed, from which the episodes' seeds are derived.
        noise_seed: Seed of the policy's noise, mixed with each scene's; None is the scene's own.
        instruction: Another wording, in which ``{a}`` and ``{b}`` stand for colours; empty for each
            task's own.
        duration: Maximum duration of an episode [simulated s].
        control_frequency: Control ticks per second; it must divide 600.
        workers: Number of simulators; None for the number of free cores.
        episode_timeout: Maximum wall-clock time of an episode [s], restarts of a replica included;
            then its simulator is hung.
        films: Failures of each row that are filmed.
        clips: Clips of the expert on which forward and inverse dynamics are evaluated; 0 for
            neither.
        suite: ``table``, or one of LIBERO's (:data:`~strands_cosmos3.worlds.libero.suites.SUITES`),
            whose tasks are numbers.
        robot: Of our table: a name, or a .toml file (docs/robots.md).
        protocol: For LIBERO: one of :data:`~strands_cosmos3.worlds.libero.protocol.PROTOCOLS`.

    Raises:
        ConfigError, UnknownNameError, InputError: The settings are invalid; nothing was started or
            written.
    """

    policy: PolicySettings = field(default_factory=lambda: PolicySettings(backend="scripted"))
    tasks: tuple[str, ...] = ("reach", "pick", "place", "stack")
    seeds: int = 100
    seed: int = 0
    noise_seed: int | None = None
    conditions: tuple[Perturbation, ...] = (Perturbation(),)
    topology: Topology = field(default_factory=Topology)
    instruction: str = ""
    duration: float = 20.0
    control_frequency: float = 50.0
    workers: int | None = None
    episode_timeout: float = 1800.0
    films: int = 3
    clips: int = 0
    suite: str = TABLE
    protocol: str = "openpi"
    robot: str = PANDA.name

    def __post_init__(self) -> None:
        robot = evaluated_robot(self.robot)
        known = LIBERO_TASKS if self.is_libero else tasks_of(robot)
        if not self.tasks or "" in self.tasks or len(set(self.tasks)) != len(self.tasks):
            raise ConfigError(
                f"tasks {list(self.tasks)}: name at least one of {', '.join(known)}, each once."
            )
        for task in self.tasks:
            if task not in known:
                raise UnknownNameError("task", task, known)
        distinct(self.conditions)
        seed_number(self.seed)
        if self.noise_seed is not None:
            seed_number(self.noise_seed, "noise_seed")
        for name, least in (("seeds", 1), ("films", 0), ("clips", 0), ("workers", 1)):
            value = getattr(self, name)
            if value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or value < least
            ):
                raise ConfigError(
                    f"{name} must be a whole number of at least {least}, got {value!r}."
                )
        for name in ("duration", "episode_timeout"):
            value = getattr(self, name)
            if (
                not isinstance(value, int | float)
                or isinstance(value, bool)
                or not 0 < value < float("inf")
            ):
                raise ConfigError(
                    f"{name} is {value!r}; it must be a finite number of seconds above zero."
                )
        physics_steps_per_tick(self.control_frequency)
        get_protocol(self.protocol)
        if robot != PANDA and (self.is_libero or self.clips):
            raise ConfigError(
                f"{'suite ' + self.suite if self.is_libero else 'clips'} has the Panda, not "
                f"{robot.name!r}."
            )
        if self.is_libero:
            require_libero(
                self.suite, self.seeds, self.clips, str(self.policy.backend), self.conditions
            )
        else:
            self._check_instruction()
            require_conditions(robot, self.conditions)
        self._check_policy()
        if self.policy.backend != "python":
            borrowed(
                self.robot, embodiment_of(robot), self.policy.backend, self.policy.borrow_domain
            )

    @property
    def is_libero(self) -> bool:
        """Whether the suite is one of LIBERO's and not our table."""
        return self.suite != TABLE

    @property
    def embodiment(self) -> str:
        """The embodiment whose rows the policy answers."""
        return "libero" if self.is_libero else embodiment_of(evaluated_robot(self.robot))

    def _check_instruction(self) -> None:
        if not self.instruction:
            return
        if len(self.tasks) > 1:
            raise ConfigError(
                f"one instruction cannot ask for {', '.join(self.tasks)}; name one task, or leave "
                "it out."
            )
        try:
            for task in self.tasks:
                parse_instruction(goal_instruction(task, 0, self.instruction))
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"instruction {self.instruction!r} cannot be judged ({error}); write e.g. 'pick "
                f"up the {{a}} cube', where "
                "{a} and {b} are colours."
            ) from None

    def _check_policy(self) -> None:
        policy, sharded = self.policy, self.topology.replicas > 0
        if policy.backend not in EVALUATED_BACKENDS:
            raise UnknownNameError("backend", policy.backend, EVALUATED_BACKENDS)
        if (policy.backend in MODEL_BACKENDS) != (policy.model is not None):
            raise ConfigError(
                f"backend {policy.backend!r} with model={policy.model!r}: a checkpoint's folder or "
                "hub repository belongs to native and diffusers, which need one."
            )
        if (policy.backend == "python") != (policy.policy is not None):
            raise ConfigError(
                f"backend {policy.backend!r} with policy={policy.policy!r}: backend python needs "
                "one, as module:name."
            )
        # native runs split, too: the topology has the degrees
        require_heeded(policy.backend, replace(policy, parallel=ParallelConfig()))
        if sharded and policy.backend != "native":
            raise ConfigError(
                f"{self.topology}: replicas run backend 'native'; {policy.backend!r} runs in "
                "every worker, so leave num_gpus, "
                "tp, cfg and total_shard out."
            )
        if sharded:
            policy.engine.require_runnable(
                "cuda" if self.topology.num_gpus else "cpu", self.topology.tp_size
            )
        if sharded and policy.engine.device is not None:
            raise ConfigError(
                f"device {policy.engine.device!r}: num_gpus decides where replicas run; leave the device "
                "out."
            )
        if self.topology.cfg_size > 1 and policy.sampling.guidance_scale == 1:
            raise ConfigError(
                "cfg_size=2 with guidance_scale=1: there is no second pass to compute; use "
                "cfg_size=1."
            )
        if self.clips and policy.backend != "native":
            raise ConfigError(
                f"clips={self.clips}: dynamics are evaluated with backend 'native', not with "
                f"{policy.backend!r}."
            )
        for row in self.conditions:
            if row.images == "blank" and policy.backend == "scripted":
                raise ConfigError(
                    f"condition {row.name!r}: the scripted expert uses no images; blank ones "
                    "change nothing."
                )
            if row.num_steps is not None and policy.backend not in MODEL_BACKENDS:
                raise ConfigError(
                    f"condition {row.name!r}: {policy.backend!r} has no denoising steps to set."
                )

    def plan(self) -> tuple[Assignment, ...]:
        """Return every episode, in the order of the report."""
        if self.is_libero:
            return plan_libero(self.suite, self.tasks, self.seeds, self.seed, self.conditions)
        return make_plan(self.tasks, self.seeds, self.seed, self.conditions, self.instruction)

    def identity(self, assignment: Assignment) -> dict[str, Any]:
        """Return everything that determines an episode's result. A stored episode counts if its
        identity is equal.

        The number of GPUs, replicas, workers, episodes, tasks and perturbations does not belong to
        it.
        """
        policy = self.policy.to_dict()
        return {
            "policy": {name: policy[name] for name in policy if name not in _SAME_RESULT},
            "tp_size": self.topology.tp_size,
            "cfg_size": self.topology.cfg_size,
            "on_gpu": self.topology.num_gpus > 0,
            "condition": assignment.perturbation.identity(),
            "task": assignment.task,
            "index": assignment.index,
            "seed": assignment.seed,
            "asked": assignment.goal_instruction,
            "told": assignment.policy_instruction,
            "duration": self.duration,
            "control_frequency": self.control_frequency,
            **({} if self.noise_seed is None else {"noise_seed": self.noise_seed}),
            **identity_of(self.robot),
            **(
                {"suite": self.suite, "protocol": vars(get_protocol(self.protocol))}
                if self.is_libero
                else {}
            ),
        }

    def dynamics_identity(self) -> dict[str, Any]:
        """Return everything that determines the figures of dynamics."""
        return {
            "model": self.policy.model,
            "num_steps": self.policy.sampling.num_steps,
            "clips": self.clips,
            "seed": self.seed,
        }

    def digest(self, assignment: Assignment) -> str:
        """Return a hash of :meth:`identity`, 16 characters."""
        text = json.dumps(self.identity(assignment), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Return the settings for JSON, without the token."""
        values = {
            **vars(self),
            "tasks": list(self.tasks),
            "conditions": [c.identity() for c in self.conditions],
        }
        topology = {**vars(self.topology), "replicas": self.topology.replicas}
        return {**values, "policy": self.policy.to_dict(), "topology": topology}


_SAME_RESULT = ("offload_text", "text_cache_bytes", "tp", "cfg")
"""Options that do not change a result, or that the topology has."""
_TOPOLOGY = ("num_gpus", "total_shard")
_RUN = (
    *("suite", "protocol", "robot", "tasks", "seeds", "seed", "noise_seed", "conditions"),
    *("instruction", "duration", "control_frequency", "workers", "episode_timeout", "films"),
    "clips",
)
_PLACE = ("out", "address")
OPTIONS = (*_RUN, *POLICY_OPTIONS, *_TOPOLOGY, *_PLACE)
"""Names of all options, in TOML and (with dashes) on the command line."""


def read_toml(path: Path) -> dict[str, Any]:
    """Return the options of a TOML file: at its top, in ``[model]`` (``path`` is the checkpoint),
    and ``[[conditions]]``.

    Raises:
        ResourceNotFoundError, ConfigError, UnknownNameError: Unreadable, not TOML, or an option is
            unknown or repeated.
    """
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ResourceNotFoundError(
            f"cannot read the configuration {str(path)!r} ({error.strerror})."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from None
    section = values.pop("model", {})
    if isinstance(section, str):
        section = {"path": section}
    in_model = (*POLICY_OPTIONS, "path")
    for key in section:
        if key not in in_model:
            raise UnknownNameError(f"option of [model] in {path}", key, in_model)
    if "path" in section:
        section["model"] = section.pop("path")
    for key in values:
        if key not in OPTIONS or key == "model":
            raise UnknownNameError(f"option in {path}", key, OPTIONS)
    if twice := sorted(set(values) & set(section)):
        raise ConfigError(
            f"{path} gives {', '.join(twice)} at its top and again in [model]; give it once."
        )
    return values | section


def make_settings(options: Mapping[str, Any], token: str | None = None) -> Settings:
    """Return settings from some of :data:`OPTIONS`; ``out`` and ``address`` are ignored, None
    stands for the default.

    Conditions may be short forms, tables, or both. ``token`` is a policy server's. Errors: as
    :class:`Settings`.
    """
    given = {name: value for name, value in options.items() if value is not None}
    run = {name: given[name] for name in _RUN if name in given}
    if "robot" in run:
        run["robot"] = absolute(instance_of(run["robot"], str, "robot"))
        if len(evaluated_robot(run["robot"]).limbs) > 1:
            run.setdefault("tasks", tasks_of(evaluated_robot(run["robot"])))
    if "tasks" in run:
        run["tasks"] = _names(run["tasks"], "tasks")
    if "conditions" in run:
        run["conditions"] = _conditions(run["conditions"])
    policy = {name: given[name] for name in POLICY_OPTIONS if name in given}
    policy.setdefault("backend", "native" if "model" in policy else "scripted")
    if run.get("suite", TABLE) != TABLE:
        run, policy = libero_options(run), policy | libero_policy(policy)
    settings = with_options(
        PolicySettings(), policy | ({} if token is None else {"api_key": token})
    )
    topology = Topology(
        tp_size=settings.parallel.tp_size,
        cfg_size=settings.parallel.cfg_size,
        **{name: given[name] for name in _TOPOLOGY if name in given},
    )
    return Settings(settings, topology=topology, **run)


def _names(value: Any, option: str) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{option} are names, separated by commas on the command line and a list in TOML; got "
            f"{value!r}."
        )
    return tuple(name.strip() for name in names)


def _conditions(value: Any) -> tuple[Perturbation, ...]:
    if isinstance(value, str):
        return parse_conditions(_names(value, "conditions"))
    if not isinstance(value, list | tuple):
        raise ConfigError(f"conditions are short forms or tables, got {value!r}.")
    made = [
        Perturbation.from_dict(one) if isinstance(one, Mapping) else Perturbation.parse(str(one))
        for one in value
    ]
    return distinct(tuple(made))
