"""The backend protocol: one question, one answer, wherever inference happens."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from strands_cosmos3.types import ActionChunk, Request


@runtime_checkable
class Backend(Protocol):
    """Answers requests with action chunks.

    Attributes:
        name: As users name it.
        needs_privileged: Whether it wants what only a simulator knows. Such a backend must live in this process.
        requires_images: Whether it wants the composed picture.
        model_sha256: Digest of the checkpoint behind it, or None.
    """

    @property
    def name(self) -> str: ...
    @property
    def needs_privileged(self) -> bool: ...
    @property
    def requires_images(self) -> bool: ...
    @property
    def model_sha256(self) -> str | None: ...

    def infer(self, request: Request) -> ActionChunk:
        """The chunk for a request.

        Raises:
            BackendError: Inference failed, or the request lacks what this backend needs.
        """
        ...

    def reset(self, seed: int | None = None) -> None:
        """Forget the episode so far."""
        ...

    def close(self) -> None:
        """Free whatever it holds; calling it twice is harmless."""
        ...
