"""Recipes of small policies: run them with ``python -m recipes.NAME``."""
