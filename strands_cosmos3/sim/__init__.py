"""Simulation: the scene, its tasks, the robot in it, pictures and films of it."""
