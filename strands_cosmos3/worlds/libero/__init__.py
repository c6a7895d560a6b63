"""The LIBERO benchmark as a world: its suites, protocol, simulation and an expert."""
