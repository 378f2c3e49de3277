"""Learn from the context: invented dictionaries, repeats, induction heads.

The data, the model and the measurements of "Learning in context" in the
section "Large-scale pretraining with Transformers". Sources: Brown et al.
(2020), learning in context; Elhage et al. (2021), attention-only models;
Olsson et al. (2022), induction heads.

Axes: B batch, T query positions, S key positions (here S = T), D model
width, H heads. Heads are named by pairs (layer, head), both from 0.
"""

import torch
from torch import nn
from torch.nn import functional as F

from snippets.attention_scoring_functions import causal_mask, check_sizes
from snippets.self_attention_and_positional_encoding import RotaryAttention


def interleave(letters, symbols, num_letters):
    """Write letter, symbol, letter, symbol …; → tokens (B, 2n).

    letters and symbols (B, n), counted from 0; symbol j has the id
    `num_letters` + j.
    """
    pairs = torch.stack([letters, symbols + num_letters], dim=-1)
    return pairs.flatten(1)


# --8<-- [start:draw_dictionaries]
def draw_dictionaries(count, num_pairs=12, size=8):
    """Invent a dictionary for each sequence, and look up random letters.

    It maps each of `size` letters to one of `size` symbols, equal ones
    allowed → tokens (B, 2 · num_pairs), B = count.
    """
    check_sizes(num_pairs, size)
    dictionary = torch.randint(size, (count, size))
    letters = torch.randint(size, (count, num_pairs))
    return interleave(letters, dictionary.gather(1, letters), size)


# --8<-- [end:draw_dictionaries]


def draw_shifts(count, num_pairs=12, size=10):
    """Draw dictionaries of one rule, symbol = (letter + shift) mod `size`.

    The shift is drawn for each sequence → tokens (B, 2 · num_pairs).
    """
    check_sizes(num_pairs, size)
    letters = torch.randint(size, (count, num_pairs))
    shift = torch.randint(size, (count, 1))
    return interleave(letters, (letters + shift) % size, size)


# --8<-- [start:draw_repeats]
def draw_repeats(count, length=32, num_symbols=16):
    """Draw a block of different symbols, and repeat it up to `length`.

    → tokens (B, T). The size of the block, the period, is drawn for each
    sequence from 4 … length // 2. Raises `ValueError` if there is no such
    size, or if the symbols are too few for it.
    """
    longest = length // 2
    if not 4 <= longest <= num_symbols:
        raise ValueError(
            f"no blocks of 4 to {longest} from {num_symbols} symbols"
        )
    period = torch.randint(4, longest + 1, (count, 1))
    block = torch.rand(count, num_symbols).argsort(-1)  # shuffled symbols
    return block.gather(1, torch.arange(length) % period)


# --8<-- [end:draw_repeats]


def endless(draw, count):
    """Yield batches of `count` new sequences for ever."""
    while True:
        yield draw(count)


class AttentionLayer(nn.Module):
    """Add to each vector what its heads find at or before its position.

    x (B, T, D) → the same shape, and weights (B, H, T, T) or None. Rotary
    positions, norm first; heads that are `closed` find nothing.
    """

    def __init__(self, width, num_heads):
        """Make the norm and the heads."""
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.heads = RotaryAttention(width, num_heads)

    def forward(self, x, need_weights=False, closed=()):
        """Attend; a head without keys has the output zero."""
        mask = causal_mask(x.shape[1], x.shape[1], device=x.device)
        if closed:
            mask = mask.repeat(len(x), self.heads.num_heads, 1, 1)
            mask[:, list(closed)] = False
        y = self.norm(x)
        output, weights = self.heads(y, y, y, mask, need_weights)
        return x + output, weights


class AttentionOnly(nn.Module):
    """Predict the next token by attention alone, without other networks."""

    def __init__(self, vocab_size, width, num_heads, num_layers):
        """Make the layers."""
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(
            AttentionLayer(width, num_heads) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens, need_weights=False, closed=()):
        """Read tokens (B, T); → logits, and weights (B, H, T, T) a layer."""
        x, found = self.embedding(tokens), []
        for layer, heads in zip(self.layers, by_layer(self, closed)):
            x, weights = layer(x, need_weights, heads)
            found.append(weights)
        return self.output(self.norm(x)), found


def by_layer(model, closed):
    """Sort pairs (layer, head) into one set of heads a layer.

    Raises `ValueError` for a head that the model does not have.
    """
    sets = [set() for _ in model.layers]
    for layer, head in closed:
        if not (
            0 <= layer < len(sets)
            and 0 <= head < model.layers[layer].heads.num_heads
        ):
            raise ValueError(f"there is no head {head} in layer {layer}")
        sets[layer].add(head)
    return sets


# --8<-- [start:symbol_loss]
def symbol_loss(model, tokens):
    """Give the cross-entropy of the symbols alone, in nats.

    tokens (B, 2n) of `interleave`: letters cannot be predicted.
    """
    logits, _ = model(tokens)
    return F.cross_entropy(
        logits[:, ::2].flatten(0, 1), tokens[:, 1::2].flatten()
    )


# --8<-- [end:symbol_loss]


def right_symbols(model, tokens):
    """Tell which symbols the model predicts, (B, n), from what is before."""
    logits, _ = model(tokens)
    return logits[:, ::2].argmax(-1) == tokens[:, 1::2]


def expected_accuracy(num_examples, size):
    """Give the accuracy of looking up, and of guessing what is not there.

    1 − (1 − 1/size)^(num_examples + 1); numbers or tensors.
    """
    return 1 - (1 - 1 / size) ** (num_examples + 1)


# --8<-- [start:after_copies]
def after_copies(tokens):
    """Mark the keys whose previous token is the token of the query.

    tokens (B, T) → bool (B, T, S), never a key after the query.
    """
    length = tokens.shape[1]
    same = tokens[:, :, None] == tokens[:, None, :]  # (B, T, S)
    after = F.pad(same, (1, 0))[..., :-1]  # one key to the right
    return after & causal_mask(length, length, device=tokens.device)


# --8<-- [end:after_copies]


# --8<-- [start:induction_score]
def induction_score(weights, tokens):
    """Give the mean weight on what followed earlier copies, (H,).

    weights (B, H, T, T), tokens (B, T). The mean is over the queries whose
    token has stood before; `ValueError` if there is none.
    """
    targets = after_copies(tokens)
    seen = targets.any(-1)  # (B, T)
    if not seen.any():
        raise ValueError("no token stands twice in a sequence")
    found = (weights * targets[:, None]).sum(-1)  # (B, H, T)
    return found.transpose(0, 1)[:, seen].mean(-1)


# --8<-- [end:induction_score]


def previous_score(weights):
    """Give the mean weight on the previous token, (H,).

    weights (B, H, T, T); the first query has no previous token.
    """
    return weights.diagonal(-1, -2, -1).mean((0, 2))


def next_loss(model, tokens):
    """Give the cross-entropy of the next token, in nats."""
    logits, _ = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def repeat_loss(model, tokens, closed=()):
    """Give the loss where the token has stood before, so can be continued.

    closed: pairs (layer, head) to knock out.
    """
    logits, _ = model(tokens[:, :-1], closed=closed)
    seen = after_copies(tokens[:, :-1]).any(-1)
    return F.cross_entropy(logits[seen], tokens[:, 1:][seen])
