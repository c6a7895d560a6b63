"""Process groups and their exchanges, each counted in :class:`Traffic`. Nothing else in this
package sends tensors.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from strands_cosmos3.errors import ConfigError, Cosmos3Error, DigestError, RankLostError
from strands_cosmos3.parallel.launched import told, watch_machines

_ANSWER_S = 2.0
_DIGEST_S = 3600  # a large checkpoint is read once
# gloo's errors have no type of their own
_EXCHANGE = re.compile("gloo|nccl|connection|timed out", re.IGNORECASE)


@dataclass
class Traffic:
    """Contributions of this rank to exchanges, by kind: their number, and the bytes of its tensors
    in them.

    A halo counts once for each neighbour that it was sent to.
    """

    messages: Counter[str] = field(default_factory=Counter)
    payload: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, x: torch.Tensor) -> None:
        """Count one exchange of a tensor."""
        self.messages[kind] += 1
        self.payload[kind] += x.nbytes

    def clear(self) -> None:
        """Reset all counters."""
        self.messages.clear()
        self.payload.clear()


class Group:
    """Ranks that exchange tensors; all make the same calls in the same order."""

    def __init__(self, group: dist.ProcessGroup | None, traffic: Traffic):
        self._group = group
        self._traffic = traffic
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def sum(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        """Return the sum over ranks, computed in place and bit-equal on all of them."""
        x = x.contiguous()
        self._traffic.add(kind, x)
        with naming_lost_ranks(kind):
            dist.all_reduce(x, group=self._group)
        return x

    def gather(self, x: torch.Tensor, kind: str) -> list[torch.Tensor]:
        """Return every rank's tensor, in rank order. All have the same shape."""
        x = x.contiguous()
        self._traffic.add(kind, x)
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with naming_lost_ranks(kind):
            dist.all_gather(parts, x, group=self._group)
        return parts

    def gather_widths(self, x: torch.Tensor, widths: Sequence[int], kind: str) -> torch.Tensor:
        """Concatenate tensors [..., widths[rank]] of all ranks along the last axis, on every
        rank.
        """
        return torch.cat(_cut(self.gather(_padded(x, max(widths)), kind), widths), dim=-1)

    def swap(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        """Send x[r] of x [ranks, ...] to rank r; return what all ranks sent to this one, in rank
        order.
        """
        self._traffic.add(kind, x)
        received = torch.empty_like(x)
        with naming_lost_ranks(kind):
            dist.all_to_all_single(received, x, group=self._group)
        return received

    def collect(
        self, x: torch.Tensor, widths: Sequence[int], kind: str
    ) -> list[torch.Tensor] | None:
        """Return the tensors [..., widths[rank]] of all ranks on rank 0, None on the others."""
        padded = _padded(x, max(widths)).contiguous()
        parts = [torch.empty_like(padded) for _ in widths] if self.rank == 0 else None
        if self.rank:
            self._traffic.add(kind, padded)
        with naming_lost_ranks(kind):
            dist.gather(padded, parts, group=self._group, group_dst=0)
        return None if parts is None else _cut(parts, widths)

    def neighbours(
        self, to_left: torch.Tensor | None, to_right: torch.Tensor | None, kind: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Send tensors to both neighbours and return what they sent: (from the left, from the
        right).

        All ranks pass tensors of the same shape, or None for a direction that is not used. The
        result is None where there is no neighbour.
        """
        received: dict[int, torch.Tensor] = {}
        operations: list[dist.P2POp] = []
        # what moves right arrives from the left
        for step, out, alike in ((-1, to_left, to_right), (1, to_right, to_left)):
            peer = self.rank + step
            if not 0 <= peer < self.size:
                continue
            if alike is not None:
                received[step] = buffer = torch.empty_like(alike)
                operations.append(
                    dist.P2POp(dist.irecv, buffer, group=self._group, group_peer=peer)
                )
            if out is not None:
                self._traffic.add(kind, out)
                operations.append(dist.P2POp(dist.isend, out, group=self._group, group_peer=peer))
        with naming_lost_ranks(kind):
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
        return received.get(-1), received.get(1)


def require_same_checkpoint(digest: Callable[[], str]) -> None:
    """Raise a DigestError on every rank if the machines hold different checkpoints. The first
    process of each asks for its digest.
    """
    if (nodes := told("GROUP_WORLD_SIZE", 1)) == 1:
        return
    store = _store()
    store.set_timeout(timedelta(seconds=_DIGEST_S))
    if told("LOCAL_RANK") == 0:
        store.set(f"checkpoint of {told('GROUP_RANK')}", digest())
    found = [store.get(f"checkpoint of {node}").decode()[:12] for node in range(nodes)]
    if len({*found}) > 1:
        raise DigestError(
            f"the checkpoint is not the same on all machines (SHA-256 of node 0, 1 ...: "
            f"{', '.join(found)}); copy one machine's to the others."
        )


@contextmanager
def naming_lost_ranks(doing: str) -> Iterator[None]:
    """Raise :class:`RankLostError`, which names the ranks that are gone, where an exchange fails
    with torch's own error.

    Every rank that is still there says so in the group's store; those that do not within two
    seconds are gone, or hang.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, Cosmos3Error) or not (
            isinstance(error, dist.DistError) or _EXCHANGE.search(str(error))
        ):
            raise
        reason = [*str(error).strip().splitlines(), type(error).__name__][0][:200]
        raise RankLostError(
            f"rank {dist.get_rank()} could not exchange {doing!r}: {_lost_ranks()} ended or "
            "hangs. Its own error, if any, is "
            f"above; start all ranks again. (torch: {reason})"
        ) from None


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()  # the only way to reach torchrun's store


def _lost_ranks() -> str:
    """Name the ranks that do not answer, e.g. "rank 1"."""
    try:
        store = _store()
        store.set(f"strands_cosmos3/there/{dist.get_rank()}", "1")
        deadline = time.monotonic() + _ANSWER_S
        waiting = set(range(dist.get_world_size()))
        while waiting and time.monotonic() < deadline:
            waiting -= {rank for rank in waiting if store.check([f"strands_cosmos3/there/{rank}"])}
            time.sleep(0.05)
    except RuntimeError:  # the store was on the rank that is gone
        time.sleep(_ANSWER_S)  # a watch says who it was, and ends this process
        return "another rank (rank 0, if it held the store)"
    return (
        f"rank {', '.join(map(str, sorted(waiting)))}" if waiting else "another rank's connection"
    )


def world_size() -> int:
    """Return the number of processes that this one runs with: an initialised group's,
    torchrun's, or 1.
    """
    if not dist.is_available():
        return 1
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1


def connect(
    device: torch.device, timeout_s: float, init_method: str, rank: int = -1, size: int = -1
) -> None:
    """Initialise the process group, NCCL between GPUs, gloo between CPUs; return when every rank
    has connected.

    Raises:
        ConfigError: This torch was built without torch.distributed.
        RankLostError: Other ranks do not connect.
    """
    if not dist.is_available():
        raise ConfigError(
            "this torch was built without torch.distributed; install one with "
            "it, or use one process."
        )
    cuda = device.type == "cuda"
    if init_method == "env://":
        watch_machines()
    try:
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            init_method=init_method,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if cuda else None,
        )
    except RuntimeError as error:
        raise RankLostError(
            f"rank {rank if rank >= 0 else os.environ.get('RANK', '?')} could not connect to the "
            "other ranks within "
            f"{timeout_s:g} s ({str(error).strip().splitlines()[0][:200]}); start all ranks again."
        ) from None


def patient_group() -> Any:
    """Return all processes as a group whose members may wait for days: encoding a large dataset
    takes hours, and so may sampling or a robot's next request.
    """
    return dist.new_group(backend="gloo", timeout=timedelta(days=7))


def own_device(device: torch.device) -> torch.device:
    """Resolve ``cuda`` to the GPU with this process's local rank, and select it."""
    if device.type != "cuda":
        return device
    if device.index is None:
        device = torch.device("cuda", dist.get_node_local_rank(fallback_rank=0))
    torch.cuda.set_device(device)
    return device


def _cut(parts: Sequence[torch.Tensor], widths: Sequence[int]) -> list[torch.Tensor]:
    return [part[..., :width] for part, width in zip(parts, widths, strict=True)]


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    return x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1]))
