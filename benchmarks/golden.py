"""Guard of a refactoring: runs the same cases in two trees and compares their results.

    python benchmarks/golden.py --base 49133e3                    # with the working tree
    python benchmarks/golden.py --base 49133e3 --head 49133e3     # that all cases are deterministic
    python benchmarks/golden.py --base 49133e3 --only rollout.pick,wire --tolerance-rad 1e-9

Cases (golden_cases.toml) are rollouts, rollouts with a policy server, replies to recorded clients,
evaluations, inferences, converted checkpoints and action chunks. Each runs in a process of its
tree, by the command line or by names of ``strands_cosmos3.__all__``. The base tree makes the inputs
of both trees once: small random checkpoints and recordings. Its results stay in ``--cache``, which
worktrees can share, by commit, case, machine and packages, so that a second run runs the head
alone. Times of the clock, versions and paths are not compared.

With a tolerance, numbers in rad may differ by it, and other fractions (mm, m, s) by a thousand
times as much, relative above 1; texts, counts and outcomes never. Exit status: 0 equal,
1 different, 2 a case of the base failed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from golden_results import compare, read_results
from golden_trees import Tree, interrupt_all
from tests.helpers.transcripts import Transcript, replay_client, replay_http_client

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CASES = (HERE / "golden_cases.toml").read_text()
CHUNKS = HERE / "golden_chunks.py"
CACHE = ROOT / "out/golden"
HEAD = CACHE / "head"  # results of the head, of the last run alone
# The kinds that take longest come first.
KINDS = ("evaluate", "chunks", "service", "wire", "rollout", "infer", "checkpoint")


@dataclass(frozen=True)
class Case:
    """A case of golden_cases.toml."""

    kind: str
    key: str
    options: Any  # a command line, or several by name

    @property
    def name(self) -> str:
        """Its name, e.g. ``rollout.pick``."""
        return f"{self.kind}.{self.key}"

    def run(self, tree: Tree, out: Path) -> None:
        """Run it in a tree and write its results to the folder ``out``."""
        figures = " --json OUT/figures.json --npz OUT/arrays.npz"
        if self.kind == "wire":
            with tree.server(self.options["serve"], out) as port:
                transcript = Transcript.load(self.options["transcript"])
                replay = replay_http_client if self.key == "libero" else replay_client
                replies = replay(transcript, port)
            (out / "replies.json").write_text(json.dumps(replies, default=plain))
            return
        if self.kind == "service":
            with tree.server(self.options["serve"], out) as port:
                call = f"--backend service --port PORT {self.options['rollout']}{figures}"
                status = tree.run(tree.line("rollout", call, out, port), out)
        elif self.kind == "chunks":
            line = [sys.executable, str(CHUNKS), self.options, str(tree.inputs), str(out)]
            status = tree.run(line, out, (0,))
        else:
            outputs = {"rollout": figures, "evaluate": " --out OUT", "infer": " --out OUT/answer"}
            line = tree.line(self.kind, self.options + outputs.get(self.kind, ""), out)
            status = tree.run(line, out, (0, 1, 2) if "refused" in self.key else (0, 1))
        (out / "status.json").write_text(json.dumps({"exit status": status}))


def plain(value: Any) -> Any:
    """Return an array or another value of a message for JSON."""
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "data": value.tolist()}
    return repr(value)


def run(
    base: str,
    head: str = ".",
    cache: Path = CACHE,
    workers: int = 2,
    only: str = "",
    tolerance_rad: float = 0.0,
) -> int:
    """Run what is not cached, compare, print a table; return the exit status.

    Args:
        base: Commit to compare with.
        head: Commit, or . for the working tree.
        cache: Folder of the base, to share.
        workers: Cases at a time.
        only: Names or kinds of cases, separated by commas.
        tolerance_rad: Largest difference of angles.
    """
    cache = cache.resolve()
    cases = read_cases(only)
    commit, folder = checkout(base, cache)
    inputs = made_inputs(cache / commit, folder)
    base_tree = Tree(folder, inputs)
    head_tree = Tree(ROOT if head == "." else checkout(head, cache)[1], inputs)
    chunks = CHUNKS.read_text() + CASES
    stored: dict[str, Path] = {}
    for case in cases:
        parts = [json.dumps(case.options), inputs.name, chunks if case.kind == "chunks" else ""]
        stored[case.name] = cache / commit / "results" / f"{case.name}-{digest_of(*parts)}"
    missing = [case for case in cases if not stored[case.name].exists()]
    print(f"base {commit[:10]}, {len(cases) - len(missing)} cases cached", flush=True)
    if failed := run_all(base_tree, missing, stored, workers):
        for name, error in failed.items():
            print(f"{name}: {error}", file=sys.stderr)
        return 2
    shutil.rmtree(HEAD, ignore_errors=True)
    fresh = {case.name: HEAD / case.name for case in cases}
    failed = run_all(head_tree, cases, fresh, workers)
    equal = 0
    words = {str(inputs): "INPUTS", str(folder): "TREE", str(head_tree.folder): "TREE"}
    for name in stored:
        if name in failed:
            verdict = f"failed: {failed[name]}"
        else:
            results = read_results(stored[name], words)
            difference = compare(results, read_results(fresh[name], words), tolerance_rad)
            verdict = difference or f"equal ({len(results)} values)"
            equal += difference is None
        print(f"{name:28} {verdict}", flush=True)
    print(f"{equal} of {len(cases)} cases are equal")
    return int(equal < len(cases))


def run_all(tree: Tree, cases: list[Case], out: Mapping[str, Path], workers: int) -> dict[str, str]:
    """Run cases side by side; return the errors by the case's name."""
    errors: dict[str, str] = {}

    def run_one(case: Case) -> None:
        begin = time.monotonic()
        try:
            with whole(out[case.name]) as hidden:
                case.run(tree, hidden)
        except Exception as error:
            errors[case.name] = f"{type(error).__name__}: {error}"
        mark = " failed" if case.name in errors else ""
        print(f"  {case.name:28} {time.monotonic() - begin:6.1f} s{mark}\n", end="", flush=True)

    print(f"{len(cases)} cases to run in {tree.folder}", flush=True)
    with ThreadPoolExecutor(workers) as pool:
        try:
            list(pool.map(run_one, cases))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            interrupt_all()
            raise
    return errors


def checkout(revision: str, cache: Path) -> tuple[str, Path]:
    """Return a commit and the folder with its files, which git knows nothing of."""
    git = ["git", "-C", str(ROOT)]
    parse = [*git, "rev-parse", "--verify", f"{revision}^{{commit}}"]
    commit = subprocess.check_output(parse, text=True).strip()
    folder = cache / commit / "tree"
    if not folder.exists():
        files = io.BytesIO(subprocess.check_output([*git, "archive", commit]))
        with tarfile.open(fileobj=files) as archive, whole(folder) as hidden:
            archive.extractall(hidden, filter="data")
    return commit, folder


def made_inputs(cache: Path, tree: Path) -> Path:
    """Return the folder of inputs, made by the base tree."""
    commands = tomllib.loads(CASES)["inputs"]
    source = CHUNKS.read_text().partition("def observations")[0]
    folder = cache / f"inputs-{digest_of(json.dumps(commands), source, machine())}"
    if folder.exists():
        return folder
    print("making the inputs", flush=True)
    with whole(folder) as hidden:
        maker = Tree(tree, hidden)
        maker.run([sys.executable, str(CHUNKS), "make", str(hidden)], hidden, (0,))
        for options in commands.values():
            command, _, rest = options.partition(" ")
            maker.run(maker.line(command, rest, hidden), hidden)
        shutil.copy(tree / "tests/assets/droid_episode_48330.json", hidden)
    return folder


def digest_of(*parts: str) -> str:
    """Return a short digest of texts."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder that becomes ``folder`` if the block succeeds, else is removed."""
    hidden = folder.with_name(f".{folder.name}.{os.getpid()}")
    hidden.mkdir(parents=True)
    try:
        yield hidden
        with suppress(OSError):  # another process was faster, with an equal folder
            hidden.rename(folder)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def machine() -> str:
    """Return the processor and the versions of Python and all packages but this one."""
    info = Path("/proc/cpuinfo")
    processor = re.search(r"model name\s*:(.*)", info.read_text()) if info.exists() else None
    packages = {f"{d.name} {d.version}" for d in distributions() if d.name != "strands-cosmos3"}
    here = [platform.platform(), processor[1] if processor else "", sys.version]
    return "\n".join([*here, *sorted(packages)])


def read_cases(only: str) -> list[Case]:
    """Return the cases whose name or kind ``only`` lists; all if it is empty."""
    sections = tomllib.loads(CASES)
    cases = [Case(kind, key, options) for kind in KINDS for key, options in sections[kind].items()]
    names = set(filter(None, only.split(",")))
    known = {*KINDS, *(case.name for case in cases)}
    if unknown := names - known:
        shown = ", ".join(sorted(known))
        raise SystemExit(f"golden: no case {', '.join(sorted(unknown))}; there are {shown}.")
    return [case for case in cases if not names or {case.name, case.kind} & names]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(tyro.cli(run, description=__doc__))
