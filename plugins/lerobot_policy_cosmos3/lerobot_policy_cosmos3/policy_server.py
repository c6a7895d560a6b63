"""LeRobot's asynchronous policy server with this plugin.

    python -m lerobot_policy_cosmos3.policy_server --host=127.0.0.1 --port=8080

``python -m lerobot.async_inference.policy_server`` of lerobot 0.6.1 does not look for plugins, has
a fixed list of policy types, and compares states in degrees. Everything else, and every flag, is
its own.
"""

from dataclasses import replace
from math import degrees

from lerobot.async_inference import policy_server
from lerobot.async_inference.constants import SUPPORTED_POLICIES
from lerobot.async_inference.helpers import TimedObservation
from lerobot.utils.import_utils import register_third_party_plugins

_POLICY_TYPE = "cosmos3"
_JOINTS = 7
_PER_CENT = 100.0


class Cosmos3PolicyServer(policy_server.PolicyServer):
    """LeRobot's server, with states of this plugin compared in LeRobot's own units.

    It leaves out an observation whose state differs by a norm below 1 from the one that it answered
    last: a degree of an arm whose joints are in degrees and whose gripper is in per cent. Ours are
    in radians and a fraction, of which 1 is most of a workspace.
    """

    def _obs_sanity_checks(self, obs: TimedObservation, previous_obs: TimedObservation) -> bool:
        if self.policy_type == _POLICY_TYPE:
            obs, previous_obs = self._in_degrees(obs), self._in_degrees(previous_obs)
        return super()._obs_sanity_checks(obs, previous_obs)

    def _in_degrees(self, seen: TimedObservation) -> TimedObservation:
        """An observation with its joint angles in degrees and its gripper in per cent."""
        values = dict(seen.get_observation())
        for i, name in enumerate(self.lerobot_features["observation.state"]["names"]):
            number = float(values[name])
            values[name] = degrees(number) if i < _JOINTS else _PER_CENT * number
        return replace(seen, observation=values)


def main() -> None:
    """Serve until interrupted."""
    register_third_party_plugins()
    if _POLICY_TYPE not in SUPPORTED_POLICIES:
        SUPPORTED_POLICIES.append(_POLICY_TYPE)  # the list that the server reads
    policy_server.PolicyServer = Cosmos3PolicyServer  # the class that serve() makes
    policy_server.serve()


if __name__ == "__main__":
    main()
