"""Checkpoints in other formats than the released one, read through the same small interface
(docs/formats.md).
"""
