"""How a group judges its ranks, with scripted handles: no processes, no real waiting."""

import itertools
from contextlib import ExitStack

import pytest

from strands_cosmos3 import errors
from strands_cosmos3.errors import (
    InputError,
    RankFailedError,
    RankLostError,
    RanksError,
    RankSilentError,
    WeightsError,
)
from strands_cosmos3.parallel import group as module
from strands_cosmos3.parallel.group import (
    RankGroup,
    RankHandle,
    RankStatus,
    RankTimeouts,
    error_from_name,
)

TIMEOUTS = RankTimeouts(start_s=50, silent_s=8, stalled_s=20)


class Clock:
    """Time passes when somebody waits."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


class Scripted(RankHandle):
    """A handle that returns, at each call, the next of some lists of statuses; then the last one
    forever.
    """

    def __init__(self, clock, name, *scripts):
        self.name, self._clock = name, clock
        self._scripts = itertools.chain(scripts, itertools.repeat(scripts[-1] if scripts else []))
        self.submitted, self.ends = [], []

    def submit(self, payload):
        self.submitted.append(payload)

    def statuses(self, wait_s):
        self._clock.now += wait_s
        said = next(self._scripts)
        if isinstance(said, Exception):
            raise said
        return said() if callable(said) else said

    def close(self):
        self.ends.append("close")

    def kill(self):
        self.ends.append("kill")


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def counting():
    numbers = itertools.count(1)
    return lambda: [RankStatus("heartbeat", progress=next(numbers))]


ANSWER = [RankStatus("answer", payload=b"yes")]
SILENT: list[RankStatus] = []
REFUSED = [RankStatus("error", error=("InputError", "no such domain"))]
BROKEN = [RankStatus("error", error=("RuntimeError", "Connection closed by peer"))]


def led(clock, *scripts):
    """A group whose ranks have loaded, and its handles."""
    handles = [Scripted(clock, f"rank {i}", *script) for i, script in enumerate(scripts)]
    group = RankGroup(lambda end: start(end, handles), TIMEOUTS)
    group.handles = tuple(start(group._end, handles))
    return group, handles


def start(end, handles):
    for handle in handles:
        end.callback(handle.kill)
    return handles


def unstarted(clock, *scripts):
    """A group whose ranks have not been started, and their handles."""
    group, handles = led(clock, *scripts)
    group.handles, group._end = (), ExitStack()
    return group, handles


def test_every_handle_gets_the_request_and_rank_0_answers(clock):
    group, handles = led(clock, [SILENT, ANSWER], [[RankStatus("answer")]])
    assert group.infer(b"what?") == b"yes"
    assert [m.submitted for m in handles] == [[b"what?"]] * 2
    assert group.handles
    group.close()
    group.close()
    assert [m.ends for m in handles] == [["close", "kill"]] * 2


def test_a_lost_handle_ends_all(clock):
    cleaned = []
    group, handles = led(clock, [SILENT], [SILENT, RankLostError("rank 1 was ended by SIGKILL")])
    group._end.callback(lambda: cleaned.append(1))
    with pytest.raises(RankLostError, match="SIGKILL"):
        group.infer(b"")
    assert all(m.ends == ["kill"] for m in handles)
    assert (group.handles, group.starts, cleaned) == ((), 0, [1])
    # the next call starts ranks again; this test's are lost again
    with pytest.raises(RankLostError, match="SIGKILL"):
        group.infer(b"")
    assert (group.handles, group.starts) == ((), 1)


def test_a_silent_handle_is_found_though_others_beat(clock):
    group, handles = led(clock, [counting()], [SILENT])
    with pytest.raises(RankSilentError, match=r"rank 1 has sent no heartbeat for 8 s"):
        group.infer(b"")
    assert all(m.ends == ["kill"] for m in handles)
    assert clock.now < 9


@pytest.mark.parametrize("who", ["backend", "evaluate"])
@pytest.mark.parametrize("failed", [SILENT, BROKEN])
def test_a_failure_is_reported_within_15_seconds_with_the_default_timeouts(clock, who, failed):
    """Of a rank that was stopped, or lost its neighbour, while the other one gives signs of
    life.
    """
    group, handles = led(clock, [counting()], [[RankStatus("heartbeat", progress=1)], failed])
    default = (
        RankTimeouts()
        if who == "backend"
        else pytest.importorskip("strands_cosmos3.fleet.replicas").TIMEOUTS
    )
    group.timeouts = default
    with pytest.raises(RanksError):
        group.infer(b"")
    assert all(m.ends == ["kill"] for m in handles)
    assert clock.now < 15


def test_beats_without_progress_are_a_hang(clock):
    group, _ = led(
        clock, [[RankStatus("heartbeat", progress=3)]], [[RankStatus("heartbeat", progress=3)]]
    )
    with pytest.raises(RankSilentError, match="no rank has made progress"):
        group.infer(b"")
    assert 20 <= clock.now < 22


def test_slow_progress_is_no_hang(clock):
    beats = counting()
    group, _ = led(
        clock,
        [*[beats] * 4000, ANSWER],
        [*[[RankStatus("heartbeat")]] * 4000, [RankStatus("answer")]],
    )
    assert group.infer(b"") == b"yes"
    assert clock.now > TIMEOUTS.stalled_s


def test_all_refuse_alike_and_live_on(clock):
    group, handles = led(clock, [REFUSED], [SILENT, REFUSED])
    with pytest.raises(InputError, match="no such domain"):
        group.infer(b"")
    assert group.handles
    assert not any(m.ends for m in handles)


@pytest.mark.parametrize(
    "other", [[[RankStatus("answer")]], [[RankStatus("error", error=("InputError", "another"))]]]
)
def test_disagreement_ends_all(clock, other):
    group, handles = led(clock, [REFUSED], other)
    with pytest.raises(RankFailedError, match="disagree"):
        group.infer(b"")
    assert all(m.ends for m in handles)


def test_one_refuses_and_the_others_work_on(clock):
    group, _ = led(clock, [REFUSED], [counting()])
    with pytest.raises(RankFailedError, match="no such domain"):
        group.infer(b"")


def test_who_lost_its_neighbour_is_not_to_blame(clock):
    """Rank 0 speaks first, rank 1 is the one that died."""
    group, _ = led(clock, [BROKEN], [SILENT, SILENT, RankLostError("rank 1 was ended by SIGKILL")])
    with pytest.raises(RankLostError, match="rank 1"):
        group.infer(b"")


def test_a_failure_without_a_lost_handle(clock):
    group, _ = led(clock, [BROKEN], [SILENT])
    with pytest.raises(
        RankFailedError, match="rank 0 failed with RuntimeError: Connection closed by peer"
    ):
        group.infer(b"")


def test_an_interrupted_leader_ends_all(clock):
    """Nobody knows what the handles are at: the next answer would be this request's."""
    group, handles = led(clock, [KeyboardInterrupt()], [SILENT])
    handles[0].statuses = lambda wait_s: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        group.infer(b"")
    assert all(m.ends == ["kill"] for m in handles)


def test_loading(clock):
    group, _ = unstarted(clock, [SILENT, [RankStatus("ready")]], [[RankStatus("ready")]])
    group.start()
    damaged = [RankStatus("error", error=("WeightsError", "NaN"))]
    group, handles = unstarted(clock, [damaged], [damaged])
    with pytest.raises(WeightsError, match="NaN"):
        group.start()
    assert all(m.ends == ["kill"] for m in handles)


def test_loading_may_be_silent_for_long_but_not_for_ever(clock):
    group, _ = unstarted(clock, [SILENT], [SILENT])
    with pytest.raises(RankSilentError):
        group.start()
    assert 50 <= clock.now < 52


def test_steps_are_those_of_rank_0(clock):
    beats = [[RankStatus("heartbeat", progress=i, step=(i, 3))] for i in (1, 2, 3)]
    group, _ = led(clock, [*beats, ANSWER], [*beats, [RankStatus("answer")]])
    seen = []
    group.infer(b"", lambda *step: seen.append(step))
    assert seen == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("name", [n for n in dir(errors) if n.endswith("Error")])
def test_errors_come_back_as_their_kind_of_error(name):
    found = error_from_name(name, "it is so")
    assert isinstance(
        found, getattr(errors, name) if name != "UnknownNameError" else errors.InputError
    )
    assert str(found) == "it is so"


def test_foreign_errors_become_ours():
    assert str(error_from_name("OutOfMemoryError", "no")) == "OutOfMemoryError: no"
    assert type(error_from_name("Path", "no")) is errors.BackendError


def test_the_next_request_after_a_failure_starts_new_ranks(clock):
    ready = [RankStatus("ready")]
    generations = [[[ready, RankLostError("rank 0 was ended by SIGKILL")]], [[ready, ANSWER]]]
    made = []

    def start_next(end):
        made.append([Scripted(clock, "rank 0", *script) for script in generations[len(made)]])
        return start(end, made[-1])

    group = RankGroup(start_next, TIMEOUTS)
    with pytest.raises(RankLostError):
        group.infer(b"")
    assert group.infer(b"again") == b"yes"
    assert group.starts == 2
    assert [handle.ends for handles in made for handle in handles] == [["kill"], []]
    assert made[1][0].submitted == [b"again"]
