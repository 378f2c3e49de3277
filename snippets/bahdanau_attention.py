"""Translate with recurrent networks, without and with attention.

The models and the decoding of the section "The Bahdanau attention mechanism".
Sources: Cho et al. (2014) and Sutskever, Vinyals, Le (2014), encoder and
decoder; Bahdanau, Cho, Bengio (2015), attention between the two; Wu et al.
(2016), section 7, the length penalty of the beam.

Axes: B batch, T target positions, S source positions. A state is a tensor, or
a tuple, list or dict of tensors, each with the batch axis first; no function
changes a state that is given to it.
"""

import math

import torch
from torch import nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pad_packed_sequence,
)

from snippets.attention_scoring_functions import (
    AdditiveAttention,
    check_sizes,
    length_mask,
    masked_softmax,
)
from snippets.datasets import encode_pairs
from snippets.training import evaluating, sequence_loss


# --8<-- [start:check_lengths]
def check_lengths(tokens, lengths):
    """Refuse lengths that do not fit tokens (B, S).

    Raises `TypeError` unless both are tensors of integers, `ValueError`
    unless there are B lengths from 1 to S.
    """
    kinds = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    for name, x in (("tokens", tokens), ("lengths", lengths)):
        kind = getattr(x, "dtype", type(x))
        if kind not in kinds:
            raise TypeError(f"{name} must be integers, not {kind}")
    if tokens.ndim != 2 or lengths.shape != tokens.shape[:1]:
        raise ValueError(
            f"lengths {tuple(lengths.shape)} do not fit"
            f" tokens {tuple(tokens.shape)}"
        )
    found, size = lengths.tolist(), tokens.shape[1]
    if not found or min(found) < 1 or max(found) > size:
        raise ValueError(f"lengths must be 1 to {size}, not {found}")


# --8<-- [end:check_lengths]


# --8<-- [start:make_gru]
def make_gru(input_size, hidden_size, num_layers, dropout, **options):
    """Make a GRU with the batch first, and dropout between its layers."""
    check_sizes(input_size, hidden_size, num_layers)
    return nn.GRU(
        input_size,
        hidden_size,
        num_layers,
        batch_first=True,
        dropout=dropout if num_layers > 1 else 0.0,  # else torch warns
        **options,
    )


# --8<-- [end:make_gru]


# --8<-- [start:pack_tokens]
def pack_tokens(tokens, lengths, *layers):
    """Pack tokens (B, S) and send the real ones alone through some layers.

    Raises what `check_lengths` does.
    """
    check_lengths(tokens, lengths)
    packed = pack_padded_sequence(
        tokens.long(),
        lengths.long().cpu(),
        batch_first=True,
        enforce_sorted=False,
    )
    data, *places = packed
    for layer in layers:
        data = layer(data)  # (number of real tokens, ...)
    return PackedSequence(data, *places)


# --8<-- [end:pack_tokens]


# --8<-- [start:RecurrentEncoder]
class RecurrentEncoder(nn.Module):
    """Read a source in both directions with a GRU; padding is never read.

    tokens (B, S), lengths (B,) from 1 to S → outputs (B, S, 2 hidden_size),
    zero at padding, and state (B, num_layers, 2 hidden_size).
    """

    def __init__(
        self, vocab_size, embed_size, hidden_size, num_layers, dropout=0.0
    ):
        """Set the sizes; raise `ValueError` for one below 1."""
        super().__init__()
        check_sizes(vocab_size, embed_size, hidden_size, num_layers)
        self.embedding = nn.Embedding(vocab_size, embed_size)
        self.dropout = nn.Dropout(dropout)
        sizes = embed_size, hidden_size, num_layers
        self.rnn = make_gru(*sizes, dropout, bidirectional=True)

    def forward(self, tokens, lengths):
        """Pack, embed, read, unpack."""
        packed = pack_tokens(tokens, lengths, self.embedding, self.dropout)
        outputs, state = self.rnn(packed)
        return unpack(outputs, state, tokens.shape[1])


# --8<-- [end:RecurrentEncoder]


# --8<-- [start:unpack]
def unpack(outputs, state, num_tokens):
    """Put the batch first, both directions side by side, zeros at padding.

    The state has what the GRU ended with: forward at the last real token,
    backward at the first.
    """
    outputs, _ = pad_packed_sequence(
        outputs, batch_first=True, total_length=num_tokens
    )
    state = state.unflatten(0, (-1, 2))  # (num_layers, 2, B, hidden_size)
    return outputs, state.permute(2, 0, 1, 3).flatten(2)


# --8<-- [end:unpack]


# --8<-- [start:DecoderParts]
class DecoderParts(nn.Module):
    """Hold what the decoders with and without attention have in common.

    `context_size` is the width of the encoder's outputs and of its state.
    The GRU reads the token and the context; the output layer reads the top
    state and the context.
    """

    def __init__(
        self, vocab_size, embed_size, hidden_size, num_layers, context_size,
        dropout=0.0
    ):  # fmt: skip
        """Set the sizes; raise `ValueError` for one below 1."""
        super().__init__()
        check_sizes(vocab_size, embed_size, hidden_size, context_size)
        self.embedding = nn.Embedding(vocab_size, embed_size)
        self.dropout = nn.Dropout(dropout)
        self.bridge = nn.Linear(context_size, hidden_size)
        joined = embed_size + context_size
        self.rnn = make_gru(joined, hidden_size, num_layers, dropout)
        self.output = nn.Linear(hidden_size + context_size, vocab_size)


# --8<-- [end:DecoderParts]


# --8<-- [start:first_hidden]
def first_hidden(decoder, state):
    """Turn the encoder's last state into the decoder's first.

    state (B, num_layers, context_size) → (B, num_layers, hidden_size).
    Raises `ValueError` for other sizes than the decoder was made for.
    """
    sizes = decoder.rnn.num_layers, decoder.bridge.in_features
    if state.shape[1:] != sizes:
        raise ValueError(
            f"a state of {tuple(state.shape)} does not fit a decoder"
            f" of num_layers {sizes[0]} and context_size {sizes[1]}"
        )
    return torch.tanh(decoder.bridge(state))


# --8<-- [end:first_hidden]


# --8<-- [start:embed_targets]
def embed_targets(decoder, tokens, hidden):
    """Embed target tokens (B, T), dropout included; → (B, T, embed_size).

    Raises `ValueError` without a token, or if hidden has not B rows.
    """
    if tokens.ndim != 2 or len(tokens) != len(hidden) or tokens.numel() < 1:
        raise ValueError(
            f"target tokens {tuple(tokens.shape)} do not fit"
            f" a state of batch size {len(hidden)}"
        )
    return decoder.dropout(decoder.embedding(tokens))


# --8<-- [end:embed_targets]


# --8<-- [start:gru_steps]
def gru_steps(rnn, inputs, hidden):
    """Run a GRU on, its state with the batch axis first before and after.

    inputs (B, T, width), hidden (B, num_layers, hidden_size) → tops
    (B, T, hidden_size), the top layer's states, and the new hidden.
    """
    tops, hidden = rnn(inputs, hidden.transpose(0, 1).contiguous())
    return tops, hidden.transpose(0, 1)


# --8<-- [end:gru_steps]


# --8<-- [start:RecurrentDecoder]
class RecurrentDecoder(DecoderParts):
    """Decode from the encoder's last state alone: the bottleneck.

    The context is the top layer of that state, the same at every step, fed
    to the GRU and to the output layer as well. Cho et al. (2014).
    """

    def start(self, outputs, state, lengths):
        """Turn what the encoder gave into the first state."""
        return first_hidden(self, state), state[:, -1]

    def forward(self, tokens, state, need_weights=False):
        """Map tokens (B, T), state → logits, state, None: no weights."""
        hidden, context = state
        x = embed_targets(self, tokens, hidden)  # (B, T, embed_size)
        everywhere = context[:, None].expand(-1, tokens.shape[1], -1)
        tops, hidden = gru_steps(
            self.rnn, torch.cat([x, everywhere], -1), hidden
        )
        logits = self.output(torch.cat([tops, everywhere], -1))
        return logits, (hidden, context), None


# --8<-- [end:RecurrentDecoder]


# --8<-- [start:BahdanauDecoder]
class BahdanauDecoder(DecoderParts):
    """Decode with a context that is looked up anew at every step.

    Query: the top state of the step before; keys and values: the outputs of
    the encoder. Arguments: those of `DecoderParts`. Bahdanau et al. (2015),
    section 3.1; their output layer has a maxout layer before it.
    """

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        hidden, context = self.rnn.hidden_size, self.bridge.in_features
        dropout = self.dropout.p
        self.attention = AdditiveAttention(hidden, context, hidden, dropout)

    def start(self, outputs, state, lengths):
        """Keep the hidden state, the projected keys, the values, the mask."""
        hidden = first_hidden(self, state)
        mask = length_mask(lengths.to(outputs.device), outputs.shape[1])
        outputs = outputs.masked_fill(~mask.mT, 0)  # 0 · NaN would be NaN
        keys = self.attention.score.key_layer(outputs)  # once, not T times
        return hidden, keys, outputs, mask

    def forward(self, tokens, state, need_weights=False):
        """Map tokens (B, T), state → logits, state, weights or None."""
        return decode_with_attention(self, tokens, state, need_weights)


# --8<-- [end:BahdanauDecoder]


# --8<-- [start:look_up]
def look_up(attention, query, keys, values, mask):
    """Attend with keys that are projected already.

    attention: an `AdditiveAttention`; query (B, query_size), keys (B, S, h),
    values (B, S, V), mask (B, 1, S) → context (B, V), weights (B, 1, S)
    before dropout. The result is that of the attention itself.
    """
    score = attention.score
    query = score.query_layer(query)[:, None]  # (B, 1, h)
    scores = score.score_layer(torch.tanh(query + keys)).mT  # (B, 1, S)
    weights = masked_softmax(scores, mask)
    context = attention.dropout(weights) @ values
    return context[:, 0], weights


# --8<-- [end:look_up]


# --8<-- [start:decode_with_attention]
def decode_with_attention(decoder, tokens, state, need_weights=False):
    """Look up, read, look up, read: one target token after the other.

    tokens (B, T) → logits (B, T, vocab_size), the state after the last
    token, and the weights (B, T, S) before dropout, or None.
    """
    hidden, *memory = state
    pieces, rows = [], []
    for token in embed_targets(decoder, tokens, hidden).unbind(1):
        query = hidden[:, -1]  # the top state of the step before
        context, weights = look_up(decoder.attention, query, *memory)
        x = torch.cat([token, context], dim=-1)[:, None]
        top, hidden = gru_steps(decoder.rnn, x, hidden)
        pieces.append(torch.cat([top[:, 0], context], dim=-1))
        rows.append(weights)
    logits = decoder.output(torch.stack(pieces, dim=1))
    weights = torch.cat(rows, dim=1) if need_weights else None
    return logits, (hidden, *memory), weights


# --8<-- [end:decode_with_attention]


# --8<-- [start:Seq2Seq]
class Seq2Seq(nn.Module):
    """An encoder and a decoder, trained as one and decoded step by step.

    source (B, S), target (B, T) beginning with `<bos>`, source_lens (B,)
    → logits (B, T, vocab_size): at every position for the token after it.
    """

    def __init__(self, encoder, decoder):
        """Join an encoder and a decoder."""
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def start(self, source, source_lens):
        """Read the sources; → the state before the first target token."""
        outputs, state = self.encoder(source, source_lens)
        return self.decoder.start(outputs, state, source_lens)

    def forward(self, source, target, source_lens):
        """Predict every next token from the true ones before it."""
        return self.decoder(target, self.start(source, source_lens))[0]

    def step(self, tokens, state):
        """Go on by tokens (N,); → log-probabilities of the next, state."""
        logits, state, _ = self.decoder(tokens[:, None], state)
        return logits[:, -1].log_softmax(dim=-1), state


# --8<-- [end:Seq2Seq]


# --8<-- [start:translation_loss]
def translation_loss(model, batch, pad_id=0):
    """Teach with the true tokens before: the input drops the last column.

    batch: source, its lengths, target from `<bos>` to `<eos>` → scalar.
    """
    source, source_lens, target = batch
    logits = model(source, target[:, :-1], source_lens)
    return sequence_loss(logits, target[:, 1:], pad_id)


# --8<-- [end:translation_loss]


# --8<-- [start:on_tensors]
def on_tensors(function, state):
    """Apply a function to every tensor of a state; its form stays."""
    if torch.is_tensor(state):
        return function(state)
    if isinstance(state, dict):
        return {key: on_tensors(function, x) for key, x in state.items()}
    if isinstance(state, tuple | list):
        made = [on_tensors(function, x) for x in state]
        named = hasattr(state, "_fields")  # a namedtuple
        return type(state)(*made) if named else type(state)(made)
    raise TypeError(f"a state has no place for {type(state).__name__}")


# --8<-- [end:on_tensors]


# --8<-- [start:first_tensor]
def first_tensor(state):
    """Give a tensor of the state, whose batch size all others share.

    Raises `ValueError` if there is none, or if they do not share it.
    """
    tensors = []
    on_tensors(tensors.append, state)
    sizes = {tuple(x.shape[:1]) for x in tensors}
    if len(sizes) != 1 or () in sizes:
        shapes = [tuple(x.shape) for x in tensors]
        raise ValueError(f"no common batch axis in a state of {shapes}")
    return tensors[0]


# --8<-- [end:first_tensor]


# --8<-- [start:greedy_decode]
@torch.no_grad()
def greedy_decode(step, state, *, bos_id, eos_id, max_len):
    """Take the most probable token at every step.

    step(tokens (N,), state) → log-probabilities (N, vocab_size), state.
    → ids (B, at most max_len) without `<bos>`; `<eos>` counts, and what
    follows it is `<eos>` again. Ends as soon as all have ended.
    Raises `ValueError` for a negative max_len or a state without a batch.
    """
    if max_len < 0:
        raise ValueError(f"max_len must not be negative, but is {max_len}")
    like = first_tensor(state)
    tokens = torch.full((len(like),), bos_id, device=like.device)
    ended = torch.zeros_like(tokens, dtype=torch.bool)
    ids = [tokens[:, None][:, :0]]
    while len(ids) <= max_len and not ended.all():
        log_probs, state = step(tokens, state)
        tokens = log_probs.argmax(dim=-1).masked_fill(ended, eos_id)
        ids.append(tokens[:, None])
        ended = ended | (tokens == eos_id)
    return torch.cat(ids, dim=1)


# --8<-- [end:greedy_decode]


# --8<-- [start:check_beam]
def check_beam(state, beam_size, max_len, length_penalty):
    """Raise `ValueError` for an argument that no beam can have."""
    if beam_size < 1 or max_len < 0 or not math.isfinite(length_penalty):
        raise ValueError(
            f"no beam of {beam_size} over {max_len} steps with a"
            f" length penalty of {length_penalty}"
        )
    size = len(first_tensor(state))
    if size != 1:
        raise ValueError(f"one sequence at a time, but the batch has {size}")


# --8<-- [end:check_beam]


# --8<-- [start:best_continuations]
def best_continuations(totals, log_probs, beam_size):
    """Find the most probable continuations of the prefixes in a beam.

    totals: N sums of log-probabilities, one a prefix; log_probs
    (N, vocab_size) → at most `beam_size` (total, prefix, token), the best
    first, none of probability 0. Raises `ValueError` for NaN.
    """
    log_probs = log_probs.cpu().double()
    if log_probs.isnan().any():
        raise ValueError("a log-probability is NaN")
    sums = torch.tensor(totals, dtype=torch.double)[:, None] + log_probs
    values, places = sums.flatten().sort(descending=True, stable=True)
    width = log_probs.shape[1]
    return [
        (value, place // width, place % width)
        for value, place in zip(
            values[:beam_size].tolist(),
            places[:beam_size].tolist(),
            strict=True,
        )
        if value > -math.inf
    ]


# --8<-- [end:best_continuations]


# --8<-- [start:beam_search]
@torch.no_grad()
def beam_search(
    step, state, *, bos_id, eos_id, beam_size, max_len, length_penalty=0.0
):
    """Keep the `beam_size` most probable prefixes at every step.

    → at most beam_size (ids, score), best first; ids without `<bos>`; score:
    sum of log-probabilities / length^length_penalty, `<eos>` counted.
    `state` is of one sequence. Raises what `check_beam` does.
    """
    check_beam(state, beam_size, max_len, length_penalty)
    device, live, ended = first_tensor(state).device, [([], 0.0)], []
    for _ in range(max_len):
        last = [ids[-1] if ids else bos_id for ids, _ in live]
        log_probs, state = step(torch.tensor(last, device=device), state)
        best = best_continuations([t for _, t in live], log_probs, beam_size)
        grown = [([*live[i][0], token], t) for t, i, token in best]
        ended += [each for each in grown if each[0][-1] == eos_id]
        live = [each for each in grown if each[0][-1] != eos_id]
        if not live:
            break
        state = rows_of(state, [i for _, i, token in best if token != eos_id])
    scored = [(x, t / max(len(x), 1) ** length_penalty)
              for x, t in ended + live]  # fmt: skip
    return sorted(scored, key=lambda each: -each[1])[:beam_size]


# --8<-- [end:beam_search]


# --8<-- [start:rows_of]
def rows_of(state, rows):
    """Pick rows of the batch axis of a state, → a new state."""
    return on_tensors(lambda x: x[torch.tensor(rows, device=x.device)], state)


# --8<-- [end:rows_of]


# --8<-- [start:translate]
def translate(model, sentences, vocabularies, *, max_len=60):
    """Translate lists of words greedily, → as many lists of words."""
    german = vocabularies[1]
    pairs = [(words, []) for words in sentences]
    source, source_lens, _ = encode_pairs(pairs, vocabularies)
    with evaluating(model):
        ids = greedy_decode(
            model.step,
            model.start(source, source_lens),
            bos_id=german.bos_id,
            eos_id=german.eos_id,
            max_len=max_len,
        )
    return [german.decode(row) for row in ids.tolist()]


# --8<-- [end:translate]


# --8<-- [start:exact_match]
def exact_match(model, pairs, vocabularies, *, max_len=60):
    """Give the share of pairs whose translation is right in every word."""
    sentences, references = zip(*pairs, strict=True)
    found = translate(model, sentences, vocabularies, max_len=max_len)
    right = [a == list(b) for a, b in zip(found, references, strict=True)]
    return sum(right) / len(right)


# --8<-- [end:exact_match]
