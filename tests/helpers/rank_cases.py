"""What a rank does in a test, and the single process that it is compared with. Everything here
runs in either.
"""

import io
import os
import signal
import time
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

from helpers import post_training, reinforcement, sharded_training
from helpers.memory import peak_growth
from strands_cosmos3.engine.engine import Cosmos3Engine
from strands_cosmos3.engine.options import EngineOptions
from strands_cosmos3.engine.request import Cosmos3ActionRequest
from strands_cosmos3.parallel.collectives import Traffic
from strands_cosmos3.parallel.config import ParallelConfig
from strands_cosmos3.parallel.payload import decode_requests, encode_requests
from strands_cosmos3.training import loop

COLUMNS = 11
ROWS = 4
MODES = ("policy", "forward_dynamics", "inverse_dynamics")
TRAFFIC = ("messages", "payload")
RESULTS = ("action", "video", "pixels", "sound", "waveform")


def question(
    mode="policy",
    guidance=3.0,
    interval=None,
    steps=3,
    seed=5,
    prompt=40,
    frames=5,
    columns=COLUMNS,
    sound=False,
):
    """A request with 4 x ``columns`` latents a frame and four action rows."""
    generator = torch.Generator().manual_seed(seed)
    return Cosmos3ActionRequest(
        text_ids=torch.arange(prompt, prompt + 23),
        neg_text_ids=torch.arange(7, 16),
        video_shape=((frames - 1) // 4 + 1, ROWS, columns),
        action_chunk=4,
        domain_id=8,
        raw_action_dim=10,
        cond_video_pixels=torch.rand(1, 3, frames, 16 * ROWS, 16 * columns, generator=generator) * 2
        - 1,
        cond_action=torch.rand(4, 10, generator=generator) if mode == "forward_dynamics" else None,
        mode=mode,
        fps=15.0,
        num_inference_steps=steps,
        guidance_scale=guidance,
        guidance_interval=interval,
        flow_shift=5.0,
        use_karras_sigmas=False,
        seed=seed,
        sound=sound,
    )


@cache
def engine(
    folder,
    tp=1,
    cfg=1,
    sp=1,
    decode=True,
    split="exact",
    dtype="float32",
    quantize=None,
    sound=False,
):
    """One engine for each set of arguments and process; in a group, one rank of it."""
    parallel = ParallelConfig(tp, cfg, sp, split) if tp * cfg * sp > 1 else None
    return Cosmos3Engine.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        parallel=parallel,
        decode_video=decode,
        options=EngineOptions(quantize=quantize, decode_sound=sound),
    )


def step(asked, **which):
    """A whole inference: action, video latents, pixels where this rank keeps them, and what was
    sent for it.
    """
    (found,) = answers((encode_requests([question(**asked)]),), **which)
    return found


def answers(batches, **which):
    """The same for the requests of several batches, each as bytes; what was sent is that of a
    batch.
    """
    loaded = engine(**which)
    traffic = getattr(loaded.parallel_context, "traffic", Traffic())
    found = []
    for batch in batches:
        traffic.clear()
        for result in loaded.step_batch(decode_requests(batch)):
            kept = {name: result[name].numpy() for name in RESULTS if name in result}
            found.append(kept | {name: dict(getattr(traffic, name)) for name in TRAFFIC})
    return found


def clip_and_latents(columns, frames):
    """A clip to encode and latents to decode, of as many columns of latents."""
    clip = torch.rand(
        (1, 3, frames, 16 * ROWS, 16 * columns), generator=torch.Generator().manual_seed(columns)
    )
    shape = 1, 16, (frames - 1) // 4 + 1, ROWS, columns
    given = torch.randn(shape, generator=torch.Generator().manual_seed(columns))
    return clip * 2 - 1, given


def encode_decode(widths, frames, split="exact", **which):
    """For each width: latents of a clip everywhere, pixels of those latents where they are kept."""
    vae = engine(split=split, **which).vae
    found = []
    with torch.inference_mode():
        for columns in widths:
            clip, given = clip_and_latents(columns, frames)
            latents = vae.encode(clip)
            pixels = vae.decode(given)
            found.append((latents.numpy(), None if pixels is None else pixels.numpy()))
    return found


def flops(**which):
    """Of one guided step's matrix products, as torch counts them; both prompts are of one
    length, and known.
    """
    from dataclasses import replace

    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    loaded = engine(**which)
    asked = replace(question(steps=1), neg_text_ids=torch.arange(10, 33))
    loaded.step(asked)
    counted = []
    velocity = loaded.transformer.velocity

    def counter(*arguments):
        # torch counts attention that is made of matrix products
        with FlopCounterMode(display=False) as mode, sdpa_kernel(SDPBackend.MATH):
            velocities = velocity(*arguments)
        counted.append(mode.get_total_flops())
        return velocities

    loaded.transformer.velocity = counter  # until it is deleted from the instance
    loaded.step(asked)
    del loaded.transformer.velocity
    return counted[0]


def weights(**which):
    """Bytes of each of the transformer's parameters on this rank, and of everything that the
    engine keeps.
    """
    loaded = engine(**which)
    held = {name: p.numel() * p.element_size() for name, p in loaded.transformer.named_parameters()}
    return held, loaded.kept_bytes


def loading_peak(small, folder, tp, cfg=1):
    """Largest growth of anonymous memory while this rank loads a checkpoint, and what it keeps."""
    degrees = ParallelConfig(tp, cfg)
    # imports and allocators are the baseline
    Cosmos3Engine.from_pretrained(small, dtype=torch.float32, parallel=degrees)
    loaded, growth = peak_growth(
        lambda: Cosmos3Engine.from_pretrained(folder, dtype=torch.float32, parallel=degrees)
    )
    return growth, loaded.kept_bytes


def refused(mode_of, **which):
    """The error with which a rank refuses: of loading, or of a request that names a domain
    outside the checkpoint.
    """
    from dataclasses import replace

    from strands_cosmos3.errors import Cosmos3Error

    try:
        loaded = engine(**which)
        if mode_of == "request":
            loaded.step(replace(question(), raw_action_dim=65))
    except Cosmos3Error as error:
        return type(error).__name__, str(error)
    return None


def biased(tp):
    """An attention layer with biases, cut and summed by hand as a checkpoint's would be: keys and
    values in float64, of the whole, and of this rank's heads.
    """
    from strands_cosmos3.engine.config import TransformerConfig
    from strands_cosmos3.engine.transformer import Cosmos3Transformer
    from strands_cosmos3.engine.weights import checkpoint_key

    torch.manual_seed(3)
    config = TransformerConfig(
        32, 2, 4, 2, 16, 64, 16, 8, attention_bias=True, rope_axes_dim=(4, 2, 2)
    )
    whole, part = Cosmos3Transformer(config), Cosmos3Transformer(config)
    mesh = ParallelConfig(tp).join(torch.device("cpu"))
    shard = mesh.sharding(config)
    for (name, stored), module_parameter in zip(
        whole.named_parameters(), part.named_parameters(), strict=True
    ):
        cut = shard(checkpoint_key(name), tuple(stored.shape))
        module_parameter[1].data = stored[cut].detach().clone() if cut else stored.detach().clone()
    mesh.parallelize(part)
    ids, rope = torch.arange(5), (torch.ones(5, 16), torch.zeros(5, 16))
    with torch.inference_mode():
        one, many = whole.text(ids, rope), part.text(ids, rope)
        exact = whole.double().text(ids, tuple(table.double() for table in rope))
        heads = slice(mesh.tp.rank * 2 // tp, mesh.tp.rank * 2 // tp + max(2 // tp, 1))
        layers = zip(exact.layers, one.layers, many.layers, strict=True)
        return [
            (e[i][heads].numpy(), a[i][heads].numpy(), b[i].numpy())
            for e, a, b in layers
            for i in (0, 1)
        ]


def command(arguments):
    """Our program's status and what it says on stdout and on stderr."""
    from strands_cosmos3.cli import main

    with redirect_stdout(io.StringIO()) as said, redirect_stderr(io.StringIO()) as cried:
        status = main(arguments)
    return status, said.getvalue(), cried.getvalue()


def train(folder, until):
    sharded_training.main(Path(folder), until)


def train_by_clocks_of_their_own(folder, until):
    """A minute passes between two looks at rank 0's clock, and less at that of rank 1."""
    ticks = count(step=60.0 - 25.0 * int(os.environ["RANK"]))
    with patch.object(loop, "time", SimpleNamespace(monotonic=lambda: next(ticks), time=time.time)):
        sharded_training.main(Path(folder), until)


def reinforce(model, episode, folder, until):
    reinforcement.main(model, Path(episode), Path(folder), until)


def post_train(source, dataset, folder, until):
    post_training.main(Path(source), Path(dataset), Path(folder), until)


def kill(rank):
    """End one rank without an answer; the others return their numbers."""
    if (own := int(os.environ["RANK"])) == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return own
