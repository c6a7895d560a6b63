"""The LeRobot policy: batches of tensors in, joint angles out. ``strands_cosmos3.Cosmos3Policy``
does the work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import OBS_IMAGES, OBS_STATE
from torch import Tensor

from lerobot_policy_cosmos3.configuration_cosmos3 import _NO_TRAINING, BUNDLED, VIEWS, Cosmos3Config
from lerobot_policy_cosmos3.processor_cosmos3 import make_cosmos3_pre_post_processors
from strands_cosmos3 import Cosmos3Policy as Policy
from strands_cosmos3.errors import ConfigError, ObservationError
from strands_cosmos3.observe.mapping import CANONICAL
from strands_cosmos3.policy.arm import steps_of_rows

_WHOLE_CHUNK = 4096  # more steps than any chunk has


class Cosmos3Policy(PreTrainedPolicy):
    """A Cosmos 3 checkpoint as a LeRobot policy.

    ``save_pretrained`` writes the configuration and the processors. ``model.safetensors`` there is
    empty: the weights stay in the checkpoint that the configuration names.

    Args:
        config: Its configuration.
        kwargs: LeRobot's ``dataset_stats`` and ``dataset_meta``, which are not needed.

    Attributes:
        policy: The :class:`strands_cosmos3.Cosmos3Policy` that answers.

    Raises:
        ConfigError: The features are not a Panda's, or the checkpoint cannot be run.
    """

    config_class = Cosmos3Config
    name = "cosmos3"
    config: Cosmos3Config

    def __init__(self, config: Cosmos3Config, **kwargs: Any):
        super().__init__(config)
        config.validate_features()
        self.policy = Policy(
            embodiment=config.embodiment,
            robot="panda",
            backend="native",
            model=None if config.model == BUNDLED else config.model,
            seed=config.seed,
            actions_per_step=_WHOLE_CHUNK,
            device=config.device,
            options={
                "observed_gripper": "fraction",
                "commanded_gripper": "fraction",
                **config.options,
            },
        )
        if config.fps is not None:
            self.policy.set_control_frequency(config.fps)
        self._queue: deque[Tensor] = deque()

    def reset(self) -> None:
        """Start an episode: the queue is emptied, and the noise begins with the configuration's
        seed.
        """
        self._queue.clear()
        self.policy.reset()

    @torch.no_grad()
    def predict_action_chunk(self, batch: dict[str, Any], **kwargs: Any) -> Tensor:
        """The whole chunk for each observation.

        Args:
            batch: What the preprocessor answers: ``observation.state`` [B, 8], pictures [B, 3, H,
                W] in 0..1, ``task`` [B].
            kwargs: ``noise`` must be None.

        Returns:
            Actions [B, T, 8], at ``config.fps``. Several observations are answered by one
            inference, each as at the beginning of an episode; the longer chunks are cut to the
            shortest.

        Raises:
            ConfigError: ``noise`` was given. ObservationError: The state or a picture is missing.
            BackendError: Inference failed.
        """
        if kwargs.get("noise") is not None:
            raise ConfigError("noise= cannot be given; set the configuration's seed.")
        if OBS_STATE not in batch or batch[OBS_STATE].shape[1:] != (len(CANONICAL),):
            found = list(batch[OBS_STATE].shape) if OBS_STATE in batch else "missing"
            raise ObservationError(
                f"{OBS_STATE} is {found}; valid: [B, 8], seven joint angles "
                "[rad] and an open fraction."
            )
        observations, tasks = list(self._observations(batch)), _tasks(batch)
        if len(observations) == 1:
            answers = [self.policy.get_actions_sync(observations[0], tasks[0])]
        else:
            answers = self.policy.get_actions_batch(observations, tasks)
        chunks = [[list(step.values()) for step in steps] for steps in answers]
        shortest = min(map(len, chunks))
        return torch.tensor([chunk[:shortest] for chunk in chunks], device=batch[OBS_STATE].device)

    def select_action(self, batch: dict[str, Any], **kwargs: Any) -> Tensor:
        """The next action [B, 8]; a new chunk is predicted when ``config.n_action_steps`` of the
        last one are used up.
        """
        if not self._queue:
            chunk = self.predict_action_chunk(batch, **kwargs)
            self._queue.extend(chunk[:, : self._n_action_steps].unbind(1))
        return self._queue.popleft()

    @property
    def _n_action_steps(self) -> int | None:
        rows = self.policy.info.replan_rows
        if self.config.n_action_steps is not None or rows is None:
            return self.config.n_action_steps
        return steps_of_rows(rows, self.policy.embodiment.fps, self.config.fps)

    def _observations(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The batch's observations by the arm's own names."""
        keys = [self.policy.mapping.observed[name] for name in CANONICAL]
        pictures = {
            view: _uint8(batch[key]) for view in VIEWS if (key := f"{OBS_IMAGES}.{view}") in batch
        }
        for i, state in enumerate(batch[OBS_STATE].double().cpu().numpy()):
            yield {
                **dict(zip(keys, state, strict=True)),
                **{view: frames[i] for view, frames in pictures.items()},
            }

    def _save_pretrained(
        self, save_directory: Path, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        super()._save_pretrained(save_directory, state_dict)
        for pipeline in make_cosmos3_pre_post_processors(self.config):
            pipeline.save_pretrained(save_directory)

    def get_optim_params(self) -> dict[str, Any]:
        """Raise ConfigError: this plugin does not train."""
        raise ConfigError(_NO_TRAINING)

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Any] | None]:
        """Raise ConfigError: this plugin does not train."""
        raise ConfigError(_NO_TRAINING)


def _tasks(batch: dict[str, Any]) -> list[str]:
    task = batch.get("task", "")
    return [task] * len(batch[OBS_STATE]) if isinstance(task, str) else list(task)


def _uint8(pictures: Tensor) -> Any:
    """[B, H, W, 3] uint8 from [B, 3, H, W] in 0..1."""
    scaled = (
        pictures
        if pictures.dtype == torch.uint8
        else (pictures.clamp(0, 1) * 255).round().to(torch.uint8)
    )
    return scaled.permute(0, 2, 3, 1).cpu().numpy()
