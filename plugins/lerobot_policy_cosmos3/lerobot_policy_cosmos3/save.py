"""Write a folder that LeRobot takes as ``--policy.path`` or ``--pretrained_name_or_path``:

python -m lerobot_policy_cosmos3.save out/cosmos3 --model bundled
"""

import argparse

from lerobot_policy_cosmos3.configuration_cosmos3 import BUNDLED, Cosmos3Config
from lerobot_policy_cosmos3.modeling_cosmos3 import Cosmos3Policy


def main() -> None:
    """Load the checkpoint once, and write the folder."""
    parser = argparse.ArgumentParser(
        prog="python -m lerobot_policy_cosmos3.save", description="Write a LeRobot policy folder."
    )
    parser.add_argument("folder")
    parser.add_argument(
        "--model",
        default=BUNDLED,
        help="folder or hub repository (default: the bundled policy)",
    )
    parser.add_argument("--embodiment", default="droid")
    parser.add_argument(
        "--fps", type=float, help="rate of your robot's loop (default: the checkpoint's own)"
    )
    given = parser.parse_args()
    policy = Cosmos3Policy(
        Cosmos3Config(model=given.model, embodiment=given.embodiment, fps=given.fps)
    )
    policy.save_pretrained(given.folder)
    policy.policy.close()
    print(f"wrote {given.folder}")


if __name__ == "__main__":
    main()
