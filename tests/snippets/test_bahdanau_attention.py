"""Prove that the translator reads, attends and searches as the section says."""

import copy
import itertools
import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from snippets.attention_scoring_functions import AdditiveAttention, length_mask
from snippets.bahdanau_attention import (
    BahdanauDecoder,
    RecurrentDecoder,
    RecurrentEncoder,
    Seq2Seq,
    beam_search,
    exact_match,
    greedy_decode,
    look_up,
    translate,
    translation_loss,
)
from snippets.datasets import (
    encode_pairs,
    number_pairs,
    number_parts,
    number_vocabularies,
)
from snippets.training import evaluating, train

# Axes: a prime each, so that no swapped axis can pass.
B, S, T = 5, 11, 7
SOURCES, TARGETS = 23, 19  # sizes of the vocabularies
EMBED, WIDTH = 3, 13
LENGTHS = [11, 1, 4, 7, 2]

# The largest error allowed, absolute and relative, by dtype.
TOLERANCE = {
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
    torch.float32: 2e-6,
    torch.float64: 1e-12,
}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
layer_counts = pytest.mark.parametrize("num_layers", [1, 2])
KINDS = {"bahdanau": BahdanauDecoder, "recurrent": RecurrentDecoder}
kinds = pytest.mark.parametrize("kind", KINDS)


def close(found, expected, dtype=torch.float32):
    """Assert equality within the tolerance of a dtype."""
    limit = TOLERANCE[dtype]
    assert_close(found.to(expected.dtype), expected, atol=limit, rtol=limit)


def make_encoder(num_layers=2, dropout=0.0, seed=0):
    torch.manual_seed(seed)
    return RecurrentEncoder(SOURCES, EMBED, WIDTH, num_layers, dropout)


def make_model(kind, num_layers=2, dropout=0.0, seed=0, hidden_size=17):
    encoder = make_encoder(num_layers, dropout, seed)
    decoder = KINDS[kind](TARGETS, 5, hidden_size, num_layers, 2 * WIDTH, dropout)
    return Seq2Seq(encoder, decoder)


def draw_sources(size=B, width=S, lengths=None):
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(4, SOURCES, (size, width), generator=generator)
    lengths = torch.tensor(LENGTHS[:size] if lengths is None else lengths)
    return tokens.masked_fill(~length_mask(lengths, width)[:, 0], 0), lengths


def draw_targets(size=B, width=T):
    generator = torch.Generator().manual_seed(8)
    targets = torch.randint(4, TARGETS, (size, width), generator=generator)
    targets[:, 0] = 1
    return targets


def row(state, i):
    """Keep one sample of a state of any nest."""
    if torch.is_tensor(state):
        return state[i : i + 1]
    if isinstance(state, dict):
        return {key: row(part, i) for key, part in state.items()}
    return type(state)(row(part, i) for part in state)


# ----------------------------------------------------------------- encoder


@layer_counts
def test_the_outputs_stand_over_the_tokens_and_the_state_has_the_batch_first(num_layers):
    outputs, state = make_encoder(num_layers)(*draw_sources())
    assert outputs.shape == (B, S, 2 * WIDTH)
    assert state.shape == (B, num_layers, 2 * WIDTH)


@layer_counts
def test_the_encoder_is_the_gru_of_torch_on_every_exact_length(num_layers):
    encoder = make_encoder(num_layers)
    tokens, lengths = draw_sources()
    outputs, state = encoder(tokens, lengths)
    gru = nn.GRU(EMBED, WIDTH, num_layers, batch_first=True, bidirectional=True)
    gru.load_state_dict(encoder.rnn.state_dict())
    for i, length in enumerate(LENGTHS):
        alone, last = gru(encoder.embedding(tokens[i : i + 1, :length]))
        close(outputs[i, :length], alone[0])
        close(state[i, :, :WIDTH], last[0::2, 0])
        close(state[i, :, WIDTH:], last[1::2, 0])


def gru_by_hand(x, hidden, rnn, suffix):
    """Step one layer of a GRU through the equations, (S, width) → (S, h)."""
    w_x, w_h, b_x, b_h = (
        getattr(rnn, f"{name}_{suffix}")
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    rows = []
    for each in x:
        a, b = w_x @ each + b_x, w_h @ hidden + b_h
        (a_r, a_z, a_n), (b_r, b_z, b_n) = a.chunk(3), b.chunk(3)
        reset, keep = torch.sigmoid(a_r + b_r), torch.sigmoid(a_z + b_z)
        new = torch.tanh(a_n + reset * b_n)
        hidden = (1 - keep) * new + keep * hidden
        rows.append(hidden)
    return torch.stack(rows)


def test_the_state_is_the_last_one_forward_and_the_first_one_backward():
    encoder = make_encoder(num_layers=1)
    tokens, lengths = draw_sources()
    outputs, state = encoder(tokens, lengths)
    for i, length in enumerate(LENGTHS):
        x, zero = encoder.embedding(tokens[i, :length]), torch.zeros(WIDTH)
        there = gru_by_hand(x, zero, encoder.rnn, "l0")
        back = gru_by_hand(x.flip(0), zero, encoder.rnn, "l0_reverse").flip(0)
        close(outputs[i, :length], torch.cat([there, back], -1))
        close(state[i, 0], torch.cat([there[-1], back[0]]))


@layer_counts
def test_appended_padding_changes_no_bit(num_layers):
    encoder = make_encoder(num_layers)
    tokens, lengths = draw_sources()
    outputs, state = encoder(tokens, lengths)
    longer, same_state = encoder(nn.functional.pad(tokens, (0, 5)), lengths)
    assert torch.equal(state, same_state)
    assert longer.shape[1] == S + 5
    assert torch.equal(longer[:, :S], outputs)
    assert (longer[:, S:] == 0).all()


def test_what_stands_at_padding_is_never_read():
    encoder = make_encoder()
    tokens, lengths = draw_sources()
    outputs, state = encoder(tokens, lengths)
    padding = ~length_mask(lengths, S)[:, 0]
    for noise in (1, SOURCES - 1):
        found, last = encoder(tokens.masked_fill(padding, noise), lengths)
        assert torch.equal(found, outputs)
        assert torch.equal(last, state)
    assert (outputs[padding] == 0).all()
    with torch.no_grad():
        encoder.embedding.weight[0] = math.nan  # that of the padding
    found, last = encoder(tokens, lengths)
    assert torch.equal(found, outputs)
    assert torch.equal(last, state)


def test_a_sample_does_not_depend_on_its_neighbours_or_their_order():
    encoder = make_encoder()
    tokens, lengths = draw_sources()
    outputs, state = encoder(tokens, lengths)
    order = torch.tensor([3, 0, 4, 1, 2])
    mixed, mixed_state = encoder(tokens[order], lengths[order])
    close(mixed, outputs[order])
    close(mixed_state, state[order])
    for i, length in enumerate(LENGTHS):
        alone, last = encoder(tokens[i : i + 1, :length], lengths[i : i + 1])
        close(alone[0], outputs[i, :length])
        close(last[0], state[i])


def test_every_real_token_reaches_the_state():
    encoder = make_encoder(num_layers=1)
    tokens, lengths = draw_sources()
    _, state = encoder(tokens, lengths)
    for place in range(S):
        other = tokens.clone()
        other[:, place] = (other[:, place] + 1) % SOURCES
        _, changed = encoder(other, lengths)
        moved = (changed != state).any(-1).any(-1)
        assert torch.equal(moved, place < lengths)


@dtypes
def test_the_encoder_keeps_its_dtype(dtype):
    encoder = make_encoder()
    outputs, state = encoder(*draw_sources())
    found, last = encoder.to(dtype)(*draw_sources())
    assert found.dtype == last.dtype == dtype
    limit = 1e-5 if dtype == torch.float64 else TOLERANCE[dtype]
    assert_close(found.float(), outputs, atol=limit, rtol=limit)
    assert_close(last.float(), state, atol=limit, rtol=limit)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_lengths_may_be_any_integers(dtype):
    encoder = make_encoder()
    tokens, lengths = draw_sources()
    expected = encoder(tokens, lengths)
    found = encoder(tokens, lengths.to(dtype))
    assert all(map(torch.equal, found, expected))
    encoder(tokens.to(torch.int32), lengths)


@pytest.mark.parametrize("wrong", [0, -1, S + 1])
def test_lengths_out_of_range_are_refused(wrong):
    tokens, _ = draw_sources()
    lengths = torch.tensor([3, 2, wrong, 5, 7])
    with pytest.raises(ValueError, match=rf"{S}.*{wrong}"):
        make_encoder()(tokens, lengths)


def test_lengths_of_another_batch_are_refused():
    tokens, lengths = draw_sources()
    with pytest.raises(ValueError, match=r"\(3,\).*\(5, 11\)"):
        make_encoder()(tokens, lengths[:3])
    with pytest.raises(ValueError, match=r"\(1, 5\)"):
        make_encoder()(tokens, lengths[None])
    with pytest.raises(TypeError, match="float"):
        make_encoder()(tokens, lengths.float())


@pytest.mark.parametrize("place", range(4))
def test_an_encoder_of_no_size_is_refused(place):
    sizes = [7, 5, 3, 2]
    sizes[place] = 0
    with pytest.raises(ValueError, match="0"):
        RecurrentEncoder(*sizes)


def test_the_encoder_drops_in_training_only():
    encoder = make_encoder(dropout=0.5)
    sources = draw_sources()
    assert not torch.equal(encoder(*sources)[0], encoder(*sources)[0])
    encoder.eval()
    assert torch.equal(encoder(*sources)[0], encoder(*sources)[0])
    close(encoder(*sources)[0], make_encoder()(*sources)[0])


def test_every_parameter_of_the_encoder_learns_and_padding_teaches_nothing():
    encoder = make_encoder()
    tokens, lengths = draw_sources()
    outputs, state = encoder(tokens, lengths)
    (outputs.square().sum() + state.square().sum()).backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
    slope = encoder.embedding.weight.grad
    read = tokens[length_mask(lengths, S)[:, 0]].unique()
    assert slope[0].abs().sum() == 0
    assert (slope.abs().sum(-1) > 0).nonzero().flatten().tolist() == read.tolist()


# ----------------------------------------------------- decoders and models


@kinds
@layer_counts
def test_there_is_a_logit_for_every_target_token_and_word(kind, num_layers):
    model = make_model(kind, num_layers)
    tokens, lengths = draw_sources()
    logits = model(tokens, draw_targets(), lengths)
    assert logits.shape == (B, T, TARGETS)


@kinds
@layer_counts
def test_one_step_at_a_time_is_the_teacher_forced_pass(kind, num_layers):
    model = make_model(kind, num_layers).double()
    (tokens, lengths), targets = draw_sources(), draw_targets()
    logits = model(tokens, targets, lengths)
    state = model.start(tokens, lengths)
    for t in range(T):
        log_probs, state = model.step(targets[:, t], state)
        close(log_probs, logits[:, t].log_softmax(-1), torch.float64)
    for cut in (1, 3, T - 1):  # in two chunks, too
        state = model.start(tokens, lengths)
        first, state, _ = model.decoder(targets[:, :cut], state)
        second, _, _ = model.decoder(targets[:, cut:], state)
        close(torch.cat([first, second], 1), logits, torch.float64)


@kinds
def test_a_state_that_is_not_passed_on_gives_another_answer(kind):
    model = make_model(kind)
    (tokens, lengths), targets = draw_sources(), draw_targets()
    logits = model(tokens, targets, lengths)
    state = model.start(tokens, lengths)
    stuck = torch.stack([model.step(each, state)[0] for each in targets.T], 1)
    right = logits.log_softmax(-1)
    close(stuck[:, 0], right[:, 0])
    assert ((stuck - right).abs().amax((0, 2))[1:] > 1e-3).all()


@kinds
def test_no_state_is_changed_by_decoding_from_it(kind):
    model = make_model(kind)
    (tokens, lengths), targets = draw_sources(), draw_targets()
    state = model.start(tokens, lengths)
    before = copy.deepcopy([each.detach() for each in leaves(state)])
    first, after, _ = model.decoder(targets, state)
    again, _, _ = model.decoder(targets, state)
    assert torch.equal(first, again)
    assert all(map(torch.equal, before, leaves(state)))
    assert len(leaves(after)) == len(before)
    assert all(len(each) == B for each in leaves(after)), "batch axis first"


@kinds
def test_a_later_target_token_moves_no_earlier_logit(kind):
    model = make_model(kind)
    for mode in (True, False):
        model.train(mode)
        (tokens, lengths), targets = draw_sources(), draw_targets()
        logits = model(tokens, targets, lengths)
        for place in range(T):
            other = targets.clone()
            other[:, place] = (other[:, place] + 3) % TARGETS
            changed = model(tokens, other, lengths)
            assert torch.equal(changed[:, :place], logits[:, :place])
            assert (changed[:, place] != logits[:, place]).any(-1).all()


@kinds
def test_the_padding_of_a_source_changes_no_logit(kind):
    model = make_model(kind)
    (tokens, lengths), targets = draw_sources(), draw_targets()
    logits = model(tokens, targets, lengths)
    padding = ~length_mask(lengths, S)[:, 0]
    assert torch.equal(model(tokens.masked_fill(padding, SOURCES - 1), targets, lengths), logits), (
        "equal shapes, equal bits"
    )
    longer = nn.functional.pad(tokens, (0, 6), value=9)
    close(model(longer, targets, lengths), logits)


@kinds
def test_a_sentence_is_translated_alone_as_in_a_batch(kind):
    model = make_model(kind).double()
    (tokens, lengths), targets = draw_sources(), draw_targets()
    logits = model(tokens, targets, lengths)
    for i, length in enumerate(LENGTHS):
        one = tokens[i : i + 1, :length], targets[i : i + 1], lengths[i : i + 1]
        close(model(*one)[0], logits[i], torch.float64)
        state = row(model.start(tokens, lengths), i)
        close(model.decoder(targets[i : i + 1], state)[0][0], logits[i], torch.float64)


@kinds
@dtypes
def test_the_model_keeps_its_dtype(kind, dtype):
    model = make_model(kind)
    (tokens, lengths), targets = draw_sources(), draw_targets()
    logits = model(tokens, targets, lengths)
    found = model.to(dtype)(tokens, targets, lengths)
    assert found.dtype == dtype
    limit = {torch.float64: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}.get(dtype, 2e-6)
    assert_close(found.float(), logits, atol=limit, rtol=limit)


@kinds
def test_every_parameter_learns_and_padding_teaches_nothing(kind):
    model = make_model(kind)
    tokens, lengths = draw_sources()
    targets = draw_targets()
    targets[2, 4:] = 0
    translation_loss(model, (tokens, lengths, targets)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name
    assert (model.encoder.embedding.weight.grad[0] == 0).all()


@kinds
def test_the_loss_ignores_what_is_taught_at_padding(kind):
    model = make_model(kind)
    tokens, lengths = draw_sources()
    targets = draw_targets()
    targets[:, 5:] = 0
    loss = translation_loss(model, (tokens, lengths, targets))
    longer = nn.functional.pad(targets, (0, 9))
    close(translation_loss(model, (tokens, lengths, longer)), loss)
    logits = model(tokens, targets[:, :4], lengths).log_softmax(-1)
    wanted = targets[:, 1:5, None]
    close(loss, -logits.gather(2, wanted).mean())


@kinds
@pytest.mark.parametrize(("num_layers", "context_size"), [(3, 2 * WIDTH), (2, WIDTH)])
def test_an_encoder_that_does_not_fit_the_decoder_is_refused(kind, num_layers, context_size):
    decoder = KINDS[kind](TARGETS, 5, 17, num_layers, context_size)
    model = Seq2Seq(make_encoder(num_layers=2), decoder)
    with pytest.raises(ValueError, match=rf"\(5, 2, 26\).* {num_layers} .* {context_size}"):
        model(draw_sources()[0], draw_targets(), draw_sources()[1])


@kinds
def test_targets_that_do_not_fit_the_sources_are_refused(kind):
    model, (tokens, lengths) = make_model(kind), draw_sources()
    with pytest.raises(ValueError, match=r"\(3, 7\).* 5"):
        model(tokens, draw_targets()[:3], lengths)
    with pytest.raises(ValueError, match=r"\(5, 7\).* 1"):
        model(tokens[:1], draw_targets(), lengths[:1])
    with pytest.raises(ValueError, match=r"\(5, 0\)"):
        model(tokens, draw_targets()[:, :0], lengths)


@kinds
def test_a_fresh_model_knows_nothing(kind):
    model = make_model(kind)
    loss = translation_loss(model, (*draw_sources(), draw_targets()))
    assert loss.item() == pytest.approx(math.log(TARGETS), abs=0.3)


@kinds
def test_dropout_acts_in_training_only(kind):
    model = make_model(kind, dropout=0.4)
    inputs = draw_sources()[0], draw_targets(), draw_sources()[1]
    assert not torch.equal(model(*inputs), model(*inputs))
    model.eval()
    assert torch.equal(model(*inputs), model(*inputs))
    close(model(*inputs), make_model(kind)(*inputs))


@kinds
def test_embedded_tokens_layers_and_weights_are_what_is_dropped(kind):
    model, used = make_model(kind, dropout=0.4), set()
    for name, part in model.named_modules():
        if isinstance(part, nn.Dropout):
            part.register_forward_hook(lambda *_, name=name: used.add(name))
            assert part.p == 0.4
        if isinstance(part, nn.GRU):
            assert part.dropout == 0.4, "between its layers"
    model(draw_sources()[0], draw_targets(), draw_sources()[1])
    expected = {"encoder.dropout", "decoder.dropout"}
    assert used == expected | ({"decoder.attention.dropout"} if kind == "bahdanau" else set())


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("place", range(5))
def test_a_decoder_of_no_size_is_refused(kind, place):
    sizes = [7, 5, 3, 2, 11]
    sizes[place] = 0
    with pytest.raises(ValueError, match="0"):
        kind(*sizes)


@kinds
def test_nothing_of_a_batch_stays_on_the_model(kind):
    model = make_model(kind)
    inputs = draw_sources()[0], draw_targets(), draw_sources()[1]
    names = {name for module in model.modules() for name in vars(module)}
    stored = {*model.state_dict()}
    model(*inputs)
    copy.deepcopy(model)
    assert {name for module in model.modules() for name in vars(module)} == names
    assert {*model.state_dict()} == stored


# --------------------------------------------------------------- attention


def decode_with_weights(model, targets=None):
    tokens, lengths = draw_sources()
    targets = draw_targets() if targets is None else targets
    return model.decoder(targets, model.start(tokens, lengths), need_weights=True)


def test_weights_come_when_asked_for_and_the_baseline_has_none():
    (tokens, lengths), targets = draw_sources(), draw_targets()
    model = make_model("bahdanau")
    state = model.start(tokens, lengths)
    logits, _, weights = model.decoder(targets, state)
    assert weights is None
    same, _, weights = decode_with_weights(model)
    assert weights.shape == (B, T, S)
    assert torch.equal(logits, same)
    assert decode_with_weights(make_model("recurrent"))[2] is None


@dtypes
def test_the_weights_of_a_step_sum_to_one_and_are_zero_at_padding(dtype):
    _, _, weights = decode_with_weights(make_model("bahdanau").to(dtype))
    limit = TOLERANCE[dtype]
    assert_close(weights.sum(-1).float(), torch.ones(B, T), atol=limit, rtol=limit)
    padding = ~length_mask(torch.tensor(LENGTHS), S)
    assert (weights.masked_select(padding) == 0).all()
    assert (weights.masked_select(~padding.expand_as(weights)) > 0).all()
    assert (weights[1, :, 0] == 1).all(), "one word takes it all"


def test_the_weights_are_those_before_dropout():
    model = make_model("bahdanau", dropout=0.5)
    _, _, weights = decode_with_weights(model)
    assert model.training
    close(weights.sum(-1), torch.ones(B, T))
    assert (weights <= 1).all()
    attention = model.decoder.attention
    query, keys, values = torch.randn(B, 17), torch.randn(B, S, 17), torch.randn(B, S, 2 * WIDTH)
    mask = length_mask(torch.tensor(LENGTHS), S)
    contexts = [look_up(attention, query, keys, values, mask)[0] for _ in range(2)]
    assert not torch.equal(*contexts), "but dropout does act on the context"


def test_the_attention_with_projected_keys_is_the_additive_attention():
    torch.manual_seed(2)
    attention = AdditiveAttention(17, 29, 31).double()
    query = torch.randn(B, 17, dtype=torch.float64)
    values = torch.randn(B, S, 29, dtype=torch.float64)
    mask = length_mask(torch.tensor(LENGTHS), S)
    keys = attention.score.key_layer(values)
    context, weights = look_up(attention, query, keys, values, mask)
    expected = attention(query[:, None], values, values, mask, need_weights=True)
    close(context, expected[0][:, 0], torch.float64)
    close(weights, expected[1], torch.float64)


def bahdanau_by_hand(model, tokens, targets):
    """Translate one sentence by the three equations, a number at a time."""
    decoder, score = model.decoder, model.decoder.attention.score
    outputs, state = model.encoder(tokens[None], torch.tensor([len(tokens)]))
    annotations = outputs[0]  # h_1 … h_S
    layers = decoder.rnn.num_layers
    hidden = [torch.tanh(decoder.bridge(state[0, each])) for each in range(layers)]
    logits, rows = [], []
    for token in targets:
        scores = [
            score.score_layer.weight[0]
            @ torch.tanh(score.query_layer.weight @ hidden[-1] + score.key_layer.weight @ each)
            for each in annotations
        ]
        exps = torch.stack(scores).exp()
        alpha = exps / exps.sum()
        context = sum(a * each for a, each in zip(alpha, annotations, strict=True))
        x = torch.cat([decoder.embedding.weight[token], context])
        for each in range(layers):
            hidden[each] = x = gru_by_hand(x[None], hidden[each], decoder.rnn, f"l{each}")[0]
        logits.append(decoder.output(torch.cat([x, context])))
        rows.append(alpha)
    return torch.stack(logits), torch.stack(rows)


@layer_counts
def test_the_decoder_is_a_loop_over_the_three_equations(num_layers):
    model = make_model("bahdanau", num_layers).double()
    (tokens, _), targets = draw_sources(), draw_targets()
    logits, _, weights = decode_with_weights(model)
    for i, length in enumerate(LENGTHS):
        expected = bahdanau_by_hand(model, tokens[i, :length], targets[i])
        close(logits[i], expected[0], torch.float64)
        close(weights[i, :, :length], expected[1], torch.float64)


@layer_counts
def test_the_baseline_is_a_loop_with_one_context(num_layers):
    model = make_model("recurrent", num_layers).double()
    (tokens, lengths), targets = draw_sources(), draw_targets()
    logits = model(tokens, targets, lengths)
    decoder = model.decoder
    for i, length in enumerate(LENGTHS):
        _, state = model.encoder(tokens[i : i + 1, :length], lengths[i : i + 1])
        hidden = [torch.tanh(decoder.bridge(each)) for each in state[0]]
        for t, token in enumerate(targets[i]):
            x = torch.cat([decoder.embedding.weight[token], state[0, -1]])
            for each in range(num_layers):
                hidden[each] = x = gru_by_hand(x[None], hidden[each], decoder.rnn, f"l{each}")[0]
            expected = decoder.output(torch.cat([x, state[0, -1]]))
            close(logits[i, t], expected, torch.float64)


def test_the_keys_are_projected_once_and_not_at_every_step():
    model = make_model("bahdanau")
    layer, calls = model.decoder.attention.score.key_layer, []
    layer.register_forward_hook(lambda *_: calls.append(1))
    decode_with_weights(model)
    assert len(calls) == 1
    greedy_decode(model.step, model.start(*draw_sources()), bos_id=1, eos_id=2, max_len=5)
    assert len(calls) == 2


def test_what_stands_at_padded_keys_does_not_reach_the_decoder():
    model = make_model("bahdanau")
    tokens, lengths = draw_sources()
    outputs, state = model.encoder(tokens, lengths)
    logits = model(tokens, draw_targets(), lengths)
    padding = ~length_mask(lengths, S)[:, 0]
    for bad in (math.nan, math.inf, 1e30):
        spoiled = outputs.masked_fill(padding[..., None], bad).detach().requires_grad_()
        start = model.decoder.start(spoiled, state, lengths)
        found, _, _ = model.decoder(draw_targets(), start)
        assert torch.equal(found, logits)
        (slope,) = torch.autograd.grad(found.sum(), spoiled)
        assert (slope[padding] == 0).all()


def test_the_query_is_the_state_before_the_step():
    model = make_model("bahdanau")
    (_, lengths), targets = draw_sources(), draw_targets()
    _, _, weights = decode_with_weights(model)
    other = targets.clone()
    other[:, 2] = (other[:, 2] + 1) % TARGETS
    _, _, changed = decode_with_weights(model, other)
    assert torch.equal(changed[:, :3], weights[:, :3]), "not that of the token's own step"
    long = lengths > 1
    assert (changed[long, 3] != weights[long, 3]).any(-1).all()


# ------------------------------------------------------------- translation


@pytest.fixture(scope="module")
def learned():
    """Train a small model until it knows nine numbers by heart."""
    pytest.importorskip("num2words", reason="a package of section 4")
    pairs = number_pairs(list(range(61, 70)), 1, 9)
    vocabularies = number_vocabularies(number_parts()[0])
    english, german = vocabularies
    torch.manual_seed(0)
    model = Seq2Seq(
        RecurrentEncoder(len(english), 16, 16, 1, dropout=0.1),
        BahdanauDecoder(len(german), 16, 32, 1, 32, dropout=0.1),
    )
    batch = encode_pairs(pairs, vocabularies)
    losses, _ = train(model, translation_loss, itertools.repeat(batch), steps=90, rate=2e-2)
    assert losses[-1] < losses[0] / 10
    return model, pairs, vocabularies


def test_a_small_model_learns_nine_numbers_by_heart(learned):
    model, pairs, vocabularies = learned
    assert exact_match(model, pairs, vocabularies) == 1
    found = translate(model, [english for english, _ in pairs], vocabularies)
    assert found == [german for _, german in pairs]


def test_exact_match_counts_whole_sentences(learned):
    model, pairs, vocabularies = learned
    spoiled = [(pairs[0][0], [*pairs[0][1], "und"]), (pairs[1][0], pairs[1][1][:-1])]
    assert exact_match(model, [*spoiled, *pairs[2:]], vocabularies) == pytest.approx(7 / 9)
    assert exact_match(model, pairs, vocabularies, max_len=2) == 0


def test_a_translation_is_the_same_twice_alone_and_in_any_company(learned):
    model, pairs, vocabularies = learned
    sentences = [english for english, _ in pairs]
    sentences += [["six", "hundred"], ["six", ",", "sixty", "one", ",", "nine"]]
    model.train()
    found = translate(model, sentences, vocabularies)
    assert model.training
    assert all(part.training for part in model.modules())
    assert translate(model, sentences, vocabularies) == found
    assert translate(model, sentences[::-1], vocabularies)[::-1] == found
    for sentence, words in zip(sentences, found, strict=True):
        assert translate(model, [sentence], vocabularies) == [words]
    model.eval()
    assert translate(model, sentences, vocabularies) == found


def test_a_beam_finds_what_the_model_was_taught(learned):
    model, pairs, vocabularies = learned
    source, source_lens, _ = encode_pairs(pairs[:1], vocabularies)
    with evaluating(model):
        state = model.start(source, source_lens)
        found = beam_search(
            model.step, state, bos_id=1, eos_id=2, beam_size=4, max_len=9, length_penalty=0.6
        )
        ids, score = found[0]
        target = torch.tensor([[1, *ids]])
        log_probs = model(source, target[:, :-1], source_lens).log_softmax(-1)
    assert vocabularies[1].decode(ids) == pairs[0][1]
    total = log_probs.gather(2, target[:, 1:, None]).sum().item()
    assert score == pytest.approx(total / len(ids) ** 0.6, rel=1e-4, abs=1e-6)


# ---------------------------------------------------------------- decoding


BOS, EOS = 0, 1


class Toy:
    """A language model whose every prefix has its own distribution.

    The state holds a prefix as a number, (N,) or in any nest of tensors, all
    of which must agree whenever it is stepped: a beam that forgets to
    reorder one of them is found out.
    """

    def __init__(self, size, max_len, seed, barred=0.0, dtype=torch.float64):
        generator = torch.Generator().manual_seed(seed)
        rows = sum(size**i for i in range(max_len + 2))
        logits = 2 * torch.randn(rows, size, generator=generator, dtype=torch.float64)
        if barred:
            gone = torch.rand(rows, size, generator=generator) < barred
            gone[:, -1] &= ~gone[:, :-1].all(dim=-1)  # one way on is left
            logits = logits.masked_fill(gone, -math.inf)
        self.size, self.table, self.calls = size, logits.log_softmax(-1).to(dtype), 0
        self.kinds = set()  # of state

    def step(self, tokens, state):
        assert tokens.dtype == torch.int64
        assert tokens.ndim == 1
        self.kinds.add(type(state))
        parts = leaves(state)
        assert all(len(part) == len(tokens) for part in parts)
        codes = parts[0].reshape(len(tokens), -1)[:, 0]
        for part in parts:
            assert torch.equal(part.reshape(len(tokens), -1)[:, -1], codes)
        if self.calls == 0:
            assert (tokens == BOS).all()
            new = codes
        else:
            new = codes * self.size + tokens + 1
        self.calls += 1
        return self.table[new % len(self.table)], mapped(state, codes, new)

    def log_prob(self, ids, start=0):
        code, total = start, 0.0
        for i in ids:
            total += self.table[code % len(self.table), i].item()
            code = code * self.size + i + 1
        return total


def leaves(state):
    """List the tensors of a nest of tuples, lists and dicts."""
    if torch.is_tensor(state):
        return [state]
    parts = state.values() if isinstance(state, dict) else state
    return [leaf for part in parts for leaf in leaves(part)]


def mapped(state, old, new):
    """Put new codes where the old ones were, in the same nest."""
    if torch.is_tensor(state):
        return new.reshape(-1, *(1,) * (state.ndim - 1)).expand(state.shape).clone()
    if isinstance(state, dict):
        return {key: mapped(part, old, new) for key, part in state.items()}
    parts = [mapped(part, old, new) for part in state]
    return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)


class Pair(NamedTuple):
    """A state with names: a tuple too."""

    one: torch.Tensor
    two: torch.Tensor


NESTS = {
    "tensor": lambda codes: codes,
    "matrix": lambda codes: codes[:, None].expand(-1, 3),
    "tuple": lambda codes: (codes, codes[:, None, None].expand(-1, 2, 5)),
    "list": lambda codes: [codes[:, None], codes],
    "dict": lambda codes: {"one": codes, "two": codes[:, None].expand(-1, 7)},
    "namedtuple": lambda codes: Pair(codes, two=codes[:, None]),
    "nested": lambda codes: {"one": codes, "two": (codes, [codes[:, None]])},
}
nests = pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)


def codes(*values):
    return torch.tensor(values, dtype=torch.int64)


def options(max_len, **others):
    return {"bos_id": BOS, "eos_id": EOS, "max_len": max_len, **others}


def as_list(ids):
    return [int(i) for i in ids]


def cut(ids):
    """Keep a row of `greedy_decode` up to its first eos, eos included."""
    ids = as_list(ids)
    return ids[: ids.index(EOS) + 1] if EOS in ids else ids


def one_greedy(toy, start, max_len):
    """Decode greedily in plain Python."""
    ids, code = [], start
    while len(ids) < max_len and EOS not in ids:
        ids.append(toy.table[code % len(toy.table)].argmax().item())
        code = code * toy.size + ids[-1] + 1
    return ids


def everything(toy, max_len, penalty=0.0):
    """Score every hypothesis that the model allows, best first."""
    found, inner = [], [i for i in range(toy.size) if i != EOS]
    for length in range(1, max_len + 1):
        for head in itertools.product(inner, repeat=length - 1):
            for last in range(toy.size) if length == max_len else (EOS,):
                ids = [*head, last]
                score = toy.log_prob(ids) / length**penalty
                if score > -math.inf:
                    found.append((ids, score))
    return sorted(found, key=lambda pair: -pair[1])


def beams(toy, max_len, nest=NESTS["tensor"], **others):
    found = beam_search(toy.step, nest(codes(0)), **options(max_len, **others))
    assert isinstance(found, list)
    return [(as_list(ids), float(score)) for ids, score in found]


# ------------------------------------------------------------------ greedy


@nests
@pytest.mark.parametrize("max_len", [1, 2, 5])
def test_greedy_takes_the_likeliest_token_of_every_sample(nest, max_len):
    starts = [0, 3, 11, 2, 8, 19, 5]
    toy = Toy(5, 4, seed=1)
    ids = greedy_decode(toy.step, nest(codes(*starts)), **options(max_len))
    assert ids.dtype == torch.int64
    assert ids.shape[0] == len(starts)
    assert ids.shape[1] <= max_len
    for row, start in zip(ids, starts, strict=True):
        assert cut(row) == one_greedy(toy, start, max_len)


def ending(ends, size=5):
    """Make a step that emits 3 until eos at the given step of each sample."""
    ends, count = torch.tensor(ends), []

    def step(tokens, state):
        count.append(tokens)
        logits = torch.zeros(len(tokens), size)
        over = ends == len(count)
        logits[torch.arange(len(tokens)), torch.where(over, EOS, 3)] = 5.0
        logits[ends < len(count), 4] = 9.0  # what comes after the end is noise
        return logits.log_softmax(-1), state

    return step, count


def test_after_its_end_a_sample_is_filled_with_eos():
    step, count = ending([1, 4, 2])
    ids = greedy_decode(step, torch.zeros(3, 2), **options(11))
    assert ids.tolist() == [[1, 1, 1, 1], [3, 3, 3, 1], [3, 1, 1, 1]]
    assert len(count) == 4, "it stops when all have ended"


def test_eos_at_once_is_one_step_and_one_column():
    step, count = ending([1, 1])
    assert greedy_decode(step, torch.zeros(2, 3), **options(7)).tolist() == [[1], [1]]
    assert len(count) == 1


def test_greedy_stops_at_max_len_without_eos():
    step, count = ending([9, 2])
    ids = greedy_decode(step, torch.zeros(2, 1), **options(3))
    assert ids.tolist() == [[3, 3, 3], [3, 1, 1]]
    assert len(count) == 3


def test_eos_counts_as_a_token_of_max_len():
    step, _ = ending([3])
    assert greedy_decode(step, torch.zeros(1, 1), **options(3)).tolist() == [[3, 3, 1]]
    step, _ = ending([3])
    assert greedy_decode(step, torch.zeros(1, 1), **options(2)).tolist() == [[3, 3]]


def test_max_len_zero_gives_no_column_and_steps_not_once():
    step, count = ending([2, 2, 2])
    ids = greedy_decode(step, torch.zeros(3, 1), **options(0))
    assert ids.shape == (3, 0)
    assert ids.dtype == torch.int64
    assert not count


@nests
def test_greedy_treats_the_samples_of_a_batch_apart(nest):
    starts = [7, 1, 4, 13]
    toy = Toy(4, 4, seed=6)
    together = greedy_decode(toy.step, nest(codes(*starts)), **options(6))
    for row, start in zip(together, starts, strict=True):
        toy.calls = 0
        alone = greedy_decode(toy.step, nest(codes(start)), **options(6))[0]
        assert cut(row) == cut(alone)
        assert (row[len(cut(row)) :] == EOS).all()


def test_the_tokens_that_greedy_feeds_are_the_ones_it_returns():
    step, count = ending([9, 9])
    ids = greedy_decode(step, torch.zeros(2, 1), **options(4))
    fed = torch.stack(count, dim=1)
    assert (fed[:, 0] == BOS).all()
    assert torch.equal(fed[:, 1:], ids[:, :-1])


def test_bos_and_eos_may_be_any_ids():
    seen = []

    def step(tokens, state):
        seen.append(tokens.tolist())
        logits = torch.zeros(len(tokens), 9)
        logits[:, 7 if len(seen) == 2 else 2] = 1.0
        return logits, state

    ids = greedy_decode(step, torch.zeros(1, 1), bos_id=8, eos_id=7, max_len=5)
    assert ids.tolist() == [[2, 7]]
    assert seen == [[8], [2]]
    seen.clear()
    best = beam_search(step, torch.zeros(1, 1), bos_id=8, eos_id=7, beam_size=1, max_len=5)
    assert as_list(best[0][0]) == [2, 7]
    assert seen == [[8], [2]]


@nests
@pytest.mark.parametrize("search", ["greedy", "beam"])
def test_decoding_leaves_the_given_state_as_it_was(nest, search):
    toy, state = Toy(4, 4, seed=2), nest(codes(0))
    before = copy.deepcopy(state)
    if search == "greedy":
        greedy_decode(toy.step, state, **options(4))
    else:
        beam_search(toy.step, state, **options(4, beam_size=3))
    assert all(map(torch.equal, leaves(before), leaves(state)))


@pytest.mark.parametrize("search", ["greedy", "beam"])
def test_decoding_keeps_no_graph_and_leaves_the_grad_mode(search):
    weight = torch.randn(4, 4, requires_grad=True)

    def step(tokens, state):
        assert not torch.is_grad_enabled()
        return weight[tokens].log_softmax(-1), state

    if search == "greedy":
        found = [greedy_decode(step, torch.zeros(2, 1), **options(4))]
    else:
        found = beam_search(step, torch.zeros(1, 1), **options(4, beam_size=2))
        found = [part for pair in found for part in pair]
    assert not any(getattr(part, "requires_grad", False) for part in found)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_decoding_takes_log_probabilities_of_every_dtype(dtype):
    toy = Toy(3, 3, seed=9, dtype=dtype)
    assert cut(greedy_decode(toy.step, codes(0), **options(3))[0]) == one_greedy(toy, 0, 3)
    toy.calls = 0
    found = beams(toy, 3, beam_size=40)
    for ids, score in found:
        assert score == pytest.approx(toy.log_prob(ids), abs=1e-5)


# -------------------------------------------------------------------- beam


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("barred", [0.0, 0.4])
@pytest.mark.parametrize(("size", "max_len"), [(2, 1), (2, 6), (3, 4), (4, 3), (5, 3)])
def test_a_beam_as_wide_as_everything_is_brute_force(size, max_len, barred, penalty):
    for seed in range(3):
        toy = Toy(size, max_len, seed, barred)
        expected = everything(toy, max_len, penalty)
        found = beams(toy, max_len, beam_size=size**max_len, length_penalty=penalty)
        assert found, "some hypothesis is always there"
        for (ids, score), (right, best) in zip(found, expected, strict=False):
            assert score == pytest.approx(best, abs=1e-9)
            assert score == pytest.approx(toy.log_prob(ids) / len(ids) ** penalty, abs=1e-9)
            assert ids == right


def test_a_beam_wider_than_everything_lists_every_hypothesis():
    for barred in (0.0, 0.5):
        toy = Toy(3, 4, 4, barred)
        found = beams(toy, 4, beam_size=1009)
        assert [ids for ids, _ in found] == [ids for ids, _ in everything(toy, 4)]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 4),
    st.integers(1, 5),
    st.integers(1, 7),
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([0.0, 0.7, 1.0]),
)
def test_what_a_narrow_beam_returns_is_true(size, max_len, width, seed, barred, penalty):
    toy = Toy(size, max_len, seed, barred)
    found = beams(toy, max_len, beam_size=width, length_penalty=penalty)
    assert found
    scores = [score for _, score in found]
    assert scores == sorted(scores, reverse=True), "best first"
    assert len({tuple(ids) for ids, _ in found}) == len(found), "no hypothesis twice"
    assert len(found) <= width
    best = everything(toy, max_len, penalty)[0][1]
    for ids, score in found:
        assert score == pytest.approx(toy.log_prob(ids) / len(ids) ** penalty, abs=1e-9)
        assert -math.inf < score <= best + 1e-9
        assert EOS not in ids[:-1]
        assert ids[-1] == EOS or len(ids) == max_len
        assert 1 <= len(ids) <= max_len


def plain_beam(toy, width, max_len):
    """Search in plain Python: the `width` best ways on; those that end leave."""
    alive, ended = [([], 0.0)], []
    for _ in range(max_len):
        ways = [([*ids, i], toy.log_prob([*ids, i])) for ids, _ in alive for i in range(toy.size)]
        ways = sorted((way for way in ways if way[1] > -math.inf), key=lambda way: -way[1])
        ended += [way for way in ways[:width] if way[0][-1] == EOS]
        alive = [way for way in ways[:width] if way[0][-1] != EOS]
    return max([*ended, *alive], key=lambda way: way[1])


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_a_narrow_beam_keeps_the_best_ways_on(width):
    for seed in range(30):
        toy = Toy(4, 5, seed, barred=0.3 * (seed % 2))
        ids, score = plain_beam(toy, width, 5)
        found = beams(toy, 5, beam_size=width)
        assert found[0][1] == pytest.approx(score, abs=1e-9)
        assert found[0][0] == ids


@nests
def test_a_beam_of_one_is_greedy(nest):
    for seed in range(20):
        toy = Toy(4, 5, seed)
        (ids, score), *others = beams(toy, 5, nest, beam_size=1)
        assert not others
        assert ids == one_greedy(toy, 0, 5)
        assert score == pytest.approx(toy.log_prob(ids), abs=1e-9)


@nests
def test_the_state_follows_its_hypothesis(nest):
    toy = Toy(4, 4, seed=8)
    found = beams(toy, 4, nest, beam_size=300)
    assert toy.kinds == {type(nest(codes(0)))}
    assert [ids for ids, _ in found] == [ids for ids, _ in everything(toy, 4)]


def counter_example():
    """Make the model of the text: a 0.50, b 0.42; then a trap for beams."""
    third = [1 / 3] * 3

    def step(tokens, state):
        rows = []
        for row in state.tolist():
            prefix = [i for i in row if i >= 0]
            rows.append(
                {
                    (): [0.50, 0.42, 0.08],
                    (2,): [0.34, 0.33, 0.33],
                    (3,): [0.48, 0.48, 0.04],
                    (2, 2): [1.0, 0.0, 0.0],
                }.get(tuple(prefix), third)
            )
        probs = torch.tensor(rows, dtype=torch.float64)
        return torch.cat([torch.zeros(len(rows), 2), probs], -1).log(), state

    def counted(tokens, state):
        if (tokens != BOS).any():
            filled = (state >= 0).sum(-1)
            state = state.clone()
            state[torch.arange(len(state)), filled] = tokens
        return step(tokens, state)

    return counted, torch.full((1, 3), -1)


def test_a_beam_of_two_can_end_below_greedy():
    step, state = counter_example()
    greedy = greedy_decode(step, state, **options(3))
    assert greedy.tolist() == [[2, 2, 2]]  # 0.50 · 0.34 · 1 = 0.17
    ids, score = beam_search(step, state, **options(3, beam_size=2))[0]
    assert math.exp(score) == pytest.approx(0.42 * 0.48 / 3)
    assert as_list(ids)[0] == 3
    ids, score = beam_search(step, state, **options(3, beam_size=3))[0]
    assert as_list(ids) == [2, 2, 2]
    assert math.exp(score) == pytest.approx(0.17)


def chain(*rows):
    """Make a step whose distribution depends on the place alone."""
    table = torch.tensor(rows, dtype=torch.float64).log()

    def step(tokens, state):
        return table[state[:, 0]], state + 1

    return step, torch.zeros(1, 1, dtype=torch.int64)


def test_the_length_penalty_changes_the_winner_and_divides_as_stated():
    # eos at once: ln 0.4. Two tokens: ln 0.6 + ln 0.6 = ln 0.36.
    step, state = chain([0.0, 0.4, 0.6], [0.0, 0.6, 0.4], [0.0, 0.5, 0.5])
    plain = beam_search(step, state, **options(2, beam_size=5))
    assert as_list(plain[0][0]) == [1]
    assert plain[0][1] == pytest.approx(math.log(0.4))
    for penalty in (0.5, 1.0, 3.0):
        found = beam_search(step, state, **options(2, beam_size=5, length_penalty=penalty))
        assert as_list(found[0][0]) == [2, 1]
        assert found[0][1] == pytest.approx(math.log(0.36) / 2**penalty)


def test_a_negative_length_penalty_prefers_the_short():
    step, state = chain([0.0, 0.45, 0.55], [0.0, 0.99, 0.01])
    assert as_list(beam_search(step, state, **options(2, beam_size=5))[0][0]) == [2, 1]
    found = beam_search(step, state, **options(2, beam_size=5, length_penalty=-1.0))
    assert as_list(found[0][0]) == [1]
    assert found[0][1] == pytest.approx(math.log(0.45))


def test_an_early_end_does_not_stop_the_search_for_a_better_long_one():
    # After one step the finished "eos" leads; with the penalty, length wins.
    rows = [[0.0, 0.6, 0.4], *[[0.0, 0.01, 0.99]] * 5, [0.0, 0.99, 0.01]]
    step, state = chain(*rows)
    found = beam_search(step, state, **options(7, beam_size=2, length_penalty=1.0))
    assert as_list(found[0][0]) == [2] * 6 + [1]
    score = (math.log(0.4) + 6 * math.log(0.99)) / 7
    assert found[0][1] == pytest.approx(score)


def test_unfinished_hypotheses_are_in_the_list():
    step, state = chain([0.0, 0.1, 0.9], [0.0, 0.2, 0.8])
    found = beam_search(step, state, **options(2, beam_size=9))
    assert [as_list(ids) for ids, _ in found] == [[2, 2], [2, 1], [1]]
    assert [math.exp(score) for _, score in found] == pytest.approx([0.72, 0.18, 0.1])


def test_a_finished_hypothesis_is_never_extended():
    sent = []

    def step(tokens, state):
        sent.extend(tokens.tolist())
        return torch.full((len(tokens), 3), 1 / 3).log(), state

    beam_search(step, torch.zeros(1, 1), **options(4, beam_size=4))
    assert EOS not in sent


def test_the_beam_stops_when_nothing_is_left_alive():
    step, count = ending([2])

    def certain(tokens, state):
        log_probs, state = step(tokens, state)
        sure = torch.full_like(log_probs, -math.inf)
        return sure.scatter(1, log_probs.argmax(-1, keepdim=True), 0.0), state

    found = beam_search(certain, torch.zeros(1, 1), **options(50, beam_size=3))
    assert [as_list(ids) for ids, _ in found] == [[3, 1]]
    assert found[0][1] == 0
    assert len(count) == 2


@pytest.mark.parametrize("wrong", [{"beam_size": 0}, {"beam_size": -3}])
def test_a_beam_without_width_is_refused(wrong):
    toy = Toy(3, 2, 0)
    with pytest.raises(ValueError, match=str(wrong["beam_size"])):
        beam_search(toy.step, codes(0), **options(2, **wrong))


def test_a_negative_max_len_is_refused():
    toy = Toy(3, 2, 0)
    with pytest.raises(ValueError, match="-1"):
        greedy_decode(toy.step, codes(0), **options(-1))
    with pytest.raises(ValueError, match="-2"):
        beam_search(toy.step, codes(0), **options(-2, beam_size=2))


def test_a_beam_takes_one_sequence():
    toy = Toy(3, 2, 0)
    with pytest.raises(ValueError, match="2"):
        beam_search(toy.step, codes(0, 1), **options(2, beam_size=2))


def test_a_state_of_two_batch_sizes_is_refused():
    toy = Toy(3, 2, 0)
    with pytest.raises(ValueError, match=r"2.*3|3.*2"):
        greedy_decode(toy.step, (codes(0, 1), codes(0, 1, 2)), **options(2))


def test_no_step_is_one_empty_hypothesis():
    toy = Toy(3, 2, 0)
    assert beams(toy, 0, beam_size=3, length_penalty=1.0) == [([], 0.0)]
    assert toy.calls == 0


def test_a_nan_is_not_searched_for():
    def step(tokens, state):
        return torch.tensor([[math.nan, 0.0, 0.0]]), state

    with pytest.raises(ValueError, match="NaN"):
        beam_search(step, codes(0), **options(2, beam_size=2))


@pytest.mark.parametrize("penalty", [math.nan, math.inf])
def test_a_length_penalty_that_is_no_number_is_refused(penalty):
    with pytest.raises(ValueError, match=str(penalty)):
        beam_search(Toy(3, 2, 0).step, codes(0), **options(2, beam_size=2, length_penalty=penalty))


@pytest.mark.parametrize("state", [(), {}, torch.tensor(1.0), [codes(0), torch.tensor(0)]])
def test_a_state_without_a_batch_axis_is_refused(state):
    with pytest.raises(ValueError, match="batch"):
        greedy_decode(Toy(3, 2, 0).step, state, **options(2))


def test_a_state_that_holds_no_tensor_is_refused():
    with pytest.raises(TypeError, match="str"):
        greedy_decode(Toy(3, 2, 0).step, (codes(0), "state"), **options(2))
