"""From a robot's observations to a model's inputs: keys, pictures, captions. numpy only."""
