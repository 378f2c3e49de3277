"""Attend in several heads at once, and mix what they found.

The layers of the section "Multi-head attention", and its task, the two-name
look-up. Sources: Vaswani et al. (2017), section 3.2.2; Shazeer (2019) and
Ainslie et al. (2023), fewer heads of keys and values than of queries.

Axes: B batch, T query positions, S key positions, D model width, H heads,
G heads of keys and values, d = D/H the width of a head. A mask is boolean;
True means that this key may be attended to.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from snippets.attention_scoring_functions import (
    check_bias,
    check_mask,
    check_sizes,
    is_causal,
    scaled_dot_product_attention,
)


# --8<-- [start:draw_boards]
def draw_boards(count, num_names=25, num_records=10, num_symbols=8):
    """Draw boards of records, each a name and a symbol; ask for two names.

    → names and symbols (B, S) of the records in random order, the two names
    asked for (B, 2) and their symbols (B, 2), B = count, S = num_records.
    """
    names = torch.rand(count, num_names).argsort(-1)[:, :num_records]
    symbols = torch.randint(num_symbols, (count, num_records))
    places = torch.rand(count, num_records).argsort(-1)[:, :2]
    return names, symbols, names.gather(1, places), symbols.gather(1, places)


# --8<-- [end:draw_boards]


# --8<-- [start:endless_boards]
def endless_boards(count):
    """Yield batches of `count` new boards from torch's random state."""
    while True:
        yield draw_boards(count)


# --8<-- [end:endless_boards]


# --8<-- [start:LookUp]
class LookUp(nn.Module):
    """Look up two names in one step of attention, and read both symbols.

    names and symbols (B, S), asked (B, 2) → logits (B, 2, num_symbols) and
    the weights (B, H, S) of `attend`, or None.
    """

    def __init__(self, attend, read, width=32, num_names=25, num_symbols=8):
        """Keep two layers: `read` turns an output into 2 · num_symbols."""
        super().__init__()
        self.first = nn.Embedding(num_names, width)
        self.second = nn.Embedding(num_names, width)
        self.name = nn.Embedding(num_names, width)
        self.symbol = nn.Embedding(num_symbols, width)
        self.attend, self.read = attend, read

    def forward(self, names, symbols, asked, mask=None, need_weights=False):
        """Ask one query, the sum of two learned vectors."""
        query = self.first(asked[:, :1]) + self.second(asked[:, 1:])
        board = self.name(names), self.symbol(symbols)  # keys, values
        output, weights = self.attend(query, *board, mask, need_weights)
        logits = self.read(output[:, 0]).unflatten(-1, (2, -1))
        return logits, weights[:, :, 0] if need_weights else None


# --8<-- [end:LookUp]


# --8<-- [start:look_up_loss]
def look_up_loss(model, boards):
    """Give the mean cross-entropy of both answers, in nats."""
    *question, answer = boards
    logits, _ = model(*question)
    return F.cross_entropy(logits.flatten(0, 1), answer.flatten())


# --8<-- [end:look_up_loss]


# --8<-- [start:right_answers]
def right_answers(model, boards):
    """Tell which of the two symbols of each board are right, (B, 2)."""
    *question, answer = boards
    logits, _ = model(*question)
    return logits.argmax(-1) == answer


# --8<-- [end:right_answers]


# --8<-- [start:Head]
class Head(nn.Module):
    """Project queries, keys and values, then attend by any layer.

    query (B, T, ·), key and value (B, S, ·) → output (B, T, ·), weights
    (B, T, S); each of the three sizes is a pair: width before and after.
    """

    def __init__(self, query_size, key_size, value_size, attend):
        """Make three linear maps without bias."""
        super().__init__()
        self.query_layer = nn.Linear(*query_size, bias=False)
        self.key_layer = nn.Linear(*key_size, bias=False)
        self.value_layer = nn.Linear(*value_size, bias=False)
        self.attend = attend

    def forward(self, query, key, value, mask=None):
        """Attend to what the projections let through."""
        query, key = self.query_layer(query), self.key_layer(key)
        value = self.value_layer(value)
        return self.attend(query, key, value, mask, need_weights=True)


# --8<-- [end:Head]


# --8<-- [start:LoopedHeads]
class LoopedHeads(nn.Module):
    """Run heads one after the other, join their outputs and project.

    query (B, T, ·), key and value (B, S, ·) → output (B, T, width) and, when
    asked for, weights (B, H, T, S).
    """

    def __init__(self, heads, width):
        """Keep the heads; `width` is that of the output."""
        super().__init__()
        self.heads = nn.ModuleList(heads)
        joined = sum(head.value_layer.out_features for head in heads)
        self.output_layer = nn.Linear(joined, width, bias=False)

    def forward(self, query, key, value, mask=None, need_weights=False):
        """Attend in every head."""
        found = [head(query, key, value, mask) for head in self.heads]
        outputs, weights = zip(*found, strict=True)
        output = self.output_layer(torch.cat(outputs, dim=-1))
        return output, torch.stack(weights, dim=1) if need_weights else None


# --8<-- [end:LoopedHeads]


# --8<-- [start:split_heads]
def split_heads(x, num_heads):
    """Cut the width into heads; the head axis goes before the positions.

    x (B, T, H · d) → (B, H, T, d), a view of the same numbers.
    """
    x = x.unflatten(-1, (num_heads, -1))  # (B, T, H, d)
    return x.transpose(1, 2)  # (B, H, T, d)


# --8<-- [end:split_heads]


# --8<-- [start:merge_heads]
def merge_heads(x):
    """Undo `split_heads`: join what the heads found, position by position.

    x (B, H, T, d) → (B, T, H · d).
    """
    x = x.transpose(1, 2)  # (B, T, H, d)
    return x.flatten(2)  # (B, T, H · d)


# --8<-- [end:merge_heads]


# --8<-- [start:head_size_for]
def head_size_for(width, num_heads, num_kv_heads):
    """Give the width of one head, width / num_heads.

    Raises `ValueError` unless the sizes are at least 1 and divide evenly.
    """
    check_sizes(width, num_heads, num_kv_heads)
    if width % num_heads:
        raise ValueError(
            f"width {width} does not split into {num_heads} heads"
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} heads cannot share {num_kv_heads} heads of keys"
            " and values evenly"
        )
    return width // num_heads


# --8<-- [end:head_size_for]


# --8<-- [start:HeadProjections]
class HeadProjections(nn.Module):
    """Hold the linear maps into the heads, and the one out of them."""

    def __init__(
        self, width, num_heads, *, num_kv_heads=None, dropout=0.0, bias=False
    ):
        """Raise `ValueError` for sizes that do not divide evenly."""
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_size = head_size_for(width, num_heads, self.num_kv_heads)
        kv_width = self.num_kv_heads * head_size
        self.query_layer = nn.Linear(width, width, bias=bias)
        self.key_layer = nn.Linear(width, kv_width, bias=bias)
        self.value_layer = nn.Linear(width, kv_width, bias=bias)
        self.output_layer = nn.Linear(width, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def split(self, query, key, value):
        """Project → query (B, H, T, d), key and value (B, G, S, d)."""
        query = split_heads(self.query_layer(query), self.num_heads)
        key = split_heads(self.key_layer(key), self.num_kv_heads)
        return query, key, split_heads(self.value_layer(value), key.shape[1])


# --8<-- [end:HeadProjections]


# --8<-- [start:score_shape]
def score_shape(query, key, value, width, num_heads):
    """Give (B, H, T, S) for query (B, T, width), key and value (B, S, width).

    Raises `ValueError` with the shapes, if they are others.
    """
    shapes = [tuple(x.shape) for x in (query, key, value)]
    wanted = (*shapes[0][:1], *shapes[1][1:2], width)  # (B, S, width)
    if shapes[0][2:] != (width,) or shapes[1:] != [wanted, wanted]:
        raise ValueError(
            f"expected query (B, T, {width}), key and value"
            f" (B, S, {width}), not {', '.join(map(str, shapes))}"
        )
    batch, length, _ = wanted
    return batch, num_heads, shapes[0][1], length


# --8<-- [end:score_shape]


# --8<-- [start:add_head_axis]
def add_head_axis(mask, shape):
    """Check a mask against scores (B, H, T, S); give it its head axis.

    None, (T, S) and (B, 1 or H, T, S) stay as they are, (B, 1 or T, S)
    becomes (B, 1, 1 or T, S). Raises what `check_mask` raises.
    """
    if mask is None:
        return None
    if getattr(mask, "ndim", None) == 3:  # also where B = H
        check_mask(mask, (shape[0], *shape[2:]))
        return mask[:, None]
    check_mask(mask, shape)
    return mask


# --8<-- [end:add_head_axis]


# --8<-- [start:close_by_bias]
def close_by_bias(mask, score_bias, shape):
    """Let −∞ in the bias close a pair, as False in the mask does.

    mask: from `add_head_axis`; score_bias: float, broadcasts to `shape`,
    (B, H, T, S) → mask, or None. Raises what `check_bias` raises.
    """
    if score_bias is None:
        return mask
    check_bias(score_bias, shape)
    if 0 in shape or score_bias.is_meta or score_bias.amin() > -math.inf:
        return mask
    allowed = (score_bias != -math.inf).expand(shape)
    return allowed if mask is None else mask & allowed


# --8<-- [end:close_by_bias]


# --8<-- [start:some]
def some(mask, dim):
    """Give what `mask.any(dim)` gives; on a CPU this is faster."""
    if 0 in mask.shape:
        return mask.any(dim)
    return mask.view(torch.uint8).amax(dim).bool()


# --8<-- [end:some]


# --8<-- [start:for_any_head]
def for_any_head(mask, key):
    """Give the pairs that some head may use: (T, S) or (B, 1 or T, S)."""
    if mask is None and key.shape[1] == 0:
        return key.new_zeros(1, 0, dtype=torch.bool)
    if mask is None or mask.ndim == 2:
        return mask
    return mask[:, 0] if mask.shape[1] == 1 else some(mask, 1)


# --8<-- [end:for_any_head]


# --8<-- [start:blank_where_needed]
def blank_where_needed(query, key, value, used):
    """Do what `blank_unused` does, but copy nothing that stays as it is."""
    if used is None or used.is_meta:
        return query, key, value
    idle = ~some(used, -1)[..., None]  # (B or 1, T or 1, 1)
    unread = ~some(used, -2)[..., None]  # (B or 1, S, 1)
    if idle.any():
        query = query.masked_fill(idle, 0)
    if not unread.any():
        return query, key, value
    same = value is key
    key = key.masked_fill(unread, 0)
    return query, key, key if same else value.masked_fill(unread, 0)


# --8<-- [end:blank_where_needed]


# --8<-- [start:mix_heads]
def mix_heads(layer, output, used):
    """Join what the heads found, position by position, and project it.

    output (B, H, T, d) → (B, T, D), zero where a query has no key to use.
    """
    output = layer(merge_heads(output))
    if layer.bias is None or used is None:
        return output
    idle = ~some(used, -1)[..., None]  # (B or 1, T or 1, 1)
    return output.masked_fill(idle, 0)  # else they would get the bias


# --8<-- [end:mix_heads]


# --8<-- [start:add_to_mask]
def add_to_mask(score_bias, mask, dtype):
    """Make one tensor of bias and mask, for the fused kernel of torch."""
    half = dtype in (torch.float16, torch.bfloat16)
    bias = score_bias.to(torch.float32 if half else dtype)
    bias = bias[(None,) * (4 - bias.ndim)]  # it is slow with three axes
    return bias if mask is None else bias.masked_fill(~mask, -math.inf)


# --8<-- [end:add_to_mask]


# --8<-- [start:attend_fused]
def attend_fused(query, key, value, mask, causal, score_bias, dropout):
    """Give the output of all heads by the fused kernel of torch.

    query (B, H, T, d), key and value (B, G, S, d), mask and score_bias that
    broadcast to (B, H, T, S), or None → (B, H, T, d). `causal`: the mask is
    the square causal one; `dropout`: the layer for the weights.
    """
    if score_bias is not None:
        mask = add_to_mask(score_bias, mask, query.dtype)
        causal = False
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if causal else mask,
        dropout_p=dropout.p if dropout.training else 0.0,
        is_causal=causal,
        enable_gqa=query.shape[1] != key.shape[1],
    )


# --8<-- [end:attend_fused]


# --8<-- [start:attend_openly]
def attend_openly(query, key, value, mask, score_bias, dropout):
    """Give the output of all heads, and the weights that made it.

    Shapes as in `attend_fused` → output (B, H, T, d), weights (B, H, T, S)
    before dropout.
    """
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    if mask is not None:
        mask = mask.expand(*query.shape[:3], key.shape[2])
    output, weights = scaled_dot_product_attention(
        query, key, value, mask, score_bias=score_bias
    )
    if dropout.training and dropout.p > 0:
        output = dropout(weights) @ value
    return output, weights


# --8<-- [end:attend_openly]


# --8<-- [start:MultiHeadAttention]
class MultiHeadAttention(HeadProjections):
    """Attend in H heads of the width d = D/H at once, and mix their outputs.

    query (B, T, D), key and value (B, S, D), mask (T, S), (B, 1 or T, S) or
    (B, 1 or H, T, S), score_bias: float, broadcasts to (B, H, T, S)
    → output (B, T, D), weights (B, H, T, S) before dropout, or None.
    """

    def forward(
        self, query, key, value, mask=None, need_weights=False, *,
        score_bias=None,
    ):  # fmt: skip
        """Attend; without `need_weights` the fused kernel does it."""
        size = self.query_layer.in_features, self.num_heads
        shape = score_shape(query, key, value, *size)
        mask = close_by_bias(add_head_axis(mask, shape), score_bias, shape)
        causal = mask is not None and is_causal(mask)  # every key is read
        used = None if causal else for_any_head(mask, key)
        heads = self.split(*blank_where_needed(query, key, value, used))
        rest = score_bias, self.dropout
        if need_weights:
            output, weights = attend_openly(*heads, mask, *rest)
        else:
            output, weights = attend_fused(*heads, mask, causal, *rest), None
        return mix_heads(self.output_layer, output, used), weights


# --8<-- [end:MultiHeadAttention]
