"""Prove that what adapts, shrinks, widens and steers a model does what it says and no more."""

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from snippets.after_pretraining import (
    Int8Linear,
    LoRALinear,
    MixtureOfExperts,
    add_lora,
    answer_log_probs,
    dpo_loss,
    encode_answers,
    merge,
    quantise_rows,
    replace_layers,
    route,
    run_experts,
    without_lora,
)
from snippets.datasets import alphabet, characters_to_ids, ids_to_characters
from snippets.large_pretraining_transformers import GPT
from snippets.multihead_attention import MultiHeadAttention
from snippets.training import sequence_loss
from snippets.transformer import PositionWiseFFN

# Axes: a number each that no other has, so that no swapped axis can pass.
B, T, IN, OUT, RANK = 2, 5, 7, 11, 3
D, HIDDEN, E, TOKENS = 13, 17, 5, 19

dtypes = pytest.mark.parametrize(
    "dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64), ids=str
)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def shaken_lora(alpha=None, dtype=torch.float32):
    """Return an adapted layer whose B is no longer zero."""
    layer = LoRALinear(nn.Linear(IN, OUT, dtype=dtype), RANK, alpha)
    nn.init.normal_(layer.up)
    return layer


def tiny_gpt(layers=2):
    return GPT(len(alphabet()), 64, 12, 3, layers)


# LoRA


def test_nothing_changes_before_training():
    layer, x = nn.Linear(IN, OUT), torch.randn(B, T, IN)
    assert torch.equal(LoRALinear(copy.deepcopy(layer), RANK)(x), layer(x))


def test_a_correction_by_hand():
    layer = nn.Linear(2, 2, bias=False)
    nn.init.eye_(layer.weight)
    lora = LoRALinear(layer, rank=1, alpha=3.0)
    with torch.no_grad():
        lora.down.copy_(torch.tensor([[1.0, 2.0]]))
        lora.up.copy_(torch.tensor([[10.0], [100.0]]))
    # x = (1, 1): A x = 3, B A x = (30, 300), times 3/1
    assert lora(torch.ones(2)).tolist() == [91.0, 901.0]


@pytest.mark.parametrize(("alpha", "factor"), ((None, 1.0), (RANK, 1.0), (6.0, 2.0), (0, 0.0)))
def test_the_correction_is_scaled_by_alpha_over_rank(alpha, factor):
    lora, x = shaken_lora(alpha), torch.randn(B, T, IN)
    change = x @ lora.down.T @ lora.up.T
    assert_close(lora(x), lora.layer(x) + factor * change)


@dtypes
@pytest.mark.parametrize("alpha", (None, 5.0))
def test_merged_equals_unmerged(dtype, alpha):
    lora, x = shaken_lora(alpha, dtype), torch.randn(B, T, IN, dtype=dtype)
    merged = merge(lora)
    limit = {torch.float16: 3e-2, torch.bfloat16: 2e-1}.get(dtype, 1e-6)
    assert type(merged) is nn.Linear and merged(x).dtype == dtype
    assert_close(merged(x), lora(x), atol=limit, rtol=limit)


def test_merging_leaves_the_adapted_layer_alone_and_gives_a_layer_that_can_learn():
    lora = shaken_lora()
    before = copy.deepcopy(lora.state_dict())
    merged = merge(lora)
    assert all(torch.equal(before[name], x) for name, x in lora.state_dict().items())
    assert all(x.requires_grad for x in merged.parameters())
    assert not any(x.requires_grad for x in lora.layer.parameters())


def test_the_weight_is_frozen_and_b_learns_first():
    lora = LoRALinear(nn.Linear(IN, OUT), RANK)
    lora(torch.randn(B, IN)).square().sum().backward()
    assert lora.layer.weight.grad is None and lora.layer.bias.grad is None
    assert lora.up.grad.abs().min() > 0  # A is drawn
    assert not lora.down.grad.any()  # B is zero


def test_the_parameters_that_learn_are_as_many_as_theory_says():
    lora = LoRALinear(nn.Linear(IN, OUT), RANK)
    assert sum(x.numel() for x in lora.parameters() if x.requires_grad) == RANK * (IN + OUT)
    assert (lora.in_features, lora.out_features) == (IN, OUT)
    assert lora.down.shape == (RANK, IN) and lora.up.shape == (OUT, RANK)


def test_a_is_drawn_at_the_scale_of_its_inputs():
    lora = LoRALinear(nn.Linear(1000, 2), 50)
    assert lora.down.std().item() == pytest.approx(1000**-0.5, rel=0.05)


@dtypes
def test_a_correction_has_the_dtype_of_its_layer(dtype):
    lora = LoRALinear(nn.Linear(IN, OUT, dtype=dtype), RANK)
    assert lora.down.dtype == lora.up.dtype == dtype
    assert lora(torch.randn(B, IN, dtype=dtype)).dtype == dtype


def test_a_correction_follows_its_layer_to_another_device():
    lora = LoRALinear(nn.Linear(IN, OUT, device="meta"), RANK)
    assert {x.device.type for x in lora.parameters()} == {"meta"}


def test_the_bias_stays_as_it_is():
    layer = nn.Linear(IN, OUT)
    assert LoRALinear(layer, RANK).bias is layer.bias
    assert LoRALinear(nn.Linear(IN, OUT, bias=False), RANK).bias is None


@pytest.mark.parametrize("rank", (0, -1))
def test_a_rank_below_one_is_an_error(rank):
    with pytest.raises(ValueError, match="at least 1"):
        LoRALinear(nn.Linear(IN, OUT), rank)


def test_add_lora_freezes_a_model_but_for_its_corrections():
    model = tiny_gpt()
    assert add_lora(model, RANK) is model
    learning = {name for name, x in model.named_parameters() if x.requires_grad}
    expected = {
        f"blocks.{block}.attention.{layer}.{part}"
        for block in (0, 1)
        for layer in ("query_layer", "value_layer")
        for part in ("down", "up")
    }
    assert learning == expected


def test_a_gpt_with_lora_is_the_same_gpt_until_it_learns_and_when_switched_off():
    model, tokens = tiny_gpt(), torch.randint(70, (B, TOKENS))
    before = model(tokens)
    add_lora(model, RANK)
    assert torch.equal(model(tokens), before)
    adam = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(3):
        adam.zero_grad()
        sequence_loss(model(tokens), tokens, -1).backward()
        adam.step()
    assert not torch.allclose(model(tokens), before, atol=1e-3)
    with without_lora(model):
        assert torch.equal(model(tokens), before)
    changed = model(tokens)
    replace_layers(model, LoRALinear, merge)
    assert_close(model(tokens), changed, atol=1e-5, rtol=1e-5)
    assert not any(isinstance(x, LoRALinear) for x in model.modules())


def test_other_layers_are_adapted_when_asked_for():
    model = add_lora(tiny_gpt(), RANK, names=("hidden_layer",))
    found = {name for name, x in model.named_modules() if isinstance(x, LoRALinear)}
    assert found == {"blocks.0.ffn.hidden_layer", "blocks.1.ffn.hidden_layer"}
    everything = add_lora(tiny_gpt(), RANK, names=None)
    assert sum(isinstance(x, LoRALinear) for x in everything.modules()) == 2 * 6


def test_add_lora_hands_alpha_on():
    model = add_lora(tiny_gpt(), RANK, alpha=6.0)
    assert model.blocks[1].attention.query_layer.scale == 2.0


def test_adapted_attention_takes_masks_and_idle_queries():
    attention = MultiHeadAttention(12, 3, bias=True)
    x, mask = torch.randn(B, T, 12), torch.ones(T, T, dtype=torch.bool).tril(-1)
    before, _ = attention(x, x, x, mask)
    names = ("query_layer", "value_layer", "output_layer")
    after, _ = add_lora(attention, RANK, names=names)(x, x, x, mask)
    assert torch.equal(after, before) and not after[:, 0].any()


def test_corrections_are_switched_on_again_after_an_error():
    model = add_lora(tiny_gpt(), RANK)
    layers = [x for x in model.modules() if isinstance(x, LoRALinear)]
    with pytest.raises(RuntimeError, match="stop"), without_lora(model):
        assert not any(layer.active for layer in layers)
        raise RuntimeError("stop")
    assert all(layer.active for layer in layers)


def test_a_correction_that_was_off_stays_off():
    model = add_lora(tiny_gpt(), RANK)
    first = model.blocks[0].attention.query_layer
    first.active = False
    with without_lora(model), without_lora(model):
        pass
    assert not first.active and model.blocks[1].attention.query_layer.active


def test_replacing_counts_and_nothing_to_replace_is_an_error():
    model = nn.Sequential(nn.Linear(IN, OUT), nn.ReLU(), nn.Sequential(nn.Linear(OUT, IN)))
    assert replace_layers(copy.deepcopy(model), nn.Linear, Int8Linear) == 2
    assert replace_layers(copy.deepcopy(model), nn.Linear, Int8Linear, names=("2", "0")) == 2
    with pytest.raises(ValueError, match="no LoRALinear"):
        replace_layers(model, LoRALinear, merge)
    with pytest.raises(ValueError, match="query_layer"):
        add_lora(nn.Sequential(nn.Linear(IN, OUT)), RANK)


# Eight bits


def test_a_row_by_hand():
    codes, steps = quantise_rows(torch.tensor([[127.0, -63.4, 0.6, 0.0], [-2.54, 1.0, 0, 0]]))
    assert codes.tolist() == [[127, -63, 1, 0], [-127, 50, 0, 0]]
    assert codes.dtype == torch.int8
    assert_close(steps, torch.tensor([[1.0], [0.02]]))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.floats(-20, 20), st.integers(1, 40), st.integers(1, 5))
def test_no_entry_is_off_by_more_than_half_a_step(seed, size, columns, rows):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * 10**size
    codes, steps = quantise_rows(weight)
    assert (weight - steps * codes).abs().le(steps * (0.5 + 1e-9)).all()
    assert codes.long().abs().amax(dim=1).eq(127).all()  # so -128 is not used
    assert torch.equal(quantise_rows(-weight)[0], -codes)


def test_rows_do_not_depend_on_each_other():
    weight = torch.randn(OUT, IN)
    codes, steps = quantise_rows(weight)
    weight[1] *= 1000
    others = torch.arange(OUT) != 1
    assert torch.equal(quantise_rows(weight)[0][others], codes[others])
    assert torch.equal(quantise_rows(weight)[1][others], steps[others])


@pytest.mark.parametrize("tiny", (0.0, 1e-45, 1e-38))
def test_a_row_of_zeros_stays_zero(tiny):
    weight = torch.tensor([[0.0, 0.0], [tiny, -tiny], [1.0, 0.5]])
    codes, steps = quantise_rows(weight)
    restored = steps * codes
    assert not codes[0].any() and steps[0].item() == 1
    assert restored.isfinite().all()
    assert_close(restored, weight, atol=1e-2, rtol=1e-2)


def test_a_step_that_is_rounded_down_makes_no_code_too_large():
    weight = torch.tensor([[2.66e-43, -2.66e-43]])  # 190 of the least float32, a step is 1.496
    assert quantise_rows(weight)[0].tolist() == [[127, -127]]


@dtypes
def test_codes_are_right_in_every_dtype(dtype):
    weight = torch.randn(OUT, IN).to(dtype)
    codes, steps = quantise_rows(weight)
    expected, _ = quantise_rows(weight.double())
    assert (codes.int() - expected.int()).abs().max() <= 1
    assert steps.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@dtypes
def test_a_layer_in_eight_bits_is_the_layer_with_the_restored_weight(dtype):
    layer, x = nn.Linear(IN, OUT, dtype=dtype), torch.randn(B, T, IN, dtype=dtype)
    codes, steps = quantise_rows(layer.weight)
    expected = F.linear(x, (steps * codes).to(dtype), layer.bias)
    found = Int8Linear(layer)(x)
    assert found.dtype == dtype
    assert torch.equal(found, expected)
    assert_close(found, layer(x), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
def test_what_is_not_finite_is_an_error(bad):
    with pytest.raises(ValueError, match="not finite"):
        quantise_rows(torch.tensor([[1.0, bad]]))


def test_a_layer_in_eight_bits_keeps_nothing_else():
    layer = nn.Linear(IN, OUT)
    small = Int8Linear(layer)
    assert not list(small.parameters()) and not small.bias.requires_grad
    sizes = {name: x.nbytes for name, x in small.state_dict().items()}
    assert sizes == {"codes": IN * OUT, "steps": 4 * OUT, "bias": 4 * OUT}
    assert (small.in_features, small.out_features) == (IN, OUT)
    before = small(torch.ones(IN))
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    assert torch.equal(small(torch.ones(IN)), before)
    assert small.state_dict()["codes"].dtype == torch.int8


def test_a_layer_without_bias():
    layer = nn.Linear(IN, OUT, bias=False)
    assert Int8Linear(layer).bias is None
    assert not Int8Linear(layer)(torch.zeros(B, IN)).any()


def test_a_gpt_in_eight_bits_says_nearly_the_same():
    model, tokens = tiny_gpt(), torch.randint(70, (B, TOKENS))
    small = copy.deepcopy(model)
    assert replace_layers(small, nn.Linear, Int8Linear) == 2 * 6
    assert_close(small(tokens), model(tokens), atol=1e-2, rtol=1e-2)
    assert not torch.equal(small(tokens), model(tokens))
    assert torch.equal(small.embedding.weight, model.embedding.weight)


# Mixture of experts


def weighted_sum(layer, x):
    """Return the sum over all experts, each weighted by its probability."""
    shares = layer.router(x).softmax(dim=-1)
    return sum(shares[..., [number]] * expert(x) for number, expert in enumerate(layer.experts))


@pytest.mark.parametrize("shape", ((D,), (TOKENS, D), (B, T, D), (B, 3, T, D)))
def test_all_experts_chosen_is_the_weighted_sum(shape):
    layer, x = MixtureOfExperts(D, HIDDEN, E, top_k=E).double(), torch.randn(shape).double()
    assert layer(x).shape == shape
    assert_close(layer(x), weighted_sum(layer, x))


def test_one_expert_is_its_network():
    layer, x = MixtureOfExperts(D, HIDDEN, 1, top_k=1), torch.randn(B, T, D)
    assert_close(layer(x), layer.experts[0](x))


@pytest.mark.parametrize("top_k", range(1, E + 1))
def test_each_token_gets_the_renormalised_sum_of_its_experts(top_k):
    layer, x = MixtureOfExperts(D, HIDDEN, E, top_k).double(), torch.randn(TOKENS, D).double()
    for token, found in zip(x, layer(x)):
        probabilities = layer.router(token).softmax(dim=-1)
        best = sorted(range(E), key=lambda i: -probabilities[i])[:top_k]
        total = sum(probabilities[i] for i in best)
        expected = sum(probabilities[i] / total * layer.experts[i](token) for i in best)
        assert_close(found, expected)


def test_routing_by_hand():
    logits = torch.tensor([[0.0, math.log(3), -1.0], [5.0, 1.0, 5.0 + math.log(4)]])
    gates, chosen = route(logits, 2)
    assert chosen.tolist() == [[1, 0], [2, 0]]
    assert_close(gates, torch.tensor([[0.75, 0.25], [0.8, 0.2]]))


def test_an_expert_works_on_its_tokens_alone():
    seen = []

    def expert(x):
        seen.append(len(x))
        return x

    tokens = torch.randn(TOKENS, D)
    gates, chosen = route(torch.randn(TOKENS, E), 2)
    output = run_experts([expert] * E, tokens, gates, chosen)
    assert sum(seen) == 2 * TOKENS and seen == chosen.flatten().bincount(minlength=E).tolist()
    assert_close(output, tokens)  # the gates sum to one


def test_experts_that_are_not_chosen_learn_nothing_and_change_nothing():
    layer, x = MixtureOfExperts(D, HIDDEN, E, top_k=2), torch.randn(1, D)
    _, chosen = route(layer.router(x), 2)
    before = layer(x)
    before.sum().backward()
    for number, expert in enumerate(layer.experts):
        grad = expert.output_layer.weight.grad
        assert (number in chosen) == bool(grad is not None and grad.any())
        if number not in chosen:
            nn.init.constant_(expert.output_layer.bias, 1000.0)
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize("top_k", (1, 2, E))
def test_the_router_learns_only_if_gates_can_differ(top_k):
    layer = MixtureOfExperts(D, HIDDEN, E, top_k).double()
    layer(torch.randn(TOKENS, D).double()).square().sum().backward()
    assert (layer.router.weight.grad.abs().max() > 1e-9) == (top_k > 1)


def test_tokens_do_not_see_each_other():
    layer, x = MixtureOfExperts(D, HIDDEN, E), torch.randn(TOKENS, D)
    order = torch.randperm(TOKENS)
    assert_close(layer(x)[order], layer(x[order]))
    assert_close(layer(x)[:3], layer(x[:3]))


def test_no_tokens_are_no_problem():
    assert MixtureOfExperts(D, HIDDEN, E)(torch.zeros(0, T, D)).shape == (0, T, D)


def test_a_layer_that_is_not_contiguous_in_memory():
    layer, x = MixtureOfExperts(D, HIDDEN, E), torch.randn(B, D, T).mT
    assert_close(layer(x), layer(x.contiguous()))


@dtypes
def test_experts_keep_the_dtype(dtype):
    layer = MixtureOfExperts(D, HIDDEN, E).to(dtype)
    found = layer(torch.randn(B, T, D, dtype=dtype))
    assert found.dtype == dtype and found.isfinite().all()


def test_the_options_are_those_of_the_network():
    layer = MixtureOfExperts(D, HIDDEN, E, bias=False, activation="gelu")
    plain = PositionWiseFFN(D, HIDDEN, bias=False, activation="gelu")
    sizes = [x.shape for x in plain.parameters()]
    assert [x.shape for x in layer.experts[3].parameters()] == sizes
    assert layer.experts[3].activation is plain.activation
    assert sum(x.numel() for x in layer.parameters()) == 2 * D * HIDDEN * E + D * E
    assert layer.top_k == 2


@pytest.mark.parametrize("top_k", (0, E + 1, -1))
def test_more_experts_than_there_are_is_an_error(top_k):
    with pytest.raises(ValueError, match=f"{top_k} of {E}"):
        MixtureOfExperts(D, HIDDEN, E, top_k)


def test_a_wrong_width_is_an_error():
    with pytest.raises(ValueError, match=f"{D} wide, not {D + 1}"):
        MixtureOfExperts(D, HIDDEN, E)(torch.zeros(B, D + 1))


# Instructions and preferences


def test_the_loss_counts_on_the_answer_alone():
    inputs, labels = encode_answers([("2+3?", "five"), ("6?", "six")])
    texts = "q: 2+3?\na: five\n", "q: 6?\na: six\n"
    for text, answer, row, marks in zip(texts, ("five\n", "six\n"), inputs, labels):
        ids = characters_to_ids(text)
        assert torch.equal(row[: len(ids) - 1], ids[:-1])
        assert ids_to_characters(marks[marks != -100]) == answer
        (places,) = (marks != -100).nonzero(as_tuple=True)
        assert places.tolist() == list(range(len(ids) - 1 - len(answer), len(ids) - 1))
        assert torch.equal(marks[places], ids[places + 1])  # the next character
    assert inputs.shape == labels.shape == (2, len(texts[0]) - 1)
    assert not inputs[1, len(texts[1]) - 1 :].any()


def test_another_template():
    inputs, labels = encode_answers([("x", "y")], template="{} -> ")
    assert ids_to_characters(inputs[0]) == "x -> y"
    assert (labels[0] != -100).tolist() == [False] * 4 + [True] * 2


def test_characters_outside_the_alphabet_are_an_error():
    with pytest.raises(ValueError, match="alphabet"):
        encode_answers([("Why?", "because")])


def test_log_probabilities_of_a_model_that_knows_nothing():
    inputs, labels = encode_answers([("a", "bcd"), ("a long question", "e")])
    found = answer_log_probs(lambda tokens: torch.zeros(*tokens.shape, 70), inputs, labels)
    assert_close(found, -math.log(70) * torch.tensor([4.0, 2.0]))


def test_log_probabilities_are_the_loss_times_the_tokens():
    model = tiny_gpt()
    inputs, labels = encode_answers([("one", "un"), ("two", "deux"), ("twelve", "douze")])
    found = answer_log_probs(model, inputs, labels)
    assert found.shape == (3,)
    total = sequence_loss(model(inputs), labels, -100) * (labels != -100).sum()
    assert_close(found.sum(), -total)
    alone = torch.cat(
        [
            answer_log_probs(model, *encode_answers([pair]))
            for pair in (("one", "un"), ("two", "deux"))
        ]
    )
    assert_close(found[:2], alone)  # padding has no part in it


def test_an_answer_without_a_label_has_probability_one():
    inputs = torch.zeros(B, T, dtype=torch.long)
    labels = torch.full((B, T), -100)
    found = answer_log_probs(tiny_gpt(), inputs, labels)
    assert not found.any()
    found.sum().backward()


@pytest.mark.parametrize("beta", (0.1, 0.5, 2.0))
def test_at_the_reference_the_loss_is_ln_2_and_the_slopes_half_beta(beta):
    known = torch.randn(B, 4, dtype=torch.float64)
    chosen, rejected = known.clone().requires_grad_()
    loss = dpo_loss(chosen, rejected, *known, beta=beta)
    assert loss.item() == pytest.approx(math.log(2))
    slopes = torch.autograd.grad(loss, (chosen, rejected))
    assert_close(slopes[0], torch.full((4,), -beta / 2 / 4).double())
    assert_close(slopes[1], torch.full((4,), beta / 2 / 4).double())


def test_the_preference_loss_by_hand():
    values = torch.tensor([[-1.0], [-5.0], [-2.0], [-4.0]]).unbind()
    # margin (-1 + 2) - (-5 + 4) = 2
    expected = -math.log(1 / (1 + math.exp(-0.5 * 2)))
    assert dpo_loss(*values, beta=0.5).item() == pytest.approx(expected)
    assert dpo_loss(*values).item() == pytest.approx(math.log(1 + math.exp(-0.2)))


def test_swapping_both_answers_turns_the_margin():
    chosen, rejected, known, other = torch.randn(4, 1, dtype=torch.float64)
    right = dpo_loss(chosen, rejected, known, other, beta=1.0)
    wrong = dpo_loss(rejected, chosen, other, known, beta=1.0)
    assert (torch.exp(-right) + torch.exp(-wrong)).item() == pytest.approx(1)


def test_the_preference_loss_is_a_mean_and_finite_for_huge_margins():
    zeros = torch.zeros(2)
    chosen = torch.tensor([1e6, -1e6], requires_grad=True)
    loss = dpo_loss(chosen, zeros, zeros, zeros, beta=1.0)
    assert loss.item() == pytest.approx(5e5)
    loss.backward()
    assert chosen.grad.tolist() == [0.0, -0.5]


def test_preference_training_turns_the_odds_and_leaves_the_reference_alone():
    model = add_lora(tiny_gpt(), RANK)
    pairs = [[(question, answer) for question in "abc"] for answer in ("yes", "no")]
    chosen, rejected = map(encode_answers, pairs)
    with without_lora(model), torch.no_grad():
        known = [answer_log_probs(model, *side) for side in (chosen, rejected)]
    adam = torch.optim.Adam(model.parameters(), lr=0.03)
    losses = []
    for _ in range(15):
        found = [answer_log_probs(model, *side) for side in (chosen, rejected)]
        losses.append(dpo_loss(*found, *known, beta=1.0))
        adam.zero_grad()
        losses[-1].backward()
        adam.step()
    assert losses[0].item() == pytest.approx(math.log(2), abs=1e-5)
    assert losses[-1] < 0.6
    with torch.no_grad():
        ratios = [
            answer_log_probs(model, *side) - before
            for side, before in zip((chosen, rejected), known)
        ]
        assert (ratios[0] > ratios[1]).all()
        with without_lora(model):
            for side, before in zip((chosen, rejected), known):
                assert torch.equal(answer_log_probs(model, *side), before)


def test_only_the_difference_counts():
    values = torch.randn(4, 3, dtype=torch.float64)
    shift = torch.tensor([[7.0], [7.0], [0.0], [0.0]], dtype=torch.float64)
    assert_close(dpo_loss(*values), dpo_loss(*(values + shift)))
    assert_close(dpo_loss(*values), dpo_loss(*(values + torch.randn(1, 3))))


def test_every_pair_of_answers_counts_alike():
    values = torch.randn(4, 3, dtype=torch.float64)
    single = [dpo_loss(*values[:, [place]]) for place in range(3)]
    assert_close(dpo_loss(*values), torch.stack(single).mean())
    for order in itertools.permutations(range(3)):
        assert_close(dpo_loss(*values[:, list(order)]), dpo_loss(*values))
