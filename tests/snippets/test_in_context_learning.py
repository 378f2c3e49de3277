"""Prove that dictionaries, scores and knock-outs measure what the section says."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from snippets.in_context_learning import (
    AttentionLayer,
    AttentionOnly,
    after_copies,
    by_layer,
    draw_dictionaries,
    draw_repeats,
    draw_shifts,
    endless,
    expected_accuracy,
    induction_score,
    interleave,
    next_loss,
    previous_score,
    repeat_loss,
    right_symbols,
    symbol_loss,
)

# Axes: a prime each, so that no swapped axis can pass.
B, T, VOCAB = 2, 7, 11
HEADS, HEAD_SIZE, LAYERS = 3, 2, 5
WIDTH = HEADS * HEAD_SIZE


@pytest.fixture
def model():
    """A model whose every part matters: no weight is small."""
    torch.manual_seed(3)
    model = AttentionOnly(VOCAB, WIDTH, HEADS, LAYERS)
    for x in model.parameters():
        nn.init.normal_(x)
    return model


@pytest.fixture
def tokens():
    return torch.randint(VOCAB, (B, T), generator=torch.Generator().manual_seed(5))


# Sequences


def test_letters_and_symbols_stand_in_turn():
    letters, symbols = torch.tensor([[0, 2, 1]]), torch.tensor([[1, 0, 4]])
    assert interleave(letters, symbols, 3).tolist() == [[0, 4, 2, 3, 1, 7]]


@pytest.mark.parametrize("draw", [draw_dictionaries, draw_shifts])
def test_letters_and_symbols_have_ids_of_their_own(draw):
    torch.manual_seed(0)
    tokens = draw(199, num_pairs=5, size=3)
    assert tokens.shape == (199, 10) and tokens.dtype == torch.int64
    assert set(tokens[:, ::2].flatten().tolist()) == {0, 1, 2}
    assert set(tokens[:, 1::2].flatten().tolist()) == {3, 4, 5}


@pytest.mark.parametrize("draw", [draw_dictionaries, draw_shifts])
def test_a_letter_keeps_its_symbol_within_a_sequence(draw):
    torch.manual_seed(1)
    for row in draw(97, num_pairs=13, size=5).tolist():
        pairs = set(zip(row[::2], row[1::2], strict=True))
        assert len(pairs) == len({letter for letter, _ in pairs})


def test_every_sequence_has_a_dictionary_of_its_own():
    torch.manual_seed(2)
    tokens = draw_dictionaries(20_000, num_pairs=1, size=3)
    counts = tokens.unique(dim=0, return_counts=True)[1]
    assert len(counts) == 9
    assert ((counts / 20_000 - 1 / 9).abs() < 0.01).all()


def test_entries_of_a_dictionary_are_independent():
    torch.manual_seed(3)
    tokens = draw_dictionaries(30_000, num_pairs=2, size=4)
    other = tokens[:, 0] != tokens[:, 2]
    equal = tokens[other, 1] == tokens[other, 3]
    assert abs(equal.float().mean() - 1 / 4) < 0.012


def test_a_shift_is_the_same_for_all_letters_of_a_sequence():
    torch.manual_seed(4)
    tokens = draw_shifts(501, num_pairs=7, size=11)
    shifts = (tokens[:, 1::2] - 11 - tokens[:, ::2]) % 11
    assert (shifts == shifts[:, :1]).all()
    assert len(shifts[:, 0].unique()) == 11


@pytest.mark.parametrize("draw", [draw_dictionaries, draw_shifts])
@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)])
def test_pairs_and_letters_must_exist(draw, sizes):
    with pytest.raises(ValueError, match="at least 1"):
        draw(2, *sizes)


def period_of(row):
    """Find the place of the first symbol that has stood before."""
    return next(place for place, x in enumerate(row) if x in row[:place])


@settings(max_examples=40, deadline=None)
@given(st.integers(8, 31), st.integers(0, 5), st.integers(0, 2**31))
def test_repeats_repeat_a_block_of_different_symbols(length, more, seed):
    torch.manual_seed(seed)
    num_symbols = length // 2 + more
    tokens = draw_repeats(5, length, num_symbols)
    assert tokens.shape == (5, length)
    assert tokens.min() >= 0 and tokens.max() < num_symbols
    for row in tokens.tolist():
        period = period_of(row)
        assert 4 <= period <= length // 2
        assert row[period:] == row[:-period]


def test_all_periods_are_equally_likely_and_no_other_occurs():
    torch.manual_seed(6)
    periods = [period_of(row) for row in draw_repeats(7000, 20, 12).tolist()]
    shares = torch.bincount(torch.tensor(periods), minlength=11) / 7000
    assert shares[:4].sum() == 0 and len(shares) == 11
    assert ((shares[4:] - 1 / 7).abs() < 0.02).all()


def test_all_symbols_start_a_block_equally_often():
    torch.manual_seed(7)
    first = draw_repeats(13_000, 8, 13)[:, 0]
    assert ((torch.bincount(first) / 13_000 - 1 / 13).abs() < 0.012).all()


@pytest.mark.parametrize(("length", "num_symbols"), [(7, 16), (32, 15), (0, 3)])
def test_blocks_that_cannot_be_are_refused(length, num_symbols):
    with pytest.raises(ValueError, match=f"4 to {length // 2} from {num_symbols}"):
        draw_repeats(2, length, num_symbols)


def test_batches_never_end_and_follow_the_random_state():
    torch.manual_seed(8)
    found = list(itertools.islice(endless(draw_dictionaries, 3), 4))
    torch.manual_seed(8)
    again = list(itertools.islice(endless(draw_dictionaries, 3), 4))
    assert [x.shape for x in found] == [(3, 24)] * 4
    assert not torch.equal(found[0], found[1])
    assert all(map(torch.equal, found, again))


# Model


def test_shapes_of_logits_and_weights(model, tokens):
    logits, weights = model(tokens, need_weights=True)
    assert logits.shape == (B, T, VOCAB)
    assert [x.shape for x in weights] == [(B, HEADS, T, T)] * LAYERS
    assert model(tokens)[1] == [None] * LAYERS


def test_both_ways_of_attending_agree(model, tokens):
    closed = [(0, 1), (4, 2)]
    for heads in ((), closed):
        assert_close(model(tokens, True, heads)[0], model(tokens, False, heads)[0])


def test_weights_are_causal_and_sum_to_one(model, tokens):
    for weights in model(tokens, need_weights=True)[1]:
        assert_close(weights.sum(-1), torch.ones(B, HEADS, T))
        assert (weights.triu(1) == 0).all()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("closed", [(), [(1, 2)]])
def test_no_prediction_depends_on_a_later_token(model, tokens, training, closed):
    model.train(training)
    before = model(tokens, closed=closed)[0]
    for place in range(1, T):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % VOCAB
        after = model(changed, closed=closed)[0]
        assert_close(after[:, :place], before[:, :place])
        assert not torch.allclose(after[:, place], before[:, place])


def test_one_layer_knows_the_order_of_the_past():
    torch.manual_seed(6)
    model = AttentionOnly(VOCAB, WIDTH, HEADS, 1)  # the mask alone would not tell
    swapped = model(torch.tensor([[2, 1, 3]]))[0][0, -1]
    assert not torch.allclose(model(torch.tensor([[1, 2, 3]]))[0][0, -1], swapped, atol=1e-4)


def test_logits_by_hand(model, tokens):
    x = model.embedding(tokens)
    for layer in model.layers:
        y = layer.norm(x)
        x = x + layer.heads(y, y, y, torch.ones(T, T).tril().bool())[0]
    assert_close(model(tokens)[0], model.output(model.norm(x)))


def test_parameters_are_counted_by_the_formula():
    model = AttentionOnly(VOCAB, WIDTH, HEADS, LAYERS)
    expected = 2 * VOCAB * WIDTH + LAYERS * (4 * WIDTH**2 + 2 * WIDTH) + 2 * WIDTH
    assert sum(x.numel() for x in model.parameters()) == expected


def test_a_model_that_starts_small_knows_nothing():
    torch.manual_seed(9)
    model = AttentionOnly(64, 32, 4, 2)
    for x in model.parameters():
        if x.ndim == 2:
            nn.init.normal_(x, std=0.02)
    loss = next_loss(model, torch.randint(64, (20, 30)))
    assert abs(loss - torch.tensor(64.0).log()) < 0.05


def test_the_model_is_the_same_for_a_seed():
    states = []
    for _ in range(2):
        torch.manual_seed(10)
        states.append(AttentionOnly(VOCAB, WIDTH, HEADS, 2).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_give_the_same_within_their_precision(model, tokens, dtype):
    for x in model.parameters():
        x.data.mul_(0.3)
    found = copy.deepcopy(model).to(dtype)(tokens, closed=[(0, 0)])[0]
    assert found.dtype == dtype
    limit = {torch.float64: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    expected = model(tokens, closed=[(0, 0)])[0]
    assert_close(found.float(), expected, atol=limit, rtol=limit)


# Knocking out


@pytest.mark.parametrize("head", [(0, 0), (1, 2), (4, 1)])
def test_knocking_out_is_zeroing_the_columns_that_read_the_head(model, tokens, head):
    layer, index = head
    wiped = copy.deepcopy(model)
    columns = slice(index * HEAD_SIZE, (index + 1) * HEAD_SIZE)
    with torch.no_grad():
        wiped.layers[layer].heads.output_layer.weight[:, columns] = 0
    assert_close(model(tokens, closed=[head])[0], wiped(tokens)[0])
    assert not torch.allclose(model(tokens, closed=[head])[0], model(tokens)[0], atol=1e-3)


def test_a_head_that_is_knocked_out_has_no_weights_and_the_others_keep_theirs(model, tokens):
    weights = model(tokens, True, [(0, 1)])[1][0]
    everything = model(tokens, True)[1][0]
    assert (weights[:, 1] == 0).all()
    assert_close(weights[:, [0, 2]], everything[:, [0, 2]])


def test_without_any_head_only_the_token_itself_is_read(model, tokens):
    closed = list(itertools.product(range(LAYERS), range(HEADS)))
    expected = model.output(model.norm(model.embedding(tokens)))
    assert_close(model(tokens, closed=closed)[0], expected)


def test_knocking_out_changes_nothing_for_good(model, tokens):
    before = model(tokens)[0]
    model(tokens, closed=[(0, 0), (1, 1)])
    assert torch.equal(model(tokens)[0], before)


def test_order_and_repetition_of_heads_do_not_matter(model, tokens):
    once = model(tokens, closed=[(0, 1), (2, 0)])[0]
    assert torch.equal(model(tokens, closed=[(2, 0), (0, 1), (2, 0)])[0], once)


def test_no_gradient_reaches_a_head_that_is_knocked_out(model, tokens):
    model(tokens, closed=[(1, 1)])[0].sum().backward()
    gradient = model.layers[1].heads.output_layer.weight.grad
    assert (gradient[:, HEAD_SIZE : 2 * HEAD_SIZE] == 0).all()
    assert (gradient[:, :HEAD_SIZE] != 0).any()


def test_heads_are_sorted_by_layer(model):
    assert by_layer(model, [(4, 0), (1, 2), (4, 1)]) == [set(), {2}, set(), set(), {0, 1}]


@pytest.mark.parametrize("head", [(LAYERS, 0), (-1, 0), (0, HEADS), (0, -1)])
def test_a_head_that_does_not_exist_is_refused(model, tokens, head):
    with pytest.raises(ValueError, match=f"no head {head[1]} in layer {head[0]}"):
        model(tokens, closed=[head])


def test_one_layer_can_be_used_alone():
    layer = AttentionLayer(WIDTH, HEADS)
    x = torch.randn(B, T, WIDTH)
    assert torch.equal(layer(x, closed=range(HEADS))[0], x)
    assert layer(x, need_weights=True)[1].shape == (B, HEADS, T, T)


# Scores


def brute_targets(row):
    """List (query, key) where the key's previous token is the query's."""
    return [
        (t, s) for t in range(len(row)) for s in range(1, t + 1) if row[s - 1] == row[t]
    ]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_keys_after_copies_are_found(row):
    found = after_copies(torch.tensor([row]))[0]
    assert found.dtype == torch.bool and found.shape == (len(row), len(row))
    assert [tuple(pair) for pair in found.nonzero().tolist()] == brute_targets(row)


def test_keys_after_copies_by_hand():
    found = after_copies(torch.tensor([[5, 6, 5, 6, 5], [1, 1, 2, 3, 4]]))
    assert found.nonzero().tolist() == [
        [0, 2, 1], [0, 3, 2], [0, 4, 1], [0, 4, 3], [1, 1, 1]
    ]  # fmt: skip


def perfect_weights(tokens):
    """Put all weight on what followed earlier copies, else on the query."""
    targets = after_copies(tokens).float()
    alone = targets.sum(-1) == 0
    targets[alone] = torch.eye(tokens.shape[1]).expand(len(tokens), -1, -1)[alone]
    return targets / targets.sum(-1, keepdim=True)


def test_a_perfect_induction_head_scores_one_and_others_nothing():
    torch.manual_seed(11)
    tokens = draw_repeats(5, 20, 10)
    perfect = perfect_weights(tokens)
    itself = torch.eye(20).expand(5, -1, -1)
    before = torch.eye(20).roll(-1, -1).expand(5, -1, -1)  # the previous token
    weights = torch.stack([itself, perfect, before], dim=1)
    assert_close(induction_score(weights, tokens), torch.tensor([0.0, 1.0, 0.0]))


def test_the_score_does_not_care_which_earlier_copy_is_used():
    tokens = torch.arange(4).repeat(1, 5)
    for back in range(5):  # as many periods back as there are, at most `back`
        weights = torch.zeros(1, 1, 20, 20)
        for t in range(4, 20):
            weights[0, 0, t, t + 1 - 4 * min(back + 1, t // 4)] = 1
        assert_close(induction_score(weights, tokens), torch.ones(1))


def test_uniform_weights_score_the_share_of_the_targets():
    period, length = 5, 13
    tokens = torch.arange(length)[None] % period
    weights = torch.ones(1, 2, length, length).tril()
    weights = weights / weights.sum(-1, keepdim=True)
    shares = [(t // period) / (t + 1) for t in range(period, length)]
    expected = torch.tensor(sum(shares) / len(shares))
    assert_close(induction_score(weights, tokens), expected.expand(2))


def test_only_queries_that_have_a_copy_count():
    tokens = torch.tensor([[0, 1, 2, 0], [3, 4, 5, 6]])
    weights = torch.rand(2, 3, 4, 4)
    assert_close(induction_score(weights, tokens), weights[0, :, 3, 1])


def test_the_mean_is_over_queries_not_over_sequences():
    tokens = torch.tensor([[0, 0, 0, 0], [1, 2, 3, 1]])
    weights = torch.zeros(2, 1, 4, 4)
    weights[1, 0, 3, 1] = 1
    assert_close(induction_score(weights, tokens), torch.tensor([1 / 4]))


def test_without_a_copy_there_is_no_induction_score():
    with pytest.raises(ValueError, match="twice"):
        induction_score(torch.rand(1, 2, 4, 4), torch.arange(4)[None])


def test_the_score_has_a_gradient():
    weights = torch.rand(B, HEADS, 4, 4, requires_grad=True)
    tokens = torch.tensor([[0, 1, 0, 1], [1, 1, 1, 1]])
    induction_score(weights, tokens).sum().backward()
    assert weights.grad[after_copies(tokens)[:, None].expand_as(weights)].min() > 0


def test_previous_tokens_by_hand():
    weights = torch.zeros(1, 3, 4, 4)
    weights[0, 0] = torch.eye(4).roll(1, 0)  # the previous token, or none
    weights[0, 1] = torch.ones(4, 4).tril() / torch.arange(1.0, 5)[:, None]
    weights[0, 2] = torch.eye(4)
    expected = torch.tensor([1.0, (1 / 2 + 1 / 3 + 1 / 4) / 3, 0.0])
    assert_close(previous_score(weights), expected)


def test_previous_score_is_the_mean_over_samples_and_queries():
    weights = torch.rand(B, HEADS, T, T)
    sums = sum(weights[:, :, t, t - 1] for t in range(1, T)).sum(0)
    assert_close(previous_score(weights), sums / (B * (T - 1)))


# Losses


def test_the_loss_is_that_of_the_next_token(model, tokens):
    log_probs = model(tokens)[0].log_softmax(-1)
    picked = [log_probs[b, t, tokens[b, t + 1]] for b in range(B) for t in range(T - 1)]
    assert_close(next_loss(model, tokens), -torch.stack(picked).mean())


def test_the_repeat_loss_counts_tokens_that_have_stood_before(model):
    tokens = torch.tensor([[1, 2, 1, 2, 3, 1, 4], [5, 6, 7, 8, 9, 5, 0]])
    log_probs = model(tokens, closed=[(0, 1)])[0].log_softmax(-1)
    places = [(0, 2), (0, 3), (0, 5), (1, 5)]
    picked = [log_probs[b, t, tokens[b, t + 1]] for b, t in places]
    found = repeat_loss(model, tokens, [(0, 1)])
    assert_close(found, -torch.stack(picked).mean())
    assert not torch.isclose(found, repeat_loss(model, tokens))


def test_the_symbol_loss_counts_symbols_only(model):
    torch.manual_seed(12)
    tokens = draw_dictionaries(B, num_pairs=3, size=5)
    log_probs = model(tokens)[0].log_softmax(-1)
    picked = [log_probs[b, t, tokens[b, t + 1]] for b in range(B) for t in (0, 2, 4)]
    assert_close(symbol_loss(model, tokens), -torch.stack(picked).mean())


def test_right_symbols_are_compared_with_the_prediction_at_the_letter():
    tokens = torch.tensor([[0, 3, 1, 4, 0, 3]])

    def one_hot_model(tokens):
        wanted = torch.tensor([[3, 0, 2, 0, 3, 0]])
        return F.one_hot(wanted, 6).float(), None

    assert right_symbols(one_hot_model, tokens).tolist() == [[True, False, True]]


# What can be expected


def test_expected_accuracy_by_hand():
    assert expected_accuracy(0, 8) == pytest.approx(1 / 8)
    assert expected_accuracy(1, 2) == pytest.approx(3 / 4)
    assert expected_accuracy(5, 1) == 1
    assert_close(
        expected_accuracy(torch.arange(5), 8),
        torch.tensor([0.125, 0.234, 0.330, 0.414, 0.487]), atol=6e-4, rtol=0,
    )  # fmt: skip


@pytest.mark.parametrize("size", [2, 3, 8])
def test_expected_accuracy_is_that_of_looking_up(size):
    torch.manual_seed(13)
    tokens = draw_dictionaries(20_000, num_pairs=6, size=size)
    letters, symbols = tokens[:, ::2], tokens[:, 1::2]
    for place in range(6):
        same = letters[:, :place] == letters[:, place : place + 1]
        right = torch.where(same.any(-1), True, symbols[:, place] == size)  # guess the first
        found = right.double().mean().item()
        assert abs(found - expected_accuracy(place, size)) < 0.015
