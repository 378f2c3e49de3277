"""Train in several processes at once, each on its share of every batch.

A small GPT of the section "Large-scale pretraining with Transformers" learns
to write out numbers. To start two processes on this machine:

    torchrun --nproc-per-node=2 -m snippets.data_parallel

Without torchrun, `python -m snippets.data_parallel`, it is one process. Both
print the same losses. Source: Li et al. (2020), PyTorch Distributed.
"""

import os
import sys

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from snippets.after_pretraining import encode_answers
from snippets.datasets import alphabet, draw_numbers, english_number
from snippets.large_pretraining_transformers import GPT
from snippets.training import one_cycle, sequence_loss, take, update


def place_among():
    """Give the number of this process and how many there are."""
    if not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def add_up(value):
    """Add up a tensor over all processes; no gradient flows through."""
    value = value.detach().clone()
    if distributed.is_initialized():
        distributed.all_reduce(value)
    return value


# --8<-- [start:shared_loss]
def shared_loss(model, share):
    """Scale the loss of a share so that the mean of all is that of the batch.

    share: inputs, labels (B, T) → scalar, processes · labels here / labels
    everywhere times the mean over the labels here.
    """
    inputs, labels = share
    loss = sequence_loss(model(inputs), labels, -100)
    here = (labels != -100).sum()
    return loss * here * place_among()[1] / add_up(here).clamp(min=1)


# --8<-- [end:shared_loss]


def draw_questions(batch_size):
    """Yield batches of numbers to write out, as of `encode_answers`."""
    while True:
        drawn = draw_numbers(range(1, 1000), batch_size)
        words = [" ".join(english_number(number)) for number in drawn]
        yield encode_answers(list(zip(map(str, drawn), words)))


# --8<-- [start:train_together]
def train_together(model, batches, *, steps, rate):
    """Train with every process that there is; → the loss of each step.

    All processes draw the same batches, take different rows, and have the
    same weights after each step.
    """
    rank, size = place_among()
    wrapped = DistributedDataParallel(model) if size > 1 else model
    adam = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    losses = []
    for step, batch in take(batches, steps):
        share = [each[rank::size] for each in batch]
        loss = shared_loss(wrapped, share)
        speed = one_cycle(step, steps, rate)
        loss = update(wrapped, adam, loss, speed, clip=1.0)  # gradients meet
        losses.append(add_up(loss).item() / size)
    return losses


# --8<-- [end:train_together]


def train_small_gpt(steps):
    """Train a small GPT on questions; → the losses.

    In float64, so that rounding hides no mistake.
    """
    torch.manual_seed(0)
    model = GPT(len(alphabet()), 64, 16, 2, 2).double()
    questions = draw_questions(8)
    return train_together(model, questions, steps=steps, rate=1e-2)


def main(steps):
    """Join the other processes if torchrun started this one, and train."""
    if "RANK" in os.environ:  # torchrun says who and how many we are
        distributed.init_process_group("gloo")
    losses = train_small_gpt(steps)
    if place_among()[0] == 0:  # one of them is enough
        print(*losses, sep="\n")
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 12)
