"""Settings of an evaluation, from options or TOML, and the part of them that determines an
episode's result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from strands_cosmos3.checks import (
    known_name,
    positive,
    require_type,
    seed_number,
    typed_fields,
    whole_number,
)
from strands_cosmos3.errors import ConfigError, UnknownNameError
from strands_cosmos3.evaluation.plan import (
    Assignment,
    Condition,
    make_plan,
    part_of,
    require_distinct,
)
from strands_cosmos3.evaluation.policy_settings import (
    EVALUATED_BACKENDS,
    POLICY_OPTIONS,
    PolicySettings,
)
from strands_cosmos3.fleet.topology import Topology
from strands_cosmos3.options import MODEL_BACKENDS, require_heeded, with_options
from strands_cosmos3.parallel.config import DEGREES, ParallelConfig
from strands_cosmos3.policy.preflight import borrowed
from strands_cosmos3.robots.catalogue import get_robot
from strands_cosmos3.tables import read_toml
from strands_cosmos3.worlds import RunOptions, World, get_world
from strands_cosmos3.worlds.world import REWORDINGS

_LEAST = {"seeds": 1, "films": 0, "clips": 0, "workers": 1}
_MOST = 1_000_000  # episodes of a task and condition: all are planned before the first one runs
REASONER = "reasoner"
"""The judge that is a checkpoint."""
INSTRUCTION = "{instruction}"
QUESTION = "Task: {instruction}. Did the robot succeed? Answer yes or no."
"""The judge's question, unless another one is set."""
DEFAULT_SEEDS = 100
"""Episodes of each task and condition, unless the world has official starts."""
_DIALECT_OF_EMBODIMENT: Mapping[str, str] = {"libero": "libero"}


@dataclass(frozen=True)
class Settings:
    """An evaluation: ``seeds`` episodes of each task and condition. A condition is a row of the
    report.

    Args:
        world: As :func:`~strands_cosmos3.worlds.get_world` takes it.
        robot: One of the world's, or a .toml file; None is its first.
        seed: The evaluation's seed, from which the episodes' seeds are derived.
        noise_seed: Seed of the policy's noise, mixed with each scene's; None is the scene's own.
        instruction: Another wording for the only task; empty for each task's own.
        duration: Maximum duration of an episode [simulated s]; None is the task's.
        control_frequency: Control ticks per second; None is the world's.
        workers: Number of simulators; None for the number of free cores.
        episode_timeout: Maximum wall-clock time of an episode [s], restarts of a replica included;
            then its simulator is hung.
        films: Failures of each row that are filmed.
        clips: Clips of the expert on which forward and inverse dynamics are evaluated; 0 for
            neither.
        num_gpus, total_shard: GPUs and replicas of the :attr:`topology`, whose degrees are the
            policy's.
        judge: Who is asked after each episode whether its film shows success: ``reasoner``, or
            ``module:name`` (:mod:`.judging`); None is nobody.
        judge_model: The reasoner's checkpoint; None is the policy's.
        judge_question: What it is asked, with ``{instruction}`` for the goal; empty is
            :data:`QUESTION`.

    Raises:
        ConfigError, UnknownNameError, InputError: The settings are invalid; nothing was started or
            written.
        MissingDependencyError: The world's simulator is not installed.
    """

    policy: PolicySettings
    tasks: tuple[str, ...]
    seeds: int = DEFAULT_SEEDS
    seed: int = 0
    noise_seed: int | None = None
    conditions: tuple[Condition, ...] = (Condition(),)
    world: str = "table"
    robot: str | None = None
    instruction: str = ""
    duration: float | None = None
    control_frequency: float | None = None
    workers: int | None = None
    episode_timeout: float = 1800.0
    films: int = 3
    clips: int = 0
    num_gpus: int = 0
    total_shard: int | None = None
    judge: str | None = None
    judge_model: str | None = None
    judge_question: str = ""

    def __post_init__(self) -> None:
        typed_fields(self)
        sharded = self.topology.replicas > 0  # raises where the GPUs do not divide
        for name, value in vars(self).items():
            if value is None:
                continue
            if name in _LEAST:
                whole_number(value, name, _LEAST[name], _MOST)
            elif name in ("seed", "noise_seed"):
                seed_number(value, name)
            elif name in ("duration", "episode_timeout", "control_frequency"):
                positive(value, name)
        require_distinct(self.conditions)
        self._check_world()
        self._check_policy(sharded)
        self._check_judge()

    @property
    def topology(self) -> Topology:
        """How the GPUs are divided into replicas of the policy."""
        return Topology(self.policy.parallel, self.num_gpus, self.total_shard)

    def get_world(self) -> World:
        """Return the world."""
        return get_world(self.world)

    def _check_world(self) -> None:
        world = self.get_world()
        check_robot(world, self.robot)
        tasks = world.tasks(self.robot)
        if not self.tasks or len(set(self.tasks)) != len(self.tasks):
            raise ConfigError(
                f"tasks {list(self.tasks)}: name at least one of {', '.join(tasks)}, each once."
            )
        for name in self.tasks:
            known_name(name, "task", tasks)
            starts = tasks[name].starts
            if starts is not None and self.seeds > starts:
                raise ConfigError(
                    f"seeds={self.seeds}: task {name} of {world.name} has {starts} initial states; "
                    "use at most that."
                )
        if self.instruction and len(self.tasks) > 1:
            raise ConfigError(
                f"one instruction cannot ask for {', '.join(self.tasks)}; name one task, or leave "
                "it out."
            )
        for condition in self.conditions:
            text = condition.policy.text
            if text in REWORDINGS and text not in world.rewordings:
                raise ConfigError(
                    f"condition {condition.name!r}: world {world.name!r} has "
                    f"no {text} instructions."
                )
            world.check_variation(condition.world, self.robot)
            world.check_run(self.run_options(condition))
        for first in self.plan(seeds=1):
            world.check_instruction(first.task, first.goal_instruction)

    def _check_policy(self, sharded: bool) -> None:
        policy = self.policy
        world = self.get_world()
        known_name(policy.backend, "backend", EVALUATED_BACKENDS)
        if (policy.backend in MODEL_BACKENDS) != (policy.model is not None):
            raise ConfigError(
                f"backend {policy.backend!r} with model={policy.model!r}: a checkpoint's folder or "
                "hub repository belongs to native, onnx and diffusers, which need one."
            )
        if (policy.backend == "python") != (policy.policy is not None):
            raise ConfigError(
                f"backend {policy.backend!r} with policy={policy.policy!r}: backend python needs "
                "one, as module:name."
            )
        # native runs split, too: in replicas
        require_heeded(policy.backend, replace(policy, parallel=ParallelConfig()))
        dialect = _DIALECT_OF_EMBODIMENT.get(self.embodiment)
        if policy.backend == "service" and dialect not in (None, policy.service.dialect):
            raise ConfigError(
                f"dialect {policy.service.dialect!r} carries DROID's columns; rows of "
                f"{self.embodiment} travel in dialect {dialect}."
            )
        if policy.backend == "scripted":
            world.required_expert(self.robot)
        if sharded and policy.backend != "native":
            raise ConfigError(
                f"{self.topology}: replicas run backend 'native'; {policy.backend!r} runs in "
                "every worker, so leave num_gpus, total_shard and degrees of parallelism out."
            )
        if sharded:
            device = "cuda" if self.num_gpus else "cpu"
            policy.engine.require_runnable(device, policy.parallel.layer_ranks)
            if policy.engine.device is not None:
                raise ConfigError(
                    f"device {policy.engine.device!r}: num_gpus decides where replicas run; leave "
                    "the device out."
                )
        if policy.parallel.cfg_size > 1 and policy.sampling.guidance_scale == 1:
            raise ConfigError(
                "cfg=2 with guidance_scale=1: there is no second pass to compute; use cfg=1."
            )
        if self.clips and policy.backend != "native":
            raise ConfigError(
                f"clips={self.clips}: dynamics are evaluated with backend 'native', not "
                f"with {policy.backend!r}."
            )
        for condition in self.conditions:
            if condition.policy.images == "blank" and policy.backend == "scripted":
                raise ConfigError(
                    f"condition {condition.name!r}: the scripted expert uses no images; blank ones "
                    "change nothing."
                )
            if condition.policy.num_steps is not None and policy.backend not in MODEL_BACKENDS:
                raise ConfigError(
                    f"condition {condition.name!r}: {policy.backend!r} has no "
                    "denoising steps to set."
                )
        if policy.backend != "python":
            robot = self.robot or world.robots[0]
            borrowed(robot, self.embodiment, policy.backend, policy.borrow_domain)

    def _check_judge(self) -> None:
        alone = self.judge_model is not None and self.judge != REASONER
        if alone or (self.judge_question and self.judge is None):
            raise ConfigError(
                f"judge={self.judge!r}: judge_model belongs to judge {REASONER!r}, and "
                "judge_question to any judge; add it, or leave them out."
            )
        if self.judge == REASONER and (self.judge_model or self.policy.model) is None:
            raise ConfigError(
                f"backend {self.policy.backend!r} has no checkpoint that could judge; name one "
                "with a vision encoder as judge_model."
            )
        if INSTRUCTION not in self.question:
            raise ConfigError(
                f"judge_question {self.judge_question!r} names no goal; write {INSTRUCTION} where "
                f"the instruction belongs, as in {QUESTION!r}."
            )

    @property
    def question(self) -> str:
        """What the judge is asked, with :data:`INSTRUCTION` for the goal."""
        return self.judge_question or QUESTION

    @property
    def embodiment(self) -> str:
        """The embodiment whose rows the policy answers."""
        return self.get_world().embodiment(self.robot)

    def plan(self, seeds: int | None = None) -> tuple[Assignment, ...]:
        """Return every episode, in the order of the report; ``seeds`` replaces their number."""
        seeds = seeds or self.seeds
        return make_plan(
            self.get_world(), self.tasks, seeds, self.seed, self.conditions, self.instruction
        )

    def run_options(self, condition: Condition) -> RunOptions:
        """Return how episodes of a condition are run."""
        return RunOptions(
            duration_s=condition.policy.limit_s or self.duration,
            control_frequency_hz=self.control_frequency,
            latency=condition.policy.latency_s or 0.0,
            film_layout="views",
            identify=False,  # each record states what answered
        )

    def duration_s(self, task: str) -> float:
        """Return the maximum duration of a task's episodes, conditions aside [simulated s]."""
        return self.duration or self.get_world().task(task, self.robot).horizon_s

    def identity(self, assignment: Assignment) -> dict[str, Any]:
        """Return everything that determines an episode's result. A stored episode counts if its
        identity is equal.

        The number of GPUs, replicas, workers, episodes, tasks and conditions does not belong to
        it.
        """
        policy = self.policy.to_dict()
        world = self.get_world()
        return {
            "policy": {name: policy[name] for name in policy if name not in _SAME_RESULT},
            **self.policy.parallel.degrees,
            "on_gpu": self.num_gpus > 0,
            **world.identity(self.robot),
            "condition": assignment.condition.identity(),
            "task": assignment.task,
            "index": assignment.index,
            "seed": assignment.seed,
            **assignment.instructions(),
            "duration": self.duration_s(assignment.task),
            "control_frequency": self.control_frequency or world.control_frequency_hz,
            **({} if self.noise_seed is None else {"noise_seed": self.noise_seed}),
        }

    def dynamics_identity(self) -> dict[str, Any]:
        """Return everything that determines the figures of dynamics."""
        return {
            "model": self.policy.model,
            "num_steps": self.policy.sampling.num_steps,
            "clips": self.clips,
            "seed": self.seed,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the settings for JSON, without the token."""
        values = dict(vars(self))
        topology = {
            "num_gpus": values.pop("num_gpus"),
            **self.policy.parallel.degrees,
            "total_shard": values.pop("total_shard"),
            "replicas": self.topology.replicas,
        }
        return {
            **values,
            "tasks": list(self.tasks),
            "conditions": [condition.identity() for condition in self.conditions],
            "duration": max(self.duration_s(task) for task in self.tasks),
            "control_frequency": self.control_frequency or self.get_world().control_frequency_hz,
            "policy": self.policy.to_dict(),
            "topology": topology,
        }


def digest_of(identity: Mapping[str, Any]) -> str:
    """Return a hash of what determines an episode's result, 16 characters."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def check_robot(world: World, robot: str | None) -> None:
    """Raise UnknownNameError for a robot that a world does not have, unless it is a file."""
    if robot is None or _is_file(robot, ".toml"):
        return
    if robot not in world.robots and get_robot(robot).name not in world.robots:
        raise UnknownNameError(f"robot of world {world.name!r}", robot, world.robots)


_SAME_RESULT = ("offload_text", "text_cache_bytes", *DEGREES)
"""Options that do not change a result, or that an identity states by themselves."""
_RUN = tuple(option.name for option in fields(Settings) if option.name != "policy")
_OF_COMMAND = {"out": str, "address": str, "resume": bool, "verify": bool}
OPTIONS = (*_RUN, *POLICY_OPTIONS, *_OF_COMMAND)
"""Names of all options, in TOML and (with dashes) on the command line."""


def read_options(path: Path) -> dict[str, Any]:
    """Return the options of a TOML file: at its top, in ``[model]`` (``path`` is the checkpoint),
    and ``[[conditions]]``.

    Raises:
        ResourceNotFoundError, ConfigError, UnknownNameError, InputError: Unreadable, not TOML, or
            an option is unknown, repeated or of another type.
    """
    values = read_toml(path)
    section = values.pop("model", {})
    if isinstance(section, str):
        section = {"path": section}
    require_type(section, dict, f"[model] in {path}")
    for part, kind, known in (
        (section, "option of [model]", (*POLICY_OPTIONS, "path")),
        (values, "option", OPTIONS),
    ):
        for key in part:
            known_name(key, f"{kind} in {path}", known)
    for name in _OF_COMMAND.keys() & values.keys():
        require_type(values[name], _OF_COMMAND[name], f"{name} in {path}")
    if "backend" in values | section:
        known_name((values | section)["backend"], f"backend in {path}", EVALUATED_BACKENDS)
    if "path" in section:
        section["model"] = section.pop("path")
    if twice := sorted(set(values) & set(section)):
        raise ConfigError(
            f"{path} gives {', '.join(twice)} at its top and again in [model]; give it once."
        )
    return values | section


def make_settings(options: Mapping[str, Any], token: str | None = None) -> Settings:
    """Return settings from some of :data:`OPTIONS`; those of the command alone are ignored, None
    stands for the default.

    Conditions may be short forms, tables, or both. ``token`` is a policy server's. Errors: as
    :class:`Settings`.
    """
    options = {name: value for name, value in options.items() if value is not None}
    run = part_of(options, _RUN)
    for name, suffix in (("world", ".py"), ("robot", ".toml")):
        if name in run:
            run[name] = _absolute(run[name], suffix, name)
    world = get_world(run.get("world", "table"))
    check_robot(world, run.get("robot"))
    tasks = world.tasks(run.get("robot"))
    run["tasks"] = _names(run["tasks"], "tasks") if "tasks" in run else tuple(tasks)
    starts = [tasks[name].starts for name in run["tasks"] if name in tasks]
    run.setdefault("seeds", min((n for n in starts if n is not None), default=DEFAULT_SEEDS))
    if "conditions" in run:
        run["conditions"] = _conditions(run["conditions"], world)
    policy = part_of(options, POLICY_OPTIONS)
    policy.setdefault("backend", "native" if "model" in policy else "scripted")
    dialect = _DIALECT_OF_EMBODIMENT.get(world.embodiment(run.get("robot")))
    if policy["backend"] == "service" and dialect is not None:
        policy.setdefault("dialect", dialect)
    return Settings(with_options(PolicySettings(), {**policy, "api_key": token}), **run)


def _is_file(name: str, suffix: str) -> bool:
    return name.partition(":")[0].lower().endswith(suffix)


def _absolute(name: Any, suffix: str, option: str) -> str:
    """Return a name, of a file with its absolute path: workers may run in another folder."""
    if not isinstance(name, str):
        raise ConfigError(f"{option} is a name or a {suffix} file, got {name!r}.")
    return str(Path(name).expanduser().absolute()) if _is_file(name, suffix) else name


def _names(value: Any, option: str) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{option} are names, separated by commas on the command line and a list "
            f"in TOML; got {value!r}."
        )
    return tuple(name.strip() for name in names)


def _conditions(value: Any, world: World) -> tuple[Condition, ...]:
    values = _names(value, "conditions") if isinstance(value, str) else value
    if not isinstance(values, list | tuple):
        raise ConfigError(f"conditions are short forms or tables, got {value!r}.")
    return tuple(
        Condition.from_dict(each, world.variation)
        if isinstance(each, Mapping)
        else Condition.parse(str(each), world.variation)
        for each in values
    )
