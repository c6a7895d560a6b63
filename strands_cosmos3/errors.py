"""The exception tree: one root, so that a caller can catch everything this package raises on purpose.

::

    Cosmos3Error
    ├── InputError (ValueError)          a value from the caller that cannot be used
    │   ├── ShapeError                   wrong rank, width or length
    │   ├── NonFiniteError               NaN or infinity
    │   ├── UnknownNameError             a name outside a closed set; the valid ones are listed
    │   ├── ActionOutOfRangeError              a normalised action beyond |z| = 10: a fault, not motion
    │   ├── StatisticsError              statistics of the wrong domain or width, or q99 <= q01
    │   ├── ActionSpaceError             an action chunk handed to the wrong decoder
    │   ├── FrameError                   a frame that does not exist, or is not rigidly attached
    │   ├── ObservationError             a camera or state key that is missing or malformed
    │   └── WireFormatError              bytes that are no message of the policy protocol, or a value that has none
    ├── ConfigError (ValueError)         options that contradict each other or are not available
    ├── ControlError (RuntimeError)      the arm cannot, or must not, execute what was asked
    │   └── ActuatorGuardError           a non-finite or out-of-range control value, stopped before `ctrl`
    ├── BackendError (RuntimeError)      inference failed, or answered something unusable
    │   ├── RanksError                   several processes infer together and cannot any more: all were ended
    │   │   ├── RankLostError (ConnectionError)   one of them ended
    │   │   ├── RankSilentError (TimeoutError)    one of them stopped, or hangs
    │   │   └── RankFailedError          one of them failed in a way that has no name here, or they disagree
    │   └── ServiceError                 a policy server, or the way to it, failed; the next call dials again
    │       ├── ServiceUnavailableError (ConnectionError)   nothing listens there
    │       ├── ServiceTimeoutError (TimeoutError)      it did not answer in time
    │       ├── ServiceClosedError (ConnectionError)   it hung up before the answer was complete
    │       ├── ServiceUnreadableError   it answered something else than this protocol
    │       ├── ServiceRefusedError      it answered with an error: no access, a bad request, failed inference
    │       └── ServiceChunkError        it answered rows that must not be executed: not finite, or of another shape
    ├── EvaluationError (RuntimeError)   an evaluation cannot go on; what is finished is kept
    │   └── ReplicaLostError             whoever speaks for a shared replica is gone; its episodes run again
    ├── CheckpointError (RuntimeError)   a checkpoint that must not, or cannot, be loaded
    │   ├── LayoutError                  empty, truncated, pickled, unreadable, or pointing outside its folder
    │   ├── WeightsError                 missing, surplus, misshapen or non-finite weights; they are named
    │   ├── DigestError                  a file whose bytes are not those whose digest was recorded
    │   ├── VariantError                 another variant or action space than the one asked for
    │   └── PreflightError               this device cannot hold it; every failure is listed
    ├── TrainingError (RuntimeError)     a loss that is no longer finite, or a stage that did not pass its gate
    ├── DatasetError (RuntimeError)   a dataset that cannot be read, or must not be written to
    │   ├── DatasetFormatError        files that are absent, truncated, contradictory, or point outside their folder
    │   ├── DatasetMismatchError (ValueError)   it holds other features, or another rate, than what is to be added
    │   └── DatasetBusyError          another process is writing to it
    └── EnvironmentalError (RuntimeError)  something on this machine is missing
        ├── MissingDependencyError (ImportError)
        ├── ResourceNotFoundError (FileNotFoundError)
        └── RenderError                  no usable OpenGL

Every message states the value, what is allowed, and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class Cosmos3Error(Exception):
    """Root of everything that strands_cosmos3 raises on purpose."""


class InputError(Cosmos3Error, ValueError):
    """A value from the caller that cannot be used."""


class ShapeError(InputError):
    """Wrong rank, width or length."""


class NonFiniteError(InputError):
    """NaN or infinity where a finite number is needed."""


class UnknownNameError(InputError):
    """A name outside a closed set.

    Args:
        kind: What the name stands for, e.g. ``"embodiment"``.
        name: The offending value.
        valid: The names that would work; all of them are listed in the message.
    """

    def __init__(self, kind: str, name: object, valid: Iterable[str]):
        names = sorted(valid)
        close = get_close_matches(str(name), names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        super().__init__(f"unknown {kind} {name!r}.{hint} Valid: {', '.join(names)}.")


class ActionOutOfRangeError(InputError):
    """A normalised action so large that it is a fault and not motion."""


class StatisticsError(InputError):
    """Action statistics that do not belong to this domain or cannot be inverted."""


class ActionSpaceError(InputError):
    """An action chunk handed to a decoder of another action space."""


class FrameError(InputError):
    """A frame that does not exist in the model, or is not rigidly attached where it must be."""


class ObservationError(InputError):
    """An observation without a camera or state key that is needed, or with a malformed one."""


class WireFormatError(InputError):
    """Bytes that are no message of the policy protocol, or a value that cannot become one."""


class ConfigError(Cosmos3Error, ValueError):
    """Options that contradict each other, or that this installation cannot honour."""


class ControlError(Cosmos3Error, RuntimeError):
    """The arm cannot, or must not, execute what was asked."""


class ActuatorGuardError(ControlError):
    """A non-finite or out-of-range control value, refused before anything was written."""


class BackendError(Cosmos3Error, RuntimeError):
    """Inference failed or answered something unusable."""


class RanksError(BackendError):
    """Several processes infer together and cannot any more; all of them were ended, and the next call starts new ones."""


class RankLostError(RanksError, ConnectionError):
    """A rank's process ended."""


class RankSilentError(RanksError, TimeoutError):
    """A rank was stopped, or hangs: it gave no sign of life, or made no progress."""


class RankFailedError(RanksError):
    """A rank failed in a way that has no name here, or ranks answered differently."""


class ServiceError(BackendError):
    """A policy server, or the way to it, failed. The connection is gone; the next call dials again."""


class ServiceUnavailableError(ServiceError, ConnectionError):
    """Nothing listens at that address, or there is no such host."""


class ServiceTimeoutError(ServiceError, TimeoutError):
    """The server accepted the connection and did not answer in time."""


class ServiceClosedError(ServiceError, ConnectionError):
    """The server hung up before its answer was complete."""


class ServiceUnreadableError(ServiceError):
    """What answers there does not speak this protocol."""


class ServiceRefusedError(ServiceError):
    """The server answered with an error: no access, a request it cannot use, an inference that failed."""


class ServiceChunkError(ServiceError):
    """The server answered rows that must not be executed: not finite, or of another shape."""


class EvaluationError(Cosmos3Error, RuntimeError):
    """An evaluation cannot go on: its workers do not start, or what they ask is gone. Finished episodes are kept."""


class ReplicaLostError(EvaluationError):
    """Whoever speaks for a shared replica is gone. It is replaced, and the episode runs again."""


class CheckpointError(Cosmos3Error, RuntimeError):
    """A checkpoint that must not, or cannot, be loaded."""


class LayoutError(CheckpointError):
    """Files of a checkpoint are absent, truncated, pickled, unreadable, or lie outside its folder."""


class WeightsError(CheckpointError):
    """Weights are missing, surplus, misshapen or not finite; the message names them."""


class DigestError(CheckpointError):
    """A file's bytes are not those whose digest the checkpoint recorded."""


class VariantError(CheckpointError):
    """The checkpoint is of another variant, or speaks another action space, than was asked for."""


class PreflightError(CheckpointError):
    """This device cannot hold the checkpoint; the message lists every failure at once."""


class TrainingError(Cosmos3Error, RuntimeError):
    """A loss that is no longer finite, or a stage that did not pass its gate."""


class DatasetError(Cosmos3Error, RuntimeError):
    """A dataset that cannot be read, or must not be written to."""


class DatasetFormatError(DatasetError):
    """Files of a dataset are absent, truncated, contradict each other, or lie outside its folder."""


class DatasetMismatchError(DatasetError, ValueError):
    """A dataset holds other features, or another rate, than what is to be added; the message names the differences."""


class DatasetBusyError(DatasetError):
    """Another process is writing to the dataset."""


class EnvironmentalError(Cosmos3Error, RuntimeError):
    """Something that this machine lacks."""


class MissingDependencyError(EnvironmentalError, ImportError):
    """An optional dependency is not installed; the message names the extra."""


class ResourceNotFoundError(EnvironmentalError, FileNotFoundError):
    """A packaged or named file does not exist."""

    def __str__(self) -> str:  # OSError would print "[Errno ...]"
        return str(self.args[0]) if self.args else ""


class RenderError(EnvironmentalError):
    """No usable OpenGL for off-screen rendering."""
