"""The beginning of a program in whose process PyTorch and what stands on it are not installed."""

WITHOUT_TORCH = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "diffusers", "onnx"):
            raise ModuleNotFoundError(f"no {name} here", name=name)

sys.meta_path.insert(0, Absent())
"""
