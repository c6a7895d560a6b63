"""Observations of a robot as the inputs of a model: mapping of keys, pictures, captions. numpy only."""
