"""Guard of a refactoring: runs the same cases in two trees and compares their results.

    python benchmarks/golden.py --base 49133e3                    # with the working tree
    python benchmarks/golden.py --base 49133e3 --head 49133e3     # that all cases are deterministic
    python benchmarks/golden.py --base 49133e3 --only rollout.pick,wire --tolerance 1e-9

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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
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
HEAD = ROOT / "out/golden/head"  # results of the head, of the last run alone
CHUNKS = str(HERE / "golden_chunks.py")
CASES = tomllib.loads((HERE / "golden_cases.toml").read_text())
OUTPUTS: Mapping[str, str] = CASES["outputs"]
# The kinds that take longest come first.
KINDS = ("evaluate", "chunks", "service", "wire", "rollout", "infer", "checkpoint")


@dataclass(frozen=True)
class Case:
    """A case of golden_cases.toml."""

    kind: str
    key: str
    options: str | Mapping[str, str]

    @property
    def name(self) -> str:
        """Its name, e.g. ``rollout.pick``."""
        return f"{self.kind}.{self.key}"

    def run(self, tree: Tree, out: Path) -> None:
        """Run it in a tree and write its results to the folder ``out``."""
        options = {"": self.options} if isinstance(self.options, str) else self.options
        if self.kind == "wire":
            transcript = Transcript.load(str(tree.inputs / options["transcript"]))
            replay = replay_http_client if self.key == "libero" else replay_client
            with tree.server(options["serve"], out) as port:
                replies = replay(transcript, port)
            (out / "replies.json").write_text(json.dumps(replies, default=plain))
            return
        if self.kind == "service":
            with tree.server(options["serve"], out) as port:
                call = f"--backend service --port PORT {options['rollout']} {OUTPUTS['rollout']}"
                status = tree.run(tree.line("rollout", call, out, port), out)
        elif self.kind == "chunks":
            line = [sys.executable, CHUNKS, options[""], str(tree.inputs), str(out)]
            status = tree.run(line, out)
        else:
            line = tree.line(self.kind, f"{options['']} {OUTPUTS.get(self.kind, '')}", out)
            status = tree.run(line, out, (0, 1, 2) if "refused" in self.key else (0, 1))
        (out / "status.json").write_text(json.dumps({"exit status": status}))


def plain(value: Any) -> Any:
    """Return an array or another value of a message for JSON."""
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "shape": value.shape, "data": value.tolist()}
    return value.decode() if isinstance(value, bytes) else repr(value)


@dataclass
class Golden:
    """A comparison of two trees: the options of the command line, and what the cases share."""

    base: str | None = None
    """Commit to compare with."""
    head: str = "."
    """Commit, or . for the working tree."""
    cache: Path = ROOT / "out/golden"
    """Folder of the base, to share."""
    workers: int = 2
    """Cases at a time."""
    only: str = ""
    """Names or kinds of cases, separated by commas."""
    tolerance: float = 0.0
    """Largest difference of angles in rad."""
    list: bool = False
    """Print the names of the cases."""

    @cached_property
    def cases(self) -> Sequence[Case]:
        """The cases that are run."""
        return read_cases(self.only)

    def run(self) -> int:
        """Run what is not cached, compare, print a table; return the exit status."""
        commit, folder = self._checkout(self.base or "")
        inputs = self._inputs(commit, folder)
        base = Tree(folder, inputs)
        head = Tree(ROOT if self.head == "." else self._checkout(self.head)[1], inputs)
        results = self.cache / commit / "results"
        digests = {case.name: self._digest(case, inputs) for case in self.cases}
        stored = {name: results / f"{name}-{digest}" for name, digest in digests.items()}
        fresh = {name: HEAD / name for name in digests}
        missing = [case for case in self.cases if not stored[case.name].exists()]
        count = f"{len(missing)} cases to run, {len(self.cases) - len(missing)} cached"
        print(f"base {commit[:10]}: {count}", flush=True)
        failed = self._run_all(base, missing, stored)
        if failed:
            for name, error in failed.items():
                print(f"{name}: {error}", file=sys.stderr)
            return 2
        shutil.rmtree(HEAD, ignore_errors=True)
        print(f"head {self.head}: {len(self.cases)} cases to run", flush=True)
        failed = self._run_all(head, self.cases, fresh)
        equal = 0
        words = {str(inputs): "INPUTS", str(base.folder): "TREE", str(head.folder): "TREE"}
        for name in digests:
            if name in failed:
                verdict = f"failed: {failed[name]}"
            else:
                results = read_results(stored[name], words)
                difference = compare(results, read_results(fresh[name], words), self.tolerance)
                verdict = difference or f"equal ({len(results)} values)"
                equal += difference is None
            print(f"{name:28} {verdict}", flush=True)
        print(f"{equal} of {len(self.cases)} cases are equal")
        return int(equal < len(self.cases))

    def _run_all(
        self, tree: Tree, cases: Sequence[Case], out: Mapping[str, Path]
    ) -> dict[str, str]:
        """Run cases side by side; return the errors by the case's name."""
        errors: dict[str, str] = {}
        started = time.monotonic()

        def run(case: Case) -> None:
            begin = time.monotonic()
            final = out[case.name]
            try:
                with whole(final) as hidden:
                    case.run(tree, hidden)
            except Exception as error:
                errors[case.name] = f"{type(error).__name__}: {error}"
            mark = " failed" if case.name in errors else ""
            print(f"  {case.name:28} {time.monotonic() - begin:6.1f} s{mark}\n", end="", flush=True)

        with ThreadPoolExecutor(self.workers) as pool:
            try:
                list(pool.map(run, cases))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                interrupt_all()
                raise
        print(f"  {len(cases)} cases in {time.monotonic() - started:.0f} s", flush=True)
        return errors

    def _checkout(self, revision: str) -> tuple[str, Path]:
        """Return a commit and the folder with its files, which git knows nothing of."""
        git = ["git", "-C", str(ROOT)]
        commit = subprocess.check_output(
            [*git, "rev-parse", "--verify", f"{revision}^{{commit}}"], text=True
        ).strip()
        folder = self.cache / commit / "tree"
        if not folder.exists():
            files = io.BytesIO(subprocess.check_output([*git, "archive", commit]))
            with tarfile.open(fileobj=files) as archive, whole(folder) as hidden:
                archive.extractall(hidden, filter="data")
        return commit, folder

    def _inputs(self, commit: str, tree: Path) -> Path:
        """Return the folder of inputs, made by the base tree."""
        commands = CASES["inputs"]
        source = Path(CHUNKS).read_text().partition("def observation")[0]
        digest = digest_of(json.dumps(commands) + source + machine())
        folder = self.cache / commit / f"inputs-{digest}"
        if folder.exists():
            return folder
        print("making the inputs", flush=True)
        with whole(folder) as hidden:
            maker = Tree(tree, hidden)
            maker.run([sys.executable, CHUNKS, "make", str(hidden)], hidden, (0,))
            for name, options in commands.items():
                command, _, rest = options.partition(" ")
                print(f"  {name}", flush=True)
                maker.run(maker.line(command, rest, hidden), hidden)
            shutil.copy(tree / "tests/assets/droid_episode_48330.json", hidden)
            for transcript in (tree / "tests/serving/transcripts").glob("*.zip"):
                shutil.copy(transcript, hidden)
        return folder

    def _digest(self, case: Case, inputs: Path) -> str:
        """Return a digest of everything but the commit that decides a case's results."""
        parts = [case.name, json.dumps([case.options, OUTPUTS]), inputs.name, machine()]
        if case.kind == "chunks":
            files = "golden_chunks.py", "golden_policies.toml"
            parts += [(HERE / file).read_text() for file in files]
        return digest_of(*parts)


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
    cases = [Case(kind, key, options) for kind in KINDS for key, options in CASES[kind].items()]
    names = [name for name in only.split(",") if name]
    if unknown := set(names) - {*KINDS, *(case.name for case in cases)}:
        raise SystemExit(f"golden: no case {', '.join(sorted(unknown))}; --list shows them.")
    return [case for case in cases if not names or case.name in names or case.kind in names]


def main() -> int:
    """Compare by the options of the command line; returns the exit status."""
    golden = tyro.cli(Golden, description=__doc__)
    if golden.list:
        print("\n".join(case.name for case in golden.cases))
        return 0
    if golden.base is None:
        print("golden: --base COMMIT is missing", file=sys.stderr)
        return 2
    golden.cache = golden.cache.resolve()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return golden.run()
    except KeyboardInterrupt:
        print("golden: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
