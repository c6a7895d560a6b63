"""Actions: statistics, rotations and the decoding of chunks into poses. numpy only."""
