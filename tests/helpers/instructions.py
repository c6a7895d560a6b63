"""The instruction sets that numeric kernels use, and the suites of arithmetic under each of them:
``python -m helpers.instructions -- ARGUMENTS OF PYTEST`` is what ``make test-isa`` runs.

Torch's own kernels, MKL (products of matrices in float32) and oneDNN (convolutions, bfloat16) each
choose by the processor; one variable holds each to fewer instructions. Summing in another order
moves last bits, which a bound must allow (helpers/parity.py) and a fault must exceed
(engine/test_mutations.py). On a processor that is not Intel's, MKL uses AVX2 in any case.
"""

from __future__ import annotations

import os
import subprocess
import sys

SETTINGS = (
    ("ATEN_CPU_CAPABILITY", "default"),
    ("ATEN_CPU_CAPABILITY", "avx2"),
    ("ATEN_CPU_CAPABILITY", "avx512"),
    ("MKL_ENABLE_INSTRUCTIONS", "AVX2"),
    ("ONEDNN_MAX_CPU_ISA", "AVX2"),
)
SUITES = ("tests/engine", "tests/parallel", "tests/backends")
_NEEDED = {"avx2": ("avx2",), "avx512": ("avx512_f", "avx512_vl", "avx512_bw", "avx512_dq")}


def instructions() -> str:
    """Torch's CPU capability, and what the environment asks of torch, MKL and oneDNN."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    names = dict.fromkeys(name for name, _ in SETTINGS)
    asked = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    return ", ".join([f"torch {torch.backends.cpu.get_cpu_capability()}", *asked])


def lacking(value: str) -> list[str]:
    """Instructions of a setting that this processor does not have."""
    import torch

    has = torch.cpu.get_capabilities()
    return [name for name in _NEEDED.get(value.lower(), ()) if not has.get(name)]


def main(arguments: list[str]) -> int:
    """Run the suites under every setting; 0 if every one that could run passed."""
    results: dict[str, str] = {}
    for name, value in SETTINGS:
        setting = f"{name}={value}"
        if missing := lacking(value):
            results[setting] = f"not run: this processor lacks {', '.join(missing)}"
            continue
        print(f"\n{setting}", flush=True)
        command = [sys.executable, "-m", "pytest", *SUITES, *arguments]
        code = subprocess.run(command, env={**os.environ, name: value}).returncode
        results[setting] = "passed" if code == 0 else f"FAILED (pytest ended with {code})"
    print()
    for setting, result in results.items():
        print(f"{setting:<32} {result}")
    return int(any(result.startswith("FAILED") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
