"""LeRobot's asynchronous policy server with this plugin.

    python -m lerobot_policy_cosmos3.policy_server --host=127.0.0.1 --port=8080

``python -m lerobot.async_inference.policy_server`` of lerobot 0.6.1 does not look for plugins and
has a fixed list of policy types. Everything else, and every flag, is its own.
"""

from lerobot.async_inference.constants import SUPPORTED_POLICIES
from lerobot.async_inference.policy_server import serve
from lerobot.utils.import_utils import register_third_party_plugins


def main() -> None:
    """Serve until interrupted."""
    register_third_party_plugins()
    if "cosmos3" not in SUPPORTED_POLICIES:
        SUPPORTED_POLICIES.append("cosmos3")  # the list that the server reads
    serve()


if __name__ == "__main__":
    main()
