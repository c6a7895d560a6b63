"""Robot models: the bundled Franka Panda, its limits and frames, and servo feed-forward."""
