"""The one training loop of the book, its loss and its schedules."""

import io
import math
import sys
from itertools import count, repeat

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from snippets.training import (
    evaluating,
    inverse_sqrt_rate,
    one_cycle,
    round_to_half,
    sequence_loss,
    show_progress,
    take,
    train,
    update,
)

PAD = 0
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def tokens_to_predict():
    """Give targets (B=2, T=5) of 7 words, with 3 and 4 real ones."""
    return torch.tensor([[3, 6, 2, PAD, PAD], [1, 5, 4, 2, PAD]])


# The loss


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary_whatever_the_padding():
    for real in (1, 2, 4):
        targets = torch.tensor([[5] * real + [PAD] * (4 - real)])
        loss = sequence_loss(torch.zeros(1, 4, 10), targets, PAD)
        assert loss.item() == pytest.approx(2.302585, abs=1e-6)


def test_loss_is_the_mean_over_real_tokens_computed_by_hand():
    logits, targets = drawn(2, 5, 7), tokens_to_predict()
    by_hand = [
        -logits[b, t].log_softmax(-1)[targets[b, t]]
        for b in range(2)
        for t in range(5)
        if targets[b, t] != PAD
    ]
    assert len(by_hand) == 7
    torch.testing.assert_close(sequence_loss(logits, targets, PAD), sum(by_hand) / 7)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_loss_agrees_with_cross_entropy_of_torch(smoothing):
    logits, targets = drawn(2, 5, 7, dtype=torch.float64), tokens_to_predict()
    expected = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, label_smoothing=smoothing
    )
    found = sequence_loss(logits, targets, PAD, label_smoothing=smoothing)
    torch.testing.assert_close(found, expected)


def test_label_smoothing_of_uniform_logits_is_the_logarithm_of_the_vocabulary():
    targets = torch.tensor([[1, 0]])
    loss = sequence_loss(torch.zeros(1, 2, 5), targets, 0, label_smoothing=0.4)
    assert loss.item() == pytest.approx(1.6094, abs=1e-4)


def test_padding_takes_no_part_not_even_as_nan():
    targets = tokens_to_predict()
    clean = drawn(2, 5, 7).requires_grad_()
    spoilt = clean.detach().clone()
    spoilt[targets == PAD] = math.nan
    spoilt.requires_grad_()
    losses = [sequence_loss(x, targets, PAD) for x in (clean, spoilt)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    assert torch.equal(clean.grad, spoilt.grad)
    assert (spoilt.grad[targets == PAD] == 0).all()
    assert (spoilt.grad[targets != PAD] != 0).all()


def test_loss_does_not_depend_on_the_width_that_a_batch_is_padded_to():
    logits, targets = drawn(2, 5, 7), tokens_to_predict()
    wider = F.pad(targets, (0, 3), value=PAD)
    filled = torch.cat([logits, drawn(2, 3, 7, seed=1)], dim=1)
    assert torch.equal(sequence_loss(logits, targets, PAD), sequence_loss(filled, wider, PAD))


def test_loss_of_a_batch_without_real_tokens_is_zero_with_zero_gradient():
    logits = drawn(2, 3, 5).requires_grad_()
    loss = sequence_loss(logits, torch.full((2, 3), PAD), PAD)
    loss.backward()
    assert loss == 0 and (logits.grad == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_of_low_precision_is_computed_in_float32(dtype):
    logits = (100 * drawn(2, 5, 7)).to(dtype).requires_grad_()
    loss = sequence_loss(logits, tokens_to_predict(), PAD)
    loss.backward()
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    wide = sequence_loss(logits.double(), tokens_to_predict(), PAD)
    assert loss.item() == pytest.approx(wide.item(), rel=1e-5)
    assert logits.grad.dtype == dtype and logits.grad.isfinite().all()


def test_any_id_can_stand_for_padding():
    logits, targets = drawn(2, 5, 7), tokens_to_predict()
    moved = targets.masked_fill(targets == PAD, -100)
    assert torch.equal(sequence_loss(logits, targets, PAD), sequence_loss(logits, moved, -100))


def test_loss_refuses_shapes_that_do_not_go_together():
    with pytest.raises(ValueError, match=r"\(2, 5, 7\).*\(2, 4\)"):
        sequence_loss(drawn(2, 5, 7), torch.ones(2, 4, dtype=torch.long), PAD)
    with pytest.raises(ValueError, match="logits"):
        sequence_loss(drawn(10, 7), torch.ones(10, dtype=torch.long), PAD)


# The schedules


def test_inverse_square_root_has_the_values_of_the_paper():
    rates = [inverse_sqrt_rate(step, 512, 4000) for step in (1, 4000, 8000)]
    assert rates == pytest.approx([1.747e-7, 6.988e-4, 4.941e-4], rel=1e-3)
    assert rates[1] / rates[2] == pytest.approx(math.sqrt(2))


@given(st.integers(1, 500), st.integers(1, 999))
def test_inverse_square_root_is_highest_at_the_end_of_the_warm_up(warmup, width):
    rates = [inverse_sqrt_rate(step, width, warmup) for step in range(1, 3 * warmup + 3)]
    assert max(range(len(rates)), key=rates.__getitem__) + 1 == warmup
    assert rates[warmup - 1] == pytest.approx((width * warmup) ** -0.5)


@pytest.mark.parametrize("bad", [(0, 512, 4000), (-1, 512, 4000), (1, 0, 10), (1, 8, 0)])
def test_inverse_square_root_counts_from_one(bad):
    with pytest.raises(ValueError, match=f"step {bad[0]}, width {bad[1]}"):
        inverse_sqrt_rate(*bad)


def test_one_cycle_rises_to_its_peak_and_falls_to_nearly_zero():
    rates = [one_cycle(step, 100, 0.5) for step in range(1, 101)]
    assert max(rates) == rates[29] == 0.5
    assert rates[:30] == sorted(rates[:30])
    assert rates[29:] == sorted(rates[29:], reverse=True)
    assert 0.5 / 25 < rates[0] < 0.5 / 20
    assert 0 < rates[-1] < 0.001
    assert one_cycle(15, 100, 0.5) == pytest.approx(0.26)  # the middle of 0.02 and 0.5
    assert one_cycle(65.5, 100, 0.5) == pytest.approx(0.25)


@given(st.integers(1, 50))
def test_every_step_of_one_cycle_moves_something(steps):
    assert all(0 < one_cycle(step, steps, 0.1) <= 0.1 for step in range(1, steps + 1))


# Evaluation


def test_evaluating_puts_back_the_mode_of_every_part():
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)))
    model[1].eval()
    with evaluating(model) as same:
        assert same is model
        assert not any(part.training for part in model.modules())
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert [part.training for part in model.modules()] == [True, True, False, False, False]


def test_evaluating_puts_back_mode_and_gradients_after_an_error():
    model = nn.Dropout(0.5)
    with pytest.raises(KeyError), evaluating(model):
        raise KeyError
    assert model.training and torch.is_grad_enabled()


def test_evaluating_does_not_move_the_random_state():
    before = torch.get_rng_state()
    with evaluating(nn.Dropout(0.5)):
        torch.rand(7)
    assert torch.equal(torch.get_rng_state(), before)


# Rounding


class Counter(nn.Module):
    """A parameter, a buffer, and an integer that must stay."""

    def __init__(self, value=1 / 3):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([value, 1.0]))
        self.register_buffer("mean", torch.tensor([math.pi]))
        self.register_buffer("steps", torch.tensor([70_001]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_gives_float16_values_in_the_old_dtype_in_place(dtype):
    model = Counter().to(dtype)
    places = [x.data_ptr() for x in (model.weight, model.mean)]
    round_to_half(model)
    assert [x.data_ptr() for x in (model.weight, model.mean)] == places
    assert model.weight.dtype == dtype and model.weight.requires_grad
    assert model.weight.tolist() == [0.333251953125, 1.0]
    assert model.mean.item() == 3.140625
    assert model.steps.item() == 70_001


def test_rounding_twice_changes_nothing():
    model = nn.Linear(5, 3)
    round_to_half(model)
    once = model.weight.detach().clone()
    round_to_half(model)
    assert torch.equal(model.weight, once)


def test_rounding_names_what_float16_cannot_hold_and_changes_nothing():
    model = Counter(value=70_000.0)
    with pytest.raises(ValueError, match="weight"):
        round_to_half(model)
    assert model.mean.item() == pytest.approx(math.pi)


# The loop


def line_data():
    """Give the points of the line y = 2 x − 1, and a model that can learn it."""
    x = torch.linspace(-1, 1, 11)[:, None]
    torch.manual_seed(3)
    return nn.Linear(1, 1), (x, 2 * x - 1)


def squared_error(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def test_training_finds_the_line_and_ends_in_float16_values_and_eval_mode():
    model, data = line_data()
    losses, curve = train(model, squared_error, repeat(data), steps=200, rate=0.1)
    assert losses.shape == (200,) and not losses.requires_grad
    assert losses[-1] < 1e-4 < losses[0] and curve == []
    assert model.weight.item() == pytest.approx(2, abs=0.01)
    assert not model.training
    for x in model.parameters():
        assert torch.equal(x, x.half().float())


def test_training_is_repeated_by_its_seed_also_where_batches_and_dropout_are_random():
    def batches():
        while True:
            x = torch.rand(7, 1)
            yield x, 2 * x - 1

    def run(seed, steps=20, measure=None):
        torch.manual_seed(11)
        model = nn.Sequential(nn.Linear(1, 5), nn.Dropout(0.5), nn.Linear(5, 1))
        options = {"steps": steps, "rate": 0.01, "seed": seed, "measure": measure, "every": 3}
        return train(model, squared_error, batches(), **options)[0]

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))
    assert torch.equal(run(0), run(0, measure=lambda model: torch.rand(3).sum()))


def test_measures_are_taken_in_eval_mode_without_gradients_and_after_rounding():
    model, data = line_data()

    def measure(model):
        assert not model.training and not torch.is_grad_enabled()
        return torch.equal(model.weight, model.weight.half().float())

    _, curve = train(
        model, squared_error, repeat(data), steps=25, rate=0.01, measure=measure, every=10
    )
    assert curve == [(10, False), (20, False), (25, True)]


def test_the_last_measure_is_not_taken_twice():
    model, data = line_data()
    _, curve = train(
        model, squared_error, repeat(data), steps=20, rate=0.01, measure=lambda m: 0, every=10
    )
    assert [step for step, _ in curve] == [10, 20]


def test_the_model_is_in_training_mode_when_the_loss_is_taken():
    model, data = line_data()
    model.eval()

    def loss(model, batch):
        assert model.training and torch.is_grad_enabled()
        return squared_error(model, batch)

    train(model, loss, repeat(data), steps=4, rate=0.01, measure=lambda m: 0, every=1)


def test_the_rate_may_be_a_function_of_the_step_counted_from_one():
    asked = []

    def rate(step):
        asked.append(step)
        return 0.0 if step < 3 else 1.0

    model, data = line_data()
    start = model.weight.item()
    train(model, squared_error, repeat(data), steps=2, rate=rate)
    assert asked == [1, 2]
    assert model.weight.item() == pytest.approx(start, rel=1e-3)  # rounded, else unmoved


def test_the_first_update_of_adam_moves_by_the_rate_of_the_first_step():
    model, data = line_data()
    start = model.weight.item()
    train(model, squared_error, repeat(data), steps=1, rate=lambda step: 0.25)
    assert abs(model.weight.item() - start) == pytest.approx(0.25, abs=1e-3)


def test_weight_decay_is_off_unless_asked_for():
    def nothing(model, batch):
        return 0 * model.weight.sum()

    model, data = line_data()
    start = model.weight.item()
    train(model, nothing, repeat(data), steps=5, rate=0.1)
    assert model.weight.item() == pytest.approx(start, rel=1e-3)
    train(model, nothing, repeat(data), steps=5, rate=lambda step: 0.1, weight_decay=0.5)
    assert model.weight.item() == pytest.approx(start * 0.95**5, rel=1e-2)


def test_the_norm_of_the_gradient_is_clipped():
    weight = nn.Linear(2, 1, bias=False)
    plain = torch.optim.SGD(weight.parameters(), lr=0.0)
    start = weight.weight.detach().clone()
    loss = update(weight, plain, 100 * weight(torch.tensor([3.0, 4.0])).sum(), 0.5, clip=2.0)
    assert not loss.requires_grad
    assert weight.weight.grad.norm().item() == pytest.approx(2.0, rel=1e-4)
    moved = start - weight.weight.detach()
    torch.testing.assert_close(moved, torch.tensor([[0.6, 0.8]]), rtol=1e-4, atol=1e-5)


def test_gradients_do_not_add_up_over_steps():
    weight = nn.Linear(1, 1, bias=False)
    plain = torch.optim.SGD(weight.parameters(), lr=0.0)
    for _ in range(3):
        update(weight, plain, weight(torch.ones(1)).sum(), 0.0, clip=9.0)
    assert weight.weight.grad.item() == 1.0


def test_an_unused_parameter_does_not_stop_the_training():
    model, data = line_data()
    model.unused = nn.Parameter(torch.ones(3))
    train(model, squared_error, repeat(data), steps=2, rate=0.1)
    assert torch.equal(model.unused, torch.ones(3))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_training_before_it_spoils_the_weights(value):
    model, data = line_data()
    with pytest.raises(ValueError, match="the loss is (nan|-?inf)"):
        train(model, lambda m, b: value * m.weight.sum(), repeat(data), steps=3, rate=0.1)
    assert model.weight.isfinite().all()


def test_too_few_batches_are_an_error_with_both_numbers():
    model, data = line_data()
    with pytest.raises(ValueError, match="5 steps, but only 3 batches"):
        train(model, squared_error, [data] * 3, steps=5, rate=0.1)


def test_no_batch_more_than_needed_is_drawn():
    stream = count()
    assert list(take(stream, 4)) == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert next(stream) == 4


class Terminal(io.StringIO):
    """A text file that says it is a terminal."""

    def isatty(self):
        return True


def test_progress_is_one_line_on_a_terminal_and_nothing_elsewhere(monkeypatch, capsys):
    show_progress(1, 2, 0.5)
    assert capsys.readouterr() == ("", "")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    show_progress(1, 2, 0.51234)
    show_progress(2, 2, 0.25)
    assert terminal.getvalue() == "\rstep 1 of 2, loss 0.512\rstep 2 of 2, loss 0.250\n"
