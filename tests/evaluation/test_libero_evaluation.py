"""An evaluation on LIBERO: the same on one worker and on two, films, and what the policy was
asked. ``make test-libero``.
"""

import io

import pytest

pytest.importorskip("libero", reason="LIBERO has an environment of its own: make test-libero")

from strands_cosmos3.evaluation.driver import Driver
from strands_cosmos3.evaluation.folder import RunFolder, without_times
from strands_cosmos3.evaluation.runner import AssignmentRunner
from strands_cosmos3.evaluation.settings import make_settings

pytestmark = pytest.mark.libero
SETTINGS = make_settings(
    {
        "world": "libero/libero_object",
        "backend": "scripted",
        "tasks": "3",
        "seeds": 2,
        "conditions": "plain,swapped",
        "films": 0,
    }
)
PLAN = {assignment.key: assignment for assignment in SETTINGS.plan()}


@pytest.fixture(scope="module")
def runner():
    runner = AssignmentRunner(SETTINGS)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def records(runner):
    return {key: without_times(runner.run(assignment)) for key, assignment in PLAN.items()}


def test_the_expert_does_what_it_is_asked_and_that_is_judged_by_the_goal(records):
    for (condition, _, _), record in records.items():
        asked = condition == "plain"
        assert record["success"] is asked
        assert record.get("followed") is (None if asked else True)
        assert record["outcome"] == ("success" if asked else "followed")
        assert (record["goal_instruction"] == record["policy_instruction"]) is asked
        assert record["duration_s"] == record["counters"]["steps"] / 20
        assert record["counters"]["chunks"] == record["counters"]["steps"], (
            "the expert looks at every step"
        )


def test_a_film_shows_the_same_episode(runner, records):
    import av

    assignment = PLAN["plain", "3", 1]
    record, film = runner.film(assignment)
    assert without_times(record) == records[assignment.key]
    with av.open(io.BytesIO(film)) as container:
        video = container.streams.video[0]
        assert (video.height, video.width) == (256, 512)
        assert sum(1 for _ in container.decode(video)) == -(-record["counters"]["steps"] // 2)


def test_two_workers_store_what_one_process_computes(local_ray, records, tmp_path):
    with RunFolder(tmp_path, SETTINGS, resume=False) as folder:
        driver = Driver(folder, 2)
        try:
            driver.run()
        finally:
            driver.close()
        stored = folder.read_all(driver.plan)
    for key, record in records.items():
        assert record.items() <= without_times(stored[key]).items()
    assert len(stored) == 4
