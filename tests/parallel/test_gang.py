"""The leader's judgement, with members that say what the test wants: no processes, no waiting for real."""

import itertools

import pytest

from strands_cosmos3 import errors
from strands_cosmos3.errors import InputError, RankFailedError, RankLostError, RanksError, RankSilentError, WeightsError
from strands_cosmos3.parallel import gang as module
from strands_cosmos3.parallel.gang import Gang, GangLimits, Report, revive

LIMITS = GangLimits(start_s=50, silent_s=8, stalled_s=20)


class Clock:
    """Time passes when somebody waits."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


class Scripted:
    """A member that says, at each look, the next of some lists of reports; then the last for ever."""

    def __init__(self, clock, name, *looks):
        self.name, self._clock = name, clock
        self._looks = itertools.chain(looks, itertools.repeat(looks[-1] if looks else []))
        self.submitted, self.ends = [], []

    def submit(self, payload):
        self.submitted.append(payload)

    def reports(self, wait_s):
        self._clock.now += wait_s
        said = next(self._looks)
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
    return lambda: [Report("beat", progress=next(numbers))]


ANSWER = [Report("answer", payload=b"yes")]
SILENT: list[Report] = []
REFUSED = [Report("error", error=("InputError", "no such domain"))]
BROKEN = [Report("error", error=("RuntimeError", "Connection closed by peer"))]


def led(clock, *scripts):
    members = [Scripted(clock, f"rank {i}", *script) for i, script in enumerate(scripts)]
    return Gang(members, LIMITS), members


def test_every_member_gets_the_request_and_rank_0_answers(clock):
    gang, members = led(clock, [SILENT, ANSWER], [[Report("answer")]])
    assert gang.infer(b"what?") == b"yes"
    assert [m.submitted for m in members] == [[b"what?"]] * 2
    assert not gang.ended
    gang.close()
    gang.close()
    assert [m.ends for m in members] == [["close", "kill", "kill"]] * 2


def test_a_lost_member_ends_all(clock):
    cleaned = []
    gang, members = led(clock, [SILENT], [SILENT, RankLostError("rank 1 was ended by SIGKILL")])
    gang._clean_up = lambda: cleaned.append(1)
    with pytest.raises(RankLostError, match="SIGKILL"):
        gang.infer(b"")
    assert all(m.ends == ["kill"] for m in members)
    assert (gang.ended, cleaned) == (True, [1])
    with pytest.raises(RankLostError, match="start new ones"):
        gang.infer(b"")


def test_a_silent_member_is_found_though_others_beat(clock):
    gang, members = led(clock, [counting()], [SILENT])
    with pytest.raises(RankSilentError, match=r"rank 1 has given no sign of life for 8 s"):
        gang.infer(b"")
    assert all(m.ends == ["kill"] for m in members)
    assert clock.now < 9


@pytest.mark.parametrize("who", ["backend", "evaluate"])
@pytest.mark.parametrize("failed", [SILENT, BROKEN])
def test_with_the_limits_that_users_have_a_failure_is_told_within_15_seconds(clock, who, failed):
    """Of a rank that was stopped, or lost its neighbour, while the other one gives signs of life."""
    gang, members = led(clock, [counting()], [[Report("beat", progress=1)], failed])
    gang._limits = GangLimits() if who == "backend" else pytest.importorskip("strands_cosmos3.evaluation.replica").LIMITS
    with pytest.raises(RanksError):
        gang.infer(b"")
    assert all(m.ends == ["kill"] for m in members)
    assert clock.now < 15


def test_beats_without_progress_are_a_hang(clock):
    gang, _ = led(clock, [[Report("beat", progress=3)]], [[Report("beat", progress=3)]])
    with pytest.raises(RankSilentError, match="no rank has made progress"):
        gang.infer(b"")
    assert 20 <= clock.now < 22


def test_slow_progress_is_no_hang(clock):
    beats = counting()
    gang, _ = led(clock, [*[beats] * 4000, ANSWER], [*[[Report("beat")]] * 4000, [Report("answer")]])
    assert gang.infer(b"") == b"yes"
    assert clock.now > LIMITS.stalled_s


def test_all_refuse_alike_and_live_on(clock):
    gang, members = led(clock, [REFUSED], [SILENT, REFUSED])
    with pytest.raises(InputError, match="no such domain"):
        gang.infer(b"")
    assert not gang.ended
    assert not any(m.ends for m in members)


@pytest.mark.parametrize("other", [[[Report("answer")]], [[Report("error", error=("InputError", "another"))]]])
def test_disagreement_ends_all(clock, other):
    gang, members = led(clock, [REFUSED], other)
    with pytest.raises(RankFailedError, match="disagree"):
        gang.infer(b"")
    assert all(m.ends for m in members)


def test_one_refuses_and_the_others_work_on(clock):
    gang, _ = led(clock, [REFUSED], [counting()])
    with pytest.raises(RankFailedError, match="no such domain"):
        gang.infer(b"")


def test_who_lost_its_neighbour_is_not_to_blame(clock):
    """Rank 0 speaks first, rank 1 is the one that died."""
    gang, _ = led(clock, [BROKEN], [SILENT, SILENT, RankLostError("rank 1 was ended by SIGKILL")])
    with pytest.raises(RankLostError, match="rank 1"):
        gang.infer(b"")


def test_a_failure_without_a_lost_member(clock):
    gang, _ = led(clock, [BROKEN], [SILENT])
    with pytest.raises(RankFailedError, match="rank 0 failed with RuntimeError: Connection closed by peer"):
        gang.infer(b"")


def test_an_interrupted_leader_ends_all(clock):
    """Nobody knows what the members are at: the next answer would be this request's."""
    gang, members = led(clock, [KeyboardInterrupt()], [SILENT])
    members[0].reports = lambda wait_s: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        gang.infer(b"")
    assert all(m.ends == ["kill"] for m in members)


def test_loading(clock):
    gang, _ = led(clock, [SILENT, [Report("ready")]], [[Report("ready")]])
    gang.wait_ready()
    damaged = [Report("error", error=("WeightsError", "NaN"))]
    gang, members = led(clock, [damaged], [damaged])
    with pytest.raises(WeightsError, match="NaN"):
        gang.wait_ready()
    assert all(m.ends == ["kill"] for m in members)


def test_loading_may_be_silent_for_long_but_not_for_ever(clock):
    gang, _ = led(clock, [SILENT], [SILENT])
    with pytest.raises(RankSilentError):
        gang.wait_ready()
    assert 50 <= clock.now < 52


def test_steps_are_those_of_rank_0(clock):
    beats = [[Report("beat", progress=i, step=(i, 3))] for i in (1, 2, 3)]
    gang, _ = led(clock, [*beats, ANSWER], [*beats, [Report("answer")]])
    seen = []
    gang.infer(b"", lambda *step: seen.append(step))
    assert seen == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("name", [n for n in dir(errors) if n.endswith("Error")])
def test_errors_come_back_as_their_kind_of_error(name):
    found = revive(name, "it is so")
    assert isinstance(found, getattr(errors, name) if name != "UnknownNameError" else errors.InputError)
    assert str(found) == "it is so"


def test_foreign_errors_become_ours():
    assert str(revive("OutOfMemoryError", "no")) == "OutOfMemoryError: no"
    assert type(revive("Path", "no")) is errors.BackendError
