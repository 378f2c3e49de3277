"""Adapt, shrink, widen and steer a model that is pretrained already.

What comes after pretraining in the section "Large-scale pretraining with
Transformers". Sources: Hu et al. (2022), LoRA; Dettmers et al. (2022), int8
weights; Shazeer et al. (2017), mixtures of experts; Rafailov et al. (2023),
preference optimisation.

Axes: B batch, T positions, D model width. Linear layers are replaced in
place, by name or by kind; what replaces them has the same shapes.
"""

from contextlib import contextmanager
from copy import deepcopy
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from snippets.attention_scoring_functions import check_sizes, check_width
from snippets.datasets import characters_to_ids, pad_rows
from snippets.transformer import PositionWiseFFN


# --8<-- [start:LoRALinear]
class LoRALinear(nn.Module):
    """Correct a linear layer, which is frozen, by two narrow matrices.

    x (..., in) → (..., out): layer(x) + alpha/rank · x Aᵀ Bᵀ. A (rank, in)
    is drawn, B (out, rank) is zero, so that nothing changes at the start.
    `alpha` None stands for `rank`. Hu et al. (2022), equation 3.
    """

    def __init__(self, layer, rank, alpha=None):
        super().__init__()
        check_sizes(rank)
        self.layer = layer.requires_grad_(False)
        self.out_features, self.in_features = size = layer.weight.shape
        drawn = layer.weight.new_empty(rank, size[1]).normal_()
        self.down = nn.Parameter(drawn / size[1] ** 0.5)
        self.up = nn.Parameter(drawn.new_zeros(size[0], rank))
        self.scale = (rank if alpha is None else alpha) / rank
        self.active = True

    bias = property(lambda self: self.layer.bias)

    def forward(self, x):
        """Leave the correction out while it is switched off."""
        change = self.scale * (x @ self.down.T @ self.up.T)
        return self.layer(x) + (change if self.active else 0)


# --8<-- [end:LoRALinear]


# --8<-- [start:merge]
@torch.no_grad()
def merge(adapted):
    """Give one linear layer that does what a `LoRALinear` does.

    Its weight is W + alpha/rank · B A: no step more than before adapting.
    """
    merged = deepcopy(adapted.layer)
    merged.weight += adapted.scale * adapted.up @ adapted.down
    return merged.requires_grad_(True)


# --8<-- [end:merge]


def replace_layers(model, kind, make, names=None):
    """Put `make(layer)` in the place of each layer of a kind; → how many.

    `names`: only layers whose own name is one of these. Raises `ValueError`
    if there is none, since nothing would be changed.
    """
    count = 0
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, kind) and (names is None or name in names):
                setattr(parent, name, make(layer))
                count += 1
    if not count:
        raise ValueError(f"no {kind.__name__} to replace, names: {names}")
    return count


# --8<-- [start:add_lora]
def add_lora(model, rank, alpha=None, names=("query_layer", "value_layer")):
    """Freeze a model, in place, and give its linear layers corrections.

    → the model. The default are the queries and values, as in the paper.
    """
    make = partial(LoRALinear, rank=rank, alpha=alpha)
    replace_layers(model, nn.Linear, make, names)
    for name, each in model.named_parameters():
        each.requires_grad_(name.endswith((".down", ".up")))
    return model


# --8<-- [end:add_lora]


@contextmanager
def without_lora(model):
    """Switch the corrections of a model off for a while."""
    layers = [x for x in model.modules() if hasattr(x, "active")]
    before = [layer.active for layer in layers]
    for layer in layers:
        layer.active = False
    try:
        yield model
    finally:
        for layer, active in zip(layers, before):
            layer.active = active


# --8<-- [start:quantise_rows]
def quantise_rows(weight):
    """Write each row of a matrix as whole numbers from -127 to 127.

    weight (out, in) → codes (out, in) in int8, steps (out, 1): the weight is
    about steps · codes, and no entry is off by more than half a step. The
    largest entry of a row becomes ±127; a row of zeros gets the step 1.
    Raises `ValueError` for what is not finite.
    """
    if not weight.isfinite().all():
        raise ValueError("a weight is not finite: it has no row maximum")
    wide = torch.promote_types(weight.dtype, torch.float32)
    weight = weight.detach().to(wide)
    steps = weight.abs().amax(dim=1, keepdim=True) / 127
    steps = steps.masked_fill(steps == 0, 1)
    codes = (weight / steps).round().clamp(-127, 127)
    return codes.to(torch.int8), steps


# --8<-- [end:quantise_rows]


class Int8Linear(nn.Module):
    """Keep the weight of a linear layer in one byte an entry.

    x (..., in) → (..., out). The weight is restored for the product, row by
    row with its step; the bias stays as it is. Not for training.
    """

    def __init__(self, layer):
        super().__init__()
        self.out_features, self.in_features = layer.weight.shape
        codes, steps = quantise_rows(layer.weight)
        self.register_buffer("codes", codes)
        self.register_buffer("steps", steps)
        bias = None if layer.bias is None else layer.bias.detach().clone()
        self.register_buffer("bias", bias)

    def forward(self, x):
        """Multiply by the restored weight."""
        weight = (self.steps * self.codes).to(x.dtype)
        return F.linear(x, weight, self.bias)


def route(logits, top_k):
    """Choose the experts of each token, and how much each of them counts.

    logits (N, E) of the router → gates (N, top_k), which sum to one, and
    the numbers of the chosen experts (N, top_k).
    """
    best, chosen = logits.topk(top_k, dim=-1)
    return best.softmax(dim=-1), chosen  # the others' share is dealt out


class MixtureOfExperts(nn.Module):
    """Send each token to `top_k` of `num_experts` feed-forward networks.

    x (..., D) → (..., D): what they say, weighted by their gates. Options:
    those of `PositionWiseFFN`. Raises `ValueError` unless 1 ≤ top_k ≤
    num_experts. Shazeer et al. (2017), section 2, without their noise.
    """

    def __init__(self, width, ffn_width, num_experts, top_k=2, **options):
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"cannot choose {top_k} of {num_experts} experts")
        self.top_k, self.router = top_k, nn.Linear(width, num_experts, False)
        make = partial(PositionWiseFFN, width, ffn_width, **options)
        self.experts = nn.ModuleList(make() for _ in range(num_experts))

    def forward(self, x):
        """Route, let each expert work on its tokens, add up."""
        check_width("inputs", x, self.router.in_features)
        tokens = x.reshape(-1, x.shape[-1])  # (N, D)
        gates, chosen = route(self.router(tokens), self.top_k)
        return run_experts(self.experts, tokens, gates, chosen).view_as(x)


def run_experts(experts, tokens, gates, chosen):
    """Run each expert on the tokens that chose it, and on no other.

    tokens (N, D), gates and chosen (N, top_k) → (N, D).
    """
    output = torch.zeros_like(tokens)
    for number, expert in enumerate(experts):
        rows, places = (chosen == number).nonzero(as_tuple=True)
        found = gates[rows, places, None] * expert(tokens[rows])
        output = output.index_add(0, rows, found)
    return output


def encode_answers(pairs, template="q: {}\na: "):
    """Turn (question, answer) into ids, with a loss on the answer alone.

    pairs of strings → inputs (B, T), labels (B, T): the next character where
    it is one of the answer or the newline that ends it, -100 elsewhere.
    """
    rows, marks = [], []
    for question, answer in pairs:
        prompt = characters_to_ids(template.format(question)).tolist()
        ids = prompt + characters_to_ids(answer + "\n").tolist()
        rows.append(ids[:-1])
        marks.append([-100] * (len(prompt) - 1) + ids[len(prompt) :])
    return pad_rows(rows, 0)[0], pad_rows(marks, -100)[0]


def answer_log_probs(model, inputs, labels):
    """Add up the log-probabilities of the labels that are not -100.

    inputs, labels (B, T) of ids → (B,).
    """
    log_probs = model(inputs).log_softmax(dim=-1)
    real = labels != -100
    places = labels.masked_fill(~real, 0)[..., None]
    found = log_probs.gather(-1, places)[..., 0]
    return found.masked_fill(~real, 0).sum(dim=-1)


# --8<-- [start:dpo_loss]
def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, *, beta=0.1):
    """Prefer the chosen answers more than the reference model does.

    Log-probabilities (B,) of the answers under the model and under the
    reference → the mean of -log σ(beta · margin).
    Rafailov et al. (2023), equation 7.
    """
    margin = (chosen - ref_chosen) - (rejected - ref_rejected)
    return -F.logsigmoid(beta * margin).mean()


# --8<-- [end:dpo_loss]
