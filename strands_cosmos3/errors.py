"""The exception tree. Everything that this package raises on purpose descends from one root.

::

    Cosmos3Error
    ├── InputError (ValueError)                  unusable value from the caller
    │   ├── InstructionError                     an instruction that is not understood
    │   ├── ShapeError                           wrong rank, width or length
    │   ├── NonFiniteError                       NaN or infinity
    │   ├── UnknownNameError                     name outside a closed set
    │   ├── ActionOutOfRangeError                normalised action beyond |z| = 10
    │   ├── StatisticsError                      wrong domain or width, or q99 <= q01
    │   ├── ActionSpaceError                     action chunk passed to the wrong decoder
    │   ├── FrameError                           unknown frame, or one that is not rigidly attached
    │   ├── ObservationError                     missing or malformed camera or state key
    │   │   └── SensorError                      implausible camera view or state
    │   └── WireFormatError                      invalid message, or a value that cannot be sent
    ├── ConfigError (ValueError)                 options that contradict each other or are missing
    ├── ControlError (RuntimeError)              the arm cannot, or must not, execute the motion
    │   ├── ActuatorGuardError                   non-finite or out-of-range control value
    │   └── MotionBoundsError                    too many rows, or would take too long
    ├── BackendError (RuntimeError)              inference failed or returned something unusable
    │   ├── AnswerError                          an answer in words that has not the wanted form
    │   ├── RanksError                           a group of ranks failed; its processes were ended
    │   │   ├── RankLostError (ConnectionError)  a rank's process ended
    │   │   ├── RankSilentError (TimeoutError)   a rank stopped or hangs
    │   │   └── RankFailedError                  a rank raised an unknown error, or ranks disagree
    │   └── ServiceError                         the connection to a policy server failed
    │       ├── ServiceUnavailableError (ConnectionError)  no server at that address
    │       ├── ServiceTimeoutError (TimeoutError)         no answer in time
    │       ├── ServiceClosedError (ConnectionError)       closed before the answer was complete
    │       ├── ServiceUnreadableError           the answer does not follow the protocol
    │       ├── ServiceRefusedError              the server answered with an error
    │       ├── ServiceBusyError                 no answer in the time that the client has
    │       └── ServiceChunkError                rows that must not be executed
    ├── EvaluationError (RuntimeError)           an evaluation cannot continue; episodes are kept
    │   └── ReplicaLostError                     the leader of a shared replica is gone
    ├── CheckpointError (RuntimeError)           a checkpoint cannot, or must not, be loaded
    │   ├── LayoutError                          missing, pickled or unreadable files
    │   ├── WeightsError                         missing, surplus, misshapen or non-finite weights
    │   ├── DigestError                          file contents that differ from the recorded digest
    │   ├── ContractError                        the meaning of its actions is not stated
    │   ├── VariantError                         another variant or action space than requested
    │   └── PreflightError                       the device cannot hold the checkpoint
    ├── TrainingError (RuntimeError)             non-finite loss, or a check that did not pass
    ├── DatasetError (RuntimeError)              a dataset cannot be read, or must not be written to
    │   ├── DatasetFormatError                   missing, truncated or contradictory files
    │   ├── DatasetMismatchError (ValueError)    features or frame rate differ
    │   ├── DatasetBusyError                     another process is writing to the dataset
    │   ├── DatasetNotFoundError (FileNotFoundError)    no such folder, dataset or revision
    │   ├── DatasetAccessError (PermissionError)        the hub asks for a log-in
    │   └── DatasetUnreachableError (ConnectionError)   the hub cannot be reached
    └── EnvironmentalError (RuntimeError)        something is missing on this machine
        ├── MissingDependencyError (ImportError)
        ├── ResourceNotFoundError (FileNotFoundError)
        ├── StorageError (OSError)               a file cannot be written
        ├── FetchError                           a robot's model cannot be downloaded
        └── RenderError                          no usable OpenGL

Every message states the value, the valid alternatives and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class Cosmos3Error(Exception):
    """Root of all errors that strands_cosmos3 raises on purpose."""


class InputError(Cosmos3Error, ValueError):
    """Unusable value from the caller."""


class InstructionError(InputError):
    """An instruction that is not understood; the message says what is."""


class ShapeError(InputError):
    """Wrong rank, width or length."""


class NonFiniteError(InputError):
    """NaN or infinity where a finite number is required."""


class UnknownNameError(InputError):
    """A name outside a closed set, e.g. of ``kind`` "embodiment". The message lists the valid
    names.
    """

    def __init__(self, kind: str, name: object, valid: Iterable[str]):
        names = sorted(valid)
        close = get_close_matches(str(name), names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        super().__init__(f"unknown {kind} {name!r}.{hint} Valid: {', '.join(names)}.")


class ActionOutOfRangeError(InputError):
    """A normalised action beyond |z| = 10: a fault, not motion."""


class StatisticsError(InputError):
    """Action statistics of another domain or width, or that cannot be inverted."""


class ActionSpaceError(InputError):
    """An action chunk passed to a decoder of another action space."""


class FrameError(InputError):
    """A frame that the model does not have, or that is not rigidly attached where it must be."""


class ObservationError(InputError):
    """An observation with a missing or malformed camera or state key."""


class SensorError(ObservationError):
    """Camera views or a measured state that are implausible, where the user does not want to go on
    with them (``PolicyOptions.on_event``).

    Attributes:
        final: Whether the episode ends; else the arm holds, and is asked again.
    """

    def __init__(self, message: str, final: bool = False):
        super().__init__(message)
        self.final = final


class WireFormatError(InputError):
    """Bytes that are not a message of the policy protocol, or a value that cannot be sent."""


class ConfigError(Cosmos3Error, ValueError):
    """Options that contradict each other, or that this installation does not support."""


class ControlError(Cosmos3Error, RuntimeError):
    """The arm cannot, or must not, execute the motion."""


class ActuatorGuardError(ControlError):
    """A non-finite or out-of-range control value, stopped before anything was written."""


class MotionBoundsError(ControlError):
    """A chunk with too many rows, or whose motion would take too long."""


class BackendError(Cosmos3Error, RuntimeError):
    """Inference failed or returned something unusable."""


class AnswerError(BackendError):
    """A reasoner's answer that has not the form which was asked for."""


class RanksError(BackendError):
    """A group of ranks failed. All of its processes were ended, and the next call starts new
    ones.
    """


class RankLostError(RanksError, ConnectionError):
    """A rank's process ended."""


class RankSilentError(RanksError, TimeoutError):
    """A rank stopped or hangs: it sent no heartbeat, or made no progress."""


class RankFailedError(RanksError):
    """A rank raised an error that is not part of this tree, or ranks returned different results."""


class ServiceError(BackendError):
    """A policy server, or the connection to it, failed. The connection is closed; the next call
    reconnects.
    """


class ServiceUnavailableError(ServiceError, ConnectionError):
    """No server listens at that address, or the host does not exist."""


class ServiceTimeoutError(ServiceError, TimeoutError):
    """The server accepted the connection and did not answer in time."""


class ServiceClosedError(ServiceError, ConnectionError):
    """The server closed the connection before its answer was complete."""


class ServiceUnreadableError(ServiceError):
    """The answer does not follow the policy protocol."""


class ServiceRefusedError(ServiceError):
    """The server answered with an error: access denied, invalid request, or failed inference."""


class ServiceBusyError(ServiceError):
    """The server has too much to do to answer in the time that the request can wait. The connection
    stays open; ``retry_after_s`` says when to ask again.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServiceChunkError(ServiceError):
    """The server returned rows that must not be executed: not finite, of another shape or unit, or
    outside the joints' ranges.
    """


class EvaluationError(Cosmos3Error, RuntimeError):
    """An evaluation cannot continue: its workers do not start, or their policy is gone. Finished
    episodes are kept.
    """


class ReplicaLostError(EvaluationError):
    """A replica, the processes that hold one copy of a model for several simulators, has lost its
    leader. It is replaced, and the episode runs again.
    """


class CheckpointError(Cosmos3Error, RuntimeError):
    """A checkpoint cannot, or must not, be loaded."""


class LayoutError(CheckpointError):
    """Files of a checkpoint are missing, truncated, pickled, unreadable, or outside its folder."""


class WeightsError(CheckpointError):
    """Weights are missing, surplus, misshapen or not finite; the message names them."""


class DigestError(CheckpointError):
    """The contents of a file differ from the digest that the checkpoint records."""


class ContractError(CheckpointError):
    """A checkpoint does not state what its actions mean, or is asked for something else; the
    message says what to fill in.
    """


class VariantError(CheckpointError):
    """The checkpoint has another variant or action space than requested."""


class PreflightError(CheckpointError):
    """The device cannot hold the checkpoint; the message lists every reason."""


class TrainingError(Cosmos3Error, RuntimeError):
    """A loss is not finite, or a training stage did not pass its check."""


class DatasetError(Cosmos3Error, RuntimeError):
    """A dataset cannot be read, or must not be written to."""


class DatasetFormatError(DatasetError):
    """Files of a dataset are missing, truncated, contradictory, or outside its folder."""


class DatasetMismatchError(DatasetError, ValueError):
    """A dataset has other features, or another frame rate, than the new episodes; the message
    lists the differences.
    """


class DatasetBusyError(DatasetError):
    """Another process is writing to the dataset."""


class DatasetNotFoundError(DatasetError, FileNotFoundError):
    """No such folder, and no such dataset or revision on the hub."""


class DatasetAccessError(DatasetError, PermissionError):
    """The hub asks for a log-in, or for a dataset's conditions to be accepted."""


class DatasetUnreachableError(DatasetError, ConnectionError):
    """The hub cannot be reached, and the dataset is not in the cache."""


class EnvironmentalError(Cosmos3Error, RuntimeError):
    """Something is missing on this machine."""


class MissingDependencyError(EnvironmentalError, ImportError):
    """An optional dependency is not installed; the message names the extra."""


class ResourceNotFoundError(EnvironmentalError, FileNotFoundError):
    """A packaged or named file does not exist."""


class StorageError(EnvironmentalError, OSError):
    """A file cannot be written: a full disk, no permission. The message names the path; what was
    there before stays.
    """


class FetchError(EnvironmentalError):
    """A robot's model cannot be downloaded, or an archive is not the pinned one; nothing was
    unpacked.
    """


class RenderError(EnvironmentalError):
    """No usable OpenGL for off-screen rendering."""
