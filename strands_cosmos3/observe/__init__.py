"""Observe: from what a robot reports to what a model is asked. numpy only."""
