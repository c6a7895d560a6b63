"""Options are declared once: one that is added to ``PolicyOptions`` is everywhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import strands_cosmos3
from strands_cosmos3 import Cosmos3Policy, ParallelConfig
from strands_cosmos3.errors import ConfigError, InputError
from strands_cosmos3.options import changed_options, with_options
from strands_cosmos3.policy.options import PolicyOptions

PACKAGE = Path(strands_cosmos3.__file__).parent
BEFORE = "    borrow_domain: bool = False\n"
ADDED = '''    juggled: int | None = option(None, "native", "scripted")
    """Number of cubes to juggle."""
'''
SEEN = """
import contextlib, io, json
from pathlib import Path
from strands_cosmos3 import Cosmos3Policy
from strands_cosmos3.cli import main
from strands_cosmos3.evaluation.plan import Condition
from strands_cosmos3.evaluation.policies import PolicySource
from strands_cosmos3.evaluation.settings import make_settings, read_options

def printed(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        with contextlib.suppress(SystemExit):
            main(list(arguments))
    return " ".join(out.getvalue().replace("│", "").split())

Path("e.toml").write_text("[model]\\njuggled = 3")
policy = Cosmos3Policy(robot="panda", backend="scripted", options={"juggled": 3})
evaluated = PolicySource(make_settings({"backend": "scripted", "juggled": 3}))
print(json.dumps({
    "help": {name: printed(name, "--help") for name in ("rollout", "view", "evaluate", "serve", "infer")},
    "toml": make_settings(read_options(Path("e.toml"))).policy.juggled,
    "report": make_settings(read_options(Path("e.toml"))).to_dict()["policy"],
    "policy": policy.options.juggled,
    "evaluated": evaluated.policy(Condition(), {"robot": "panda"})[0].options.juggled,
    "refused": printed("rollout", "--backend", "service", "--juggled", "3"),
}))
"""


@pytest.fixture
def with_an_added_option(tmp_path):
    """A folder with this package, one line of which is new."""
    changed = tmp_path / "strands_cosmos3/policy/options.py"
    changed.parent.mkdir(parents=True)
    for folder in (PACKAGE, PACKAGE / "policy"):
        for entry in folder.iterdir():
            link = tmp_path / entry.relative_to(PACKAGE.parent)
            if entry.name not in ("policy", "options.py", "__pycache__") or folder == PACKAGE:
                link.exists() or link.symlink_to(entry)
    source = (PACKAGE / "policy/options.py").read_text()
    assert source.count(BEFORE) == 1
    changed.write_text(source.replace(BEFORE, ADDED + BEFORE))
    return tmp_path


def test_an_option_that_is_added_is_everywhere(with_an_added_option):
    done = subprocess.run(
        [sys.executable, "-c", SEEN],
        env={**os.environ, "PYTHONPATH": str(with_an_added_option)},
        cwd=with_an_added_option,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    for command, text in seen["help"].items():
        assert "--juggled INT Number of cubes to juggle." in text, command
    assert seen["toml"] == seen["policy"] == seen["evaluated"] == 3
    assert seen["report"]["juggled"] == 3
    assert "--juggled 3 belongs to --backend native or scripted, not to service" in seen["refused"]


def test_options_are_set_by_name_at_any_depth():
    options = with_options(PolicyOptions(), {"num_steps": 2, "tp": 4, "chunk_rows": 16})
    assert options.sampling.num_steps == 2
    assert options.parallel == ParallelConfig(tp_size=4)
    assert changed_options(options) == {"chunk_rows": 16, "num_steps": 2, "tp": 4}
    assert PolicyOptions.of({"guidance_interval": [960.0, 1001.0]}).sampling.guidance_interval == (
        960.0,
        1001.0,
    )
    with pytest.raises(ConfigError, match=r"unknown option 'steps'; valid: backend, model"):
        PolicyOptions.of({"steps": 2})
    with pytest.raises(InputError, match="options must be of type PolicyOptions"):
        PolicyOptions.of(3)


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ({"num_steps": 2}, {"num_steps": 3}, "num_steps is given as an argument and in options"),
        ({"actions_per_step": 2}, {"replan_rows": 2}, "replan_rows is given"),
        ({"backend": "scripted"}, {"backend": "scripted"}, "backend is given"),
        ({"backend": "scripted"}, {"guidance_scale": 3.0}, "guidance_scale belongs to backend"),
        ({"backend": "scripted"}, {"host": "a"}, "host belongs to backend service"),
    ],
)
def test_an_option_is_given_once_and_to_a_backend_that_heeds_it(arguments, options, says):
    with pytest.raises(ConfigError, match=says):
        Cosmos3Policy(robot="panda", **arguments, options=options)


def test_arguments_and_options_make_one():
    policy = Cosmos3Policy(
        robot="panda", options={"backend": "scripted", "chunk_rows": 8}, actions_per_step=4
    )
    assert policy.execution_horizon == 4
    assert changed_options(policy.options) == {
        "backend": "scripted",
        "chunk_rows": 8,
        "replan_rows": 4,
    }
