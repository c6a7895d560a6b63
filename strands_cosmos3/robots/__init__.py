"""Robots as data, their MuJoCo models, limits and servos."""
