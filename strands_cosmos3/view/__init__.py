"""A live page: the arm, its commanded path, what its cameras see and what it counts, served by
viser.
"""
