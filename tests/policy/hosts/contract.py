"""Our contract beside strands-robots' own. Run by strands-robots' Python; prints what differs, and
what its registry makes.

Members and defaults are compared on the least subclass of either ABC: its three abstract members,
and nothing else.
"""

import inspect
import json

from strands_robots import policies as theirs

import strands_cosmos3
from strands_cosmos3 import policy as ours


def least(base):
    async def get_actions(self, observation_dict, instruction, **kwargs):
        return [{"joint1": 0.5, "asked": instruction}]

    members = {
        "get_actions": get_actions,
        "set_robot_state_keys": lambda self, robot_state_keys: None,
    }
    return type("Least", (base,), {**members, "provider_name": property(lambda self: "least")})()


def public(value):
    return {name for name in dir(value) if not name.startswith("_")}


def parameters(function):
    return [
        (name, str(p.kind), repr(p.default))
        for name, p in inspect.signature(function).parameters.items()
    ]


def refuses(call, *arguments):
    try:
        call(*arguments)
    except ValueError:
        return True
    return False


mine, host = least(ours.Policy), least(theirs.Policy)
differ = {}
for name in public(host):
    here, there = getattr(mine, name, "absent"), getattr(host, name)
    if callable(there):
        same = callable(here) and parameters(here) == parameters(there)
    else:
        same = here == there
    if not same:
        differ[name] = [str(here), str(there)]
for name, kept, values in (
    (
        "set_control_frequency",
        "control_frequency",
        (50, 0.1, 0, -1, float("nan"), float("inf"), True, "50", None, 7),
    ),
    ("set_rtc_observed_delay", "rtc_observed_delay_steps", (0, 3, None, -1, 1.5, True, "1")),
):
    for value in values:
        answers = [
            (refuses(getattr(policy, name), value), getattr(policy, kept))
            for policy in (mine, host)
        ]
        if answers[0] != answers[1]:
            differ[f"{name}({value!r})"] = answers
assert mine.get_actions_sync({}, "go") == host.get_actions_sync({}, "go")


def made(provider, **config):
    return type(theirs.create_policy(provider, **config)).__module__.split(".")[0]


answers = {"differ": differ, "missing": sorted(public(host) - public(mine))}
answers["is_a_policy_before"] = issubclass(ours.Cosmos3Policy, theirs.Policy)
answers["registered"] = strands_cosmos3.register()
assert strands_cosmos3.register() == strands_cosmos3.register()
answers["is_a_policy"] = issubclass(ours.Cosmos3Policy, theirs.Policy)
droid = {"embodiment": "droid", "robot": "panda"}
answers["by_our_name"] = made("strands_cosmos3", **droid)
served = theirs.create_policy("strands_cosmos3", **droid)
answers["by_default"] = [
    served.info.name,
    served.execution_horizon,
    theirs.resolve_chunk_length(served, 8),
]
answers["cosmos3"] = made("cosmos3", **droid)
answers["registered_over"] = strands_cosmos3.register(overwrite=True)
answers["cosmos3_over"] = made("cosmos3", **droid)
answers["address_over"] = made("cosmos3://127.0.0.1:8000", **droid)
strands_cosmos3.register()
answers["cosmos3_again"] = made("cosmos3", **droid)
try:
    theirs.create_policy("strands_cosmos3", prt=8000)
except TypeError as error:
    answers["misspelt"] = str(error)
print(json.dumps(answers))
