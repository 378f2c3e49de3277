"""Train every model of the book by one loop, and measure it the same way.

The loop of sections 4 to 9: batches in, losses out. It seeds, clips, follows
a schedule, measures in evaluation mode, and rounds the weights at the end.
"""

import math
import sys
from contextlib import contextmanager
from itertools import islice

import torch
from torch import nn
from torch.nn import functional as F


# --8<-- [start:sequence_loss]
def sequence_loss(logits, targets, pad_id, *, label_smoothing=0.0):
    """Average the cross-entropy over the real tokens of a batch.

    logits (B, T, vocab_size), targets (B, T) of ids; `pad_id` marks what is
    not real → scalar in nats a token, 0 if no token is real, at least float32.
    Raises `ValueError` if the shapes do not go together.
    """
    if logits.ndim != 3 or logits.shape[:2] != targets.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} do not fit"
            f" targets {tuple(targets.shape)}"
        )
    real = targets != pad_id
    logits = logits[real]  # (number of real tokens, vocab_size)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    total = F.cross_entropy(
        logits, targets[real], reduction="sum", label_smoothing=label_smoothing
    )
    return total / max(len(logits), 1)


# --8<-- [end:sequence_loss]


# --8<-- [start:inverse_sqrt_rate]
def inverse_sqrt_rate(step, width, warmup_steps):
    """Give the learning rate of a step, counted from 1.

    width^(-1/2) · min(step^(-1/2), step · warmup_steps^(-3/2)): it rises in a
    straight line for `warmup_steps` steps, then falls like 1/√step.
    Raises `ValueError` for a step, width or warm-up below 1.
    Vaswani et al. (2017), equation 3.
    """
    if min(step, width, warmup_steps) < 1:
        raise ValueError(
            f"step {step}, width {width} and warmup_steps {warmup_steps}"
            " must be at least 1"
        )
    return width**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


# --8<-- [end:inverse_sqrt_rate]


# --8<-- [start:one_cycle]
def one_cycle(step, steps, peak):
    """Give the learning rate of a step, 1 … `steps`: up, then down.

    Half a cosine up from peak/25 to `peak` over the first 30 % of the steps,
    then half a cosine down; it would reach 0 one step after the last.
    """
    top = 0.3 * steps
    if step <= top:
        low, place = peak / 25, 1 - step / top
    else:
        low, place = 0.0, (step - top) / (steps + 1 - top)
    return low + (peak - low) * (1 + math.cos(math.pi * place)) / 2


# --8<-- [end:one_cycle]


# --8<-- [start:evaluating]
@contextmanager
def evaluating(model):
    """Put a model into evaluation mode for a while, without gradients.

    Afterwards every part is in its old mode, and the random state of torch
    is what it was: a measurement does not change the training around it.
    """
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield model
    finally:
        for part, mode in modes:
            part.training = mode


# --8<-- [end:evaluating]


# --8<-- [start:round_to_half]
@torch.no_grad()
def round_to_half(model):
    """Round parameters and buffers to the nearest float16 values, in place.

    They keep their dtype; integers are left alone. Raises `ValueError` with
    the name of a tensor that float16 cannot hold, before any is changed.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    floats = {name: x for name, x in tensors.items() if x.is_floating_point()}
    for name, x in floats.items():
        if not x.half().isfinite().all():
            raise ValueError(f"{name} has a value that float16 cannot hold")
    for x in floats.values():
        x.copy_(x.half())


# --8<-- [end:round_to_half]


# --8<-- [start:show_progress]
def show_progress(step, steps, loss):
    """Rewrite one line with the loss, on a terminal and nowhere else."""
    if sys.stderr.isatty():
        end = "\n" if step == steps else ""
        line = f"\rstep {step} of {steps}, loss {loss:.3f}"
        print(line, end=end, file=sys.stderr, flush=True)


# --8<-- [end:show_progress]


# --8<-- [start:take]
def take(batches, steps):
    """Yield (step, batch) for the steps 1 … `steps`.

    Raises `ValueError` if the batches end before.
    """
    step = 0
    for step, batch in enumerate(islice(batches, steps), start=1):
        yield step, batch
    if step < steps:
        raise ValueError(f"{steps} steps, but only {step} batches")


# --8<-- [end:take]


# --8<-- [start:update]
def update(model, optimizer, loss, rate, clip):
    """Take one step down the gradient, its norm clipped; → the loss.

    Raises `ValueError` if the loss is not finite: no step mends that.
    """
    if not loss.isfinite():
        raise ValueError(f"the loss is {loss.item()}")
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.detach()


# --8<-- [end:update]


# --8<-- [start:train]
def train(
    model, loss, batches, *, steps, rate, seed=0, clip=1.0, weight_decay=0.0,
    measure=None, every=50
):  # fmt: skip
    """Minimise `loss(model, batch)`; → losses (steps,), [(step, measure)].

    `rate`: the peak of `one_cycle`, or a function of the step, from 1.
    """
    torch.manual_seed(seed)  # of dropout, and of batches drawn at random
    schedule = rate if callable(rate) else lambda i: one_cycle(i, steps, rate)
    adam = torch.optim.AdamW(model.parameters(), weight_decay=weight_decay)
    losses, curve = torch.zeros(steps), []
    model.train()
    for step, batch in take(batches, steps):
        value = loss(model, batch)
        losses[step - 1] = update(model, adam, value, schedule(step), clip)
        show_progress(step, steps, value.item())
        if step == steps:
            round_to_half(model)
        if measure and (step % every == 0 or step == steps):
            with evaluating(model):
                curve.append((step, measure(model)))
    model.eval()
    return losses, curve


# --8<-- [end:train]
