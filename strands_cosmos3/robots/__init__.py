"""The arm: the embedded Franka Panda, its figures and its frames."""
