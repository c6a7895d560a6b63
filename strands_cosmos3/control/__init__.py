"""Control: inverse kinematics, limits, trajectories and the executor that feeds actuators."""
