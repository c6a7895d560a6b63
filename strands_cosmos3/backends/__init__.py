"""Backends: one protocol, several places where inference may happen."""
