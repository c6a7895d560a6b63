"""Recipe of the bundled policy, which knows one simulated table."""
