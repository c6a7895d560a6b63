"""The GPU latency script in its small form, on the CPU: that it runs, and that its parts add up."""

import json
import runpy
import sys

from helpers.environments import ROOT


def test_the_small_form_measures_every_case(tmp_path, monkeypatch, capsys):
    out = tmp_path / "nano.json"
    small = ["--small", "--device", "cpu", "--dtype", "float32", "--repeats", "1", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["nano_latency.py", *small])
    runpy.run_path(str(ROOT / "benchmarks/nano_latency.py"), run_name="__main__")
    figures = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out) == figures
    assert "graphs" not in figures, "CUDA graphs are measured on a GPU only"
    cases = {name: case for name, case in figures["eager"].items() if name.startswith("N=")}
    assert set(cases) == {f"N={steps}, guidance {when}" for steps in (4, 2) for when in ("every step", "first step only")}
    for case in cases.values():
        parts = dict(case["warm_ms"])
        total = parts.pop("total")
        assert set(parts) == {"encode", "text", "denoise"}
        assert 0 < sum(parts.values()) <= 1.01 * total
        assert case["generation_floor_ms"] is None, "floors are the full size's"
