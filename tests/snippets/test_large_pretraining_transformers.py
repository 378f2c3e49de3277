"""Prove that hiding, sampling, continuing and fitting do what the section says of them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from snippets.large_pretraining_transformers import (
    GPT,
    corrupt_spans,
    exponent_interval,
    fit_power_law,
    generate,
    mask_tokens,
    predict_loss,
    restore_spans,
    sample,
)

INF, NAN = math.inf, math.nan
dtypes = pytest.mark.parametrize(
    "dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64), ids=str
)


def seeded(seed=0):
    """Make a generator of random numbers of its own."""
    return torch.Generator().manual_seed(seed)


def check_shares(counts, shares):
    """Assert by a chi-square test that counts follow shares; one test in 10,000 fails by chance."""
    counts = torch.as_tensor(counts, dtype=torch.float64)
    expected = torch.as_tensor(shares, dtype=torch.float64) * counts.sum()
    possible = expected > 0
    assert not counts[~possible].any(), "what is impossible has happened"
    found = ((counts - expected)[possible].square() / expected[possible]).sum().item()
    freedom = possible.sum().item() - 1
    assert found <= freedom + 4 * math.sqrt(2 * freedom) + 8, (counts.tolist(), expected.tolist())


def count(ids, size):
    """Count how often each of the ids 0 … size − 1 is there."""
    return torch.bincount(ids.flatten(), minlength=size)


@pytest.fixture
def same_random_state():
    """Assert that the test leaves torch's global random state alone."""
    torch.manual_seed(11)
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------------------------
# mask_tokens. Ids 0 … 3 are special, 4 hides.

MASK, SPECIAL, WORDS = 4, (0, 1, 2, 3, 4), 10_007


def draw_tokens(*shape, low=5, high=WORDS, seed=1):
    return torch.randint(low, high, shape, generator=seeded(seed))


def test_hidden_tokens_have_their_three_fates_in_shares_of_80_10_10():
    tokens = draw_tokens(300, 1000)
    inputs, labels = mask_tokens(tokens, MASK, WORDS, SPECIAL, generator=seeded())
    chosen = labels != -100
    check_shares([chosen.sum(), (~chosen).sum()], [0.15, 0.85])
    before, after = tokens[chosen], inputs[chosen]
    fates = [(after == MASK).sum(), (after == before).sum()]
    fates.append(len(after) - sum(fates))
    check_shares(fates, [0.8, 0.1, 0.1])  # a random token is the old one once in 10,000 times


@pytest.mark.parametrize("rate", (0.02, 0.4, 0.9))
def test_the_rate_is_the_share_of_ordinary_positions_with_loss(rate):
    tokens = draw_tokens(200, 500, low=0, high=11)
    _, labels = mask_tokens(tokens, MASK, 11, SPECIAL, rate=rate, generator=seeded(3))
    ordinary = tokens > MASK
    chosen = (labels != -100) & ordinary
    check_shares([chosen.sum(), (ordinary & ~chosen).sum()], [rate, 1 - rate])


def test_every_column_is_hidden_as_often_as_the_others():
    tokens = draw_tokens(40_000, 13)
    _, labels = mask_tokens(tokens, MASK, WORDS, SPECIAL, generator=seeded(4))
    check_shares((labels != -100).sum(0), [1 / 13] * 13)


def test_neighbours_are_hidden_independently():
    tokens = draw_tokens(40_000, 2)
    inputs, labels = mask_tokens(tokens, MASK, WORDS, SPECIAL, rate=0.3, generator=seeded(5))
    chosen = (labels != -100).long()
    check_shares(count(chosen[:, 0] * 2 + chosen[:, 1], 4), [0.49, 0.21, 0.21, 0.09])
    both = chosen.all(dim=1)
    hidden = (inputs[both] == MASK).long()
    check_shares(count(hidden[:, 0] * 2 + hidden[:, 1], 4), [0.04, 0.16, 0.16, 0.64])


def test_special_tokens_are_never_chosen_and_never_drawn():
    tokens = draw_tokens(500, 400, low=0, high=9)
    inputs, labels = mask_tokens(tokens, MASK, 9, SPECIAL, rate=0.5, generator=seeded(6))
    special = tokens <= MASK
    assert (labels[special] == -100).all()
    assert torch.equal(inputs[special], tokens[special])
    assert not torch.isin(inputs[~special], torch.tensor([0, 1, 2, 3])).any()


def test_the_random_token_is_drawn_evenly_from_the_ordinary_ones():
    tokens = torch.full((400, 1000), 6)
    special = (0, 2, 7, 10)  # anywhere in the vocabulary, the mask among them
    inputs, labels = mask_tokens(tokens, 7, 12, special, rate=1.0, generator=seeded(7))
    assert (labels == 6).all()
    each = 0.1 / 8
    shares = [0, each, 0, each, each, each, 0.1 + each, 0.8, each, each, 0, each]
    check_shares(count(inputs, 12), shares)


@pytest.mark.parametrize("special", ((), (0,), [0, 1]))
def test_the_mask_is_no_ordinary_token_even_if_nobody_says_so(special):
    tokens = draw_tokens(200, 500, low=2, high=6)
    tokens[tokens == MASK] = 5
    inputs, labels = mask_tokens(tokens, MASK, 6, special, rate=1.0, generator=seeded(8))
    check_shares([(inputs == MASK).sum(), (inputs != MASK).sum()], [0.8, 0.2])
    assert torch.equal(labels, tokens)


@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    rate=st.floats(0, 1),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_labels_hold_the_truth_where_there_is_loss_and_inputs_elsewhere(shape, rate, seed):
    tokens = draw_tokens(*shape, low=0, high=23, seed=seed)
    kept = tokens.clone()
    inputs, labels = mask_tokens(tokens, MASK, 23, SPECIAL, rate=rate, generator=seeded(seed))
    assert torch.equal(tokens, kept)
    assert inputs.shape == labels.shape == tokens.shape
    loss = labels != -100
    assert torch.equal(labels[loss], tokens[loss])
    assert torch.equal(inputs[~loss], tokens[~loss])
    assert not (loss & (tokens <= MASK)).any()
    assert ((inputs >= 0) & (inputs < 23)).all()


def test_rate_zero_hides_nothing_and_rate_one_everything():
    tokens = draw_tokens(7, 11, low=0, high=40)
    inputs, labels = mask_tokens(tokens, MASK, 40, SPECIAL, rate=0)
    assert torch.equal(inputs, tokens) and (labels == -100).all()
    inputs, labels = mask_tokens(tokens, MASK, 40, SPECIAL, rate=1)
    assert torch.equal(labels, tokens.masked_fill(tokens <= MASK, -100))
    assert not torch.equal(inputs, tokens)


@pytest.mark.parametrize("shape", ((0,), (0, 7), (3, 0)))
def test_nothing_gives_nothing(shape):
    tokens = torch.zeros(shape, dtype=torch.long)
    inputs, labels = mask_tokens(tokens, MASK, 40, SPECIAL)
    assert inputs.shape == labels.shape == shape


def test_a_batch_of_special_tokens_stays():
    tokens = torch.tensor([[0, 1, 2, 3, 4]])
    inputs, labels = mask_tokens(tokens, MASK, 40, SPECIAL, rate=1.0)
    assert torch.equal(inputs, tokens) and (labels == -100).all()


@pytest.mark.parametrize("dtype", (torch.int16, torch.int32, torch.int64))
def test_masking_follows_the_integer_type(dtype):
    tokens = draw_tokens(31, 37, low=0, high=200).to(dtype)
    inputs, labels = mask_tokens(tokens, MASK, 200, SPECIAL, generator=seeded())
    assert inputs.dtype == dtype
    loss = labels != -100
    assert 0 < loss.float().mean() < 0.3
    assert (labels[loss].long() == tokens[loss].long()).all()
    assert labels.min() == -100


def test_what_is_no_contiguous_batch_is_masked_as_well():
    tokens = draw_tokens(13, 17).mT[::2]
    inputs, labels = mask_tokens(tokens, MASK, WORDS, SPECIAL, generator=seeded())
    again = mask_tokens(tokens.contiguous(), MASK, WORDS, SPECIAL, generator=seeded())
    assert torch.equal(inputs, again[0]) and torch.equal(labels, again[1])


@pytest.mark.parametrize(
    "special", ([0, 1, 2, 3, 4], {0, 1, 2, 3, 4}, range(5), torch.arange(5)), ids=type
)
def test_special_ids_come_in_any_collection(special):
    tokens = draw_tokens(5, 7, low=0, high=40)
    found = mask_tokens(tokens, MASK, 40, special, generator=seeded())
    expected = mask_tokens(tokens, MASK, 40, SPECIAL, generator=seeded())
    assert all(map(torch.equal, found, expected))


def test_masking_draws_from_the_generator_alone(same_random_state):
    tokens = draw_tokens(7, 11)
    a, b, c = (
        mask_tokens(tokens, MASK, WORDS, SPECIAL, generator=seeded(seed)) for seed in (1, 1, 2)
    )
    assert all(map(torch.equal, a, b))
    assert not torch.equal(a[1], c[1])


def test_masking_without_a_generator_follows_the_global_seed():
    tokens = draw_tokens(7, 11)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(mask_tokens(tokens, MASK, WORDS, SPECIAL))
    assert all(map(torch.equal, *found[:2])) and not torch.equal(found[0][1], found[2][1])
    assert not torch.equal(mask_tokens(tokens, MASK, WORDS, SPECIAL)[1], found[2][1])


@pytest.mark.parametrize("rate", (-0.1, 1.1, NAN, INF))
def test_a_rate_is_a_share(rate):
    with pytest.raises(ValueError, match="rate"):
        mask_tokens(draw_tokens(3, 5), MASK, WORDS, SPECIAL, rate=rate)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bool, torch.uint8))
def test_only_ids_that_leave_room_for_a_negative_label_can_be_masked(dtype):
    with pytest.raises(TypeError, match="integer"):
        mask_tokens(torch.ones(3, 5).to(dtype), MASK, WORDS, SPECIAL)


def test_the_type_of_tokens_has_room_for_the_vocabulary():
    tokens = torch.full((200,), 7, dtype=torch.int8)
    inputs, _ = mask_tokens(tokens, MASK, 128, SPECIAL, rate=1.0)
    assert inputs.min() >= 0
    with pytest.raises(ValueError, match="129"):
        mask_tokens(tokens, MASK, 129, SPECIAL)


def test_a_vocabulary_needs_an_ordinary_token():
    with pytest.raises(ValueError):
        mask_tokens(torch.tensor([0, 1, 2]), 4, 5, SPECIAL)


# ------------------------------------------------------------------------------------------------
# corrupt_spans and restore_spans. Sentinels need not be in order of size.

SENTINELS = [1000 - 7 * i for i in range(70)]


def test_rates_and_spans_may_be_numbers_of_any_kind():
    found = []
    for kind in (float, torch.tensor):
        options = {"rate": kind(0.3), "mean_span": kind(2.0)}
        options["generator"] = torch.Generator().manual_seed(0)
        found.append(corrupt_spans(torch.arange(40), SENTINELS, **options))
    assert all(map(torch.equal, *found))


def spans_of(targets, sentinels=SENTINELS):
    """Cut targets at their sentinels; → the hidden spans, as lists of ids."""
    spans = []
    for token in targets.tolist():
        if token in sentinels:
            assert token == sentinels[len(spans)], "sentinels out of order"
            spans.append([])
        else:
            spans[-1].append(token)
    assert spans.pop() == [], "something stands after the closing sentinel"
    return spans


def hidden_positions(inputs, targets, sentinels=SENTINELS):
    """Say of every position of the text whether it was hidden."""
    spans, hidden = iter(spans_of(targets, sentinels)), []
    for token in inputs.tolist():
        hidden += [True] * len(next(spans)) if token in sentinels else [False]
    return hidden


spans_cases = given(
    length=st.integers(2, 64),
    rate=st.floats(0.001, 0.999),
    mean_span=st.floats(1, 12),
    seed=st.integers(0, 9999),
)


@spans_cases
@settings(max_examples=150, deadline=None)
def test_what_was_hidden_comes_back(length, rate, mean_span, seed):
    tokens = torch.randint(5, (length,), generator=seeded(seed))  # many repeats
    kept = tokens.clone()
    options = {"rate": rate, "mean_span": mean_span, "generator": seeded(seed)}
    inputs, targets = corrupt_spans(tokens, SENTINELS, **options)
    assert torch.equal(tokens, kept)
    assert torch.equal(restore_spans(inputs, targets, SENTINELS), tokens)


@spans_cases
@settings(max_examples=150, deadline=None)
def test_spans_are_real_and_apart_and_as_many_as_asked(length, rate, mean_span, seed):
    tokens = torch.arange(length)
    options = {"rate": rate, "mean_span": mean_span, "generator": seeded(seed)}
    inputs, targets = corrupt_spans(tokens, SENTINELS, **options)
    spans = spans_of(targets)
    assert all(spans), "an empty span"
    marks = [token for token in inputs.tolist() if token in SENTINELS]
    assert marks == SENTINELS[: len(spans)]
    stands = [token in SENTINELS for token in inputs.tolist()]
    assert not any(map(lambda a, b: a and b, stands, stands[1:])), "two spans touch"
    noise = sum(map(len, spans))
    assert noise == min(max(round(length * rate), 1), length - 1)
    wanted = max(round(noise / mean_span), 1)
    assert len(spans) == wanted or len(spans) < wanted and wanted > length - noise
    assert len(inputs) == length - noise + len(spans)


def test_two_tokens_have_one_hidden():
    seen = set()
    for seed in range(20):
        inputs, targets = corrupt_spans(torch.tensor([3, 5]), [9, 8], generator=seeded(seed))
        seen.add((tuple(inputs.tolist()), tuple(targets.tolist())))
    assert seen <= {((3, 9), (9, 5, 8)), ((9, 5), (9, 3, 8))}


def test_the_example_in_the_paper_comes_back():
    """Figure 2 of Raffel et al. (2020): thank you <X> me to your party <Y> week."""
    inputs = torch.tensor([1, 2, 90, 5, 6, 7, 8, 91, 10])
    targets = torch.tensor([90, 3, 4, 91, 9, 92])
    restored = restore_spans(inputs, targets, [90, 91, 92])
    assert restored.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_the_usual_rate_gives_the_usual_numbers():
    inputs, targets = corrupt_spans(torch.arange(200), SENTINELS, generator=seeded())
    spans = spans_of(targets)
    assert len(spans) == 10 and sum(map(len, spans)) == 30
    assert len(inputs) == 180 and len(targets) == 41


def test_spans_differ_in_length_and_place():
    lengths, hidden = set(), torch.zeros(40)
    for seed in range(300):
        inputs, targets = corrupt_spans(torch.arange(40), SENTINELS, generator=seeded(seed))
        spans = spans_of(targets)
        lengths.update(map(len, spans))
        hidden += torch.tensor(hidden_positions(inputs, targets))
    assert lengths >= {1, 2, 3, 4, 5}
    assert hidden[1:-1].min() > 10


def test_all_layouts_of_spans_are_equally_likely():
    """Three of six tokens in two spans: 2 ways to cut them, 6 pairs of the 4 slots."""
    layouts, generator = {}, seeded()
    for _ in range(2400):
        found = corrupt_spans(
            torch.arange(6), [99, 98, 97], rate=0.5, mean_span=1.5, generator=generator
        )
        hidden = tuple(hidden_positions(*found, [99, 98, 97]))
        layouts[hidden] = layouts.get(hidden, 0) + 1
    assert len(layouts) == 12
    check_shares([*layouts.values()], [1 / 12] * 12)


@pytest.mark.parametrize(
    ("length", "rate", "mean_span", "hidden", "spans"),
    (
        (100, 0.15, 3.0, 15, 5),
        (10, 0.0, 3.0, 1, 1),  # something is hidden
        (10, 1.0, 3.0, 9, 2),  # something is kept, and stands between two spans at most
        (10, 0.5, 1.0, 5, 5),
        (10, 0.7, 1.0, 7, 4),
        (100, 0.3, 1000.0, 30, 1),
        (7, 0.5, 2.0, 4, 2),
    ),
)
def test_the_numbers_of_hidden_tokens_and_spans_by_hand(length, rate, mean_span, hidden, spans):
    options = {"rate": rate, "mean_span": mean_span, "generator": seeded()}
    found = spans_of(corrupt_spans(torch.arange(length), SENTINELS, **options)[1])
    assert (sum(map(len, found)), len(found)) == (hidden, spans)


@pytest.mark.parametrize("kind", (list, tuple, torch.tensor), ids=("list", "tuple", "tensor"))
def test_sentinels_come_in_any_sequence(kind):
    sentinels = kind([99, 98, 97, 96])
    inputs, targets = corrupt_spans(torch.arange(30), sentinels, generator=seeded())
    expected = corrupt_spans(torch.arange(30), [99, 98, 97, 96], generator=seeded())
    assert torch.equal(inputs, expected[0]) and torch.equal(targets, expected[1])
    assert torch.equal(restore_spans(inputs, targets, sentinels), torch.arange(30))


def test_as_many_sentinels_as_are_needed_are_enough():
    tokens = torch.arange(200)
    found = corrupt_spans(tokens, SENTINELS[:11], generator=seeded())  # 10 spans and the end
    assert torch.equal(restore_spans(*found, SENTINELS[:11]), tokens)
    with pytest.raises(ValueError, match="sentinel"):
        corrupt_spans(tokens, SENTINELS[:10], generator=seeded())


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_spans_follow_the_integer_type(dtype):
    tokens = torch.arange(50, dtype=dtype)
    inputs, targets = corrupt_spans(tokens, SENTINELS, generator=seeded())
    assert inputs.dtype == targets.dtype == dtype
    assert restore_spans(inputs, targets, SENTINELS).dtype == dtype


def test_spans_are_drawn_from_the_generator_alone(same_random_state):
    tokens = torch.arange(100)
    a, b, c = (corrupt_spans(tokens, SENTINELS, generator=seeded(seed)) for seed in (1, 1, 2))
    assert all(map(torch.equal, a, b))
    assert not torch.equal(a[0], c[0])


def test_spans_without_a_generator_follow_the_global_seed():
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(corrupt_spans(torch.arange(100), SENTINELS)[0].tolist())
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("tokens", ([], [3]))
def test_fewer_than_two_tokens_hold_no_span(tokens):
    with pytest.raises(ValueError):
        corrupt_spans(torch.tensor(tokens, dtype=torch.long), SENTINELS)


def test_only_one_sequence_at_a_time_is_corrupted():
    with pytest.raises(ValueError):
        corrupt_spans(torch.ones(2, 5, dtype=torch.long), SENTINELS)


@pytest.mark.parametrize(
    "options",
    (
        {"rate": -0.1},
        {"rate": 1.1},
        {"rate": NAN},
        {"mean_span": 0},
        {"mean_span": 0.5},
        {"mean_span": INF},
        {"mean_span": -3.0},
        {"mean_span": NAN},
    ),
    ids=str,
)
def test_options_of_spans_are_checked(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        corrupt_spans(torch.arange(20), SENTINELS, **options)


def test_no_sentinel_serves_twice():
    with pytest.raises(ValueError, match="sentinel"):
        corrupt_spans(torch.arange(20), [99, 99, 98, 97], generator=seeded())


def test_a_text_with_a_sentinel_in_it_is_refused():
    tokens = torch.arange(20)
    tokens[3] = SENTINELS[5]
    with pytest.raises(ValueError, match="sentinel"):
        corrupt_spans(tokens, SENTINELS, generator=seeded())


@pytest.mark.parametrize(
    ("inputs", "targets"),
    (
        ([1, 90, 2], [90, 5]),  # no closing sentinel
        ([1, 90, 2], []),
        ([1, 90, 2], [91, 5, 92]),  # starts with the wrong one
        ([1, 90, 2, 91, 3], [91, 5, 90, 6, 92]),  # out of order
        ([1, 91, 2, 90, 3], [90, 5, 91, 6, 92]),  # out of order in the inputs
        ([1, 90, 2, 91, 3], [90, 5, 91]),  # a hole without a span
        ([1, 90, 2], [90, 5, 91, 6, 92]),  # a span without a hole
        ([1, 90, 2], [4, 90, 5, 91]),  # something before the first
        ([1, 90, 2], [90, 5, 91, 6]),  # something after the last
        ([1, 90, 2, 90, 3], [90, 5, 91, 6, 92]),  # twice in the inputs
        ([1, 90, 2], [90, 5, 90, 6, 91]),  # twice in the targets
        ([1, 90, 2], [90, 5, 92]),  # one left out
        ([1, 92, 2], [92, 5, 90]),
        ([1, 90, 2, 91], [90, 5, 91, 6]),
    ),
)
def test_what_does_not_fit_is_not_restored(inputs, targets):
    with pytest.raises(ValueError):
        restore_spans(
            torch.tensor(inputs), torch.tensor(targets, dtype=torch.long), [90, 91, 92, 93]
        )


# ------------------------------------------------------------------------------------------------
# sample.


def rows(shares, num=20_000):
    """Repeat the logarithms of shares for many draws."""
    return torch.tensor(shares).log().expand(num, -1)


def test_the_shares_of_draws_are_the_softmax():
    shares = [0.5, 0.25, 0.15, 0.07, 0.03]
    ids = sample(rows(shares), generator=seeded())
    assert ids.shape == (20_000,) and ids.dtype == torch.long
    check_shares(count(ids, 5), shares)
    ids = sample(rows(shares) + 77, generator=seeded())
    check_shares(count(ids, 5), shares)


@pytest.mark.parametrize("temperature", (0.5, 2.0))
def test_a_temperature_is_a_power_of_the_shares(temperature):
    shares = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    ids = sample(rows(shares.tolist()), temperature=temperature, generator=seeded(1))
    wanted = shares ** (1 / temperature)
    check_shares(count(ids, 5), wanted / wanted.sum())


def test_rows_are_drawn_independently_and_each_from_its_own_logits():
    logits = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.5, 0.5]]).log()
    draws = torch.stack([sample(logits, generator=seeded(seed)) for seed in range(4000)])
    for row, shares in enumerate(logits.exp()):
        check_shares(count(draws[:, row], 2), shares)
    pairs = draws[:, 0] * 2 + draws[:, 1]
    check_shares(count(pairs, 4), [0.18, 0.72, 0.02, 0.08])


def test_temperature_zero_takes_the_largest_whatever_the_options():
    logits = torch.randn(31, 17, generator=seeded())
    for options in ({}, {"top_k": 5}, {"top_p": 0.3}, {"top_k": 40, "top_p": 1.0}):
        found = sample(logits, temperature=0, **options)
        assert torch.equal(found, logits.argmax(dim=-1))
    assert torch.equal(sample(1e30 * logits, temperature=0.0), logits.argmax(dim=-1))


@pytest.mark.parametrize("temperature", (1e-3, 1e-10, 1e-38, 1e-300))
def test_a_temperature_near_zero_takes_the_largest_as_well(temperature):
    logits = torch.randperm(17, generator=seeded()).float().expand(50, -1)
    found = sample(logits, temperature=temperature, generator=seeded())
    assert torch.equal(found, logits.argmax(dim=-1))


def test_a_high_temperature_draws_evenly_but_not_the_impossible():
    logits = torch.tensor([3.0, -INF, 0.0, -5.0]).expand(20_000, -1)
    ids = sample(logits, temperature=1e9, generator=seeded())
    check_shares(count(ids, 4), [1 / 3, 0, 1 / 3, 1 / 3])


@pytest.mark.parametrize("top_k", (1, 2, 3, 4))
def test_top_k_renormalises_what_is_left(top_k):
    shares = torch.tensor([0.1, 0.4, 0.2, 0.3])
    ids = sample(rows(shares.tolist()), top_k=top_k, generator=seeded(2))
    kept = shares.where(shares >= shares.sort(descending=True).values[top_k - 1], 0)
    check_shares(count(ids, 4), kept / kept.sum())


@pytest.mark.parametrize("top_k", (None, 0, 4, 5, 10**9))
def test_top_k_beyond_the_vocabulary_or_zero_is_no_limit(top_k):
    logits = torch.randn(400, 4, generator=seeded())
    found = sample(logits, top_k=top_k, generator=seeded(3))
    assert torch.equal(found, sample(logits, generator=seeded(3)))


@pytest.mark.parametrize("top_k", (1, 2, 3))
def test_ties_do_not_let_more_than_k_through(top_k):
    logits = torch.zeros(5000, 7)
    logits[:, 3] = -1
    for row in (logits, logits.flip(-1)):
        drawn = sample(row, top_k=top_k, generator=seeded()).unique()
        assert len(drawn) == top_k
    logits[:, 2] = 1  # the largest is always among them
    assert (sample(logits, top_k=1, generator=seeded()) == 2).all()
    assert 2 in sample(logits, top_k=2, generator=seeded())


@pytest.mark.parametrize(
    ("top_p", "kept"),
    ((0.01, 1), (0.39, 1), (0.40002, 2), (0.69, 2), (0.70002, 3), (0.95, 4), (1, 4)),
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p, kept):
    shares = torch.tensor([0.1, 0.4, 0.2, 0.3])
    ids = sample(rows(shares.tolist()), top_p=top_p, generator=seeded(4))
    left = shares.where(shares >= shares.sort(descending=True).values[kept - 1], 0)
    check_shares(count(ids, 4), left / left.sum())


@pytest.mark.parametrize(("top_p", "kept"), ((0.25, 1), (0.5, 2), (0.75, 3), (0.76, 4), (0.2, 1)))
def test_a_set_that_reaches_p_exactly_gets_no_further_token(top_p, kept):
    drawn = sample(torch.zeros(5000, 4), top_p=top_p, generator=seeded())
    assert len(drawn.unique()) == kept


def test_top_p_one_keeps_everything_in_a_large_vocabulary():
    logits = 3 * torch.randn(40, 50_000, generator=seeded())
    found = sample(logits, top_p=1.0, generator=seeded(5))
    assert torch.equal(found, sample(logits, generator=seeded(5)))


def test_top_p_counts_what_top_k_left():
    shares = [0.4, 0.3, 0.2, 0.1]
    ids = sample(rows(shares), top_k=2, top_p=0.5, generator=seeded())
    assert (ids == 0).all()  # 0.4 of 0.7 is more than a half; 0.4 of 1 is less
    ids = sample(rows(shares), top_k=2, top_p=0.6, generator=seeded())
    check_shares(count(ids, 4), [4 / 7, 3 / 7, 0, 0])


def test_top_p_counts_after_the_temperature():
    shares = [0.7, 0.2, 0.1]
    assert (sample(rows(shares), top_p=0.65, generator=seeded()) == 0).all()
    ids = sample(rows(shares), temperature=2, top_p=0.65, generator=seeded())
    heads = torch.tensor([0.7, 0.2, 0]).sqrt()
    check_shares(count(ids, 3), heads / heads.sum())
    ids = sample(rows([0.4, 0.3, 0.3]), temperature=0.1, top_p=0.8, generator=seeded())
    assert (ids == 0).all()


def test_each_row_has_a_nucleus_of_its_own():
    logits = torch.tensor([[0.98, 0.01, 0.01], [0.3, 0.3, 0.4]]).log()
    draws = [sample(logits, top_p=0.9, generator=seeded(seed)) for seed in range(200)]
    first, second = torch.stack(draws).T
    assert (first == 0).all() and len(second.unique()) == 3


@pytest.mark.parametrize("options", ({}, {"top_k": 4}, {"top_k": 9}, {"top_p": 1.0}), ids=str)
def test_what_is_impossible_is_never_drawn(options):
    logits = torch.tensor([-INF, 0.0, -INF, -30.0, 0.0]).expand(3000, -1)
    drawn = sample(logits, generator=seeded(), **options).unique().tolist()
    assert set(drawn) <= {1, 3, 4} and {1, 4} <= set(drawn)
    assert (sample(logits[:, :2], generator=seeded(), **options) == 1).all()
    assert (sample(logits[:, :2], temperature=0, **options) == 1).all()


@dtypes
def test_sampling_takes_every_floating_type(dtype):
    shares = [0.5, 0.3, 0.2]
    ids = sample(rows(shares).to(dtype), generator=seeded())
    assert ids.dtype == torch.long
    check_shares(count(ids, 3), torch.tensor(shares).log().to(dtype).double().softmax(0))
    ids = sample(rows(shares).to(dtype), top_k=2, top_p=0.9, generator=seeded())
    kept = torch.tensor(shares[:2]).log().to(dtype).double().softmax(0)
    check_shares(count(ids, 3), [*kept, 0])
    large = torch.tensor([[60_000.0, -60_000.0]], dtype=dtype)
    assert sample(large, temperature=0.01, generator=seeded()).item() == 0


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_the_nucleus_of_half_precision_is_that_of_single(dtype):
    logits = torch.randn(3, 3000, generator=seeded()).to(dtype)
    for top_p in (0.5, 0.999):
        a, b = (sample(x, top_p=top_p, generator=seeded(1)) for x in (logits, logits.float()))
        assert torch.equal(a, b)
    flat = torch.zeros(3000, 600, dtype=dtype)
    ids = sample(flat, top_p=0.999, generator=seeded())
    assert len(ids.unique()) > 580  # a running sum in half precision stops long before


@dtypes
@pytest.mark.parametrize(("top_p", "kept"), ((0.6664, 2), (0.66669, 3)))
def test_thirds_are_added_up_at_least_in_single_precision(dtype, top_p, kept):
    drawn = sample(torch.zeros(500, 3, dtype=dtype), top_p=top_p, generator=seeded())
    assert len(drawn.unique()) == kept


def test_sampling_changes_neither_logits_nor_the_global_state(same_random_state):
    logits = torch.randn(5, 7, generator=seeded(), requires_grad=True)
    before = logits.detach().clone()
    a, b, c = (
        sample(
            logits.expand(5, 7),
            temperature=3,
            top_k=6,
            top_p=0.99,
            generator=seeded(seed),
        )
        for seed in (1, 1, 3)
    )
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(logits, before) and not a.requires_grad


def test_sampling_without_a_generator_follows_the_global_seed():
    logits, found = torch.zeros(50, 7), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(sample(logits).tolist())
    assert found[0] == found[1] != found[2] != sample(logits).tolist()


@pytest.mark.parametrize(
    ("options", "name"),
    (
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": NAN}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": NAN}, "top_p"),
    ),
    ids=str,
)
def test_options_of_sampling_are_checked(options, name):
    with pytest.raises(ValueError, match=name):
        sample(torch.zeros(2, 3), **options)
    if name != "temperature":
        with pytest.raises(ValueError, match=name):
            sample(torch.zeros(2, 3), temperature=0, **options)


@pytest.mark.parametrize("temperature", (0, 1.0))
@pytest.mark.parametrize("bad", ([NAN, 0.0, 1.0], [-INF, -INF, -INF]), ids=str)
def test_a_row_from_which_nothing_can_be_drawn_is_an_error(bad, temperature):
    with pytest.raises(ValueError):
        sample(torch.tensor([[0.0, 1.0, 2.0], bad]), temperature=temperature, top_k=2, top_p=0.9)


# ------------------------------------------------------------------------------------------------
# generate. A model whose next token depends on the whole window, places included, and nothing else.


class Sums(nn.Module):
    """Weigh the ids of the window by their places; the sum names the next id."""

    def __init__(self, vocab_size=11, context=6, sharpness=50.0):
        super().__init__()
        self.vocab_size, self.context, self.sharpness = vocab_size, context, sharpness
        self.sizes = []  # how many tokens each call had to read

    def forward(self, tokens):
        return self.decode(tokens)[0]

    def decode(self, tokens, cache=None):
        self.sizes.append(tokens.shape[1])
        assert not self.training and not torch.is_grad_enabled()
        past = tokens[:, :0] if cache is None else cache
        both = torch.cat([past, tokens], dim=1)
        if both.shape[1] > self.context:
            raise ValueError("past the context")
        places = torch.arange(1, both.shape[1] + 1)
        sums = (both * places * (places + 2)).cumsum(dim=1) % self.vocab_size
        logits = self.sharpness * nn.functional.one_hot(sums, self.vocab_size).float()
        return logits[:, past.shape[1] :], both


class Counter(Sums):
    """Count: after 3 comes 4."""

    def decode(self, tokens, cache=None):
        _, cache = super().decode(tokens, cache)
        following = (tokens + 1) % self.vocab_size
        return self.sharpness * nn.functional.one_hot(following, self.vocab_size).float(), cache


def continue_slowly(model, tokens, num_tokens, **options):
    """Continue without a cache, reading the window anew for each token."""
    model.eval()
    with torch.no_grad():
        for _ in range(num_tokens):
            logits = model(tokens[:, -model.context :])[:, -1]
            following = sample(logits, **options)
            tokens = torch.cat([tokens, following[:, None]], dim=1)
    return tokens


def make_gpt(context=7, seed=3, **options):
    """Make a tiny GPT whose logits are far apart."""
    torch.manual_seed(seed)
    model = GPT(13, context, 22, 2, 2, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def prompt(batch=3, length=4, vocab_size=11, seed=2):
    return torch.randint(vocab_size, (batch, length), generator=seeded(seed))


@pytest.mark.parametrize("length", (1, 4, 6, 7, 19))
@pytest.mark.parametrize("num_tokens", (1, 2, 17))
def test_the_window_slides_as_if_there_were_no_cache(length, num_tokens):
    tokens = prompt(length=length)
    found = generate(Sums(), tokens, num_tokens, temperature=0)
    assert torch.equal(found, continue_slowly(Sums(), tokens, num_tokens, temperature=0))
    assert torch.equal(found[:, :length], tokens)
    assert found.shape == (3, length + num_tokens) and found.dtype == torch.long


@pytest.mark.parametrize("length", (1, 5, 7, 16))
def test_a_gpt_continues_with_its_cache_as_without_past_the_limit(length):
    model = make_gpt().double()
    tokens = prompt(length=length, vocab_size=13)
    found = generate(model, tokens, 23, temperature=0)
    assert torch.equal(found, continue_slowly(model, tokens, 23, temperature=0))
    assert len(found[:, length:].unique()) > 3


@pytest.mark.parametrize("options", ({}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.8}), ids=str)
def test_the_same_tokens_are_drawn_with_a_cache_and_without(options):
    model = make_gpt().double()
    tokens = prompt(vocab_size=13)
    found = generate(model, tokens, 19, generator=seeded(4), **options)
    slow = continue_slowly(model, tokens, 19, generator=seeded(4), **options)
    assert torch.equal(found, slow)


def test_options_reach_the_sampler():
    model = Sums(sharpness=0.0)  # all tokens are equally likely
    tokens = prompt(batch=400)
    assert len(generate(model, tokens, 2, generator=seeded())[:, 4:].unique()) == 11
    assert len(generate(model, tokens, 2, top_k=3, generator=seeded())[:, 4:].unique()) == 3
    assert len(generate(model, tokens, 2, top_p=0.3, generator=seeded())[:, 4:].unique()) == 4
    assert len(generate(model, tokens, 2, temperature=0)[:, 4:].unique()) == 1
    with pytest.raises(ValueError, match="top_p"):
        generate(model, tokens, 2, top_p=2.0)


def test_within_the_window_each_token_is_read_once():
    for context in (24, 40):  # the last token that is drawn is not read
        model = Sums(context=context)
        generate(model, prompt(length=5), 20, temperature=0)
        assert model.sizes == [5] + [1] * 19


def test_rows_do_not_know_of_each_other():
    model, tokens = make_gpt().double(), prompt(vocab_size=13)
    found = generate(model, tokens, 15, temperature=0)
    for row in range(3):
        alone = generate(model, tokens[row : row + 1], 15, temperature=0)
        assert torch.equal(found[row : row + 1], alone)


def test_after_the_end_a_row_is_filled_with_the_end():
    tokens = torch.tensor([[0, 5], [0, 1], [3, 7]])
    found = generate(Counter(context=30), tokens, 6, temperature=0, eos_id=8)
    assert found.tolist() == [
        [0, 5, 6, 7, 8, 8, 8, 8],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [3, 7, 8, 8, 8, 8, 8, 8],
    ]


def test_an_end_in_the_prompt_ends_nothing():
    found = generate(Counter(), torch.tensor([[8, 2], [3, 8]]), 3, temperature=0, eos_id=8)
    assert found.tolist() == [[8, 2, 3, 4, 5], [3, 8, 9, 10, 0]]


def test_the_end_may_be_the_first_id():
    found = generate(Counter(), torch.tensor([[9], [5]]), 4, temperature=0, eos_id=0)
    assert found.tolist() == [[9, 10, 0, 0, 0], [5, 6, 7, 8, 9]]


def test_without_an_end_nothing_is_filled():
    found = generate(Counter(), torch.tensor([[8]]), 4, temperature=0)
    assert found.tolist() == [[8, 9, 10, 0, 1]]


def test_when_all_rows_have_ended_the_model_rests():
    model = Counter(context=50)
    found = generate(model, torch.tensor([[5], [6]]), 40, temperature=0, eos_id=8)
    assert found.shape == (2, 41) and (found[:, 3:] == 8).all()
    assert len(model.sizes) <= 4


def test_ends_past_the_window_leave_the_other_rows_alone():
    tokens = prompt(batch=5)
    free = generate(Sums(), tokens, 20, temperature=0)
    found = generate(Sums(), tokens, 20, temperature=0, eos_id=3)
    for with_end, without in zip(found[:, 4:].tolist(), free[:, 4:].tolist()):
        stop = without.index(3) if 3 in without else 20
        assert with_end == without[:stop] + [3] * (20 - stop)
    assert any(3 in row for row in free[:, 4:].tolist())


def test_no_tokens_give_the_prompt():
    tokens = prompt()
    found = generate(Sums(), tokens, 0)
    assert torch.equal(found, tokens) and found.shape == tokens.shape
    found[0, 0] += 1
    assert torch.equal(tokens, prompt()), "the prompt was handed out, not a copy"


def test_nobody_gets_no_continuation():
    found = generate(Sums(), prompt(batch=0), 3, temperature=0)
    assert found.shape == (0, 7)


def test_the_prompt_is_not_changed():
    tokens = prompt()
    generate(Sums(), tokens, 9, temperature=0)
    assert torch.equal(tokens, prompt())


@pytest.mark.parametrize("training", (True, False))
def test_modes_gradients_and_the_global_state_stay(training, same_random_state):
    torch.manual_seed(11)
    model = make_gpt(dropout=0.5).train(training)
    parts = list(model.modules())
    parts[-1].train(not training)
    modes = [part.training for part in parts]
    torch.manual_seed(11)
    a, b = (generate(model, prompt(), 12, generator=seeded(5)) for _ in range(2))
    assert torch.equal(a, b), "dropout was on"
    assert [part.training for part in parts] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()


def test_two_calls_without_a_generator_go_on_drawing():
    torch.manual_seed(0)
    model = Sums(sharpness=0.0)
    first, second = (generate(model, prompt(), 20).tolist() for _ in range(2))
    assert first != second
    torch.manual_seed(0)
    assert generate(model, prompt(), 20).tolist() == first


def test_a_generator_goes_on_drawing():
    generator, model = seeded(), Sums(sharpness=0.0)
    first, second = (generate(model, prompt(), 9, generator=generator) for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("tokens", (torch.zeros(2, 0, dtype=torch.long), torch.tensor([1, 2])))
def test_a_prompt_is_a_batch_of_rows_with_tokens(tokens):
    with pytest.raises(ValueError):
        generate(Sums(), tokens, 3)


def test_a_negative_number_of_tokens_is_an_error():
    with pytest.raises(ValueError, match="-1 tokens"):
        generate(Sums(), prompt(), -1)


def test_a_failure_puts_the_modes_back():
    model = Sums().train()
    with pytest.raises(ValueError):
        generate(model, prompt(), 3, top_k=-1)
    assert model.training


# ------------------------------------------------------------------------------------------------
# fit_power_law.


def law(x, scale, exponent, constant=0.0):
    return [scale * each**-exponent + constant for each in x]


def spread(low, high, num=8):
    """Give numbers evenly spaced in their logarithms."""
    return torch.logspace(low, high, num, dtype=torch.float64).tolist()


@pytest.mark.parametrize("span", ((0, 2), (3, 6), (6, 12), (-4, -1), (3, 12)), ids=str)
@pytest.mark.parametrize("scale", (1e-3, 1.0, 2.6, 400.0))
@pytest.mark.parametrize("exponent", (0.05, 0.34, 1.0, 2.0))
def test_an_exact_power_law_is_found_without_a_constant(span, scale, exponent):
    x = spread(*span)
    found = fit_power_law(x, law(x, scale, exponent))
    assert found[:2] == pytest.approx((scale, exponent), rel=1e-3)
    assert found[2] == pytest.approx(0, abs=1e-4 * min(law(x, scale, exponent)))


@pytest.mark.parametrize(
    ("span", "scale", "exponent", "constant"),
    (
        ((3, 9), 400.0, 0.34, 1.69),  # of Chinchilla's size
        ((3, 9), 20.0, 0.3, 1.0),
        ((0, 3), 5.0, 1.0, 2.0),
        ((3, 12), 30.0, 0.5, 0.1),
        ((6, 12), 1e4, 0.7, 0.02),
        ((0, 2), 1.0, 2.0, 1e-3),
    ),
)
def test_an_exact_constant_is_found(span, scale, exponent, constant):
    x = spread(*span, num=12)
    found = fit_power_law(x, law(x, scale, exponent, constant))
    assert found == pytest.approx((scale, exponent, constant), rel=2e-2)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("span", "scale", "exponent", "constant"),
    (((3, 9), 20.0, 0.3, 0.0), ((4, 10), 400.0, 0.34, 1.69), ((3, 12), 9.0, 0.1, 0.0)),
)
def test_a_noisy_power_law_is_found_nearly(span, scale, exponent, constant, seed):
    x = spread(*span, num=40)
    noise = 1 + 0.01 * torch.randn(40, generator=seeded(seed), dtype=torch.float64)
    y = (torch.tensor(law(x, scale, exponent, constant), dtype=torch.float64) * noise).tolist()
    found = fit_power_law(x, y)
    assert found[1] == pytest.approx(exponent, rel=0.15, abs=0.01)
    assert found[2] == pytest.approx(constant, abs=0.1)
    fitted = law(x, *found)
    assert fitted == pytest.approx(law(x, scale, exponent, constant), rel=0.02)


@pytest.mark.parametrize("seed", range(8))
def test_a_constant_that_the_data_do_not_support_is_zero(seed):
    x = spread(3, 5.3, num=7)
    noise = 1 + 0.01 * torch.randn(7, generator=seeded(seed), dtype=torch.float64)
    y = (torch.tensor(law(x, 3.4, 0.045), dtype=torch.float64) * noise).tolist()
    scale, exponent, constant = fit_power_law(x, y)
    assert 0 <= constant < min(y)
    assert exponent > 0 and scale > 0


@pytest.mark.parametrize("noise", (0.001, 0.01, 0.02))
@pytest.mark.parametrize("exponent", (0.1, 0.5))
def test_noise_seldom_makes_a_constant(exponent, noise):
    """Once in 20 times, says the docstring: here at most 8 of 50."""
    x = spread(3, 6, num=12)
    error = noise * torch.randn(50, 12, generator=seeded(3), dtype=torch.float64)
    y = torch.tensor(law(x, 5.0, exponent), dtype=torch.float64) * error.exp()
    found = [fit_power_law(x, row) for row in y.tolist()]
    assert sum(constant > 0 for *_, constant in found) <= 8
    assert all(abs(b - exponent) < 4 * noise + 1e-6 for _, b, _ in found)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("scale", "exponent", "constant"), ((406.0, 0.34, 1.69), (50.0, 0.5, 1.0), (10.0, 0.3, 0.5))
)
@pytest.mark.parametrize("num", (8, 20))
def test_one_percent_of_noise_does_not_hide_a_constant(num, scale, exponent, constant, seed):
    x = spread(3, 6, num=num)
    noise = (0.01 * torch.randn(num, generator=seeded(seed), dtype=torch.float64)).exp()
    y = torch.tensor(law(x, scale, exponent, constant), dtype=torch.float64) * noise
    found = fit_power_law(x, y)
    assert found[1] == pytest.approx(exponent, abs=0.05)
    assert found[2] == pytest.approx(constant, rel=0.3)


def test_sizes_as_in_the_section_have_no_constant():
    """Seven losses that fall in a straight line of logarithms, with a bend upwards and one down."""
    x = [1680, 6432, 14256, 25152, 56160, 99456]
    y = [2.447, 2.329, 2.210, 2.196, 2.092, 2.072]
    scale, exponent, constant = fit_power_law(x, y)
    assert constant == 0 and isinstance(constant, float)
    assert exponent == pytest.approx(0.0415, abs=0.003)
    assert scale * 222912**-exponent == pytest.approx(1.989, abs=0.02)


def test_a_straight_line_is_fitted_to_logarithms():
    """Without a constant the fit is the one of least squares of logarithms: by hand, exponent 1."""
    found = fit_power_law([1, 10, 100], [100.0, 10 * 2**0.5, 1.0])
    assert found[1] == pytest.approx(1, abs=0.15)
    x, y = [1.0, 10.0, 100.0, 1000.0], [90.0, 12.0, 0.9, 0.11]
    logs = torch.tensor([x, y], dtype=torch.float64).log()
    scale, exponent, constant = fit_power_law(x, y)
    if constant == 0:
        a, b = logs - logs.mean(dim=1, keepdim=True)
        assert exponent == pytest.approx(-((a * b).sum() / a.square().sum()).item(), rel=0.02)


@pytest.mark.parametrize("factor", (1e-6, 1e3))
def test_units_do_not_matter(factor):
    x = spread(3, 8, num=10)
    noise = 1 + 0.01 * torch.randn(10, generator=seeded(1), dtype=torch.float64)
    y = torch.tensor(law(x, 50.0, 0.4, 0.5), dtype=torch.float64) * noise
    scale, exponent, constant = fit_power_law(x, y)
    other = fit_power_law([factor * each for each in x], y)
    assert other[1:] == pytest.approx((exponent, constant), rel=1e-2, abs=1e-4)
    other = fit_power_law(x, factor * y)
    assert other == pytest.approx((factor * scale, exponent, factor * constant), rel=1e-2)


def test_the_order_of_points_does_not_matter():
    x = spread(3, 8)
    y = [a * b for a, b in zip(law(x, 50.0, 0.4, 0.5), (1, 1.01, 0.99, 1.02, 1, 0.98, 1.01, 1))]
    assert fit_power_law(x[::-1], y[::-1]) == pytest.approx(fit_power_law(x, y), rel=1e-4)


def test_points_may_repeat_an_x():
    x = [10.0, 10.0, 100.0, 100.0, 1000.0, 1000.0]
    found = fit_power_law(x, law(x, 3.0, 0.5))
    assert found == pytest.approx((3, 0.5, 0), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    "kind",
    (list, tuple, torch.tensor, "array", "half"),
    ids=("list", "tuple", "tensor", "array", "half"),
)
def test_lists_tensors_and_arrays_are_points(kind):
    x, y = [4.0, 16.0, 64.0, 256.0], [8.0, 4.0, 2.0, 1.0]
    if kind == "array":
        kind = lambda each: torch.tensor(each).numpy()  # noqa: E731
    if kind == "half":
        kind = lambda each: torch.tensor(each).half()  # noqa: E731
    found = fit_power_law(kind(x), kind(y))
    assert all(type(each) is float for each in found) and len(found) == 3
    assert found == pytest.approx((16, 0.5, 0), rel=1e-3, abs=1e-3)
    assert fit_power_law([int(each) for each in x], [int(each) for each in y]) == pytest.approx(
        found, rel=1e-4, abs=1e-4
    )


def test_three_points_are_enough():
    assert fit_power_law([1, 4, 16], [4.0, 2.0, 1.0])[1] == pytest.approx(0.5, rel=1e-2)


@pytest.mark.parametrize(
    ("x", "y"),
    (
        ([1, 2, 3], [3.0, 2.0]),
        ([1, 2], [2.0, 1.0]),
        ([], []),
        ([1, 2, 0], [3.0, 2.0, 1.0]),
        ([1, 2, -3], [3.0, 2.0, 1.0]),
        ([1, 2, 3], [3.0, 2.0, 0.0]),
        ([1, 2, 3], [3.0, 2.0, -1.0]),
        ([1, 2, NAN], [3.0, 2.0, 1.0]),
        ([1, 2, 3], [3.0, NAN, 1.0]),
        ([1, 2, INF], [3.0, 2.0, 1.0]),
        ([1, 2, 3], [3.0, INF, 1.0]),
        ([2, 2, 2], [3.0, 2.0, 1.0]),
        ([[1, 2, 3]], [[3.0, 2.0, 1.0]]),
        ([[1], [2], [3]], [[3.0], [2.0], [1.0]]),
    ),
    ids=str,
)
def test_points_that_no_law_fits_are_errors(x, y):
    with pytest.raises(ValueError):
        fit_power_law(x, y)


def noisy_laws(num=150, size=7, noise=0.02):
    x = spread(3, 5, num=size)
    error = noise * torch.randn(num, size + 1, generator=seeded(6), dtype=torch.float64)
    y = torch.tensor(law([*x, 1e6], 4.0, 0.1), dtype=torch.float64) * error.exp()
    return x, y


@pytest.mark.parametrize("level", (0.5, 0.95))
def test_predictions_hold_the_next_point_as_often_as_they_say(level):
    x, y = noisy_laws()
    inside = 0
    for row in y.tolist():
        low, middle, high = predict_loss(x, row[:-1], 1e6, level=level)
        assert low < middle < high
        inside += low < row[-1] < high
    check_shares([inside, len(y) - inside], [level, 1 - level])


@pytest.mark.parametrize("level", (0.5, 0.95))
def test_intervals_hold_the_exponent_as_often_as_they_say(level):
    x, y = noisy_laws()
    pairs = [exponent_interval(x, row[:-1], level=level) for row in y.tolist()]
    inside = sum(low < 0.1 < high for low, high in pairs)
    check_shares([inside, len(y) - inside], [level, 1 - level])


def test_intervals_are_those_of_the_textbook():
    """Six points, so four degrees of freedom: the table says 2.776445 for 95 %."""
    x, y = [10.0, 30.0, 90.0, 300.0, 800.0, 3000.0], [5.1, 4.2, 3.9, 3.1, 2.9, 2.3]
    a, b = (torch.tensor(each, dtype=torch.float64).log() for each in (x, y))
    spread_x = (a - a.mean()).square().sum()
    slope = ((a - a.mean()) * b).sum() / spread_x
    scatter = ((b - b.mean() - slope * (a - a.mean())).square().sum() / 4).sqrt()
    half = 2.776445 * scatter / spread_x.sqrt()
    expected = [(-slope + side * half).item() for side in (-1, 1)]
    assert exponent_interval(x, y) == pytest.approx(expected, rel=1e-5)
    away = math.log(1e4) - a.mean()
    half = 2.776445 * scatter * (1 + 1 / 6 + away**2 / spread_x).sqrt()
    middle = b.mean() + slope * away
    expected = [(middle + side * half).exp().item() for side in (-1, 0, 1)]
    assert predict_loss(x, y, 1e4) == pytest.approx(expected, rel=1e-5)


def test_without_scatter_a_prediction_is_a_point():
    x = spread(3, 5)
    assert predict_loss(x, law(x, 4.0, 0.1), 1e6) == pytest.approx(law([1e6], 4.0, 0.1) * 3)
    assert exponent_interval(x, law(x, 4.0, 0.1)) == pytest.approx((0.1, 0.1))


@pytest.mark.parametrize("y", ([1.0, 2.0, 1.0], [2.0, 1.0, 2.0], [3.0, 3.0, 3.0]), ids=str)
def test_points_that_neither_rise_nor_fall_have_the_exponent_zero(y):
    scale, exponent, constant = fit_power_law([1, 10, 100], y)
    assert exponent == pytest.approx(0, abs=1e-9) and constant == 0
    assert scale == pytest.approx(math.prod(y) ** (1 / 3))


def test_what_rises_has_a_negative_exponent():
    found = fit_power_law([1, 4, 16, 64], [1.0, 2.0, 4.0, 8.0])
    assert found == pytest.approx((1, -0.5, 0), rel=1e-6, abs=1e-9)


def test_a_law_that_hardly_falls_is_found_under_its_constant():
    x = spread(3, 9, num=12)
    found = fit_power_law(x, law(x, 0.9, 0.5, 7.0))
    assert found == pytest.approx((0.9, 0.5, 7.0), rel=1e-3)


def test_the_points_are_not_changed():
    x, y = torch.tensor([1.0, 10.0, 100.0]), torch.tensor([5.0, 4.0, 3.0])
    fit_power_law(x, y)
    assert x.tolist() == [1, 10, 100] and y.tolist() == [5, 4, 3]
