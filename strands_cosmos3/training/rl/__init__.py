"""Reinforcement learning: a policy adapts to what it meets, by comparing chunks that begin in the
same state of a simulation.
"""
