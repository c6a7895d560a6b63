"""The GPU latency script in its small form, on the CPU: that it runs, and that its parts add up."""

import json
import runpy
import shutil
import sys

import pytest

from helpers.environments import ROOT

SMALL = ("--small", "--device", "cpu")
FORMS = ("", ", int8", ", int8-weights", ", fp8")
COMPILE = pytest.param(
    ("--ways", "eager", "compiled"),
    {"eager", "compiled"},
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(
            shutil.which("c++") is None, reason="no C++ compiler `c++` for inductor"
        ),
    ],
)


@pytest.mark.parametrize(
    ("options", "ways"),
    [
        ((), {"eager"}),
        (
            (
                *("--dtype", "float32", "--offload-text", "--text-cache-bytes", "0"),
                *("--forms", "int8"),
            ),
            {"eager"},
        ),
        COMPILE,
    ],
)
def test_the_small_form_measures_every_case(options, ways, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["nano_latency.py", *SMALL, *options, "--repeats", "1"])
    runpy.run_path(str(ROOT / "benchmarks/nano_latency.py"), run_name="__main__")
    report = json.loads(capsys.readouterr().out)
    measured = report["ways"]
    of_weights = [", int8"] if "--forms" in options else FORMS
    forms = {f"{way}{form}" for way in ways for form in of_weights}
    assert set(measured) == forms, "CUDA graphs are measured on a GPU only"
    assert len(report["table"]) == 2 + len(forms)
    assert report["attention_ms"]["torch's choice"] > 0 < report["attention_ms"]["MATH"]
    if "eager" in measured:
        assert measured["eager, int8"]["kept_gib"] < measured["eager"]["kept_gib"]
    for way in measured.values():
        cases = {name: case for name, case in way.items() if name.startswith("N=")}
        assert set(cases) == {
            f"N={steps}, guidance {when}"
            for steps in (4, 2)
            for when in ("every step", "first step only")
        }
        for case in cases.values():
            parts = dict(case["warm_ms"])
            total = parts.pop("total")
            assert set(parts) == {"encode", "text", "denoise"}
            assert 0 < sum(parts.values()) <= 1.01 * total
            assert case["generation_floor_ms"] is None, "floors are the full size's"
        kernels_ms = dict(way["kernels_ms"])
        assert kernels_ms.pop("all") >= sum(kernels_ms.values())
