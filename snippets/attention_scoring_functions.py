"""Score queries against keys, mask, normalise, and pool the values.

The functions and layers of the section "Attention scoring functions".
Sources: Bahdanau, Cho, Bengio (2015), additive scores; Luong, Pham, Manning
(2015), bilinear scores; Vaswani et al. (2017), section 3.2.1, the scaled dot
product; Milakov and Gimelshein (2018), the online softmax.

Axes: B batch, T query positions, S key positions, D width of queries and
keys, V width of values, H heads. A mask is boolean; True means that this key
may be attended to.
"""

import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from snippets.plotting import colour_bar, heatmap, new_figure


# --8<-- [start:show_batch]
def show_batch(columns, tokens, titles):
    """Draw weights or masks over a batch: a row of panels for a sentence.

    `columns`: one tensor (B, T, S) a column of panels, queries down, keys
    across; `tokens`: B lists of S strings; `titles`: one for each column.
    """
    size = len(tokens), len(columns)
    figure, panels = new_figure(
        *size, width=3.4, height=1.4 * size[0], squeeze=False
    )
    for column, title in zip(panels.T, titles, strict=True):
        column[0].set_title(title, fontsize=9)
        column[-1].set_xlabel("keys")
    panels[size[0] // 2, 0].set_ylabel("queries")
    for row, words in enumerate(tokens):
        for column, weights in enumerate(columns):
            below = words if column == 0 else [""] * len(words)
            heatmap(
                panels[row, column], weights[row], xlabels=words, ylabels=below
            )
    if any(weights.dtype != torch.bool for weights in columns):
        colour_bar(figure, panels)
    return figure


# --8<-- [end:show_batch]


# --8<-- [start:length_mask]
def length_mask(valid_lens, num_keys):
    """Let every query see the first `valid_lens` keys of its sample.

    valid_lens (B,) or (B, T), integers from 0 to S = num_keys
    → bool (B, 1, S) or (B, T, S).
    Raises `TypeError` unless the lengths are an integer tensor, `ValueError`
    for other axes or a number that is out of range.
    """
    kinds = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    if getattr(valid_lens, "dtype", None) not in kinds:
        raise TypeError("valid_lens must be a tensor of integers")
    if valid_lens.ndim not in (1, 2) or num_keys < 0:
        raise ValueError(
            f"no mask over {num_keys} keys for valid_lens of the shape"
            f" {tuple(valid_lens.shape)}, expected (B,) or (B, T)"
        )
    lens = valid_lens.long()  # int8 could not be compared with S = 200
    wrong = (lens < 0) | (lens > num_keys)
    if not wrong.is_meta and wrong.any():  # a meta tensor has no values
        found = lens[wrong].tolist()
        raise ValueError(f"valid_lens must be 0 to {num_keys}, not {found}")
    lens = lens[:, None] if lens.ndim == 1 else lens
    return torch.arange(num_keys, device=lens.device) < lens[..., None]


# --8<-- [end:length_mask]


# --8<-- [start:causal_mask]
def causal_mask(num_queries, num_keys, *, device=None):
    """Let no query see a later key; the last query stands at the last key.

    → bool (T, S): query t sees the keys up to t + S − T.
    Raises `ValueError` for a negative number.
    """
    if min(num_queries, num_keys) < 0:
        raise ValueError(f"no mask of {num_queries} by {num_keys}")
    everything = torch.ones(
        num_queries, num_keys, dtype=torch.bool, device=device
    )
    return everything.tril(num_keys - num_queries)


# --8<-- [end:causal_mask]


# --8<-- [start:check_mask]
def check_mask(mask, shape):
    """Refuse a mask that does not fit scores of this shape.

    scores (T, S): mask (T, S); scores (B, T, S): also (B, 1 or T, S);
    scores (B, H, T, S): (T, S) or (B, 1 or H, T, S). No other broadcasting:
    it hides mistakes. Raises `TypeError` unless the mask is boolean,
    `ValueError` with both shapes if it does not fit.
    """
    if getattr(mask, "dtype", None) != torch.bool:
        raise TypeError(
            "the mask must be a boolean tensor: True = this key"
            " may be attended to"
        )
    shape, found = tuple(shape), tuple(mask.shape)
    allowed = {shape, shape[-2:]}
    if len(shape) == 3:
        allowed.add((shape[0], 1, shape[2]))
    if len(shape) == 4:
        allowed.add((shape[0], 1, *shape[2:]))
    if found not in allowed:
        raise ValueError(
            f"mask {found} does not fit scores {shape}; expected"
            f" one of {sorted(allowed)}"
        )


# --8<-- [end:check_mask]


# --8<-- [start:masked_softmax]
def masked_softmax(scores, mask=None):
    """Normalise scores over the keys that the mask allows.

    scores (..., T, S), mask: see `check_mask` → weights like scores:
    exp(score) over the sum of exp(score) at the allowed keys, 0 elsewhere.
    Under a mask, a row with no key allowed, or with −∞ at all that are,
    becomes all zeros. Raises what `check_mask` does.
    """
    if mask is None:
        return torch.softmax(scores, dim=-1)
    check_mask(mask, scores.shape)
    scores = scores.masked_fill(~mask, -math.inf)
    barred = scores == -math.inf
    empty = barred.all(dim=-1, keepdim=True)  # (..., T, 1)
    scores = scores.masked_fill(empty, 0.0)  # −∞ alone would give 0/0
    weights = torch.softmax(scores, dim=-1)
    return weights.masked_fill(barred, 0.0)


# --8<-- [end:masked_softmax]


# --8<-- [start:check_inputs]
def check_inputs(query, key, value, mask=None):
    """Refuse queries, keys, values and masks that do not go together.

    query (..., T, D), key (..., S, E), value (..., S, V), where ... stands
    for nothing, B, or B, H, the same in all three: no broadcasting.
    Raises `ValueError` with the shapes; for the mask see `check_mask`.
    """
    shapes = ", ".join(
        f"{name} {tuple(x.shape)}"
        for name, x in (("query", query), ("key", key), ("value", value))
    )
    if not query.ndim == key.ndim == value.ndim or query.ndim not in (2, 3, 4):
        raise ValueError(f"expected 2, 3 or 4 axes, alike in all: {shapes}")
    if not query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        raise ValueError(f"batch or head axes differ: {shapes}")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"each key needs one value: {shapes}")
    if mask is not None:
        check_mask(mask, (*query.shape[:-1], key.shape[-2]))


# --8<-- [end:check_inputs]


# --8<-- [start:check_sizes]
def check_sizes(*sizes):
    """Raise `ValueError` unless every size is at least 1."""
    if min(sizes) < 1:
        raise ValueError(f"sizes must be at least 1, not {sizes}")


# --8<-- [end:check_sizes]


# --8<-- [start:check_width]
def check_width(name, x, width):
    """Raise `ValueError` unless the last axis of `x` has this width."""
    if x.shape[-1] != width:
        raise ValueError(f"{name} must be {width} wide, not {x.shape[-1]}")


# --8<-- [end:check_width]


# --8<-- [start:scale_for]
def scale_for(query, key, scale=None):
    """Give `scale`, or 1/√D for queries (..., T, D) and keys (..., S, D).

    Raises `ValueError` unless both have the same width D > 0.
    """
    check_sizes(query.shape[-1], key.shape[-1])
    check_width("keys", key, query.shape[-1])
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


# --8<-- [end:scale_for]


# --8<-- [start:check_bias]
def check_bias(score_bias, shape):
    """Refuse a bias that is not float or would enlarge the scores.

    Raises `TypeError` (a mask in the wrong place, say) or `ValueError`.
    """
    if not (torch.is_tensor(score_bias) and score_bias.is_floating_point()):
        raise TypeError("score_bias must be a tensor of floats")
    found = tuple(score_bias.shape)
    pairs = zip(reversed(found), reversed(shape), strict=False)
    if len(found) > len(shape) or any(a not in (1, b) for a, b in pairs):
        raise ValueError(
            f"score_bias {found} does not broadcast to the"
            f" scores {tuple(shape)}"
        )


# --8<-- [end:check_bias]


# --8<-- [start:blank_unused]
def blank_unused(query, key, value, mask):
    """Set to zero the queries, keys and values that the mask leaves unused.

    A weight of 0 does not stop a NaN, since 0 · NaN = NaN. So what stands at
    a key that no query may attend to, or at a query with nothing to attend
    to, is replaced before anything is multiplied. Shapes do not change.
    """
    if mask is None:
        return query, key, value
    idle = ~mask.any(dim=-1)[..., None]  # (..., T or 1, 1)
    unread = ~mask.any(dim=-2)[..., None]  # (..., S, 1)
    return (
        query.masked_fill(idle, 0),
        key.masked_fill(unread, 0),
        value.masked_fill(unread, 0),
    )


# --8<-- [end:blank_unused]


# --8<-- [start:at_least_float32]
def at_least_float32(x):
    """Widen float16 and bfloat16, which are too coarse to compute in."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


# --8<-- [end:at_least_float32]


# --8<-- [start:prepare]
def prepare(query, key, value, mask):
    """Check, blank and widen what attention is about to multiply."""
    check_inputs(query, key, value, mask)
    blank = blank_unused(query, key, value, mask)
    return [at_least_float32(x) for x in blank]


# --8<-- [end:prepare]


# --8<-- [start:scaled_dot_product_attention]
def scaled_dot_product_attention(
    query, key, value, mask=None, *, score_bias=None, scale=None
):
    """Pool values by the softmax of scaled dot products.

    query (..., T, D), key (..., S, D), value (..., S, V), mask: see
    `check_mask`, score_bias: float, added to the scaled scores
    → output (..., T, V), weights (..., T, S).
    Raises `ValueError` or `TypeError` for what does not fit.
    Vaswani et al. (2017), equation 1.
    """
    dtype = query.dtype
    query, key, value = prepare(query, key, value, mask)
    scores = scale_for(query, key, scale) * query @ key.mT
    if score_bias is not None:
        check_bias(score_bias, scores.shape)
        scores = scores + score_bias.to(scores.dtype)
        mask = scores != -math.inf if mask is None else mask
    weights = masked_softmax(scores, mask)
    return (weights @ value).to(dtype), weights.to(dtype)


# --8<-- [end:scaled_dot_product_attention]


# --8<-- [start:is_causal]
def is_causal(mask):
    """Tell whether this is the square causal mask, (T, T), and no other."""
    size = mask.shape[-1]
    if mask.is_meta or mask.shape != (size, size):
        return False
    return torch.equal(mask, causal_mask(size, size, device=mask.device))


# --8<-- [end:is_causal]


# --8<-- [start:fused_attention]
def fused_attention(query, key, value, mask=None, *, dropout=0.0):
    """Compute the output alone by the fused kernel of torch.

    query (..., T, D), key (..., S, D), value (..., S, V) → (..., T, V).
    Raises what `scaled_dot_product_attention` raises.
    """
    dtype = query.dtype
    check_inputs(query, key, value, mask)
    scale_for(query, key)  # for its check of the widths
    causal = mask is not None and is_causal(mask)
    if causal:
        mask = None  # the kernel makes this one itself
    query, key, value = blank_unused(query, key, value, mask)
    no_heads = query.ndim < 4
    if no_heads:  # the fast kernel takes (B, H, T, D) only
        query, key, value = (x.unsqueeze(-3) for x in (query, key, value))
        if mask is not None and mask.ndim == 3:
            mask = mask.unsqueeze(-3)
    output = F.scaled_dot_product_attention(
        query, key, value, mask, dropout_p=dropout, is_causal=causal
    )
    return (output.squeeze(-3) if no_heads else output).to(dtype)


# --8<-- [end:fused_attention]


# --8<-- [start:DotProductAttention]
class DotProductAttention(nn.Module):
    """Scaled dot-product attention with dropout on the weights.

    query (..., T, D), key (..., S, D), value (..., S, V)
    → output (..., T, V), weights (..., T, S) before dropout, or None.
    """

    def __init__(self, dropout=0.0):
        """Set the share of weights that training drops."""
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, query, key, value, mask=None, need_weights=False):
        """Attend; without `need_weights` the fused kernel does it."""
        if not need_weights:
            rate = self.dropout.p if self.training else 0.0
            return fused_attention(query, key, value, mask, dropout=rate), None
        output, weights = scaled_dot_product_attention(query, key, value, mask)
        if self.training:
            *_, value = blank_unused(query, key, value, mask)
            output = (self.dropout(weights) @ value).to(output.dtype)
        return output, weights


# --8<-- [end:DotProductAttention]


# --8<-- [start:AdditiveScore]
class AdditiveScore(nn.Module):
    """Score query and key by a network with one hidden layer.

    query (..., T, query_size), key (..., S, key_size) → scores (..., T, S).
    Bahdanau et al. (2015), appendix A.1.2; their W_a, U_a and v_a are our
    query_layer, key_layer and score_layer.
    """

    def __init__(self, query_size, key_size, hidden_size):
        """Raise `ValueError` for a size below 1."""
        super().__init__()
        check_sizes(query_size, key_size, hidden_size)
        self.query_layer = nn.Linear(query_size, hidden_size, bias=False)
        self.key_layer = nn.Linear(key_size, hidden_size, bias=False)
        self.score_layer = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, query, key):
        """Score every pair of a query and a key."""
        check_width("queries", query, self.query_layer.in_features)
        check_width("keys", key, self.key_layer.in_features)
        query = self.query_layer(query).unsqueeze(-2)  # (..., T, 1, h)
        key = self.key_layer(key).unsqueeze(-3)  # (..., 1, S, h)
        return self.score_layer(torch.tanh(query + key)).squeeze(-1)


# --8<-- [end:AdditiveScore]


# --8<-- [start:AdditiveAttention]
class AdditiveAttention(nn.Module):
    """Additive attention; queries and keys may differ in width.

    query (..., T, query_size), key (..., S, key_size), value (..., S, V)
    → output (..., T, V), weights (..., T, S) before dropout, or None.
    """

    def __init__(self, query_size, key_size, hidden_size, dropout=0.0):
        """Set the three sizes and the share of weights to drop."""
        super().__init__()
        self.score = AdditiveScore(query_size, key_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, query, key, value, mask=None, need_weights=False):
        """Attend; there is no fused kernel for this score."""
        check_inputs(query, key, value, mask)
        query, key, value = blank_unused(query, key, value, mask)
        weights = masked_softmax(self.score(query, key), mask)
        output = self.dropout(weights) @ value
        return output, weights if need_weights else None


# --8<-- [end:AdditiveAttention]


# --8<-- [start:BilinearAttention]
class BilinearAttention(nn.Module):
    """Attention with the score qᵀMk, scaled by the width of the keys.

    Shapes as in `AdditiveAttention`. Luong et al. (2015): "general".
    """

    def __init__(self, query_size, key_size, dropout=0.0):
        """Set the sizes of M and the share of weights to drop."""
        super().__init__()
        check_sizes(query_size, key_size)
        self.project = nn.Linear(query_size, key_size, bias=False)  # Mᵀ
        self.attend = DotProductAttention(dropout)

    def forward(self, query, key, value, mask=None, need_weights=False):
        """Attend by dot products of Mᵀq and k."""
        check_inputs(query, key, value, mask)
        check_width("queries", query, self.project.in_features)
        query, key, value = blank_unused(query, key, value, mask)
        query = self.project(query)  # (..., T, key_size)
        return self.attend(query, key, value, mask, need_weights)


# --8<-- [end:BilinearAttention]


# --8<-- [start:add_tile]
def add_tile(top, total, output, scores, value):
    """Fold a tile of scores and values into a running softmax.

    top, total (..., T, 1): maximum of the scores so far and the sum of
    exp(score − top); output (..., T, V): the same sum, times the values;
    scores (..., T, tile), value (..., tile, V) → the three, updated.
    Milakov and Gimelshein (2018), algorithm 3, with the values added.
    """
    new_top = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
    shift = new_top.masked_fill(new_top == -math.inf, 0.0)  # nothing yet
    decay = torch.exp(top - shift)
    weights = torch.exp(scores - shift)
    total = decay * total + weights.sum(dim=-1, keepdim=True)
    return new_top, total, decay * output + weights @ value


# --8<-- [end:add_tile]


# --8<-- [start:tiled_attention]
def tiled_attention(
    query, key, value, mask=None, *, tile_size=128, scale=None
):
    """Compute scaled dot-product attention one tile of keys at a time.

    query (..., T, D), key (..., S, D), value (..., S, V) → (..., T, V).
    Raises what `scaled_dot_product_attention` raises.
    """
    check_sizes(tile_size)
    dtype = query.dtype
    query, key, value = prepare(query, key, value, mask)
    query = scale_for(query, key, scale) * query
    top = query.new_full((*query.shape[:-1], 1), -math.inf)
    nothing = query @ key[..., :0, :].mT @ value[..., :0, :]  # all zeros
    state = top, torch.zeros_like(top), nothing
    for start in range(0, key.shape[-2], tile_size):
        tile = slice(start, start + tile_size)
        scores = query @ key[..., tile, :].mT  # (..., T, tile)
        if mask is not None:
            scores = scores.masked_fill(~mask[..., tile], -math.inf)
        state = add_tile(*state, scores, value[..., tile, :])
    _, total, output = state
    return (output / total.masked_fill(total == 0, 1)).to(dtype)


# --8<-- [end:tiled_attention]


# --8<-- [start:high_water_mark]
def high_water_mark():
    """Give the most memory that this process has held so far, in MiB."""
    status = Path("/proc/self/status")  # Linux, where ru_maxrss is inherited
    if status.exists() and "VmHWM:" in status.read_text():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) / 2**10
    import resource  # macOS, in bytes; Windows has neither

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


# --8<-- [end:high_water_mark]


# --8<-- [start:peak_memory]
def peak_memory(lengths, width=64):
    """Measure the memory that three versions add at their peak, in MiB.

    One head, T = S = each of the rising `lengths`, no gradients → {version:
    [MiB]}. Call it once, in a fresh process: a high-water mark never falls,
    so the versions run in the order of their appetite.
    """
    versions = {
        "fused": fused_attention,
        "tiled": tiled_attention,
        "naive": scaled_dot_product_attention,
    }
    inputs = [torch.randn(3, 1, 1, length, width) for length in lengths]
    peaks = {name: [] for name in versions}
    with torch.no_grad():
        for attend in versions.values():
            attend(*inputs[0][..., :64, :])  # loads what a first call loads
        start = high_water_mark()
        for name, attend in versions.items():
            for each in inputs:
                attend(*each)
                peaks[name].append(high_water_mark() - start)
    return peaks


# --8<-- [end:peak_memory]
