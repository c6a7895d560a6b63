"""The loop: what was killed goes on to the same weights, and what is exported is the average."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from torch import nn

from helpers.parity import agree
from helpers.storage import full_disk
from strands_cosmos3.commands.demos import Demos
from strands_cosmos3.commands.train import locked_run, terminated_as_interrupted
from strands_cosmos3.errors import ConfigError, StorageError, TrainingError
from strands_cosmos3.resources import locked
from strands_cosmos3.training.cost import seconds_of
from strands_cosmos3.training.loop import Loop, TrainLoopConfig
from strands_cosmos3.training.matching import DataShard
from strands_cosmos3.training.state import PREVIOUS, STATE, read_state


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 3))


def loss_of(net: nn.Module):
    def loss(step: int):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 6, generator=generator)
        value = (net(x) - x[:, :3].sin()).square().mean()
        return value, {"loss": value.item()}

    return loss


def test_resume_gives_the_same_weights_to_the_bit(tmp_path):
    config = TrainLoopConfig(steps=40, warmup=5, ema=0.9, save_s=1e9)
    whole = Loop(net := model(), loss_of(net), config, tmp_path / "whole")
    whole.run()
    for stop in (13, 27, 40):  # three processes, each of which is stopped
        part = Loop(again := model(), loss_of(again), config, tmp_path / "parts")
        part.run(until=stop)
    assert part.step == 40
    for name, p in net.named_parameters():
        assert torch.equal(p, dict(again.named_parameters())[name])
        assert torch.equal(whole.ema[name], part.ema[name])


def test_a_metric_is_averaged_over_the_draws_that_have_it(tmp_path):
    """A draw without inverse dynamics has no error of it, which is not an error of zero."""
    lossy = loss_of(net := model())

    def sometimes(draw: int):
        error, seen = lossy(draw)
        return error, {**seen, "ends": float(draw)} if draw % 4 == 1 else seen

    config = TrainLoopConfig(steps=4, log_every=4, accumulate=2, save_s=1e9)
    Loop(net, sometimes, config, tmp_path / "run").run()
    (point,) = map(json.loads, (tmp_path / "run" / "curve.jsonl").read_text().splitlines())
    assert point["ends"] == 3.0  # draws 1 and 5 of eight


def test_accumulated_draws_average_their_gradients(tmp_path):
    """Two draws of eight windows move the weights as one draw of those sixteen does."""
    config = TrainLoopConfig(steps=6, warmup=1, weight_decay=0.0, save_s=1e9)
    both = Loop(net := model(), loss_of(net), replace(config, accumulate=2), tmp_path / "two")
    both.run()
    single = loss_of(again := model())

    def joined(step: int):
        (a, seen), (b, more) = single(2 * step), single(2 * step + 1)
        return (a + b) / 2, {"loss": (seen["loss"] + more["loss"]) / 2}

    one = Loop(again, joined, config, tmp_path / "one")
    one.run()
    for name, p in net.named_parameters():
        assert agree(p.detach(), dict(again.named_parameters())[name].detach())
    curves = [
        json.loads((tmp_path / name / "curve.jsonl").read_text())["loss"] for name in ("one", "two")
    ]
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


def test_tensorboard_shows_the_curve_and_drops_what_is_trained_again(tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator
    config = TrainLoopConfig(steps=8, warmup=1, log_every=2, save_s=1e9, tensorboard=True)
    Loop(net := model(), loss_of(net), config, tmp_path).run(until=4)
    loop = Loop(net := model(), loss_of(net), config, tmp_path)
    loop.run()
    loop.record("closed_loop", {"pick": 0.5})
    (event,) = accumulator(str(tmp_path)).Reload().Scalars("closed_loop/pick")
    assert (event.step, event.value) == (8, 0.5)
    events = accumulator(str(tmp_path)).Reload().Scalars("loss")
    curve = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert [event.step for event in events] == [point["step"] for point in curve] == [2, 4, 6, 8]
    assert [event.value for event in events] == pytest.approx(
        [point["loss"] for point in curve], abs=1e-5
    )


def test_ctrl_c_in_the_middle_of_a_step_saves_nothing_torn(tmp_path, monkeypatch):
    config = TrainLoopConfig(steps=10, warmup=1, save_s=1e9)
    loop = Loop(net := model(), loss_of(net), config, tmp_path)
    loop.run(until=4)

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.optimizers[0], "step", stop)
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    again = model()
    assert Loop(again, loss_of(again), config, tmp_path).step == 4


def test_sigterm_saves_the_state_and_ends_the_run(tmp_path):
    """What a scheduler sends before it kills."""
    config = TrainLoopConfig(steps=10, warmup=1, save_s=1e9)
    loop = Loop(net := model(), loss_of(net), config, tmp_path)
    before = signal.getsignal(signal.SIGTERM)

    def send(step: int, _: object) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt), terminated_as_interrupted():
        loop.run(on_step=send)
    assert signal.getsignal(signal.SIGTERM) is before
    again = model()
    assert Loop(again, loss_of(again), config, tmp_path).step == 3


def test_the_average_is_not_the_last_weights(tmp_path):
    loop = Loop(
        net := model(),
        loss_of(net),
        TrainLoopConfig(steps=30, lr=0.05, warmup=1, ema=0.95),
        tmp_path,
    )
    loop.run()
    own = {name: p.detach().clone() for name, p in net.named_parameters()}
    average = loop.average()
    assert max((average[name] - own[name]).abs().max().item() for name in own) > 1e-3
    with loop.averaged():
        assert all(torch.equal(p, average[name]) for name, p in net.named_parameters())
    assert all(torch.equal(p, own[name]) for name, p in net.named_parameters())


def test_figures_of_a_step_that_is_trained_again_replace_the_earlier_ones(tmp_path):
    config = TrainLoopConfig(steps=6, warmup=1, save_s=1e9)
    loop = Loop(net := model(), loss_of(net), config, tmp_path)
    loop.run(until=2, on_step=lambda step, _: loop.record("validation", {"mse": step}))
    assert not loop.lacks("validation")
    assert loop.lacks("closed_loop")
    loop.record("validation", {"mse": 7.0})
    lines = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "mse": 1}, {"step": 2, "mse": 7.0}]


def test_the_rate_rises_holds_and_falls_to_nothing():
    config = TrainLoopConfig(steps=100, lr=1.0, warmup=10, decay=0.4)
    assert config.rate(0) == pytest.approx(0.1)
    assert config.rate(30) == config.rate(59) == 1.0
    assert config.rate(80) == pytest.approx(0.5)
    assert config.rate(99) < 0.01


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_is_not_finite_stops_and_keeps_the_last_good_state(what, tmp_path):
    net, config = model(), TrainLoopConfig(steps=9, warmup=1)
    Loop(net, loss_of(net), config, tmp_path).run(until=2)
    good = (tmp_path / "state.pt").read_bytes()

    def loss(step: int):
        value, parts = loss_of(net)(step)
        if step == 3:
            # a root's slope at 0
            value = (
                value * float("nan") if what == "loss" else value + (net[0].bias.sum() * 0).sqrt()
            )
        return value, parts

    with pytest.raises(
        TrainingError, match=rf"{what}.* is nan at step 3.*another --out.*--seed.*lower --lr"
    ):
        Loop(net, loss, config, tmp_path).run()
    assert (tmp_path / "state.pt").read_bytes() == good
    assert all(p.isfinite().all() for p in net.parameters())  # the poisoned step was not taken
    again = Loop(net := model(), loss_of(net), config, tmp_path)
    again.run()
    assert again.step == 9


def test_weights_that_a_step_left_without_numbers_do_not_replace_the_state(tmp_path):
    net, config = model(), TrainLoopConfig(steps=9, warmup=1, save_s=1e9)
    Loop(net, loss_of(net), config, tmp_path).run(until=2)
    loop = Loop(net, loss_of(net), config, tmp_path)

    def poison(step: int, parts):
        if step == 4:
            net[0].weight.data.fill_(float("nan"))

    with pytest.raises(TrainingError, match="step 4"):
        loop.run(on_step=poison)
    again = model()
    assert Loop(again, loss_of(again), config, tmp_path).step == 2


def test_another_models_state_is_refused(tmp_path):
    Loop(net := model(), loss_of(net), TrainLoopConfig(steps=2), tmp_path).run()
    other = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="another model"):
        Loop(other, loss_of(other), TrainLoopConfig(steps=2), tmp_path)
    with pytest.raises(ConfigError, match="frozen"):
        Loop(other.requires_grad_(False), loss_of(other), TrainLoopConfig(steps=2), tmp_path / "x")


def test_a_curve_does_not_fold_back_after_a_kill(tmp_path):
    config = TrainLoopConfig(steps=20, log_every=5, save_s=1e9)
    Loop(net := model(), loss_of(net), config, tmp_path).run(until=10)
    curve = tmp_path / "curve.jsonl"
    with curve.open("a") as file:  # killed at step 15, after the state of step 10
        file.write('{"step": 15, "time": 0.0, "loss": 1.0}\n{"step": 2')
    Loop(net := model(), loss_of(net), config, tmp_path).run()
    assert [json.loads(line)["step"] for line in curve.read_text().splitlines()] == [5, 10, 15, 20]


def test_the_curve_has_a_point_every_so_often(tmp_path):
    Loop(net := model(), loss_of(net), TrainLoopConfig(steps=25, log_every=10), tmp_path).run()
    points = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert [point["step"] for point in points] == [10, 20, 25]
    assert points[-1]["loss"] < points[0]["loss"]


def trained(folder, *stops):
    config = TrainLoopConfig(steps=40, warmup=5, save_s=1e9)
    for stop in stops:
        loop = Loop(net := model(), loss_of(net), config, folder)
        loop.run(until=stop)
    return loop


DAMAGE = {
    "flipped in the weights": lambda data: flipped(data, len(data) // 3),
    "flipped in the digest": lambda data: flipped(data, len(data) - 5),
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "another file": lambda data: b"{}" * 500,
}


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_state_is_named_and_the_one_before_is_resumed(tmp_path, how):
    whole = trained(tmp_path / "whole", 40)
    trained(tmp_path / "run", 10, 20)
    state = tmp_path / "run" / STATE
    state.write_bytes(DAMAGE[how](state.read_bytes()))
    with pytest.warns(
        UserWarning, match=rf"{STATE} is damaged.*resumes from {PREVIOUS}, at step 10"
    ):
        again = trained(tmp_path / "run", 40)
    assert torch.equal(whole.model[0].weight, again.model[0].weight)


def test_every_flipped_byte_of_a_state_is_noticed(tmp_path):
    trained(tmp_path, 3)
    good = (tmp_path / STATE).read_bytes()
    for at in range(0, len(good), len(good) // 200):
        (tmp_path / STATE).write_bytes(flipped(good, at))
        with pytest.raises(TrainingError, match="is damaged"):
            read_state(tmp_path)


def test_without_an_undamaged_state_both_are_named(tmp_path):
    trained(tmp_path, 10, 20)
    for name in (STATE, PREVIOUS):
        (tmp_path / name).write_bytes(b"damaged")
    with pytest.raises(
        TrainingError, match=rf"{STATE} is damaged.*{PREVIOUS} is damaged.*Remove the file"
    ):
        trained(tmp_path, 30)


def test_a_full_disk_is_named_and_costs_no_state(tmp_path):
    trained(tmp_path, 10)
    with full_disk(2000), pytest.raises(StorageError, match=STATE):
        trained(tmp_path, 20)
    assert read_state(tmp_path)[0]["step"] == 10
    assert not list(tmp_path.glob(".*"))


def test_time_of_a_curve_leaves_interruptions_out(tmp_path):
    curve = tmp_path / "curve.jsonl"
    assert seconds_of(curve) == 0
    curve.write_text(
        "".join(
            json.dumps({"step": i, "time": at}) + "\n" for i, at in enumerate((5, 7, 9, 3609, 3612))
        )
    )
    assert seconds_of(curve) == 7


def test_a_second_process_is_kept_out_of_a_folder(tmp_path):
    busy = r"another process writes to .*; wait for it, stop it, or choose another --out\."
    parts, run = tmp_path / ".demos.parts-seed0", tmp_path / "run"
    for folder in (parts, run):
        folder.mkdir()
    with locked(parts, "--out"), pytest.raises(ConfigError, match=busy):
        Demos(tmp_path / "demos", episodes=1).run()
    with locked(run, "--out"):
        with pytest.raises(ConfigError, match=busy), locked_run(run, DataShard()):
            pass
        with locked_run(run, DataShard(1, 2)):  # not the first of its processes
            pass
