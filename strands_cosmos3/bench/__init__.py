"""Benchmarks: the figures of the README, measured by the code that users run."""
