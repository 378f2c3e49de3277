"""Let a sequence attend to itself, and tell it where its tokens stand.

The functions and layers of the section "Self-attention and positional
encoding". Sources: Vaswani et al. (2017), section 3.5, sinusoids; Su et al.
(2021), rotary positions; Press, Smith and Lewis (2022), linear biases.

Axes: B batch, T query positions, S key positions, D model width, H heads.
Positions count from 0. A mask is boolean; True means that this key may be
attended to.
"""

import torch
from torch import nn

from snippets.attention_scoring_functions import (
    at_least_float32,
    causal_mask,
    check_bias,
    check_sizes,
    check_width,
)
from snippets.multihead_attention import MultiHeadAttention


# --8<-- [start:frequencies]
def frequencies(width, base=10_000.0):
    """Give the angle per position of each pair of columns, in radians.

    → (⌈width/2⌉,) float64: pair j turns by base^(−2j/width), the first by a
    whole radian, every later one more slowly.
    """
    pairs = torch.arange(0, width, 2, dtype=torch.float64)  # 2j
    return base ** (-pairs / width)


# --8<-- [end:frequencies]


# --8<-- [start:sinusoid]
def sinusoid(num_positions, width, *, device=None, dtype=None):
    """Make the table of sinusoidal positions.

    → (num_positions, width): columns 2j and 2j + 1 are the sine and the
    cosine of position · 10000^(−2j/width). An odd width has no last cosine.
    Computed in float64, then rounded. Raises `ValueError` for a size below 1.
    Vaswani et al. (2017), section 3.5.
    """
    check_sizes(num_positions, width)
    positions = torch.arange(num_positions, dtype=torch.float64)
    angles = positions[:, None] * frequencies(width)  # (T, ⌈width/2⌉)
    pairs = torch.stack([angles.sin(), angles.cos()], dim=-1)
    table = pairs.flatten(1)[:, :width]
    return table.to(device=device, dtype=dtype or torch.get_default_dtype())


# --8<-- [end:sinusoid]


# --8<-- [start:rows_for]
def rows_for(x, table, offset):
    """Give the rows of `table` for the tokens of `x`, the first at `offset`.

    x (..., T, D), table (max_len, D) → (T, D) in the dtype of x.
    Raises `ValueError` for another width, a negative offset or a position
    past the end, `TypeError` for inputs that are not floats.
    """
    if not x.is_floating_point() or x.ndim < 2:
        raise TypeError("positions are added to vectors (..., T, D) of floats")
    max_len, width = table.shape
    check_width("inputs", x, width)
    end = offset + x.shape[-2]
    if offset < 0 or end > max_len:
        raise ValueError(
            f"positions {offset} to {end - 1} do not lie in a table"
            f" of {max_len} positions"
        )
    return table[offset:end].to(x.dtype)


# --8<-- [end:rows_for]


# --8<-- [start:PositionalEncoding]
class PositionalEncoding(nn.Module):
    """Add sinusoidal positions to vectors, then drop some.

    x (..., T, D) → the same shape and dtype. `offset` is the position of the
    first token: what was read before this chunk. Raises what `rows_for` does.
    """

    def __init__(self, width, max_len, dropout=0.0):
        """Make the table once; it can be made again, so it is not saved."""
        super().__init__()
        table = sinusoid(max_len, width)
        self.register_buffer("table", table, persistent=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, offset=0):
        """Add the position of each token to its vector."""
        return self.dropout(x + rows_for(x, self.table, offset))


# --8<-- [end:PositionalEncoding]


# --8<-- [start:LearnedPositions]
class LearnedPositions(nn.Module):
    """Add learned positions to vectors, then drop some.

    Shapes and errors as in `PositionalEncoding`. `std` is the size of a
    number before training; 0.7 is nearly that of a sinusoid, 1/√2.
    """

    def __init__(self, width, max_len, dropout=0.0, *, std=0.7):
        """Draw a row for each position."""
        super().__init__()
        check_sizes(max_len, width)
        self.table = nn.Parameter(std * torch.randn(max_len, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, offset=0):
        """Add the position of each token to its vector."""
        return self.dropout(x + rows_for(x, self.table, offset))


# --8<-- [end:LearnedPositions]


# --8<-- [start:check_even]
def check_even(width):
    """Raise `ValueError` unless the width can be cut into pairs."""
    if width % 2:
        raise ValueError(f"the width to rotate must be even, not {width}")


# --8<-- [end:check_even]


# --8<-- [start:position_angles]
def position_angles(x, positions):
    """Give the angle of every pair of columns of `x`, in float64.

    x (..., T, D), positions: any shape that broadcasts to (..., T), or (B, T)
    for x (B, H, T, D) → (..., T or 1, D/2).
    Raises `ValueError` for an odd width, or positions that do not fit.
    """
    check_even(x.shape[-1])
    # Apple's GPUs have no float64:
    exact = torch.float32 if x.device.type == "mps" else torch.float64
    positions = torch.as_tensor(positions, dtype=exact, device=x.device)
    if positions.ndim == 2 and x.ndim == 4:
        positions = positions[:, None]  # (B, 1, T): the same in each head
    found, shape = tuple(positions.shape), tuple(x.shape[:-1])
    pairs = zip(reversed(found), reversed(shape))
    if len(found) > len(shape) or any(a not in (1, b) for a, b in pairs):
        raise ValueError(f"positions {found} do not fit vectors {shape}")
    turn = frequencies(x.shape[-1]).to(positions)
    return positions[..., None] * turn


# --8<-- [end:position_angles]


# --8<-- [start:rotate]
def rotate(x, positions):
    """Turn each pair of columns (2j, 2j + 1) by position · 10000^(−2j/D).

    x (..., T, D), positions as in `position_angles`, integers or floats → the
    shape and dtype of x. Half precision is computed in float32.
    Raises `TypeError` unless x is a tensor of floats.
    Su et al. (2021), section 3.2.2.
    """
    if not x.is_floating_point():
        raise TypeError(f"only floats can be turned, not {x.dtype}")
    wide = at_least_float32(x)
    angles = position_angles(x, positions)
    cos, sin = angles.cos().to(wide.dtype), angles.sin().to(wide.dtype)
    first, second = wide.unflatten(-1, (-1, 2)).unbind(-1)  # (..., T, D/2)
    turned = (first * cos - second * sin, first * sin + second * cos)
    return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)


# --8<-- [end:rotate]


# --8<-- [start:RotaryAttention]
class RotaryAttention(MultiHeadAttention):
    """Multi-head attention whose queries and keys are turned by position.

    Constructor, `forward` and shapes of `MultiHeadAttention`; the width of a
    head must be even. Key s stands at position s; with fewer queries than
    keys, the queries stand at the last T positions. Values are not turned.
    """

    def __init__(self, width, num_heads, **options):
        """Raise `ValueError` for sizes that do not fit, or an odd head."""
        super().__init__(width, num_heads, **options)
        check_even(width // num_heads)

    def split(self, query, key, value):
        """Project into heads, then turn queries and keys."""
        query, key, value = super().split(query, key, value)
        num_queries, num_keys = query.shape[-2], key.shape[-2]
        places = torch.arange(num_keys, device=key.device)
        last = torch.arange(num_queries, device=key.device)
        last = last + num_keys - num_queries  # below 0 if T > S: no harm
        return rotate(query, last), rotate(key, places), value


# --8<-- [end:RotaryAttention]


# --8<-- [start:alibi_slopes]
def alibi_slopes(num_heads):
    """Give the slope of each head, from steep to flat; → (H,) float64.

    2^(−8h/H) for h = 1 … H if H is a power of two. For another H: those of
    the next smaller power, then every other one of twice that power.
    """
    check_sizes(num_heads)
    power = 2 ** (num_heads.bit_length() - 1)  # the largest one up to H
    heads = torch.arange(1, power + 1, dtype=torch.float64)
    between = heads - 0.5  # h = 1, 3, 5 … of twice as many heads
    order = torch.cat([heads, between])[:num_heads]
    return 2 ** (-8 * order / power)


# --8<-- [end:alibi_slopes]


# --8<-- [start:alibi_bias]
def alibi_bias(num_heads, num_queries, num_keys, *, device=None, dtype=None):
    """Give a bias that falls in a straight line with the distance.

    → (H, T, S): −slope · |position of the query − position of the key|, the
    last query at the last key, as in `causal_mask`. It is not a mask: a key
    ahead is treated like one as far behind.
    Raises `ValueError` for no heads or a negative length.
    Press, Smith and Lewis (2022), section 3.
    """
    slopes = alibi_slopes(num_heads)[:, None, None]
    if min(num_queries, num_keys) < 0:
        raise ValueError(f"no bias of {num_queries} by {num_keys}")
    queries = torch.arange(num_keys - num_queries, num_keys)[:, None]
    distances = (queries - torch.arange(num_keys)).abs()  # (T, S)
    bias = -slopes * distances
    return bias.to(device=device, dtype=dtype or torch.get_default_dtype())


# --8<-- [end:alibi_bias]


# --8<-- [start:AlibiAttention]
class AlibiAttention(MultiHeadAttention):
    """Multi-head attention with `alibi_bias` added to its scores.

    Constructor, `forward` and shapes of `MultiHeadAttention`.
    """

    def forward(
        self, query, key, value, mask=None, need_weights=False, *,
        score_bias=None,
    ):  # fmt: skip
        """Attend; keys count for less the farther they are."""
        shape = self.num_heads, query.shape[-2], key.shape[-2]
        dtype = torch.promote_types(query.dtype, torch.float32)
        bias = alibi_bias(*shape, device=query.device, dtype=dtype)
        if score_bias is not None:
            check_bias(score_bias, (len(query), *shape))
            bias = bias + score_bias
        return super().forward(
            query, key, value, mask, need_weights, score_bias=bias
        )


# --8<-- [end:AlibiAttention]


# --8<-- [start:CharacterBlock]
class CharacterBlock(nn.Module):
    """Attend, then work on each position by itself; add both to the input.

    x (B, T, D) → the same shape. Why it is built so: see the section on the
    Transformer.
    """

    def __init__(self, attention, width):
        """Take the attention layer; make the network of each position."""
        super().__init__()
        self.attention = attention
        self.network = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x, mask):
        """Look around, then think."""
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, mask)[0]
        return x + self.network(self.norms[1](x))


# --8<-- [end:CharacterBlock]


# --8<-- [start:position_parts]
def position_parts(scheme, width, max_len):
    """Give the layer that adds positions, if one does, and the attention.

    scheme: "none", "learned", "sinusoidal", "rotary" or "ALiBi".
    Raises `ValueError` for another one.
    """
    added = {"learned": LearnedPositions, "sinusoidal": PositionalEncoding}
    inside = {"rotary": RotaryAttention, "ALiBi": AlibiAttention}
    if scheme not in ("none", *added, *inside):
        raise ValueError(f"unknown scheme: {scheme!r}")
    if scheme in added:
        return added[scheme](width, max_len), MultiHeadAttention
    return nn.Identity(), inside.get(scheme, MultiHeadAttention)


# --8<-- [end:position_parts]


# --8<-- [start:CharacterModel]
class CharacterModel(nn.Module):
    """Predict every next character by two layers of causal attention.

    ids (B, T) → logits (B, T, vocab_size); scheme: see `position_parts`.
    """

    def __init__(self, scheme, vocab_size=70, width=64, max_len=128):
        """Draw the embeddings small, with the standard deviation 1/√D."""
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.scale = width**0.5
        self.positions, kind = position_parts(scheme, width, max_len)
        blocks = [CharacterBlock(kind(width, 4), width) for _ in range(2)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.read_out = nn.Linear(width, vocab_size, bias=False)

    def forward(self, ids):
        """Add positions to embeddings, then look back twice."""
        mask = causal_mask(*2 * ids.shape[1:], device=ids.device)
        x = self.positions(self.scale * self.embedding(ids))
        for block in self.blocks:
            x = block(x, mask)
        return self.read_out(self.norm(x))


# --8<-- [end:CharacterModel]
