"""The interface of a world: its tasks, its sentences, what can be varied in it, and sessions.

A :class:`World` is a description and cheap to make. A :class:`Session` is a world that was opened
in a process. It is reset to the :class:`Start` of an episode; then either :meth:`Session.run` runs
a policy to its end, or a caller executes chunks one by one, and saves and restores the session
between them.

Commands name a world as ``NAME``, ``NAME/VARIANT`` (``libero/libero_object``), ``module:name`` or
``file.py:name``.
The entry points ``strands_cosmos3.worlds`` of other packages add names.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from strands_cosmos3.checks import known_name, typed
from strands_cosmos3.errors import (
    ConfigError,
    Cosmos3Error,
    InstructionError,
    UnknownNameError,
)
from strands_cosmos3.resources import Closeable
from strands_cosmos3.tables import packaged_worlds
from strands_cosmos3.types import ActionChunk, JointTrajectory, Observation, Rollout

if TYPE_CHECKING:  # a world can be asked for its tasks without a simulator
    from strands_cosmos3.backends.base import Backend
    from strands_cosmos3.control.stall import OnStall
    from strands_cosmos3.language import Language
    from strands_cosmos3.policy import Policy
    from strands_cosmos3.sim.simulated_arm import SimulatedArmOptions

Rewording = Literal["swapped", "shuffled", "paraphrased"]
REWORDINGS: tuple[Rewording, ...] = ("swapped", "shuffled", "paraphrased")
ENTRY_POINTS = "strands_cosmos3.worlds"


@dataclass(frozen=True)
class Task:
    """A task of a world.

    Args:
        instruction: Its default instruction.
        horizon_s: Longest duration of an episode in simulated seconds, unless the run sets one.
        starts: Number of official initial states, one for each ``Start.index``; None where the
            seed draws any number of them.
    """

    name: str
    instruction: str
    horizon_s: float = 20.0
    starts: int | None = None


@typed()
def varied(
    least: float, largest: float, short: str = "", whole: bool = False
) -> Any:  # as dataclasses.field
    """Return a field of a :class:`Variation`: a number in a range, or None for the world as it is.

    ``short`` is its name in short forms such as ``light=0.5``, by default the field's.
    """
    kind = "a whole number" if whole else "a number"
    metadata = {"short": short, "least": least, "largest": largest, "kind": kind}
    return field(default=None, metadata=metadata)


@dataclass(frozen=True)
class Variation:
    """What is varied in a world. A world's own subclass adds fields; this one has none.

    Fields of :func:`varied` are numbers or None, boolean fields are flags, and others are names or
    None; ``metadata={"names": ...}`` lists the valid ones.

    Raises:
        ConfigError, UnknownNameError: A value is outside its range, or no valid name.
    """

    def __post_init__(self) -> None:
        for option in fields(self):
            _check_varied(option, getattr(self, option.name))

    @classmethod
    def forms(cls) -> dict[str, Field[Any]]:
        """Return the fields by the name that short forms use."""
        return {option.metadata.get("short") or option.name: option for option in fields(cls)}

    @classmethod
    def short_forms(cls) -> tuple[str, ...]:
        """Return how each field is written, e.g. ``light=N``, ``table=NAME`` and ``close``."""
        return tuple(name + _value_form(option) for name, option in cls.forms().items())

    @classmethod
    @typed()
    def change(cls, text: str) -> dict[str, Any]:
        """Return the field that one short form sets, e.g. ``{"light": 0.5}`` for ``light=0.5``.

        Raises:
            UnknownNameError, ConfigError: There is no such form; the value is no number.
        """
        name, equals, value = text.partition("=")
        option = cls.forms().get(name)
        if option is None or bool(equals) == _is_flag(option):
            raise UnknownNameError("variation", text, cls.short_forms())
        if _is_flag(option):
            return {option.name: True}
        if "least" not in option.metadata:
            return {option.name: value}
        whole = "whole" in option.metadata["kind"]
        try:
            return {option.name: int(value) if whole else float(value)}
        except ValueError:
            raise ConfigError(f"{text!r}: {value!r} is not {option.metadata['kind']}.") from None

    def identity(self) -> dict[str, Any]:
        """Return what it changes, for JSON: nothing for the world as it is."""
        return {name: value for name, value in vars(self).items() if value not in (None, False)}


NOT_VARIED = Variation()


def _is_flag(option: Field[Any]) -> bool:
    return option.default is False


def _value_form(option: Field[Any]) -> str:
    return "" if _is_flag(option) else "=N" if "least" in option.metadata else "=NAME"


def _check_varied(option: Field[Any], value: Any) -> None:
    limits = option.metadata
    if _is_flag(option):
        if not isinstance(value, bool):
            raise ConfigError(f"{option.name} must be true or false, got {value!r}.")
    elif value is not None and "least" in limits:
        kind = int if "whole" in limits["kind"] else int | float
        valid = isinstance(value, kind) and not isinstance(value, bool)
        if not valid or not limits["least"] <= value <= limits["largest"]:
            allowed = "{kind} from {least:g} to {largest:g}".format_map(limits)
            raise ConfigError(f"{option.name} must be {allowed}, got {value!r}.")
    elif value is not None and value not in limits.get("names", (value,)):
        raise UnknownNameError(option.name, value, limits["names"])


@dataclass(frozen=True)
class Start:
    """What an episode begins from.

    Args:
        task: Name of the task; None where nothing is judged.
        seed: Of everything that is random in the scene.
        index: Number of the episode among those of its task, from 0: a world with official initial
            states begins from this one, and instructions rotate with it.
        instruction: The goal that success is judged by; empty is the task's.
        variation: What is varied in the world; of its type :attr:`World.variation`.
    """

    task: str | None
    seed: int = 0
    index: int = 0
    instruction: str = ""
    variation: Variation = NOT_VARIED


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a policy is run in an episode. None stands for the world's own value.

    Args:
        instruction: The policy's instruction; empty is the goal's. If it is another goal, then
            achieving it ends the episode too (``Outcome.FOLLOWED``).
        duration_s: Longest duration in simulated seconds.
        control_frequency_hz: Rate of the control loop.
        latency: Simulated duration of an inference [s], or a callable that returns the next one's.
            0 pauses the simulation for each inference.
        realtime: Run no faster than wall-clock time, and accept each chunk when it arrives.
        on_stall: What follows where the arm stays on the spot while its chunks repeat: ``report``,
            ``stop`` or ``retreat``, see :class:`~strands_cosmos3.control.loop.LoopConfig`.
        noise_seed: Seed of the policy's noise; None is the start's.
        video: A film to write (.mp4); film_layout: ``full`` or ``views``.
        recorder, audience: A :class:`~strands_cosmos3.sim.dataset.RolloutRecorder` and a
            :class:`~strands_cosmos3.sim.film.RolloutListener`.
        identify: Whether the rollout states the digest of the policy's checkpoint, which may have
            to be read for it.
        progress: Called with simulated and total seconds.
        on_tick: Called after every tick with the session; True ends the episode (``interrupted``).
    """

    instruction: str = ""
    duration_s: float | None = None
    control_frequency_hz: float | None = None
    latency: float | Callable[[], float] = 0.0
    realtime: bool = False
    on_stall: OnStall = "report"
    noise_seed: int | None = None
    video: str | Path | None = None
    film_layout: str = "full"
    recorder: Any = None
    audience: Any = None
    identify: bool = True
    progress: Callable[[float, float], None] | None = None
    on_tick: Callable[[Session], bool | None] | None = None


@dataclass(frozen=True)
class Executed:
    """What executing a chunk did.

    Args:
        success: Whether the goal is achieved; the episode is then over.
        duration_s: Simulated duration of the part that was executed.
        fault: Why the arm could follow no further; the episode is then over.
        rows: Of the plan that were begun: success and faults end it early.
        touched: Fraction of the looks at the goal at which the arm touched what stands fixed.
    """

    success: bool
    duration_s: float
    fault: str | None = None
    rows: int = 0
    touched: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether the episode is over."""
        return self.success or self.fault is not None


@dataclass(frozen=True, eq=False)
class SessionState:
    """A saved state of a session, and of the policy that runs in it. It belongs to the session
    that saved it, is never changed by it, and can be restored any number of times.
    """

    values: Mapping[str, Any] = field(repr=False)


class Session(Closeable):
    """A world opened in this process, for one episode at a time. A context manager.

    A state that is saved in a run, by its ``on_tick``, includes the policy and the inference under
    way; :meth:`resume` goes on from it.

    Attributes:
        can_restore: Whether :meth:`save`, :meth:`restore` and :meth:`resume` work.
    """

    can_restore: bool = False

    @abstractmethod
    def reset(self, start: Start) -> None:
        """Begin an episode.

        Raises:
            ConfigError, UnknownNameError, InstructionError: The world has no such start.
        """

    @abstractmethod
    def policy_arguments(self, instruction: str = "") -> dict[str, Any]:
        """Return the arguments of :class:`~strands_cosmos3.policy.Cosmos3Policy` that follow from
        this world: embodiment, and the robot where it has one.
        """

    def policy_options(self) -> dict[str, Any]:
        """Return the options of :class:`~strands_cosmos3.policy.options.PolicyOptions`, by name,
        that follow from this world, such as an arm's limits.
        """
        return {}

    @abstractmethod
    def run(self, policy: Policy, options: RunOptions | None = None) -> Rollout:
        """Run a policy from the present start to the end of the episode.

        Raises:
            ConfigError, InputError: An option or the policy does not fit; nothing has moved.
            Cosmos3Error: The first answer cannot be executed; later ones end the episode as a
                fault.
        """

    def resume(self, policy: Policy, options: RunOptions | None = None) -> Rollout:
        """Continue the run that the restored state was saved in, with the same options."""
        raise ConfigError(f"{type(self).__name__} cannot restore a state.")

    @abstractmethod
    def observation(self, images: bool = True) -> Observation:
        """Return the observation now, with pictures if a policy needs them."""

    @abstractmethod
    def execute(
        self, plan: JointTrajectory | ActionChunk, rows: int | None = None, ticks: int = 1
    ) -> Executed:
        """Execute what a policy's ``plan`` returned, without drawing.

        Args:
            plan: A joint trajectory; in a world without joint control the chunk of actions.
            rows: How many of its rows; None is all.
            ticks: Control ticks between two looks at the goal: fewer looks are cheaper, and the
                motion is the same.

        Raises:
            Cosmos3Error: It cannot be executed; nothing has moved.
        """

    def potential(self) -> float | None:
        """Return how far the task has come, about 1 for a step of it such as a grasp; its
        difference between two states is a reward that no detour increases. None: the world does
        not say.
        """
        return None

    def plain_views(self) -> Mapping[str, NDArray[np.uint8]] | None:
        """Return the views of the present state in the world as it is, without the episode's
        variation; None where that is another scene.
        """
        return None

    def save(self, policy: Policy | None = None) -> SessionState:
        """Return the complete state: the world's, and the policy's if one is given."""
        raise ConfigError(f"{type(self).__name__} cannot save its state.")

    def restore(self, state: SessionState, policy: Policy | None = None) -> None:
        """Return to a saved state, exact to the bit."""
        raise ConfigError(f"{type(self).__name__} cannot restore a state.")

    @abstractmethod
    def draw(self) -> dict[str, NDArray[np.uint8]]:
        """Return the policy's views as they are now, [H, W, 3] by name."""

    def close(self) -> None:
        """Free all resources; closing twice is harmless."""


class World(ABC):
    """What a policy acts in and how it is judged.

    A robot is named as in :func:`~strands_cosmos3.robots.catalogue.get_robot`, or is the path of a
    ``.toml`` file. Methods that take a task or a robot raise UnknownNameError for one that this
    world does not have.

    Attributes:
        name: As :func:`get_world` takes it.
        robots: Names of its robots, the default first.
        variation: Type of what can be varied in it.
        control_frequency_hz: Rate of its control loop, unless a run sets one.
        fixed_frequency: Whether no run may set one.
        breakdown: What :meth:`category` distinguishes, for the heading of a table.
        rewordings: The forms of an instruction that :meth:`reworded` knows.
    """

    name: str
    robots: tuple[str, ...]
    variation: ClassVar[type[Variation]] = Variation
    control_frequency_hz: float = 50.0
    fixed_frequency: bool = False
    breakdown: str = ""
    rewordings: tuple[Rewording, ...] = ()

    @abstractmethod
    def tasks(self, robot: str | None = None) -> Mapping[str, Task]:
        """Return the tasks of a robot by name, the default first; None is the first robot."""

    def task(self, name: str, robot: str | None = None) -> Task:
        """Return a task by name."""
        tasks = self.tasks(robot)
        return tasks[known_name(name, "task", tasks)]

    @abstractmethod
    def embodiment(self, robot: str | None = None) -> str:
        """Return the name of the embodiment whose rows drive a robot."""

    def instruction(self, task: str, index: int = 0, template: str = "") -> str:
        """Return the instruction of an episode.

        Args:
            index: Number of the episode; what an instruction names may rotate with it.
            template: Another wording; a world says what may be left open in it.

        Raises:
            InstructionError: The template cannot be filled in or judged.
        """
        return template or self.task(task).instruction

    def reworded(
        self, task: str, instruction: str, form: Rewording, rng: np.random.Generator
    ) -> str:
        """Return an instruction in another form: of another goal that can be judged in the same
        scene (``swapped``), of any such goal (``shuffled``), or of the same goal in words that no
        demonstration contains (``paraphrased``).

        Raises:
            ConfigError: The world, the task or the instruction has no such form.
        """
        raise ConfigError(f"world {self.name!r} has no {form} instructions.")

    def same_goal(self, task: str, a: str, b: str) -> bool:
        """Whether two instructions ask for the same."""
        return a == b

    def check_instruction(self, task: str, instruction: str) -> None:
        """Raise InstructionError for an instruction that cannot be judged as this task."""
        if not instruction.strip():
            raise InstructionError("the instruction is blank.")

    def task_of(self, instruction: str, robot: str | None = None) -> str | None:
        """Return the name of the task that an instruction asks for; None where instructions do not
        tell. InstructionError: it asks for none of them.
        """
        return None

    def suggestions(
        self, robot: str | None = None, language: Language | None = None
    ) -> Sequence[str]:
        """Return instructions to offer, that a policy with this language understands."""
        return [task.instruction for task in self.tasks(robot).values()]

    def category(self, task: str, instruction: str) -> str | None:
        """Return what reports also group successes by, e.g. the colour of the goal's object."""
        return None

    def check_run(self, options: RunOptions) -> None:  # noqa: B027 - optional for implementers
        """Raise ConfigError for options that no run in this world can have."""

    def check_variation(self, variation: Variation, robot: str | None = None) -> None:  # noqa: B027
        """Raise ConfigError for a variation that changes nothing for this robot."""

    def expert(self, robot: str | None = None) -> Backend | None:
        """Return a new backend that solves the tasks from the simulator's state, or None."""
        return None

    def required_expert(self, robot: str | None = None) -> Backend:
        """As :meth:`expert`; ConfigError if there is none."""
        if (expert := self.expert(robot)) is None:
            raise ConfigError(
                f"world {self.name!r} has no scripted expert; choose another backend."
            )
        return expert

    def identity(self, robot: str | None = None) -> dict[str, Any]:
        """Return what, beside task, seed and variation, determines an episode: JSON values, also
        of the files of a robot, with which a stored episode is compared before it is kept.
        """
        return {"world": self.name, **({} if robot in (None, self.robots[0]) else {"robot": robot})}

    @abstractmethod
    def open(
        self,
        robot: str | None = None,
        *,
        task: str | None = None,
        arm: SimulatedArmOptions | None = None,
    ) -> Session:
        """Open a session.

        Args:
            task: The task of the first episode, where a scene is built for it.
            arm: How a simulated arm is controlled and what its errors are.

        Raises:
            ConfigError, UnknownNameError: No such robot or task, or it takes no ``arm``.
            MissingDependencyError: The simulator is not installed.
        """


@typed()
def get_world(name: str | World) -> World:
    """Return a world by ``NAME``, ``NAME/VARIANT``, ``module:name`` or ``file.py:name``; a World is
    returned as it is.

    The attribute that is named is a :class:`World`, or a subclass of it, which is called with the
    variant if one is given.

    Raises:
        UnknownNameError: There is no such world.
        ConfigError: It cannot be imported, or is no World.
    """
    if isinstance(name, World):
        return name
    base, _, variant = (name, "", "") if ":" in name else name.partition("/")
    place = base if ":" in base else _places().get(base)
    if place is None:
        raise UnknownNameError("world", name, (*_places(), "module:name"))
    module, _, attribute = place.rpartition(":")
    try:
        world = getattr(_imported(module), attribute)
    except Cosmos3Error:
        raise
    except (ImportError, OSError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"world {name!r} cannot be imported ({error}); give module:name of a World."
        ) from None
    if isinstance(world, type) and issubclass(world, World):
        make: Any = world  # its own arguments are not World's
        world = make(variant) if variant else make()
    if not isinstance(world, World):
        raise ConfigError(f"world {name!r} is {type(world).__name__}, not a World.")
    return world


@functools.cache  # reading the entry points of everything installed takes milliseconds
def _places() -> Mapping[str, str]:
    added = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    return added | {name: world["world"] for name, world in packaged_worlds().items()}


def _imported(module: str) -> ModuleType:
    """Import a module by name, or a file once by its path."""
    if not module.endswith(".py"):
        return importlib.import_module(module)
    path = Path(module).expanduser().resolve()
    name = f"strands_cosmos3_world_{path.stem}"
    if name in sys.modules and sys.modules[name].__file__ == str(path):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{module} is no Python file")
    sys.modules[name] = loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded
