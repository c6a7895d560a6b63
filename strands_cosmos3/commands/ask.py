"""``strands-cosmos3 ask``: a question about pictures and films, answered in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro
from rich.console import Console

from strands_cosmos3.embedded import embedded_checkpoint
from strands_cosmos3.engine.options import Dtype, EngineOptions
from strands_cosmos3.errors import InputError, ResourceNotFoundError
from strands_cosmos3.extras import require_extras
from strands_cosmos3.options import section
from strands_cosmos3.reasoner.options import AskOptions
from strands_cosmos3.resources import json_object, read_json, require_file


@dataclass(frozen=True)
class AskCommand:
    """Ask a Cosmos 3 checkpoint about pictures and films.

    The answer is written to standard output as it comes. The checkpoint needs eyes and a head:
    `strands-cosmos3 checkpoint inspect` says whether it has them.

      strands-cosmos3 ask --model nvidia/Cosmos3-Edge --image a.png "Did the gripper close?"

    Exit status: 0 answered, 1 no answer of the wanted form or a checkpoint that cannot answer, 130
    ended by Ctrl-C.
    """

    question: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="QUESTION")]
    """The question, or a task in words."""
    model: str | None = None
    """Folder, or owner/name[@revision] on the hub; the default is the bundled checkpoint."""
    image: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """A picture; again for each further one. They come before the films and the question."""
    video: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """A film; again for each further one. Two frames a second are read."""
    json: str | None = None
    """A JSON schema that the answer follows: a .json file, or the schema itself, {...}. It needs
    the extra [ask].
    """
    device: str | None = None
    """cpu, cuda or cuda:N; None is cuda where torch sees a GPU, else cpu."""
    dtype: Dtype | None = None
    """Type of weights and hidden states; None is bfloat16 on cuda, else float32."""
    answer: AskOptions = section(AskOptions)

    extras: ClassVar[tuple[str, ...]] = ("engine",)
    """Extras of the package that it needs."""

    def run(self) -> int:
        """Ask, and print the answer."""
        schema = None if self.json is None else _schema(self.json)
        if schema is not None:
            require_extras("--json", ("ask",))
        for path in (*self.image, *self.video):
            require_file(path, ResourceNotFoundError, hint="Name a picture or film.")
        from strands_cosmos3.backends.devices import resolve_device
        from strands_cosmos3.reasoner.reasoner import Reasoner

        chosen = EngineOptions(device=self.device, dtype=self.dtype)
        checkpoint = self.model or embedded_checkpoint()
        notes = Console(stderr=True, highlight=False, soft_wrap=True)
        with notes.status(f"loading {checkpoint}"):
            reasoner = Reasoner.from_pretrained(
                checkpoint, device=resolve_device(chosen), dtype=chosen.dtype
            )
        if reasoner.label:
            notes.print(f"the checkpoint says of itself: {reasoner.label}", markup=False)
        try:
            written = reasoner.ask(
                self.question,
                self.image,
                self.video,
                options=self.answer,
                schema=schema,
                on_text=_print,
            )
        finally:  # the line of an answer that was cut off ends, too
            print(flush=True)
        if not written.finished:
            notes.print(f"cut off after {written.tokens} tokens; --max-tokens sets the limit")
        return 0


def _print(text: str) -> None:
    """Print a part of an answer, without what would steer a terminal."""
    safe = (c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    print("".join(safe), end="", flush=True)


def _schema(given: str) -> Mapping[str, Any]:
    hint = "Give a .json file with a schema, or the schema itself, {...}."
    if given.lstrip().startswith("{"):
        return json_object(given, "--json", InputError, hint)
    return read_json(Path(given), InputError, hint)
