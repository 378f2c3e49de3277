"""Prove that several processes learn what one learns from the same batches."""

import contextlib
import os
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.testing import assert_close

from snippets import data_parallel as section
from snippets.data_parallel import (
    add_up,
    draw_questions,
    main,
    place_among,
    shared_loss,
    train_small_gpt,
    train_together,
)
from snippets.datasets import alphabet, english_number, ids_to_characters
from snippets.large_pretraining_transformers import GPT
from snippets.training import sequence_loss, train

ROOT = Path(__file__).resolve().parents[2]


def tiny_gpt():
    torch.manual_seed(3)
    return GPT(len(alphabet()), 64, 8, 2, 1).double()


def some_questions(batch_size=5, seed=0):
    torch.manual_seed(seed)
    return next(draw_questions(batch_size))


@contextlib.contextmanager
def pretend(monkeypatch, rank, size, batch):
    """Be one of several processes that hold the shares of a batch."""
    counts = [(batch[1][other::size] != -100).sum() for other in range(size)]
    with monkeypatch.context() as patch:
        patch.setattr(section, "place_among", lambda: (rank, size))
        patch.setattr(section, "add_up", lambda value: sum(counts))
        yield


def test_one_process_is_the_first_of_one():
    assert place_among() == (0, 1)
    value = torch.tensor(3.0, requires_grad=True)
    assert add_up(value).item() == 3 and not add_up(value).requires_grad
    assert add_up(value) is not value


def test_questions_are_numbers_and_answers_their_words():
    inputs, labels = some_questions(30)
    numbers = []
    for row, marks in zip(inputs, labels):
        question, _, words = ids_to_characters(row).partition("\na: ")
        numbers.append(int(question.removeprefix("q: ")))
        answer = " ".join(english_number(numbers[-1])) + "\n"
        assert words.startswith(answer[:-1])
        assert ids_to_characters(marks[marks != -100]) == answer
    assert 1 <= min(numbers) < 300 and 700 < max(numbers) <= 999


def test_batches_are_drawn_from_the_global_random_state():
    first, again, other = some_questions(seed=1), some_questions(seed=1), some_questions(seed=2)
    assert all(map(torch.equal, first, again))
    assert first[0].shape != other[0].shape or not torch.equal(first[0], other[0])


@pytest.mark.parametrize("size", (1, 2, 3, 6))  # of the last, one has no row
def test_the_mean_over_the_processes_is_the_loss_of_the_batch(monkeypatch, size):
    batch, model = some_questions(), tiny_gpt()
    whole = sequence_loss(model(batch[0]), batch[1], -100)
    expected = torch.autograd.grad(whole, list(model.parameters()))
    losses, naive = [], []
    for rank in range(size):
        with pretend(monkeypatch, rank, size, batch):
            share = [each[rank::size] for each in batch]
            losses.append(shared_loss(model, share))
        naive.append(sequence_loss(model(share[0]), share[1], -100))
    mean = torch.stack(losses).mean()
    assert_close(mean, whole)
    assert_close(torch.autograd.grad(mean, list(model.parameters())), expected)
    if size > 1:  # the shares are of different lengths
        assert (torch.stack(naive).mean() - whole).abs() > 1e-4


def test_a_batch_of_padding_has_no_loss():
    inputs, targets = some_questions()
    loss = shared_loss(tiny_gpt(), (inputs, torch.full_like(targets, -100)))
    assert loss.item() == 0
    loss.backward()


def test_one_process_trains_as_the_loop_of_the_book_does():
    def loss(model, batch):
        return sequence_loss(model(batch[0]), batch[1], -100)

    torch.manual_seed(0)
    expected, _ = train(tiny_gpt(), loss, draw_questions(5), steps=6, rate=1e-2)
    model = tiny_gpt()
    torch.manual_seed(0)
    found = train_together(model, draw_questions(5), steps=6, rate=1e-2)
    assert_close(torch.tensor(found), expected, atol=1e-6, rtol=1e-6)


def test_batches_that_run_out_are_an_error():
    batches = islice(draw_questions(5), 2)
    with pytest.raises(ValueError, match="only 2 batches"):
        train_together(tiny_gpt(), batches, steps=3, rate=1e-2)


def start(size, steps):
    """Start processes as the page does; return the losses, printed by one of them."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}"]
    command += ["--local-addr=127.0.0.1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    command += ["-m", "snippets.data_parallel", str(steps)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr and "Traceback" not in done.stderr
    return [float(line) for line in done.stdout.splitlines()]


def test_two_processes_have_the_loss_curve_of_one():
    alone, together = train_small_gpt(8), start(2, 8)
    assert len(alone) == len(together) == 8
    assert_close(torch.tensor(together), torch.tensor(alone), atol=1e-9, rtol=1e-9)
    assert alone[-1] < alone[0] - 0.3


def test_the_script_alone_prints_its_losses(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    main(2)
    assert [float(line) for line in capsys.readouterr().out.split()] == train_small_gpt(2)


def test_a_process_that_was_told_its_place_joins_and_leaves(monkeypatch, capsys):
    told = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(random.randint(20_000, 60_000)))
    seen = []
    original = section.train_small_gpt

    def spy(steps):
        seen.append((distributed.get_backend(), place_among()))
        return original(steps)

    monkeypatch.setattr(section, "train_small_gpt", spy)
    main(2)
    assert seen == [("gloo", (0, 1))]
    assert not distributed.is_initialized()
    assert len(capsys.readouterr().out.split()) == 2
