"""Pretrain the three kinds of Transformer: BERT, T5 and GPT.

The models, objectives and generation of the section "Large-scale
pretraining with Transformers".

Axes: B batch, T target (query) positions, S source (key) positions, D model
width, H heads, d = D/H. A mask is boolean; True means that this key may be
attended to. No function changes a cache that is given to it.
"""

import math
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from scipy import optimize, stats
from torch import nn
from torch.nn import functional as F

from snippets.attention_scoring_functions import causal_mask, check_sizes
from snippets.multihead_attention import (
    MultiHeadAttention,
    attend_fused,
    attend_openly,
    mix_heads,
    split_heads,
)
from snippets.self_attention_and_positional_encoding import (
    LearnedPositions,
    RotaryAttention,
)
from snippets.training import evaluating
from snippets.transformer import (
    AddNorm,
    TransformerDecoder,
    TransformerDecoderBlock,
    TransformerEncoder,
    TransformerEncoderBlock,
    Translator,
    attend,
    attend_to_past,
    blank_padding,
    padding_mask,
    project,
    run_decoder,
    run_encoder,
    start_cache,
)


def ordinary_ids(vocab_size, special_ids):
    """List the ids of a vocabulary that are not special; → (ids,).

    Raises `ValueError` if there is none.
    """
    ordinary = sorted(set(range(vocab_size)) - set(special_ids))
    if not ordinary:
        raise ValueError(
            f"no ordinary id in a vocabulary of {vocab_size} with the"
            f" special ids {sorted(special_ids)}"
        )
    return torch.tensor(ordinary)


def check_maskable(tokens, vocab_size, rate):
    """Raise unless tokens are signed integers and a rate is in [0, 1].

    Their type must have room for all ids of the vocabulary.
    """
    if tokens.dtype not in (torch.int8, torch.int16, torch.int32, torch.int64):
        raise TypeError(
            f"tokens must be signed integers, they are {tokens.dtype}"
        )
    if vocab_size - 1 > torch.iinfo(tokens.dtype).max:
        raise ValueError(f"{vocab_size} ids do not fit into {tokens.dtype}")
    if not 0 <= rate <= 1:
        raise ValueError(f"rate {rate} is not between 0 and 1")


# --8<-- [start:mask_tokens]
def mask_tokens(
    tokens, mask_id, vocab_size, special_ids, *, rate=0.15, generator=None
):
    """Hide some tokens, as BERT does; → (inputs, labels), shaped like tokens.

    A token that is not special is chosen with probability `rate`. Of the
    chosen 80 % become `mask_id`, 10 % a random id that is not special (in
    BERT's own code any id), 10 % stay; labels are -100 except at the chosen.
    Devlin et al. (2019), A.1. Raises as `check_maskable`, `ordinary_ids`.
    """
    check_maskable(tokens, vocab_size, rate)
    special = {mask_id, *map(int, special_ids)}
    ordinary = ordinary_ids(vocab_size, special).to(tokens)
    options = {"generator": generator, "device": tokens.device}
    chance, fate = torch.rand(2, *tokens.shape, **options)
    drawn = torch.randint(len(ordinary), tokens.shape, **options)
    special = torch.tensor(sorted(special)).to(tokens)
    chosen = (chance < rate) & ~torch.isin(tokens, special)
    inputs = tokens.masked_fill(chosen & (fate < 0.8), mask_id)
    inputs = torch.where(chosen & (fate >= 0.9), ordinary[drawn], inputs)
    return inputs, tokens.masked_fill(~chosen, -100)


# --8<-- [end:mask_tokens]


def draw_places(choices, count, generator=None):
    """Draw `count` different whole numbers below `choices`.

    → a list in ascending order; every set of numbers is equally likely.
    Without a generator, the global random state of torch is used.
    """
    device = None if generator is None else generator.device
    order = torch.randperm(choices, generator=generator, device=device)
    return sorted(order[:count].tolist())


def count_spans(length, rate, mean_span):
    """Give the number of tokens to hide of `length`, and of spans.

    → (hidden, spans): length · rate, but at least one token is hidden and
    one kept; hidden / mean_span, but no more than have room. Raises
    `ValueError` if there is nothing to hide, or for a rate or mean span that
    cannot be. The counts of Raffel et al. (2020).
    """
    if length < 2:
        raise ValueError(f"{length} tokens cannot be hidden in part")
    if not 0 <= rate <= 1 or not 1 <= mean_span < math.inf:
        raise ValueError(
            f"rate {rate} must be from 0 to 1, mean_span {mean_span} from 1"
        )
    hidden = min(max(round(length * float(rate)), 1), length - 1)
    spans = max(round(hidden / float(mean_span)), 1)
    return hidden, min(spans, length - hidden + 1)


# --8<-- [start:draw_spans]
def draw_spans(length, rate, mean_span, generator=None):
    """Draw the spans to hide, → a list of (start, stop), left to right.

    All layouts in which spans do not touch are equally likely: a span may
    stand first or last. Raises what `count_spans` does.
    """
    hidden, spans = count_spans(length, rate, mean_span)
    cuts = [1 + x for x in draw_places(hidden - 1, spans - 1, generator)]
    before = [0, *cuts]  # hidden tokens up to each span, and with it
    after = [*cuts, hidden]
    slots = draw_places(length - hidden + 1, spans, generator)
    return [
        (slot + a, slot + b)
        for slot, a, b in zip(slots, before, after, strict=True)
    ]


# --8<-- [end:draw_spans]


def check_sentinels(tokens, sentinel_ids):
    """Give the sentinels as a list of whole numbers.

    Raises `ValueError` if one comes twice, or if tokens are not (T,).
    """
    sentinels = [int(each) for each in sentinel_ids]
    if len(set(sentinels)) < len(sentinels):
        raise ValueError(f"a sentinel comes twice in {sentinels}")
    if tokens.ndim != 1:
        raise ValueError(f"tokens must be (T,), not {tuple(tokens.shape)}")
    return sentinels


# --8<-- [start:corrupt_spans]
def corrupt_spans(
    tokens, sentinel_ids, *, rate=0.15, mean_span=3.0, generator=None
):
    """Hide spans of tokens (T,) → inputs, targets, both one-dimensional.

    A sentinel stands in the inputs for each span; the targets say after each
    sentinel what was there, and close with the next. Raises `ValueError` for
    T < 2, too few sentinels, or tokens that hold one. Raffel et al. (2020).
    """
    sentinels = check_sentinels(tokens, sentinel_ids)
    spans = draw_spans(len(tokens), rate, mean_span, generator)
    if len(sentinels) <= len(spans):
        raise ValueError(f"{len(spans)} spans, {len(sentinels)} sentinels")
    if set(sentinels) & set(tokens.tolist()):
        raise ValueError(f"the tokens hold one of the sentinels {sentinels}")
    marks = tokens.new_tensor(sentinels[: len(spans) + 1]).split(1)
    inputs, targets, last = [], [], 0
    for mark, (start, stop) in zip(marks, spans):  # one mark is left over
        inputs += [tokens[last:start], mark]
        targets += [mark, tokens[start:stop]]
        last = stop
    inputs.append(tokens[last:])
    targets.append(marks[-1])
    return torch.cat(inputs), torch.cat(targets)


# --8<-- [end:corrupt_spans]


def find_sentinels(tokens, sentinels):
    """Give the places of the sentinels in tokens (T,), in order.

    Raises `ValueError` unless they are the first of the list, in its order.
    """
    places = [i for i, each in enumerate(tokens.tolist()) if each in sentinels]
    found = tokens[places].tolist()
    if found != sentinels[: len(found)]:
        raise ValueError(
            f"sentinels {found} are not {sentinels[: len(found)]}, the first"
            " of the list in its order"
        )
    return places


# --8<-- [start:restore_spans]
def restore_spans(inputs, targets, sentinel_ids):
    """Put the spans of the targets back into the inputs, → tokens (T,).

    The inverse of `corrupt_spans`. Raises `ValueError` if a sentinel is
    missing, too many or out of order, or if the targets do not begin and
    close with one.
    """
    sentinels = check_sentinels(inputs, sentinel_ids)
    check_sentinels(targets, sentinels)
    holes = find_sentinels(inputs, sentinels)
    marks = find_sentinels(targets, sentinels)
    if len(marks) != len(holes) + 1:
        raise ValueError(
            f"{len(holes)} holes need {len(holes) + 1} sentinels in the"
            f" targets, not {len(marks)}"
        )
    if (marks[0], marks[-1]) != (0, len(targets) - 1):
        raise ValueError("the targets must begin and close with a sentinel")
    pieces, last = [], 0
    for hole, (mark, stop) in zip(holes, pairwise(marks), strict=True):
        pieces += [inputs[last:hole], targets[mark + 1 : stop]]
        last = hole + 1
    return torch.cat([*pieces, inputs[last:]])


# --8<-- [end:restore_spans]


# --8<-- [start:count_parameters]
def count_parameters(*modules):
    """Count the trained numbers of some modules, a shared one only once."""
    parameters = nn.ModuleList(modules).parameters()
    return sum(each.numel() for each in parameters)


# --8<-- [end:count_parameters]


def draw_weights(model, std=0.02):
    """Draw matrices with a small standard deviation; set biases to zero.

    In place. Radford et al. (2018), section 4.1. (BERT's code cuts the tails
    of the distribution off.)
    """
    for part in model.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)


def check_tokens(tokens, context):
    """Raise `ValueError` unless tokens are (B, T) with T ≤ context."""
    shape = tuple(tokens.shape)
    if len(shape) != 2 or shape[1] > context:
        raise ValueError(
            f"tokens must be (B, at most {context}), but are {shape}"
        )


class BERTEmbedding(nn.Module):
    """Add what a token is, where it stands and which text it is from.

    tokens, segments (B, T), mask as in `blank_padding` → (B, T, D).
    """

    def __init__(
        self, vocab_size, context, width, dropout, rotary, num_segments
    ):
        """Make three tables; with `rotary` there is none of positions."""
        super().__init__()
        check_sizes(vocab_size, context, width, num_segments)
        self.tokens = nn.Embedding(vocab_size, width)
        self.segments = nn.Embedding(num_segments, width)
        self.positions = nn.Identity()  # the attention sees them
        if not rotary:
            self.positions = LearnedPositions(width, context, std=0.02)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens, segments, mask=None):
        """Add, then normalise."""
        x = self.positions(self.tokens(tokens) + self.segments(segments))
        return self.dropout(self.norm(blank_padding(x, mask)))


class MaskedHead(nn.Module):
    """Name tokens: a layer, a norm, then products with the embeddings.

    states (..., D), table (vocab_size, D) → logits (..., vocab_size).
    """

    def __init__(self, vocab_size, width):
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, states, table):
        """Compare with every token of the vocabulary."""
        states = self.norm(F.gelu(self.dense(states)))
        return F.linear(states, table, self.bias)


class BERTParts(nn.Module):
    """Hold the embedding, the encoder, the pooler and the head of a BERT."""

    def __init__(
        self, vocab_size, context, width, num_heads, num_layers, *,
        dropout=0.0, rotary=False, num_segments=2,
    ):  # fmt: skip
        """Raise `ValueError` for sizes below 1 or that do not divide."""
        super().__init__()
        self.vocab_size, self.context, self.width = vocab_size, context, width
        self.num_heads, self.num_layers = num_heads, num_layers
        sizes = vocab_size, context, width, dropout, rotary, num_segments
        self.embedding = BERTEmbedding(*sizes)
        sizes = width, 4 * width, num_heads, num_layers, dropout
        options = {"activation": "gelu", "eps": 1e-12}
        self.encoder = TransformerEncoder(*sizes, **options)
        rest = {"dropout": dropout, "bias": True}
        for block in self.encoder.blocks:
            block.ffn.dropout = nn.Identity()  # drop only what is added
            if rotary:
                block.attention = RotaryAttention(width, num_heads, **rest)
        self.pooler = nn.Linear(width, width)
        self.head = MaskedHead(vocab_size, width)
        draw_weights(self)


# --8<-- [start:BERT]
class BERT(BERTParts):
    """Read in both directions, and name the tokens that were hidden.

    tokens (B, T), lengths (B,) of the real tokens or None, segments (B, T),
    0 everywhere if None → logits (B, T, vocab_size). Raises `ValueError`
    past `context`, or for lengths that do not fit. Devlin et al. (2019).
    """

    def forward(self, tokens, lengths=None, segments=None):
        """Give logits at every position, hidden or not."""
        states = self.encode(tokens, lengths, segments)
        return self.head(states, self.embedding.tokens.weight)

    def encode(self, tokens, lengths=None, segments=None, need_weights=False):
        """Give states (B, T, D); with `need_weights` also a list."""
        return encode_bert(self, tokens, lengths, segments, need_weights)

    def pool(self, states):
        """Make one vector (B, D) of a text from its first state."""
        return torch.tanh(self.pooler(states[:, 0]))


# --8<-- [end:BERT]


def encode_bert(model, tokens, lengths, segments, need_weights):
    """Embed tokens (B, T) and send them through the encoder."""
    check_tokens(tokens, model.context)
    if segments is None:
        segments = torch.zeros_like(tokens)
    if segments.shape != tokens.shape:
        raise ValueError(
            f"segments {tuple(segments.shape)} do not fit"
            f" tokens {tuple(tokens.shape)}"
        )
    mask = None
    if lengths is not None:
        mask = padding_mask(lengths, *tokens.shape)
    x = model.embedding(tokens, segments, mask)
    states, maps = model.encoder(x, mask, need_weights)
    return (states, maps) if need_weights else states


# --8<-- [start:relative_buckets]
def relative_buckets(distances, num_buckets, max_distance, bidirectional):
    """Sort distances into buckets, one by one when near, coarsely when far.

    distances: integers, key position − query position → bucket numbers of
    the same shape. Half of the buckets hold one distance each, the others
    widen like a logarithm up to max_distance; the last holds all beyond.
    `bidirectional`: keys ahead have half of the buckets for themselves;
    otherwise they are in the bucket of distance 0. Raffel et al. (2020).
    """
    offset = torch.zeros_like(distances)
    if bidirectional:
        num_buckets = num_buckets // 2
        offset = num_buckets * (distances > 0)
        distances = distances.abs()
    else:
        distances = (-distances).clamp(min=0)
    exact = num_buckets // 2
    ratio = distances.clamp(min=exact).float() / exact  # in float32: as theirs
    place = torch.log(ratio) / math.log(max_distance / exact)
    far = exact + (place * (num_buckets - exact)).long()
    far = far.clamp(max=num_buckets - 1)
    return offset + torch.where(distances < exact, distances, far)


# --8<-- [end:relative_buckets]


class RelativeBias(nn.Module):
    """Learn for each head how much a distance adds to a score.

    → (H, T, S), the last query at the last key. Raffel et al. (2020).
    """

    def __init__(self, num_heads, num_buckets, max_distance, bidirectional):
        """Raise `ValueError` for too few buckets, or too near an end."""
        super().__init__()
        fewest = 4 if bidirectional else 2
        if num_buckets < fewest or max_distance <= num_buckets // 2:
            raise ValueError(
                f"{num_buckets} buckets cannot cover {max_distance} positions"
            )
        self.sizes = num_buckets, max_distance, bidirectional
        self.table = nn.Embedding(num_buckets, num_heads)

    def forward(self, num_queries, num_keys):
        """Look up the distance of every pair."""
        keys = torch.arange(num_keys, device=self.table.weight.device)
        queries = keys[:num_queries] + num_keys - num_queries
        buckets = relative_buckets(keys - queries[:, None], *self.sizes)
        return self.table(buckets).permute(2, 0, 1)


class UnscaledQuery(nn.Linear):
    """Project to queries √d times as long, which undoes the 1/√d of scores.

    x (..., D) → (..., D), d the width of a head.
    """

    def __init__(self, width, num_heads):
        """Make a linear map without bias."""
        super().__init__(width, width, bias=False)
        self.factor = math.sqrt(width / num_heads)

    def forward(self, x):
        """Project and lengthen."""
        return self.factor * super().forward(x)


def make_t5_block(block, width, num_heads):
    """Give a block of section 7 the norms and the scores of T5, in place."""
    for part in list(block.modules()):
        if isinstance(part, AddNorm):
            part.norm = nn.RMSNorm(width, eps=1e-6)
        if isinstance(part, MultiHeadAttention):
            part.query_layer = UnscaledQuery(width, num_heads)


class T5EncoderBlock(TransformerEncoderBlock):
    """Do what a pre-norm encoder block does, with a bias on the scores.

    bias (H, S, S); the other shapes are those of the parent.
    """

    def __init__(self, width, ffn_width, num_heads, dropout=0.0):
        options = {"bias": False, "norm_first": True}
        super().__init__(width, ffn_width, num_heads, dropout, **options)
        make_t5_block(self, width, num_heads)

    def forward(self, x, mask=None, need_weights=False, *, bias=None):
        """Attend, add; transform, add."""
        x = blank_padding(x, mask)
        y = self.attention_residual.before(x)
        y, weights = self.attention(
            y, y, y, mask, need_weights, score_bias=bias
        )
        x = self.attention_residual(x, y)
        y = self.ffn(self.ffn_residual.before(x))
        return self.ffn_residual(x, y), weights


def attend_to_past_with_bias(attention, x, cache, bias, need_weights=False):
    """Do what `attend_to_past` does, with a bias (H, T, past + T)."""
    key, value = project(attention, x)
    key = torch.cat([cache.key, key], dim=2)
    value = torch.cat([cache.value, value], dim=2)
    query = split_heads(attention.query_layer(x), attention.num_heads)
    mask = causal_mask(x.shape[1], key.shape[2], device=x.device)
    heads, dropout = (query, key, value, mask), attention.dropout
    if need_weights:
        output, weights = attend_openly(*heads, bias, dropout)
    else:
        output, weights = attend_fused(*heads, False, bias, dropout), None
    output = mix_heads(attention.output_layer, output, None)
    return output, weights, cache._replace(key=key, value=value)


class T5DecoderBlock(TransformerDecoderBlock):
    """Do what a pre-norm decoder block does, with a bias on its own scores.

    bias (H, T, past + T), None for no bias; the other shapes are those of
    the parent. Cross-attention has no bias.
    """

    def __init__(self, width, ffn_width, num_heads, dropout=0.0):
        options = {"bias": False, "norm_first": True}
        super().__init__(width, ffn_width, num_heads, dropout, **options)
        make_t5_block(self, width, num_heads)

    def forward(
        self, x, memory, memory_mask=None, cache=None, need_weights=False, *,
        bias=None,
    ):  # fmt: skip
        """Attend to the past, to the memory, transform; add each time."""
        if cache is None:
            cache = start_cache(self, memory, memory_mask)
        return t5_step(self, x, memory_mask, cache, need_weights, bias)


def t5_step(block, x, memory_mask, cache, need_weights, bias):
    """Run x (B, T, D) through the three sublayers of a T5 decoder block."""
    check_past(cache, x, block.attention)
    y = block.attention_residual.before(x)
    y, own, cache = attend_to_past_with_bias(
        block.attention, y, cache, bias, need_weights
    )
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


def check_past(cache, x, attention):
    """Raise `ValueError` unless a cache goes with x (B, T, D)."""
    heads = attention.num_heads
    wanted = len(x), heads, x.shape[-1] // heads
    for each in cache:  # keys and values, (B, H, S, d)
        if (*each.shape[:2], *each.shape[3:]) != wanted:
            raise ValueError(
                f"a cache of {tuple(each.shape)} does not fit a batch of"
                f" {len(x)} and {heads} heads of width {wanted[2]}"
            )


def with_bias(stack, num_queries, num_keys):
    """Give a stack whose blocks all get the same bias, computed once."""
    bias = stack.relative_bias(num_queries, num_keys)
    blocks = [partial(block, bias=bias) for block in stack.blocks]
    return SimpleNamespace(blocks=blocks, norm=stack.norm)


class T5Stack(nn.Module):
    """Make a stack's blocks share one `RelativeBias`; end with T5's norm."""

    bidirectional = None  # may a query have keys ahead?

    def __init__(self, *sizes, buckets):
        """Take (number of buckets, max_distance) as `buckets`."""
        super().__init__(*sizes)
        width, _, num_heads, _, dropout = sizes
        options = num_heads, *buckets, self.bidirectional
        self.relative_bias = RelativeBias(*options)
        norm = nn.RMSNorm(width, eps=1e-6)
        self.norm = nn.Sequential(norm, nn.Dropout(dropout))


class T5Encoder(T5Stack, TransformerEncoder):
    """Stack T5's encoder blocks."""

    kind = T5EncoderBlock
    bidirectional = True

    def forward(self, x, mask=None, need_weights=False):
        """Run the blocks one after the other."""
        stack = with_bias(self, x.shape[1], x.shape[1])
        return run_encoder(stack, x, mask, need_weights)


class T5Decoder(T5Stack, TransformerDecoder):
    """Stack T5's decoder blocks."""

    kind = T5DecoderBlock
    bidirectional = False

    def forward(self, x, memory, memory_mask=None, cache=None,
                need_weights=False):  # fmt: skip
        """Run the blocks, each with its own cache."""
        past = cache[0].key.shape[2] if cache else 0
        stack = with_bias(self, x.shape[1], past + x.shape[1])
        return run_decoder(stack, x, memory, memory_mask, cache, need_weights)


def draw_t5_weights(model, width, ffn_width, num_heads):
    """Draw T5's first weights, so that sums start near a common size.

    In place. What is written into the stream (embeddings and the last layer
    of each sublayer) starts half as large as in T5, for smaller first logits;
    the norms take that factor out of everything else.
    """
    stds = {
        "query_layer": (width * width // num_heads) ** -0.5,
        "attention.output_layer": 0.5 * width**-0.5,
        "ffn.output_layer": 0.5 * ffn_width**-0.5,
        "embedding": 0.5,
    }
    for name, x in model.named_parameters():
        if x.ndim == 2:
            known = [std for part, std in stds.items() if part in name]
            nn.init.normal_(x, std=known[0] if known else width**-0.5)


class T5Parts(Translator):
    """Hold the one embedding, the encoder and the decoder of a T5."""

    def __init__(
        self, vocab_size, width, num_heads, num_layers, *, ffn_width=None,
        dropout=0.0, num_buckets=32, max_distance=128,
    ):  # fmt: skip
        """Raise `ValueError` for sizes that do not fit."""
        nn.Module.__init__(self)  # the parent would make other parts
        ffn_width = 4 * width if ffn_width is None else ffn_width
        check_sizes(vocab_size, width, ffn_width)
        self.vocab_size, self.width, self.ffn_width = (
            vocab_size, width, ffn_width)  # fmt: skip
        self.num_heads, self.num_layers = num_heads, num_layers
        self.embedding = nn.Embedding(vocab_size, width)
        sizes = width, ffn_width, num_heads, num_layers, dropout
        buckets = num_buckets, max_distance
        self.encoder = T5Encoder(*sizes, buckets=buckets)
        self.decoder = T5Decoder(*sizes, buckets=buckets)
        self.dropout = nn.Dropout(dropout)
        draw_t5_weights(self, width, ffn_width, num_heads)


class T5(T5Parts):
    """Turn text into text: the `Translator` of section 7 with other parts.

    src (B, S), tgt (B, T), src_lens (B,) → logits (B, T, vocab_size); also
    `encode`, `decode`, `start` and `step` of `Translator`. Raises
    `ValueError` for lengths or a cache that do not fit. Raffel et al.
    (2020); the first version, with ReLU and tied embeddings.
    """

    def source_embedding(self, tokens, offset=0):
        """Look tokens up; the positions are in the scores."""
        return self.dropout(self.embedding(tokens))

    target_embedding = source_embedding

    def output(self, x):
        """Compare states (B, T, D) with every token's embedding."""
        return F.linear(x, self.embedding.weight) * self.width**-0.5


class PastCache(NamedTuple):
    """Keep the keys and values (B, H, tokens so far, d) of a block."""

    key: torch.Tensor
    value: torch.Tensor


# --8<-- [start:GPTBlock]
class GPTBlock(TransformerEncoderBlock):
    """Look at the tokens so far, then think. There is no memory to look at.

    x (B, T, D), which goes on where the cache ends → x (B, T, D), weights
    (B, H, T, past + T) or None, a new cache.
    """

    def __init__(self, width, num_heads, dropout=0.0):
        gelu = partial(F.gelu, approximate="tanh")  # as GPT-2 computes it
        options = {"activation": gelu, "norm_first": True}
        super().__init__(width, 4 * width, num_heads, dropout, **options)
        self.ffn.dropout = nn.Identity()  # drop only what is added

    def forward(self, x, cache=None, need_weights=False):
        """Attend to the past, add; transform, add."""
        if cache is None:
            cache = PastCache(*project(self.attention, x[:, :0]))
        check_past(cache, x, self.attention)
        rest = cache, need_weights
        y = self.attention_residual.before(x)
        y, weights, cache = attend_to_past(self.attention, y, *rest)
        x = self.attention_residual(x, y)
        y = self.ffn(self.ffn_residual.before(x))
        return self.ffn_residual(x, y), weights, cache


# --8<-- [end:GPTBlock]


# --8<-- [start:GPTParts]
class GPTParts(nn.Module):
    """Hold the embeddings, the blocks and the last norm of a GPT."""

    def __init__(
        self, vocab_size, context, width, num_heads, num_layers, *, dropout=0.0
    ):
        """Raise `ValueError` for sizes below 1 or that do not divide."""
        super().__init__()
        check_sizes(vocab_size, context, width, num_layers)
        self.vocab_size, self.context, self.width = vocab_size, context, width
        self.num_heads, self.num_layers = num_heads, num_layers
        self.embedding = nn.Embedding(vocab_size, width)
        self.positions = LearnedPositions(width, context, dropout, std=0.02)
        sizes = width, num_heads, dropout
        self.blocks = nn.ModuleList(
            GPTBlock(*sizes) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        draw_weights(self)
        std = 0.02 / math.sqrt(2 * num_layers)  # 2 sums a block
        for block in self.blocks:
            for part in (block.attention, block.ffn):
                nn.init.normal_(part.output_layer.weight, std=std)


# --8<-- [end:GPTParts]


# --8<-- [start:GPT]
class GPT(GPTParts):
    """Predict every next token from those before it.

    tokens (B, T) → logits (B, T, vocab_size), with `need_weights` also a
    list of weights (B, H, T, T). Raises `ValueError` past `context`.
    Radford et al. (2019): GPT-2, with the output tied to the embedding.
    """

    def forward(self, tokens, need_weights=False):
        """Read all tokens at once."""
        logits, _, *maps = self.decode(tokens, None, need_weights)
        return (logits, *maps) if need_weights else logits

    def decode(self, tokens, cache=None, need_weights=False):
        """Go on where the cache ends → logits (B, T, vocab_size), cache."""
        return decode_gpt(self, tokens, cache, need_weights)


# --8<-- [end:GPT]


# --8<-- [start:decode_gpt]
def decode_gpt(model, tokens, cache, need_weights):
    """Send tokens (B, T) through the blocks, each with its own cache."""
    caches = cache or [None] * len(model.blocks)
    if len(caches) != len(model.blocks):
        raise ValueError(
            f"{len(caches)} caches for {len(model.blocks)} blocks"
        )
    past = cache[0].key.shape[2] if cache else 0
    check_tokens(tokens, model.context - past)
    x = model.positions(model.embedding(tokens), past)
    kept, maps = [], []
    for block, old in zip(model.blocks, caches):
        x, weights, new = block(x, old, need_weights)
        kept.append(new)
        maps.append(weights)
    logits = F.linear(model.norm(x), model.embedding.weight)
    cache = tuple(kept)
    return (logits, cache, maps) if need_weights else (logits, cache)


# --8<-- [end:decode_gpt]


# --8<-- [start:keep_top_k]
def keep_top_k(logits, top_k):
    """Keep the `top_k` largest logits (B, vocab_size), make the rest −inf.

    Exactly so many: of equal ones, those with the smaller ids are kept.
    """
    order = logits.argsort(dim=-1, descending=True, stable=True)
    return logits.scatter(-1, order[:, top_k:], -math.inf)


# --8<-- [end:keep_top_k]


# --8<-- [start:keep_top_p]
def keep_top_p(logits, top_p):
    """Keep the fewest tokens whose probabilities reach `top_p` together.

    logits (B, vocab_size) → the same, −inf for all others. A token is kept
    if those before it do not reach `top_p`, up to rounding; so at least one.
    Holtzman et al. (2020), section 3.1: nucleus sampling.
    """
    order = logits.argsort(dim=-1, descending=True, stable=True)
    sizes = logits.gather(-1, order)
    probabilities = sizes.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    sizes = sizes.masked_fill(before > max(top_p - 1e-6, 0), -math.inf)
    return logits.scatter(-1, order, sizes)


# --8<-- [end:keep_top_p]


def check_sampling(logits, temperature, top_k, top_p):
    """Raise `ValueError` for what nothing can be drawn from."""
    if logits.ndim != 2 or logits.shape[1] < 1:
        found = tuple(logits.shape)
        raise ValueError(f"logits must be (B, vocab_size), not {found}")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature {temperature} is not finite, 0 or more")
    if top_k is not None and top_k < 0:
        raise ValueError(f"top_k {top_k} must be 0 (off) or more")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p {top_p} must be above 0 and at most 1")
    if not logits.amax(dim=-1).isfinite().all():  # finds NaN, too
        raise ValueError("a row of logits has NaN, +inf, or only −inf")


# --8<-- [start:sample]
def sample(logits, *, temperature=1.0, top_k=None, top_p=None, generator=None):
    """Draw the next token of every row from softmax(logits / temperature).

    logits (B, vocab_size) → ids (B,). Temperature 0: the most probable one.
    First only the `top_k` likeliest stay (all, if 0 or None); from their
    distribution, renormalised, the fewest that reach `top_p` together.
    Raises `ValueError` for options out of range or a row without a choice.
    """
    check_sampling(logits, temperature, top_k, top_p)
    if temperature == 0:
        return logits.argmax(dim=-1)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    logits = logits - logits.amax(dim=-1, keepdim=True)  # no overflow below
    logits = logits / max(temperature, torch.finfo(logits.dtype).tiny)
    if top_k:
        logits = keep_top_k(logits, top_k)
    if top_p is not None and top_p < 1:
        logits = keep_top_p(logits, top_p)
    probabilities = logits.softmax(dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


# --8<-- [end:sample]


def next_logits(model, tokens, cache):
    """Read what is new in tokens (B, T); → logits (B, vocab_size), a cache.

    Once the window slides, nothing in a cache is of use: every token stands
    one place further left, so its key and value are others, and in deeper
    layers even what it has seen. The whole window is read anew.
    """
    module = isinstance(model, nn.Module)
    with evaluating(model) if module else torch.no_grad():
        if cache is None or tokens.shape[1] > model.context:
            logits, cache = model.decode(tokens[:, -model.context :])
        else:
            logits, cache = model.decode(tokens[:, -1:], cache)
    return logits[:, -1], cache


# --8<-- [start:generate]
def generate(
    model, tokens, num_tokens, *, temperature=1.0, top_k=None, top_p=None,
    eos_id=None, generator=None,
):  # fmt: skip
    """Continue a prompt, tokens (B, T), T ≥ 1 → (B, T + num_tokens).

    A row that has drawn `eos_id` is filled with it. Past `model.context`
    only the last `context` tokens are read. Other options: as in `sample`.
    """
    if tokens.ndim != 2 or tokens.shape[1] < 1 or num_tokens < 0:
        shape = tuple(tokens.shape)
        raise ValueError(f"cannot add {num_tokens} tokens to {shape}")
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    total, cache = tokens.shape[1] + num_tokens, None
    finished = torch.zeros_like(tokens[:, 0], dtype=torch.bool)
    while tokens.shape[1] < total and not finished.all():
        logits, cache = next_logits(model, tokens, cache)
        new = sample(logits, generator=generator, **options).to(tokens.dtype)
        if eos_id is not None:
            new = new.masked_fill(finished, eos_id)
            finished = new == eos_id
        tokens = torch.cat([tokens, new[:, None]], dim=1)
    return F.pad(tokens, (0, total - tokens.shape[1]), value=eos_id or 0)


# --8<-- [end:generate]


def log_points(x, y):
    """Check the points of a power law; → log x, log y, arrays (n,).

    Raises `ValueError` for other than n ≥ 3 pairs of positive numbers, or if
    all x are equal.
    """
    points = []
    for given in (x, y):
        tensor = isinstance(given, torch.Tensor)
        values = given.detach().cpu().double() if tensor else given
        points.append(np.asarray(values, dtype=np.float64))
    x, y = points
    if x.ndim != 1 or x.shape != y.shape or len(x) < 3:
        raise ValueError(f"no 3 pairs or more: {x.shape}, {y.shape}")
    if not all((np.isfinite(v) & (v > 0)).all() for v in points):
        raise ValueError("all numbers must be positive and finite")
    if x.min() == x.max():
        raise ValueError(f"all x are {x[0]}: no exponent fits")
    return np.log(x), np.log(y)


def fit_bent(log_x, log_y):
    """Fit a power law and a constant to logarithms, by least squares.

    → log scale, exponent, log constant, and the sum of squares: the best
    that is found from several first guesses of the constant.
    """

    def residuals(found):
        scale, exponent, constant = found
        return np.logaddexp(scale - exponent * log_x, constant) - log_y

    fits = []
    for share in (0.1, 0.5, 0.9, 0.99):  # of the smallest y
        constant = math.log(share) + log_y.min()
        rest = log_y + np.log1p(-np.exp(constant - log_y))
        slope, height = np.polyfit(log_x, rest, 1)
        first = height, -slope, constant
        tight = dict.fromkeys(("xtol", "ftol", "gtol"), 1e-15)
        fits.append(optimize.least_squares(residuals, first, **tight))
    best = min(fits, key=lambda fit: fit.cost)
    return *best.x, 2 * best.cost


# --8<-- [start:fit_power_law]
def fit_power_law(x, y):
    """Fit y = scale · x^−exponent + constant by least squares of logarithms.

    x, y: n ≥ 3 positive numbers each → (scale, exponent, constant), floats.
    The constant is 0 unless it improves a straight line in log–log more
    than chance does once in 20 times (an F-test of one side, as it cannot
    be negative): few, noisy or close points do not identify it, and the
    exponent is then too small. Three points are on a curve: no test.
    Raises `ValueError` as `log_points` does.
    """
    log_x, log_y = log_points(x, y)
    slope, height = np.polyfit(log_x, log_y, 1)
    straight = ((log_y - height - slope * log_x) ** 2).sum()
    if straight > 1e-20 * len(log_x) and len(np.unique(log_x)) > 2:
        scale, exponent, constant, bent = fit_bent(log_x, log_y)
        dof = len(log_x) - 3
        needed = stats.f.ppf(1 - 2 / 20, 1, dof) if dof else 1e6
        if (straight - bent) * max(dof, 1) > bent * needed:
            return math.exp(scale), float(exponent), math.exp(constant)
    return math.exp(height), float(-slope), 0.0


# --8<-- [end:fit_power_law]


def exponent_interval(x, y, *, level=0.95):
    """Give the confidence interval of an exponent, → (low, high).

    That of a straight line in log–log with independent Gaussian residuals.
    """
    log_x, log_y = log_points(x, y)
    line = stats.linregress(log_x, log_y)
    half = stats.t.ppf((1 + level) / 2, len(log_x) - 2) * line.stderr
    return float(-line.slope - half), float(-line.slope + half)


# --8<-- [start:predict_loss]
def predict_loss(x, y, new_x, *, level=0.95):
    """Predict one more measurement at `new_x`, → (low, middle, high).

    With probability `level` it lies between, if the points scatter about a
    straight line in log–log with independent Gaussian residuals: the width
    counts the scatter of the new point as well as that of the line.
    """
    log_x, log_y = log_points(x, y)
    fit, dof = stats.linregress(log_x, log_y), len(log_x) - 2
    residuals = log_y - fit.intercept - fit.slope * log_x
    away = math.log(new_x) - log_x.mean()
    scatter = residuals @ residuals / dof * (1 + 1 / len(log_x))
    half = math.sqrt(scatter + (away * fit.stderr) ** 2)
    half *= stats.t.ppf((1 + level) / 2, dof)
    middle = log_y.mean() + fit.slope * away
    return tuple(math.exp(middle + side * half) for side in (-1, 0, 1))


# --8<-- [end:predict_loss]
