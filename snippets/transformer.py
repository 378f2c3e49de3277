"""Build the Transformer: blocks of attention and small networks, stacked.

The layers and the model of the section "The Transformer architecture".
Sources: Vaswani et al. (2017), the architecture; Ba, Kiros, Hinton (2016),
layer normalisation; Xiong et al. (2020), where the norm stands.

Axes: B batch, T target (query) positions, S source (key) positions, D model
width, H heads, d = D/H. A mask is boolean; True means that this key may be
attended to. No function changes a cache that is given to it.
"""

import math
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from snippets.attention_scoring_functions import (
    causal_mask,
    check_mask,
    check_sizes,
    check_width,
    length_mask,
)
from snippets.multihead_attention import (
    MultiHeadAttention,
    add_head_axis,
    attend_fused,
    attend_openly,
    for_any_head,
    mix_heads,
    some,
    split_heads,
)
from snippets.self_attention_and_positional_encoding import PositionalEncoding


# --8<-- [start:find_activation]
def find_activation(activation):
    """Give the function of a name, "relu" or "gelu"; a function stays.

    Raises `ValueError` for another name.
    """
    if callable(activation):
        return activation
    known = {"relu": F.relu, "gelu": F.gelu}
    if activation not in known:
        raise ValueError(f"activation {activation!r} is none of {[*known]}")
    return known[activation]


# --8<-- [end:find_activation]


# --8<-- [start:PositionWiseFFN]
class PositionWiseFFN(nn.Module):
    """Send every position through the same network with one hidden layer.

    x (..., D) → (..., D), hidden layer (..., ffn_width).
    Vaswani et al. (2017), equation 2; their d_ff is our ffn_width.
    """

    def __init__(
        self, width, ffn_width, *, dropout=0.0, bias=True, activation="relu"
    ):
        """Set the sizes; `dropout` acts on the hidden layer."""
        super().__init__()
        check_sizes(width, ffn_width)
        self.hidden_layer = nn.Linear(width, ffn_width, bias=bias)
        self.output_layer = nn.Linear(ffn_width, width, bias=bias)
        self.activation = find_activation(activation)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        """Widen, bend, narrow."""
        check_width("inputs", x, self.hidden_layer.in_features)
        hidden = self.activation(self.hidden_layer(x))
        return self.output_layer(self.dropout(hidden))


# --8<-- [end:PositionWiseFFN]


# --8<-- [start:AddNorm]
class AddNorm(nn.Module):
    """Add what a sublayer found to its input, with a norm around it.

    x, found (..., D) → (..., D): norm(x + dropout(found)), post-norm. With
    `norm_first`, pre-norm, the norm makes `before(x)`, which the sublayer
    reads, and the sum stays as it is. Ba, Kiros and Hinton (2016).
    """

    def __init__(
        self, width, dropout=0.0, *, norm_first=False, bias=True, eps=1e-5
    ):
        super().__init__()
        self.norm_first = norm_first
        self.norm = nn.LayerNorm(width, eps=eps, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def before(self, x):
        """Give what the sublayer is to read."""
        return self.norm(x) if self.norm_first else x

    def forward(self, x, found):
        """Add, and in post-norm normalise the sum."""
        x = add_same_shape(x, self.dropout(found))
        return x if self.norm_first else self.norm(x)


# --8<-- [end:AddNorm]


# --8<-- [start:add_same_shape]
def add_same_shape(x, found):
    """Add two tensors of one shape; `ValueError` instead of broadcasting."""
    if x.shape != found.shape:
        raise ValueError(
            f"cannot add {tuple(found.shape)} to {tuple(x.shape)}: a sublayer"
            " must keep the shape"
        )
    return x + found


# --8<-- [end:add_same_shape]


# --8<-- [start:unread_rows]
def unread_rows(mask, x):
    """Mark the rows of x (B, S, D) that no query may attend to.

    mask (T, S), (B, 1 or T, S) or (B, 1 or H, T, S)
    → bool (S, 1) or (B, S, 1). Raises what `check_mask` raises.
    """
    axes = getattr(mask, "shape", ())  # what is no tensor, check_mask refuses
    shape = (*(axes[-2:-1] or (1,)), x.shape[1])
    if len(axes) > 2:
        shape = (len(x), *axes[1:-1], x.shape[1])
    check_mask(mask, shape)
    read = some(mask, -2)  # (S,), (B, S) or (B, 1 or H, S)
    return ~(some(read, 1) if mask.ndim == 4 else read)[..., None]


# --8<-- [end:unread_rows]


# --8<-- [start:blank_padding]
def blank_padding(x, mask):
    """Set to zero what is NaN or huge in rows that no query may attend to.

    x (B, S, D), mask as in `unread_rows`, or None → (B, S, D). Nobody reads
    these rows, but in the gradient of a weight 0 · NaN would be NaN.
    """
    if mask is None:
        return x
    unread = unread_rows(mask, x)
    if unread.is_meta or not unread.any():
        return x
    wide = torch.promote_types(x.dtype, torch.float32)
    limit = torch.finfo(wide).max ** 0.25  # sums of squares stay finite
    return x.masked_fill(unread & ~(x.abs() < limit), 0)


# --8<-- [end:blank_padding]


# --8<-- [start:TransformerEncoderBlock]
class TransformerEncoderBlock(nn.Module):
    """Let the positions look at each other, then think, each for itself.

    x (B, S, D), mask (S, S), (B, 1 or S, S) or (B, 1 or H, S, S), or None
    → x (B, S, D), weights (B, H, S, S) before dropout, or None.
    """

    def __init__(
        self, width, ffn_width, num_heads, dropout=0.0, *, bias=True,
        activation="relu", norm_first=False, eps=1e-5,
    ):  # fmt: skip
        """Make two sublayers and what stands around them."""
        super().__init__()
        both = {"dropout": dropout, "bias": bias}
        norm = {"norm_first": norm_first, "eps": eps, **both}
        self.attention = MultiHeadAttention(width, num_heads, **both)
        self.attention_residual = AddNorm(width, **norm)
        self.ffn = PositionWiseFFN(
            width, ffn_width, activation=activation, **both
        )
        self.ffn_residual = AddNorm(width, **norm)

    def forward(self, x, mask=None, need_weights=False):
        """Attend, add; transform, add."""
        return encoder_step(self, blank_padding(x, mask), mask, need_weights)


# --8<-- [end:TransformerEncoderBlock]


# --8<-- [start:encoder_step]
def encoder_step(block, x, mask, need_weights):
    """Run x (B, S, D) through the two sublayers of an encoder block."""
    check_width("inputs", x, block.attention.query_layer.in_features)
    y = block.attention_residual.before(x)
    y, weights = block.attention(y, y, y, mask, need_weights)
    x = block.attention_residual(x, y)
    y = block.ffn(block.ffn_residual.before(x))
    return block.ffn_residual(x, y), weights


# --8<-- [end:encoder_step]


# --8<-- [start:make_final_norm]
def make_final_norm(
    width, final_norm=None, *, norm_first=False, bias=True, eps=1e-5, **_
):
    """Make the norm after the last block, or nothing.

    `final_norm` None: after pre-norm blocks only, since their sums have
    passed no norm. `nn.Transformer` has this norm always.
    """
    wanted = norm_first if final_norm is None else final_norm
    return nn.LayerNorm(width, eps, bias=bias) if wanted else nn.Identity()


# --8<-- [end:make_final_norm]


# --8<-- [start:Stack]
class Stack(nn.Module):
    """Hold `num_layers` blocks of one kind, and the norm after the last.

    Options: those of a block, and `final_norm`, see `make_final_norm`.
    """

    kind = None  # the class of the blocks

    def __init__(
        self, width, ffn_width, num_heads, num_layers, dropout=0.0, *,
        final_norm=None, **options,
    ):  # fmt: skip
        super().__init__()
        check_sizes(num_layers)
        sizes = width, ffn_width, num_heads, dropout
        self.blocks = nn.ModuleList(
            self.kind(*sizes, **options) for _ in range(num_layers)
        )
        self.norm = make_final_norm(width, final_norm, **options)


# --8<-- [end:Stack]


# --8<-- [start:TransformerEncoder]
class TransformerEncoder(Stack):
    """Stack encoder blocks.

    x (B, S, D), mask as in `TransformerEncoderBlock` → x (B, S, D), and a
    list with the weights of each block, or None. Options as in `Stack`.
    """

    kind = TransformerEncoderBlock

    def forward(self, x, mask=None, need_weights=False):
        """Run the blocks one after the other."""
        return run_encoder(self, x, mask, need_weights)


# --8<-- [end:TransformerEncoder]


# --8<-- [start:run_encoder]
def run_encoder(encoder, x, mask, need_weights):
    """Send x (B, S, D) through the blocks and the last norm."""
    maps = []
    for block in encoder.blocks:
        x, weights = block(x, mask, need_weights)
        maps.append(weights)
    return encoder.norm(x), maps if need_weights else None


# --8<-- [end:run_encoder]


# --8<-- [start:BlockCache]
class BlockCache(NamedTuple):
    """Keep what a decoder block needs not project again.

    Keys and values (B, H, tokens so far, d) of the past, and (B, H, S, d) of
    the encoder's memory.
    """

    key: torch.Tensor
    value: torch.Tensor
    memory_key: torch.Tensor
    memory_value: torch.Tensor


# --8<-- [end:BlockCache]


# --8<-- [start:project]
def project(attention, x):
    """Project x (B, S, D) into keys and values, each (B, H, S, d)."""
    heads = attention.num_kv_heads
    key = split_heads(attention.key_layer(x), heads)
    return key, split_heads(attention.value_layer(x), heads)


# --8<-- [end:project]


# --8<-- [start:attend]
def attend(
    attention, x, key, value, mask=None, *, causal=False, need_weights=False
):
    """Attend with keys and values that are projected already.

    attention: a `MultiHeadAttention`; x (B, T, D), key, value (B, H, S, d),
    mask (T, S), (B, 1 or T, S) or (B, 1 or H, T, S), or None → output
    (B, T, D), weights (B, H, T, S) or None. `causal`: the mask is the square
    causal one.
    """
    query = split_heads(attention.query_layer(x), attention.num_heads)
    mask = add_head_axis(mask, (*query.shape[:3], key.shape[2]))
    used = None if causal else for_any_head(mask, key[:, 0])
    heads = query, key, value, mask
    if need_weights:
        output, weights = attend_openly(*heads, None, attention.dropout)
    else:
        output = attend_fused(*heads, causal, None, attention.dropout)
        weights = None
    return mix_heads(attention.output_layer, output, used), weights


# --8<-- [end:attend]


# --8<-- [start:attend_to_past]
def attend_to_past(attention, x, cache, need_weights=False):
    """Let new tokens look at the past, at themselves, and at nothing later.

    x (B, T, D), the tokens that follow those in the cache
    → output (B, T, D), weights (B, H, T, past + T) or None, a new cache.
    """
    key, value = project(attention, x)
    num_past = cache.key.shape[2]
    if num_past:  # a new tensor: the old cache stays as it is
        key = torch.cat([cache.key, key], dim=2)
        value = torch.cat([cache.value, value], dim=2)
    num_new = x.shape[1]
    mask = causal_mask(num_new, num_past + num_new, device=x.device)
    output, weights = attend(
        attention,
        x,
        key,
        value,
        mask if num_new > 1 else None,  # the last token may see all keys
        causal=num_past == 0 and num_new > 1,
        need_weights=need_weights,
    )
    return output, weights, cache._replace(key=key, value=value)


# --8<-- [end:attend_to_past]


# --8<-- [start:TransformerDecoderBlock]
class TransformerDecoderBlock(TransformerEncoderBlock):
    """Look at the tokens so far, look at the source, then think.

    x (B, T, D), memory (B, S, D), memory_mask (T, S), (B, 1 or T, S),
    (B, 1 or H, T, S) or None → x (B, T, D), a cache, weights: None or a pair
    (B, H, T, past + T), (B, H, T, S). The first attention is causal in every
    mode. With a cache, x goes on where it ended; memory is not read again.
    """

    def __init__(self, width, ffn_width, num_heads, dropout=0.0, **options):
        super().__init__(width, ffn_width, num_heads, dropout, **options)
        self.cross_attention = MultiHeadAttention(
            width, num_heads, dropout=dropout, bias=options.get("bias", True)
        )
        self.cross_residual = deepcopy(self.attention_residual)

    def forward(
        self, x, memory, memory_mask=None, cache=None, need_weights=False
    ):
        """Attend to the past, to the memory, transform; add each time."""
        if cache is None:
            cache = start_cache(self, memory, memory_mask)
        return decoder_step(self, x, memory_mask, cache, need_weights)


# --8<-- [end:TransformerDecoderBlock]


# --8<-- [start:start_cache]
def start_cache(block, memory, memory_mask=None):
    """Project the memory (B, S, D), once; there is no past yet.

    The whole of it: tokens to come may look where these ones may not. But
    what is NaN or huge, or overflows, where nobody looks becomes zero.
    """
    cross = block.cross_attention
    check_width("memory", memory, cross.query_layer.in_features)
    if memory.ndim != 3:
        found = tuple(memory.shape)
        raise ValueError(f"memory must be (B, S, D), not {found}")
    memory = blank_padding(memory, memory_mask)
    layers = cross.key_layer, cross.value_layer
    found = [blank_padding(layer(memory), memory_mask) for layer in layers]
    heads = [split_heads(x, cross.num_kv_heads) for x in found]
    return BlockCache(*project(block.attention, memory[:, :0]), *heads)


# --8<-- [end:start_cache]


# --8<-- [start:decoder_step]
def decoder_step(block, x, memory_mask, cache, need_weights):
    """Run x (B, T, D) through the three sublayers of a decoder block."""
    check_width("inputs", x, block.attention.query_layer.in_features)
    if x.ndim != 3 or not len(x) == len(cache.key) == len(cache.memory_key):
        raise ValueError(
            f"inputs {tuple(x.shape)} do not go with a memory or a cache of"
            f" {len(cache.key)} samples"
        )
    y = block.attention_residual.before(x)
    y, own, cache = attend_to_past(block.attention, y, cache, need_weights)
    x = block.attention_residual(x, y)
    y, cross = attend(
        block.cross_attention,
        block.cross_residual.before(x),
        cache.memory_key,
        cache.memory_value,
        memory_mask,
        need_weights=need_weights,
    )
    x = block.cross_residual(x, y)
    y = block.ffn(block.ffn_residual.before(x))
    x = block.ffn_residual(x, y)
    return x, cache, (own, cross) if need_weights else None


# --8<-- [end:decoder_step]


# --8<-- [start:TransformerDecoder]
class TransformerDecoder(Stack):
    """Stack decoder blocks.

    Shapes as in `TransformerDecoderBlock` → x (B, T, D), a tuple of caches,
    and a list of pairs of weights, or None. Options as in `Stack`.
    """

    kind = TransformerDecoderBlock

    def forward(
        self, x, memory, memory_mask=None, cache=None, need_weights=False
    ):
        """Run the blocks, each with its own cache."""
        return run_decoder(self, x, memory, memory_mask, cache, need_weights)


# --8<-- [end:TransformerDecoder]


# --8<-- [start:run_decoder]
def run_decoder(decoder, x, memory, memory_mask, cache, need_weights):
    """Send x (B, T, D) through the blocks and the last norm."""
    caches = cache or [None] * len(decoder.blocks)
    if len(caches) != len(decoder.blocks):
        raise ValueError(
            f"{len(caches)} caches for {len(decoder.blocks)} blocks"
        )
    kept, maps = [], []
    for block, old in zip(decoder.blocks, caches):
        x, new, weights = block(x, memory, memory_mask, old, need_weights)
        kept.append(new)
        maps.append(weights)
    return decoder.norm(x), tuple(kept), maps if need_weights else None


# --8<-- [end:run_decoder]


# --8<-- [start:TokenEmbedding]
class TokenEmbedding(nn.Module):
    """Turn tokens into vectors that know where they stand.

    tokens (B, T) of integers, the first at the position `offset`
    → (B, T, D): √D · embedding + sinusoid. The embeddings start with the
    standard deviation 1/√D, so that neither summand drowns the other.
    Raises `ValueError` for a position past `max_len`.
    Vaswani et al. (2017), section 3.4.
    """

    def __init__(self, vocab_size, width, max_len, dropout=0.0):
        """Draw the embeddings."""
        super().__init__()
        check_sizes(vocab_size, width)
        self.embedding = nn.Embedding(vocab_size, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.positions = PositionalEncoding(width, max_len, dropout)

    def forward(self, tokens, offset=0):
        """Look up, scale, add the positions."""
        scale = math.sqrt(self.embedding.embedding_dim)
        return self.positions(scale * self.embedding(tokens), offset)


# --8<-- [end:TokenEmbedding]


# --8<-- [start:padding_mask]
def padding_mask(lengths, size, num_keys):
    """Give the mask (B, 1, S) over the real tokens, None if all are real.

    Raises `ValueError` unless there are `size` lengths from 0 to num_keys.
    """
    mask = length_mask(lengths, num_keys)
    if lengths.shape != (size,):
        found = tuple(lengths.shape)
        raise ValueError(f"expected {size} lengths, not the shape {found}")
    return None if not mask.is_meta and mask.all() else mask


# --8<-- [end:padding_mask]


# --8<-- [start:decode_chunk]
def decode_chunk(model, tgt, memory, src_lens, cache, need_weights):
    """Decode tgt (B, T), which goes on where the cache ends.

    → logits (B, T, tgt_vocab_size), a new cache, and with `need_weights` a
    list of pairs of weights as well.
    """
    num_keys = cache[0].memory_key.shape[2] if cache else memory.shape[1]
    mask = padding_mask(src_lens, len(tgt), num_keys)
    offset = cache[0].key.shape[2] if cache else 0
    x = model.target_embedding(tgt, offset)
    x, cache, maps = model.decoder(x, memory, mask, cache, need_weights)
    logits = model.output(x)
    return (logits, cache, maps) if need_weights else (logits, cache)


# --8<-- [end:decode_chunk]


# --8<-- [start:TransformerParts]
class TransformerParts(nn.Module):
    """Hold two embeddings, an encoder, a decoder and an output layer.

    Other options: the keyword-only ones of `TransformerEncoder`.
    """

    def __init__(
        self, src_vocab_size, tgt_vocab_size, width, ffn_width, num_heads,
        num_layers, *, dropout=0.0, max_len=512, norm_first=False, **options,
    ):  # fmt: skip
        """Raise `ValueError` for sizes below 1 or that do not divide."""
        super().__init__()
        sizes = width, ffn_width, num_heads, num_layers, dropout
        options["norm_first"] = norm_first
        rest = width, max_len, dropout
        self.source_embedding = TokenEmbedding(src_vocab_size, *rest)
        self.target_embedding = TokenEmbedding(tgt_vocab_size, *rest)
        self.encoder = TransformerEncoder(*sizes, **options)
        self.decoder = TransformerDecoder(*sizes, **options)
        self.output = nn.Linear(width, tgt_vocab_size)


# --8<-- [end:TransformerParts]


# --8<-- [start:Transformer]
class Transformer(TransformerParts):
    """Map a source and the target so far to the next target token.

    src (B, S), tgt (B, T), src_lens (B,) → logits (B, T, tgt_vocab_size).
    Raises `ValueError` for a position past `max_len`, or lengths that do not
    fit. Vaswani et al. (2017), figure 1.
    """

    def forward(self, src, tgt, src_lens):
        """Predict every next token from the true ones before it."""
        return self.decode(tgt, self.encode(src, src_lens), src_lens)[0]

    def encode(self, src, src_lens, need_weights=False):
        """Read src → memory (B, S, D); with `need_weights` also a list."""
        mask = padding_mask(src_lens, *src.shape)
        x = self.source_embedding(src)
        memory, maps = self.encoder(x, mask, need_weights)
        return (memory, maps) if need_weights else memory

    def decode(self, tgt, memory, src_lens, cache=None, need_weights=False):
        """Read the next tokens → logits (B, T, tgt_vocab_size), cache."""
        return decode_chunk(self, tgt, memory, src_lens, cache, need_weights)


# --8<-- [end:Transformer]


# --8<-- [start:Translator]
class Translator(Transformer):
    """Give a Transformer the two methods that `greedy_decode` needs."""

    def start(self, source, source_lens):
        """Read the sources; → the state before the first target token."""
        memory = self.encode(source, source_lens)
        mask = padding_mask(source_lens, *source.shape)
        blocks = self.decoder.blocks
        cache = tuple(start_cache(block, memory, mask) for block in blocks)
        return source_lens, cache

    def step(self, tokens, state):
        """Go on by tokens (N,); → log-probabilities of the next, state."""
        source_lens, cache = state
        logits, cache = self.decode(tokens[:, None], None, source_lens, cache)
        return logits[:, -1].log_softmax(dim=-1), (source_lens, cache)


# --8<-- [end:Translator]


# --8<-- [start:copy_attention]
@torch.no_grad()
def copy_attention(ours, theirs):
    """Copy the weights of an `nn.MultiheadAttention` into ours."""
    layers = ours.query_layer, ours.key_layer, ours.value_layer
    for layer, weight in zip(layers, theirs.in_proj_weight.chunk(3)):
        layer.weight.copy_(weight)
    if theirs.in_proj_bias is not None:
        for layer, bias in zip(layers, theirs.in_proj_bias.chunk(3)):
            layer.bias.copy_(bias)
    ours.output_layer.load_state_dict(theirs.out_proj.state_dict())


# --8<-- [end:copy_attention]


# --8<-- [start:copy_block]
def copy_block(ours, theirs):
    """Copy the weights of a block of torch, encoder's or decoder's."""
    copy_attention(ours.attention, theirs.self_attn)
    norms = [ours.attention_residual, ours.ffn_residual]
    if hasattr(ours, "cross_attention"):
        copy_attention(ours.cross_attention, theirs.multihead_attn)
        norms.insert(1, ours.cross_residual)
    ours.ffn.hidden_layer.load_state_dict(theirs.linear1.state_dict())
    ours.ffn.output_layer.load_state_dict(theirs.linear2.state_dict())
    for number, each in enumerate(norms, start=1):
        norm = getattr(theirs, f"norm{number}")
        each.norm.load_state_dict(norm.state_dict())


# --8<-- [end:copy_block]


# --8<-- [start:copy_stack]
def copy_stack(ours, theirs):
    """Copy the weights of an encoder or a decoder of torch, block by block."""
    for block, layer in zip(ours.blocks, theirs.layers, strict=True):
        copy_block(block, layer)
    if theirs.norm is not None:
        ours.norm.load_state_dict(theirs.norm.state_dict())


# --8<-- [end:copy_stack]
