"""Graphs of a checkpoint in ONNX, and the engine that runs them. ``networks`` and ``export`` make
them with torch; the others need none.
"""
