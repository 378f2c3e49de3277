"""Prove that heads are split, masked, pooled and merged as the section says."""

import copy
import io
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from snippets import multihead_attention as section
from snippets.attention_scoring_functions import (
    AdditiveAttention,
    DotProductAttention,
    causal_mask,
    length_mask,
    scaled_dot_product_attention,
)
from snippets.multihead_attention import (
    Head,
    LookUp,
    LoopedHeads,
    MultiHeadAttention,
    draw_boards,
    endless_boards,
    look_up_loss,
    merge_heads,
    right_answers,
    split_heads,
)

# Axes: a prime each, so that no swapped axis can pass.
B, H, T, S, D = 2, 3, 5, 7, 33  # a head is 11 wide

# The largest error allowed, absolute and relative, by dtype.
TOLERANCE = {
    torch.float16: 6e-3,
    torch.bfloat16: 5e-2,
    torch.float32: 1e-5,
    torch.float64: 1e-12,
}
NAN = math.nan
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
with_and_without_weights = pytest.mark.parametrize("need_weights", (False, True))


def close(found, expected, dtype=torch.float32):
    """Assert equality within the tolerance of a dtype."""
    limit = TOLERANCE[dtype]
    assert_close(found.to(expected.dtype), expected, atol=limit, rtol=limit)


def make(width=D, num_heads=H, *, seed=5, dtype=torch.float32, **options):
    """Make a layer whose biases, if it has any, are not zero."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(width, num_heads, **options)
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return layer.to(dtype)


def parts(layer):
    """Give the four linear maps: of queries, keys and values, and after."""
    names = ("query_layer", "key_layer", "value_layer", "output_layer")
    return [getattr(layer, name) for name in names]


def identity(layer):
    """Let all four maps copy; with few key-value heads, the first columns."""
    for part in parts(layer):
        nn.init.eye_(part.weight)
    return layer


def draw(batch=B, num_queries=T, num_keys=S, width=D, dtype=torch.float32):
    """Draw queries, keys and values."""
    generator = torch.Generator().manual_seed(3)
    sizes = (num_queries, num_keys, num_keys)
    return [torch.randn(batch, n, width, generator=generator).to(dtype) for n in sizes]


def make_mask(kind, batch=B, num_heads=H, num_queries=T, num_keys=S):
    """Make a mask of each kind and shape; `empty` closes whole rows."""
    generator = torch.Generator().manual_seed(7)
    lens = torch.tensor([num_keys - 2, num_keys, 2, 4][:batch])
    padding, causal = length_mask(lens, num_keys), causal_mask(num_queries, num_keys)
    full = batch, num_heads, num_queries, num_keys
    each = torch.rand(full, generator=generator) < 0.6
    each[..., 1] = True
    empty = (padding & causal).clone()
    empty[:, 2] = False
    empty[-1] = False
    some = each.clone()
    some[0, -1] = False
    some[:, :, 3] = False
    return {
        "none": None,
        "padding": padding,
        "causal": causal,
        "both": padding & causal,
        "one for all": each[0, 0],
        "each sample": each[:, 0],
        "all heads": each[:, :1],
        "each head": each,
        "padding of heads": padding[:, None].expand(batch, 1, num_queries, num_keys),
        "empty": empty,
        "empty of heads": some,
    }[kind]


FULL_ROWS = (
    "none",
    "padding",
    "causal",
    "both",
    "one for all",
    "each sample",
    "all heads",
    "each head",
    "padding of heads",
)
EMPTY_ROWS = ("empty", "empty of heads")
MASKS = FULL_ROWS + EMPTY_ROWS
masks = pytest.mark.parametrize("kind", MASKS)


def widen(mask, batch, num_heads, num_queries, num_keys):
    """Write out any mask over all axes, (B, H, T, S)."""
    if mask is None:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if mask.ndim == 3:
        mask = mask[:, None]
    return mask.expand(batch, num_heads, num_queries, num_keys)


def reference(layer, query, key, value, mask=None, score_bias=None):
    """Compute one sample, head and query at a time, from the allowed keys."""
    linears = parts(layer)
    num_heads, size = layer.num_heads, query.shape[-1] // layer.num_heads
    shape = len(query), num_heads, query.shape[1], key.shape[1]
    group = query.shape[-1] // linears[1].weight.shape[0]
    mask = widen(mask, *shape)
    bias = query.new_zeros(()) if score_bias is None else score_bias.to(query.dtype)
    bias = bias.expand(shape)
    rows = []
    for b in range(shape[0]):
        projected = [part(x[b]) for part, x in zip(linears, (query, key, value))]
        for t in range(shape[2]):
            row = query.new_zeros(query.shape[-1])
            for h in range(num_heads):
                mine = slice(h * size, (h + 1) * size)
                shared = slice(h // group * size, (h // group + 1) * size)
                seen = mask[b, h, t].nonzero().squeeze(-1)
                if not len(seen):
                    continue
                scores = projected[1][seen, shared] @ projected[0][t, mine] / math.sqrt(size)
                weights = (scores + bias[b, h, t, seen]).softmax(-1)
                head = weights @ projected[2][seen, shared]
                row = row + linears[3].weight[:, mine] @ head
            used = mask[b, :, t].any() and linears[3].bias is not None
            rows.append(row + linears[3].bias if used else row)
    return torch.stack(rows).reshape(query.shape)


def torch_twin(layer, bias):
    """Put the same weights into torch's own layer."""
    linears = parts(layer)
    width, dtype = linears[0].in_features, linears[0].weight.dtype
    twin = nn.MultiheadAttention(width, layer.num_heads, bias=bias, batch_first=True, dtype=dtype)
    with torch.no_grad():
        twin.in_proj_weight.copy_(torch.cat([part.weight for part in linears[:3]]))
        twin.out_proj.weight.copy_(linears[3].weight)
        if bias:
            twin.in_proj_bias.copy_(torch.cat([part.bias for part in linears[:3]]))
            twin.out_proj.bias.copy_(linears[3].bias)
    return twin


def slopes(output):
    """Give weights for a sum whose gradient tells all entries apart."""
    return torch.cos(torch.arange(output.numel())).reshape(output.shape).to(output)


def run(model, layer, inputs, *arguments, **options):
    """Give output, and the gradients of inputs and parameters."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    layer.zero_grad()
    output = model(*leaves, *arguments, **options)
    output = output[0] if isinstance(output, tuple) else output
    (output * slopes(output)).sum().backward()
    grads = [x.grad for x in leaves]
    return output.detach(), grads, [p.grad.clone() for p in layer.parameters()]


def compare(found, right, dtype):
    """Assert that what `run` gave is the same, gradients to their size."""
    close(found[0], right[0], dtype)
    for mine, theirs in zip(found[1] + found[2], right[1] + right[2], strict=True):
        size = max(1.0, theirs.abs().max().item())
        close(mine / size, theirs / size, dtype)


# Trusted implementations.


@pytest.mark.parametrize("kind", FULL_ROWS)
@pytest.mark.parametrize("bias", (False, True), ids="bias={}".format)
@pytest.mark.parametrize("sizes", ((D, H), (14, 1), (10, 5), (6, 6)), ids=str)
def test_equals_the_layer_of_torch(sizes, bias, kind):
    """Compare outputs, all gradients and weights, for each kind of mask."""
    width, num_heads = sizes
    mask = make_mask(kind, num_heads=num_heads)
    closed = ~widen(mask, B, num_heads, T, S).flatten(0, 1)  # torch: True bars
    names = ("weight", "bias") if bias else ("weight",)
    for dtype in (torch.float32, torch.float64):
        layer = make(width, num_heads, bias=bias, dtype=dtype)
        twin = torch_twin(layer, bias)
        inputs = draw(width=width, dtype=dtype)
        output, grads, _ = run(twin, twin, inputs, attn_mask=closed)
        theirs = [getattr(twin, f"in_proj_{name}").grad.chunk(3) for name in names]
        theirs += [[getattr(twin.out_proj, name).grad for name in names]]
        for need_weights in (False, True):
            found = run(layer, layer, inputs, mask, need_weights)
            mine = [[getattr(x, name).grad for x in parts(layer)[:3]] for name in names]
            mine += [[getattr(parts(layer)[3], name).grad for name in names]]
            compare((*found[:2], sum(mine, [])), (output, grads, sum(map(list, theirs), [])), dtype)
        _, weights = layer(*inputs, mask, True)
        _, right = twin(*inputs, attn_mask=closed, average_attn_weights=False)
        close(weights, right, dtype)


def test_equals_the_layer_of_torch_in_self_attention():
    """Pass one tensor three times, and masks as torch's layer likes them."""
    layer = make(dtype=torch.float64)
    twin = torch_twin(layer, False)
    x = draw(dtype=torch.float64)[1]
    lens = torch.tensor([S - 2, S])
    causal = causal_mask(S, S)
    right, _ = twin(x, x, x, key_padding_mask=~length_mask(lens, S)[:, 0], attn_mask=~causal)
    for need_weights in (False, True):
        output, _ = layer(x, x, x, length_mask(lens, S) & causal, need_weights)
        close(output, right, torch.float64)


@dtypes
@masks
@pytest.mark.parametrize(("num_kv_heads", "bias"), ((1, True), (3, False)), ids=str)
def test_agrees_with_one_query_at_a_time(dtype, kind, num_kv_heads, bias):
    """Compare outputs and all gradients with loops in float64."""
    layer = make(num_kv_heads=num_kv_heads, bias=bias, dtype=dtype)
    double = copy.deepcopy(layer).double()
    inputs, mask = draw(dtype=dtype), make_mask(kind)
    right = run(lambda *x: reference(double, *x, mask), double, [x.double() for x in inputs])
    for need_weights in (False, True):
        found = run(layer, layer, inputs, mask, need_weights)
        assert all(x.dtype == dtype for x in (found[0], *found[1], *found[2]))
        compare(found, right, dtype)


@pytest.mark.parametrize("kind", ("none", "causal", "padding", *EMPTY_ROWS))
@pytest.mark.parametrize("sizes", ((12, 4, 2), (20, 4, 1), (18, 6, 2), (18, 6, 3)), ids=str)
def test_grouped_heads_agree_with_one_query_at_a_time(sizes, kind):
    """Share keys and values in groups of neighbouring heads."""
    width, num_heads, num_kv_heads = sizes
    layer = make(width, num_heads, num_kv_heads=num_kv_heads, dtype=torch.float64)
    inputs = draw(width=width, dtype=torch.float64)
    mask = make_mask(kind, num_heads=num_heads)
    right = run(lambda *x: reference(layer, *x, mask), layer, inputs)
    for need_weights in (False, True):
        found = run(layer, layer, inputs, mask, need_weights)
        compare(found, right, torch.float64)


@pytest.mark.parametrize("num_kv_heads", (1, 2, 3, 6))
@pytest.mark.parametrize("bias", (False, True), ids="bias={}".format)
def test_grouped_heads_equal_full_heads_with_repeated_weights(num_kv_heads, bias):
    """Repeat each key-value head for its group, neighbours together."""
    few = make(30, 6, num_kv_heads=num_kv_heads, bias=bias, dtype=torch.float64)
    many = make(30, 6, bias=bias, seed=6, dtype=torch.float64)
    with torch.no_grad():
        for name in ("weight", "bias") if bias else ("weight",):
            for old, new in zip(parts(few), parts(many), strict=True):
                source, target = getattr(old, name), getattr(new, name)
                if len(source) < len(target):
                    heads = source.unflatten(0, (num_kv_heads, 5))
                    source = heads.repeat_interleave(6 // num_kv_heads, 0).flatten(0, 1)
                target.copy_(source)
    inputs, mask = draw(width=30, dtype=torch.float64), make_mask("each head", num_heads=6)
    for need_weights in (False, True):
        mine, right = (layer(*inputs, mask, need_weights) for layer in (few, many))
        close(mine[0], right[0], torch.float64)
        if need_weights:
            close(mine[1], right[1], torch.float64)


@pytest.mark.parametrize("kind", MASKS)
def test_one_head_of_everything_is_plain_attention(kind):
    """Agree with the function of section 3 on projected inputs."""
    layer, inputs = make(num_heads=1), draw()
    mask = make_mask(kind, num_heads=1)
    mask = mask[:, 0] if mask is not None and mask.ndim == 4 else mask
    query, key, value, after = parts(layer)
    right, weights = scaled_dot_product_attention(
        query(inputs[0]), key(inputs[1]), value(inputs[2]), mask
    )
    output, found = layer(*inputs, mask, need_weights=True)
    close(output, after(right))
    close(found[:, 0], weights)


@pytest.mark.parametrize("num_kv_heads", (1, 2, 4))
@with_and_without_weights
def test_gradcheck(num_kv_heads, need_weights):
    """Compare slopes with finite differences, an empty row included."""
    layer = make(8, 4, num_kv_heads=num_kv_heads, bias=True, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in draw(width=8, num_keys=T, dtype=torch.float64)]
    names, parameters = zip(*layer.named_parameters())
    bias = torch.randn(4, T, T, dtype=torch.float64, requires_grad=True)
    mask = make_mask("empty", num_keys=T)

    def output(query, key, value, bias, *parameters):
        return torch.func.functional_call(
            layer,
            dict(zip(names, parameters)),
            (query, key, value, mask, need_weights),
            {"score_bias": bias},
        )[0]

    assert torch.autograd.gradcheck(output, (*inputs, bias, *parameters), fast_mode=True)


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from(((1, 1), (2, 1), (2, 2), (4, 2), (6, 3))),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(0, 10**6),
)
@settings(max_examples=40, deadline=None)
def test_agrees_on_any_sizes_and_any_mask(batch, size, heads, queries, keys, seed):
    """Draw everything at random: both ways agree with the loops."""
    num_heads, num_kv_heads = heads
    layer = make(size * num_heads, num_heads, num_kv_heads=num_kv_heads, dtype=torch.float64)
    torch.manual_seed(seed)
    width = size * num_heads
    query, key, value = (
        torch.randn(batch, n, width, dtype=torch.float64) for n in (queries, keys, keys)
    )
    mask = torch.rand(batch, num_heads, queries, keys) < torch.rand(())
    bias = torch.randn(num_heads, queries, keys, dtype=torch.float64)
    right = reference(layer, query, key, value, mask, bias)
    output, weights = layer(query, key, value, mask, True, score_bias=bias)
    close(output, right, torch.float64)
    close(weights.sum(-1), mask.any(-1).double(), torch.float64)
    assert (weights[~mask] == 0).all()
    close(layer(query, key, value, mask, score_bias=bias)[0], right, torch.float64)


# Cases by hand.


@with_and_without_weights
def test_scale_by_hand(need_weights):
    """Divide by the root of the width of a head, not of the model (R10)."""
    layer = identity(make(8, 2))
    query = torch.ones(1, 1, 8)
    key = torch.stack([torch.ones(8), torch.zeros(8)])[None]
    output, weights = layer(query, key, key, need_weights=need_weights)
    close(output, torch.full((1, 1, 8), 0.8807971))  # scores 4/√4 and 0
    if need_weights:
        close(weights, torch.tensor([[[[0.8807971, 0.1192029]]] * 2]))


@with_and_without_weights
def test_split_and_merge_by_hand(need_weights):
    """Let head 0 read the first token and head 1 the last (R12, R110)."""
    layer = identity(make(6, 2))
    x = torch.arange(24.0).reshape(1, 4, 6)
    mask = torch.zeros(1, 2, 4, 4, dtype=torch.bool)
    mask[0, 0, :, 0] = mask[0, 1, :, 3] = True
    output, _ = layer(x, x, x, mask, need_weights)
    assert output.tolist() == [[[0, 1, 2, 21, 22, 23]] * 4]


@with_and_without_weights
def test_groups_by_hand(need_weights):
    """Give heads 0 and 1 the first key-value head, 2 and 3 the second."""
    layer = identity(make(8, 4, num_kv_heads=2))
    value = torch.arange(8.0).reshape(1, 1, 8)  # its heads: 0, 1 and 2, 3
    output, _ = layer(value, value, value, need_weights=need_weights)
    assert output.tolist() == [[[0, 1, 0, 1, 2, 3, 2, 3]]]


@with_and_without_weights
def test_keys_of_groups_by_hand(need_weights):
    """Score with the key of the group: query head 1 against key head 0."""
    layer = identity(make(4, 4, num_kv_heads=2))
    query = torch.tensor([[[0.0, 1.0, 1.0, 0.0]]])
    key = torch.tensor([[[10.0, -10.0, 0, 0], [-10.0, 10.0, 0, 0]]])
    value = torch.tensor([[[1.0, 3.0, 0, 0], [2.0, 4.0, 0, 0]]])
    output, _ = layer(query, key, value, need_weights=need_weights)
    close(output, torch.tensor([[[1.5, 1.0, 4.0, 3.5]]]))


def test_joining_and_projecting_adds_the_projected_heads():
    """Write the output as a sum over heads, and one knocked out."""
    layer, inputs = make(), draw()
    output, _ = layer(*inputs)
    size = D // H
    alone = []
    for h in range(H):
        one = copy.deepcopy(layer)
        with torch.no_grad():
            for other in set(range(H)) - {h}:
                parts(one)[3].weight[:, other * size : (other + 1) * size] = 0
        alone.append(one(*inputs)[0])
    close(sum(alone), output)


def test_permuting_heads_with_the_output_changes_nothing():
    """Move the blocks of rows together: heads have no order."""
    layer, inputs = make(), draw()
    order = torch.arange(D).reshape(H, -1)[[2, 0, 1]].flatten()
    moved = copy.deepcopy(layer)
    with torch.no_grad():
        for part in parts(moved)[:3]:
            part.weight.copy_(part.weight[order])
        parts(moved)[3].weight.copy_(parts(layer)[3].weight[:, order])
    output, weights = layer(*inputs, need_weights=True)
    found, new = moved(*inputs, need_weights=True)
    close(found, output)
    close(new, weights[:, [2, 0, 1]])


# Masks.


def test_weights_have_an_axis_for_heads_and_sum_to_one():
    """Return (B, H, T, S), zeros at closed pairs, rows of 1 or 0 (R11)."""
    for kind in MASKS:
        mask = make_mask(kind)
        _, weights = make()(*draw(), mask, need_weights=True)
        wide = widen(mask, B, H, T, S)
        assert weights.shape == (B, H, T, S)
        assert (weights[~wide] == 0).all()
        close(weights.sum(-1), wide.any(-1).float())


@pytest.mark.parametrize("batch", (1, 2, H))
@pytest.mark.parametrize("num_kv_heads", (1, H))
@with_and_without_weights
def test_every_shape_of_a_mask_means_one_thing(batch, num_kv_heads, need_weights):
    """Give three axes their head axis, for B = 1 and B = H too (R08)."""
    layer, inputs = make(num_kv_heads=num_kv_heads), draw(batch)
    generator = torch.Generator().manual_seed(2)
    for shape in ((T, S), (batch, 1, S), (batch, T, S), (batch, 1, T, S), (batch, H, T, S)):
        mask = torch.rand(shape, generator=generator) < 0.5
        right = reference(layer, *inputs, mask)
        close(layer(*inputs, mask, need_weights)[0], right)


@with_and_without_weights
def test_a_three_axis_mask_is_one_of_samples_never_of_heads(need_weights):
    """Close key 0 of sample 1, not of head 1, where B = H."""
    layer, inputs = make(), draw(H)
    mask = torch.ones(H, T, S, dtype=torch.bool)
    mask[1, :, 0] = False
    output, weights = layer(*inputs, mask, need_weights)
    free, _ = layer(*inputs, None, need_weights)
    close(output[[0, 2]], free[[0, 2]])
    assert not torch.allclose(output[1], free[1], atol=1e-4)
    if need_weights:
        assert (weights[1, :, :, 0] == 0).all()
        assert (weights[[0, 2]] > 0).all()


@pytest.mark.parametrize(
    "shapes",
    (
        (2, T, S, [(2, S), (H, T, S), (1, T, S), (2, 1, 1, S), (2, H, 1, S), (1, H, T, S)]),
        (2, T, S, [(1, 1, T, S), (2, 2, T, S), (T, 1), (S,), (), (2, T, 1), (S, T)]),
        (2, T, S, [(2, S, T), (1, 2, H, T, S), (2, H, S, T), (2, T, 1, S), (T, S + 1)]),
        (H, T, S, [(H, S), (1, T, S), (1, H, T, S), (H, 1, 1, S), (H, T + 1, S)]),
        (1, T, S, [(H, T, S), (2, 1, S), (1, S), (1, 1, 1, S), (1, 2, T, S)]),
        (2, S, S, [(1, S, S), (2, 1, 1, S), (H, S, S), (S,), (2, S)]),
    ),
    ids=str,
)
@with_and_without_weights
def test_wrong_shapes_of_masks_are_refused(shapes, need_weights):
    """Refuse what would broadcast by accident, and say what came (R08)."""
    batch, queries, keys, wrong = shapes
    layer, inputs = make(), draw(batch, queries, keys)
    for shape in wrong:
        for mask in (torch.ones(shape) > 0, torch.ones(shape) > 2):
            with pytest.raises(ValueError, match="does not fit") as error:
                layer(*inputs, mask, need_weights)
            assert str(shape) in str(error.value)


@with_and_without_weights
def test_masks_that_are_not_boolean_are_refused(need_weights):
    """Refuse float and integer masks: nobody knows what they mean."""
    for dtype in (torch.float32, torch.float16, torch.int64, torch.uint8):
        for shape in ((T, S), (B, 1, S), (B, T, S), (B, H, T, S)):
            with pytest.raises(TypeError, match="boolean"):
                make()(*draw(), torch.ones(shape, dtype=dtype), need_weights)
    with pytest.raises(TypeError, match="boolean"):
        make()(*draw(), [[True] * S] * T, need_weights)


@with_and_without_weights
@pytest.mark.parametrize("kind", MASKS)
def test_true_lets_a_key_be_read(kind, need_weights):
    """Change a key and value: only queries that may read it notice (R03)."""
    layer, (query, key, value), mask = make(), draw(), make_mask(kind)
    before, _ = layer(query, key, value, mask, need_weights)
    for place in (0, 3, S - 1):
        changed = [x.clone() for x in (key, value)]
        for x in changed:
            x[:, place] += 1
        after, _ = layer(query, *changed, mask, need_weights)
        read = widen(mask, B, H, T, S)[..., place].any(1)  # (B, T)
        assert torch.equal((after != before).any(-1), read)


@dtypes
@with_and_without_weights
@pytest.mark.parametrize(("bias", "num_kv_heads"), ((True, H), (False, 1)))
def test_a_query_that_may_attend_to_nothing_gets_zero(dtype, need_weights, bias, num_kv_heads):
    """Give zero weights and a zero output, and finite gradients (R01, R02)."""
    layer = make(bias=bias, num_kv_heads=num_kv_heads, dtype=dtype)
    mask = make_mask("empty")
    empty = ~mask.any(-1)  # (B, T)
    output, grads, parameters = run(layer, layer, draw(dtype=dtype), mask, need_weights)
    assert (output[empty] == 0).all()
    assert (output[~empty] != 0).any(-1).all()
    assert all(x.isfinite().all() for x in grads + parameters)
    assert (grads[0][empty] == 0).all()
    if need_weights:
        _, weights = layer(*draw(dtype=dtype), mask, True)
        assert (weights.transpose(1, 2)[empty] == 0).all()


def test_a_sample_of_padding_alone_leaves_the_others_alone():
    """Keep gradients of the rest what they were without it (R02)."""
    layer, inputs = make(bias=True), draw()
    mask = length_mask(torch.tensor([S, 0]), S)
    for need_weights in (False, True):
        found = run(layer, layer, inputs, mask, need_weights)
        right = run(layer, layer, [x[:1] for x in inputs], None, need_weights)
        assert (found[0][1] == 0).all()
        assert all((x[1] == 0).all() for x in found[1])
        close(found[0][:1], right[0])
        for mine, theirs in zip(found[2], right[2], strict=True):
            close(mine, theirs)


@dtypes
@with_and_without_weights
@pytest.mark.parametrize("bad", (NAN, math.inf))
def test_unused_keys_reach_no_output_and_no_gradient(dtype, need_weights, bad):
    """Fill the padding with NaN: not one bit changes anywhere (D7)."""
    layer = make(bias=True, num_kv_heads=1, dtype=dtype)
    mask = length_mask(torch.tensor([4, 0, S]), S)
    clean = draw(3, dtype=dtype)
    poisoned = [x.clone() for x in clean]
    for x in poisoned[1:]:
        x.masked_fill_(~mask.mT, bad)
    poisoned[0][1] = bad  # queries that may attend to nothing
    found, right = (run(layer, layer, x, mask, need_weights) for x in (poisoned, clean))
    assert torch.equal(found[0], right[0])
    for mine, theirs in zip(found[1] + found[2], right[1] + right[2], strict=True):
        assert torch.equal(mine, theirs)
        assert mine.isfinite().all()


@pytest.mark.parametrize("kind", ("one for all", "each sample", "all heads", "each head"))
@with_and_without_weights
def test_unused_keys_with_every_shape_of_mask(kind, need_weights):
    """Close key 3 to all queries of all heads, and query 2 to all keys."""
    layer, mask, clean = make(bias=True), make_mask(kind).clone(), draw()
    mask[..., 3] = False
    mask[..., 2, :] = False
    poisoned = [x.clone() for x in clean]
    poisoned[0][:, 2] = NAN
    for x in poisoned[1:]:
        x[:, 3] = NAN
    found, right = (run(layer, layer, x, mask, need_weights) for x in (poisoned, clean))
    for mine, theirs in zip(
        (found[0], *found[1], *found[2]), (right[0], *right[1], *right[2]), strict=True
    ):
        assert torch.equal(mine, theirs)


@with_and_without_weights
def test_unused_tokens_in_self_attention(need_weights):
    """Close padding as keys and as queries: its NaN stays where it is."""
    layer, x = make(bias=True), draw()[1]
    real = torch.arange(S) < torch.tensor([4, S])[:, None]
    mask = real[:, None] & real[:, :, None]
    results = []
    for filler in (0.0, NAN):
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        filled = leaf.masked_fill(~real[..., None], filler)
        output, _ = layer(filled, filled, filled, mask, need_weights)
        output.square().sum().backward()
        results.append([output, leaf.grad, *(p.grad.clone() for p in layer.parameters())])
    for found, right in zip(*results, strict=True):
        assert torch.equal(found, right)


@with_and_without_weights
def test_a_key_that_one_head_reads_is_used(need_weights):
    """Show a NaN that some head, and no other, may attend to."""
    layer, (query, key, value) = make(), draw()
    mask = torch.ones(B, H, T, S, dtype=torch.bool)
    mask[0, :2, :, 3] = False
    mask[1, :, :, 3] = False
    value[:, 3] = NAN
    output, _ = layer(query, key, value, mask, need_weights)
    assert output[0].isnan().all()
    assert output[1].isfinite().all()


# What must not matter.


@with_and_without_weights
def test_permutations_of_tokens(need_weights):
    """Follow the order of the queries, ignore that of the keys (R12)."""
    layer, (query, key, value) = make(), draw()
    order, turn = torch.tensor([3, 0, 6, 2, 5, 1, 4]), torch.tensor([4, 2, 0, 1, 3])
    mask = make_mask("each head")
    output, weights = layer(query, key, value, mask, need_weights)
    moved, new = layer(
        query[:, turn], key[:, order], value[:, order], mask[:, :, turn][..., order], need_weights
    )
    close(moved, output[:, turn])
    if need_weights:
        close(new, weights[:, :, turn][..., order])
    own, _ = layer(key, key, key, None, need_weights)
    shuffled = key[:, order]
    close(layer(shuffled, shuffled, shuffled, None, need_weights)[0], own[:, order])


@with_and_without_weights
@pytest.mark.parametrize("training", (False, True), ids="training={}".format)
@pytest.mark.parametrize("queries", (S, T, 1), ids="T={}".format)
def test_no_query_sees_the_future(need_weights, training, queries):
    """Change one token: earlier outputs keep every bit, in both modes."""
    layer, (_, x, _) = make(num_kv_heads=1).train(training), draw()
    mask = causal_mask(queries, S)
    before, _ = layer(x[:, S - queries :], x, x, mask, need_weights)
    for place in range(S):
        changed = x.clone()
        changed[:, place] += 3
        after, _ = layer(changed[:, S - queries :], changed, changed, mask, need_weights)
        first = max(place - (S - queries), 0)
        assert torch.equal(before[:, :first], after[:, :first])
        assert (before[:, first:] != after[:, first:]).any(-1).all()


@with_and_without_weights
def test_last_queries_alone_see_what_they_saw(need_weights):
    """Align fewer queries at the last key, as decoding needs it (R21)."""
    layer, x = make(), draw()[1]
    whole, _ = layer(x, x, x, causal_mask(S, S), need_weights)
    for queries in (1, 2, T):
        part, _ = layer(x[:, S - queries :], x, x, causal_mask(queries, S), need_weights)
        close(part, whole[:, S - queries :])


@pytest.mark.parametrize("batch", (1, 2, H, T, S))
@with_and_without_weights
def test_a_batch_equals_its_samples(batch, need_weights):
    """Compute each sample alone: nothing may leak between them (R08)."""
    layer, inputs = make(), draw(batch)
    mask = length_mask(1 + torch.arange(batch) % S, S) & causal_mask(T, S)
    whole, _ = layer(*inputs, mask, need_weights)
    for i in range(batch):
        alone, _ = layer(*(x[i : i + 1] for x in inputs), mask[i : i + 1], need_weights)
        close(whole[i : i + 1], alone)
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[0] += 1
    after, _ = layer(*changed, mask, need_weights)
    assert torch.equal(after[1:], whole[1:])


@with_and_without_weights
def test_appended_padding_does_not_matter(need_weights):
    """Add two masked keys with NaN in them: outputs stay."""
    layer, (query, key, value) = make(), draw()
    lens = torch.tensor([4, S])
    narrow, _ = layer(query, key, value, length_mask(lens, S), need_weights)
    wide, weights = layer(
        query,
        F.pad(key, (0, 0, 0, 2), value=9.0),
        F.pad(value, (0, 0, 0, 2), value=NAN),
        length_mask(lens, S + 2),
        need_weights,
    )
    close(wide, narrow)
    assert not need_weights or (weights[..., S:] == 0).all()


@with_and_without_weights
def test_arguments_are_not_changed(need_weights):
    """Change nothing that came in; accept leaves and views (D8)."""
    layer, inputs = make(), [x.requires_grad_() for x in draw()]
    mask, bias = make_mask("empty of heads"), torch.zeros(H, T, S)
    kept = [x.detach().clone() for x in (*inputs, mask, bias)]
    layer(*inputs, mask, need_weights, score_bias=bias)
    for x, old in zip((*inputs, mask, bias), kept, strict=True):
        assert torch.equal(x.detach(), old)
    turned = [x.detach().mT.contiguous().mT for x in inputs]
    close(layer(*turned, mask, need_weights)[0], layer(*inputs, mask, need_weights)[0])


# Weights on demand, dropout.


@masks
@pytest.mark.parametrize("num_kv_heads", (1, H))
def test_weights_on_demand_do_not_change_the_output(kind, num_kv_heads):
    """Agree with and without weights; none unless asked for (R24)."""
    layer, mask = make(num_kv_heads=num_kv_heads), make_mask(kind)
    fused, none = layer(*draw(), mask)
    scratch, weights = layer(*draw(), mask, need_weights=True)
    close(fused, scratch)
    assert none is None
    assert weights.shape == (B, H, T, S)


def read_weights(layer, query, key, mask=None, need_weights=False):
    """Give the weights in use (B, H, T, S), seen in the output.

    Each value is the unit vector of its key, once a head.
    """
    for part in parts(layer)[2:]:
        nn.init.eye_(part.weight)
    num_keys = key.shape[1]
    value = torch.eye(num_keys).repeat(len(key), 1, layer.num_heads)
    output, weights = layer(query, key, value, mask, need_weights)
    used = output.unflatten(-1, (layer.num_heads, num_keys)).transpose(1, 2)
    return used.detach(), weights


@with_and_without_weights
def test_dropout_falls_on_weights_and_keeps_their_mean(need_weights):
    """Drop single weights of single heads; scale up what is left."""
    layer = make(H * S, H, dropout=0.25)
    query, key, _ = draw(num_queries=211, width=H * S)
    right, _ = read_weights(layer.eval(), query, key)
    torch.manual_seed(0)
    used, weights = read_weights(layer.train(), query, key, None, need_weights)
    kept = used != 0
    assert abs((~kept).float().mean() - 0.25) < 0.02
    close(used[kept], right[kept] / 0.75)
    for axis in (0, 1):  # neither samples nor heads share their luck
        first, second = kept.select(axis, 0), kept.select(axis, 1)
        assert 0.3 < (first != second).float().mean() < 0.45
    if need_weights:
        close(weights, right)
    again, _ = read_weights(layer, query, key, None, need_weights)
    assert not torch.equal(again, used)


@with_and_without_weights
def test_dropout_falls_on_weights_not_on_outputs(need_weights):
    """Drop single weights: the sum of a row takes more than two values."""
    layer = make(dropout=0.5).train()
    for part in parts(layer)[2:]:
        nn.init.eye_(part.weight)
    query, key, value = draw()
    torch.manual_seed(0)
    sums, _ = layer(query, key, torch.ones_like(value), None, need_weights)
    heads = sums.unflatten(-1, (H, -1))
    assert torch.equal(heads, heads[..., :1].expand_as(heads))
    assert len(heads.detach().round(decimals=3).unique()) > B * T * H / 2


def test_returned_weights_are_those_before_dropout():
    """Return exactly 1 for a single key, in training too (R14)."""
    _, weights = make(dropout=0.2).train()(*draw(num_keys=1), need_weights=True)
    assert torch.equal(weights, torch.ones(B, H, T, 1))


@with_and_without_weights
@pytest.mark.parametrize("kind", ("none", "causal", "empty", "each head"))
def test_dropout_is_off_in_eval(kind, need_weights):
    """Give the same bits twice, and those without dropout (R15)."""
    layer, plain = make(dropout=0.5).eval(), make().train()
    inputs, mask = draw(), make_mask(kind)
    first, second = (layer(*inputs, mask, need_weights)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first, plain(*inputs, mask, need_weights)[0])


@with_and_without_weights
def test_dropout_of_everything(need_weights):
    """Return zeros, not NaN, when all weights are dropped."""
    output, _ = make(dropout=1.0).train()(*draw(), need_weights=need_weights)
    assert (output == 0).all()


@with_and_without_weights
def test_training_with_dropout_ignores_nan_in_the_padding(need_weights):
    """Blank values before the dropped weights meet them."""
    mask = length_mask(torch.tensor([4, S]), S)
    query, key, value = draw()
    value = value.masked_fill(~mask.mT, NAN)
    layer = make(dropout=0.5).train()
    output, _, parameters = run(layer, layer, (query, key, value), mask, need_weights)
    assert output.isfinite().all()
    assert all(x.isfinite().all() for x in parameters)


def spy_on_the_kernel(monkeypatch):
    """Record what the fused kernel of torch is called with."""
    seen = []
    kernel = F.scaled_dot_product_attention

    def spy(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        seen.append((attn_mask is None, is_causal, dropout_p))
        return kernel(query, key, value, attn_mask, dropout_p, is_causal, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return seen


@pytest.mark.parametrize("num_kv_heads", (1, H))
def test_the_fused_kernel_runs_when_no_weights_are_asked_for(monkeypatch, num_kv_heads):
    """Use torch's kernel, its causal flag and its dropout, or none of it."""
    seen = spy_on_the_kernel(monkeypatch)
    layer, inputs = make(dropout=0.5, num_kv_heads=num_kv_heads).eval(), draw(num_keys=T)
    layer(*inputs)
    layer(*inputs, causal_mask(T, T))
    layer(*draw(), causal_mask(T, S))
    layer.train()(*inputs, causal_mask(T, T))
    assert seen == [(True, False, 0), (True, True, 0), (False, False, 0), (True, True, 0.5)]
    layer(*inputs, need_weights=True)
    layer.eval()(*inputs, causal_mask(T, T), True)
    assert len(seen) == 4


# Bias on the scores.

BIASES = (
    (),
    (S,),
    (T, 1),
    (T, S),
    (H, 1, 1),
    (H, T, S),
    (1, T, S),
    (1, H, T, S),
    (B, 1, 1, S),
    (B, 1, T, S),
    (B, H, 1, 1),
    (B, H, T, S),
)


@pytest.mark.parametrize("shape", BIASES, ids=str)
@pytest.mark.parametrize("kind", ("none", "causal", "each head", "empty"))
def test_score_bias_is_added_to_the_scaled_scores(shape, kind):
    """Broadcast to (B, H, T, S), with gradients, as the loops do it."""
    num_kv_heads = 1 if len(shape) % 2 else H
    layer = make(num_kv_heads=num_kv_heads, bias=True, dtype=torch.float64)
    mask = make_mask(kind)
    generator = torch.Generator().manual_seed(9)
    bias = torch.randn(shape, generator=generator, dtype=torch.float64)
    inputs = draw(dtype=torch.float64)
    leaf = bias.clone().requires_grad_()
    right = run(lambda *x: reference(layer, *x, mask, leaf), layer, inputs)
    for need_weights in (False, True):
        mine = bias.clone().requires_grad_()
        found = run(layer, layer, inputs, mask, need_weights, score_bias=mine)
        compare(found, right, torch.float64)
        close(mine.grad, leaf.grad, torch.float64)


@pytest.mark.parametrize("batch", (1, H))
@with_and_without_weights
def test_a_three_axis_bias_is_one_of_heads(batch, need_weights):
    """Take (H, T, S) for every sample, where B = H too."""
    layer, inputs = make(), draw(batch)
    bias = torch.zeros(H, T, S)
    bias[1, :, 0] = -math.inf
    wide = bias.expand(batch, H, T, S)
    output, weights = layer(*inputs, None, need_weights, score_bias=bias)
    close(output, layer(*inputs, wide == 0, need_weights)[0])
    if need_weights:
        assert (weights[:, 1, :, 0] == 0).all()
        assert (weights[:, [0, 2]] > 0).all()


@dtypes
def test_bias_and_inputs_may_differ_in_dtype(dtype):
    """Follow the dtype of the input, whatever the bias has."""
    layer = make(dtype=dtype)
    double, mask = copy.deepcopy(layer).double(), make_mask("empty of heads")
    for bias_dtype in TOLERANCE:
        bias = torch.linspace(-2, 2, H * T * S).reshape(H, T, S).to(bias_dtype)
        right = reference(double, *(x.double() for x in draw(dtype=dtype)), mask, bias)
        for need_weights in (False, True):
            output, weights = layer(*draw(dtype=dtype), mask, need_weights, score_bias=bias)
            assert output.dtype == dtype
            close(output, right, dtype)
            assert not need_weights or weights.dtype == dtype


@dtypes
@with_and_without_weights
def test_a_constant_bias_changes_nothing_however_large(dtype, need_weights):
    """Keep a bias that a half cannot hold out of halves."""
    layer = make(dtype=dtype)
    for mask in (None, make_mask("empty")):
        right, _ = layer(*draw(dtype=dtype), mask, need_weights)
        for constant in (-1e5, 1e5):
            bias = torch.full((H, T, S), constant)
            output, _ = layer(*draw(dtype=dtype), mask, need_weights, score_bias=bias)
            assert_close(output, right, atol=0.05, rtol=0.05)  # the scores are rounded, too


@dtypes
@with_and_without_weights
def test_a_bias_of_minus_infinity_closes_a_pair(dtype, need_weights):
    """Give zeros, not NaN, where bias, or bias and mask, leave nothing."""
    layer = make(bias=True, dtype=dtype)
    allowed = make_mask("empty of heads")
    bias = torch.zeros(B, H, T, S, dtype=dtype).masked_fill(~allowed, -math.inf)
    plain = run(layer, layer, draw(dtype=dtype), allowed, need_weights)
    padding = length_mask(torch.tensor([S, S]), S)
    for mask in (None, padding, causal_mask(T, S)):
        leaf = bias.clone().requires_grad_()
        found = run(layer, layer, draw(dtype=dtype), mask, need_weights, score_bias=leaf)
        if mask is None or mask is padding:
            compare(found, plain, dtype)
        assert found[0].isfinite().all()
        assert all(x.isfinite().all() for x in (leaf.grad, *found[1], *found[2]))
    shut = torch.full((H, 1, 1), -math.inf, dtype=dtype)
    output, weights = layer(*draw(dtype=dtype), None, need_weights, score_bias=shut)
    assert (output == 0).all()
    assert not need_weights or (weights == 0).all()


@with_and_without_weights
def test_a_causal_bias_is_a_causal_mask(need_weights):
    """Agree with the mask, and with both at once."""
    layer, inputs = make(), draw(num_keys=T)
    mask = causal_mask(T, T)
    bias = torch.zeros(T, T).masked_fill(~mask, -math.inf)
    right, _ = layer(*inputs, mask, need_weights)
    close(layer(*inputs, None, need_weights, score_bias=bias)[0], right)
    close(layer(*inputs, mask, need_weights, score_bias=bias)[0], right)
    slope = torch.linspace(-3, 3, H * T * T).reshape(H, T, T)
    right = reference(layer, *inputs, mask, slope)
    for tilted in (slope, slope + bias):
        close(layer(*inputs, mask, need_weights, score_bias=tilted)[0], right)


@with_and_without_weights
def test_a_bias_at_a_closed_pair_does_not_matter(need_weights):
    """Let no NaN of the bias through the mask, forward or backward."""
    layer, mask = make(), make_mask("empty of heads")
    bias = torch.zeros(B, H, T, S).masked_fill(~mask, NAN).requires_grad_()
    found = run(layer, layer, draw(), mask, need_weights, score_bias=bias)
    right = run(layer, layer, draw(), mask, need_weights)
    compare(found, right, torch.float32)
    assert bias.grad.isfinite().all()


@with_and_without_weights
def test_a_bias_that_is_not_a_number_is_not_hidden(need_weights):
    """Let NaN in an open pair be seen, and nowhere else."""
    bias = torch.zeros(T, S)
    bias[1, 2] = NAN
    output, _ = make()(*draw(), None, need_weights, score_bias=bias)
    assert output[:, 1].isnan().all()
    assert output[:, [0, 2, 3, 4]].isfinite().all()


@with_and_without_weights
def test_wrong_biases_are_refused(need_weights):
    """Refuse a mask in the place of a bias, and what enlarges the scores."""
    layer = make()
    for wrong in (causal_mask(T, S), torch.ones(T, S).long(), 0.5, [[0.0]]):
        with pytest.raises(TypeError, match="floats"):
            layer(*draw(), None, need_weights, score_bias=wrong)
    for shape in ((B, T, S), (B + 1, H, T, S), (1, B, H, T, S), (S, T), (2,), (T, 2)):
        with pytest.raises(ValueError, match="does not broadcast") as error:
            layer(*draw(), None, need_weights, score_bias=torch.ones(shape))
        assert str(shape) in str(error.value)
    with pytest.raises(ValueError, match="does not broadcast"):
        layer(*draw(1), None, need_weights, score_bias=torch.ones(2, H, T, S))


# Sizes.


@pytest.mark.parametrize("width", (1, 3, 8, 33))
def test_parameters_do_not_depend_on_the_number_of_heads(width):
    """Count 4 D², 4 D more with biases, fewer with shared keys."""
    for num_heads in (n for n in range(1, width + 1) if width % n == 0):
        for bias in (False, True):
            layer = MultiHeadAttention(width, num_heads, bias=bias)
            count = sum(p.numel() for p in layer.parameters())
            assert count == 4 * width**2 + 4 * width * bias
            few = MultiHeadAttention(width, num_heads, num_kv_heads=1, bias=bias)
            thin = width // num_heads
            count = sum(p.numel() for p in few.parameters())
            assert count == 2 * width * (width + thin) + (2 * width + 2 * thin) * bias


def test_defaults():
    """Have no bias, no dropout, and as many key-value heads as heads."""
    layer = MultiHeadAttention(6, 2)
    assert all(part.bias is None for part in parts(layer))
    assert {tuple(p.shape) for p in layer.parameters()} == {(6, 6)}
    first, second = (layer.train()(*draw(width=6))[0] for _ in range(2))
    assert torch.equal(first, second)
    with pytest.raises(TypeError):
        MultiHeadAttention(6, 2, 1)
    with pytest.raises(TypeError):
        layer(*draw(width=6), None, False, torch.zeros(T, S))


@pytest.mark.parametrize(
    ("sizes", "options", "numbers"),
    (
        ((10, 3), {}, ("10", "3")),
        ((4, 8), {}, ("4", "8")),
        ((12, 4), {"num_kv_heads": 3}, ("4", "3")),
        ((12, 4), {"num_kv_heads": 8}, ("4", "8")),
        ((12, 4), {"num_kv_heads": 0}, ("0",)),
        ((12, 4), {"num_kv_heads": -2}, ("-2",)),
        ((0, 1), {}, ("0",)),
        ((12, 0), {}, ("0",)),
        ((12, -4), {}, ("-4",)),
        ((-12, 4), {}, ("-12",)),
        ((12, 4), {"dropout": 1.5}, ("1.5",)),
        ((12, 4), {"dropout": -0.1}, ("-0.1",)),
    ),
    ids=str,
)
def test_wrong_sizes_are_refused(sizes, options, numbers):
    """Name the numbers in the message."""
    with pytest.raises(ValueError, match=r"\d") as error:
        MultiHeadAttention(*sizes, **options)
    assert all(number in str(error.value) for number in numbers)


@with_and_without_weights
def test_wrong_inputs_are_refused(need_weights):
    """Name widths, lengths and batches that do not go together."""
    layer, (query, key, value) = make(), draw()
    cases = (
        ((query[..., :-1], key, value), ("33", "32")),
        ((query, key[..., :-2], value), ("33", "31")),
        ((query, key, value[..., :-3]), ("33", "30")),
        ((query, key, value[:, :-1]), (str((B, S, D)), str((B, S - 1, D)))),
        ((query[:1], key, value), (str((1, T, D)), str((B, S, D)))),
        ((query, key[:1], value[:1]), (str((B, T, D)), str((1, S, D)))),
        ((query[0], key[0], value[0]), (str((T, D)),)),
        ((query, key[0], value[0]), (str((S, D)),)),
        ((query, key[0, 0], value[0, 0]), (str((D,)),)),
        ((query, key, value[0]), (str((S, D)),)),
        ((query[0, 0], key, value), (str((D,)),)),
        ((query[0, 0, 0], key[0, 0, 0], value), (str(()),)),
        ((query[None], key[None], value[None]), (str((1, B, T, D)),)),
    )
    for inputs, numbers in cases:
        with pytest.raises(ValueError, match=r"\d") as error:
            layer(*inputs, None, need_weights)
        assert all(number in str(error.value) for number in numbers)


@pytest.mark.parametrize("num_kv_heads", (1, 3))
@with_and_without_weights
def test_extreme_sizes(num_kv_heads, need_weights):
    """Take one token, one key, a head of width 1, and no token at all."""
    for width in (3, 9, 33):
        layer = make(width, 3, num_kv_heads=num_kv_heads)
        for batch, queries, keys in ((1, 1, 1), (2, 1, 5), (2, 5, 1), (3, 1, 1)):
            inputs = draw(batch, queries, keys, width)
            output, weights = layer(*inputs, None, need_weights)
            close(output, reference(layer, *inputs))
            assert not need_weights or weights.shape == (batch, 3, queries, keys)
        for batch, queries, keys in ((0, 2, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)):
            inputs = draw(batch, queries, keys, width)
            output, weights = layer(*inputs, None, need_weights)
            assert torch.equal(output, torch.zeros(batch, queries, width))
            assert not need_weights or weights.shape == (batch, 3, queries, keys)
            for bias in (torch.zeros(3, queries, keys), torch.full((keys,), -math.inf)):
                output, _ = layer(*inputs, None, need_weights, score_bias=bias)
                assert torch.equal(output, torch.zeros(batch, queries, width))


def test_no_keys_give_zero_with_biases_too():
    """Pool nothing to zero, as behind a mask that closes everything."""
    layer, inputs = make(bias=True), draw(num_keys=0)
    for need_weights in (False, True):
        for mask in (None, torch.ones(T, 0) > 0, torch.ones(B, 1, 0) > 0):
            output, _ = layer(*inputs, mask, need_weights)
            assert torch.equal(output, torch.zeros(B, T, D))


@with_and_without_weights
def test_large_half_values_do_not_overflow(need_weights):
    """Compute products of halves in float32."""
    layer = identity(make(128, 2, dtype=torch.float16))
    x = torch.full((1, 2, 128), 300.0, dtype=torch.float16)
    for mask in (None, causal_mask(2, 2), torch.ones(1, 1, 2) > 0):
        assert torch.equal(layer(x, x, x, mask, need_weights)[0], x)


def test_autocast():
    """Keep to one dtype, weights or not, training or not, and stay close."""
    layer, mask = make(num_kv_heads=1), make_mask("empty")
    right, _ = layer(*draw(), mask)
    seen = set()
    for training in (True, False):
        for need_weights in (True, False):
            layer.train(training)
            with torch.autocast("cpu", torch.bfloat16):
                output, _ = layer(*draw(), mask, need_weights)
            close(output, right, torch.bfloat16)
            seen.add(output.dtype)
    assert len(seen) == 1


# Heads by a loop, and the task.


def test_heads_are_cut_and_joined_by_hand():
    """Give head 0 the first half of every token (R12)."""
    x = torch.arange(24).reshape(1, 4, 6)
    heads = split_heads(x, 2)
    assert heads[0, 0].tolist() == [[0, 1, 2], [6, 7, 8], [12, 13, 14], [18, 19, 20]]
    assert torch.equal(merge_heads(heads), x)
    assert split_heads(torch.zeros(B, T, D), H).shape == (B, H, T, D // H)


@pytest.mark.parametrize("kind", ("none", "causal", "padding", "each sample", "empty"))
def test_looped_heads_are_the_heads_of_the_layer(kind):
    """Copy blocks of rows into separate heads: one result."""
    layer, size = make(), D // H
    heads = [Head((D, size), (D, size), (D, size), DotProductAttention()) for _ in range(H)]
    looped = LoopedHeads(heads, D)
    with torch.no_grad():
        for h, head in enumerate(heads):
            for name in ("query_layer", "key_layer", "value_layer"):
                block = getattr(layer, name).weight[h * size : (h + 1) * size]
                getattr(head, name).weight.copy_(block)
        looped.output_layer.weight.copy_(layer.output_layer.weight)
    mask = make_mask(kind)
    right, right_weights = layer(*draw(), mask, True)
    output, weights = looped(*draw(), mask, True)
    close(output, right)
    close(weights, right_weights)
    assert looped(*draw(), mask)[1] is None


def test_looped_heads_of_different_kinds():
    """Take widths as they come, and any attention as a head."""
    looped = LoopedHeads(
        [
            Head((19, 2), (23, 2), (29, 3), DotProductAttention()),
            Head((19, 7), (23, 5), (29, 11), AdditiveAttention(7, 5, 13)),
        ],
        17,
    )
    assert looped.output_layer.weight.shape == (17, 14)
    inputs = torch.randn(B, T, 19), torch.randn(B, S, 23), torch.randn(B, S, 29)
    output, weights = looped(*inputs, None, True)
    assert output.shape == (B, T, 17)
    assert weights.shape == (B, 2, T, S)
    joined = torch.cat([head(*inputs)[0] for head in looped.heads], -1)
    close(output, looped.output_layer(joined))
    close(weights.sum(-1), torch.ones(B, 2, T))


def test_boards_hold_what_is_asked_for():
    """Draw different names, ask for two of them, answer from their records."""
    torch.manual_seed(0)
    names, symbols, asked, answer = draw_boards(500, num_names=11, num_records=7, num_symbols=3)
    assert names.shape == symbols.shape == (500, 7)
    assert asked.shape == answer.shape == (500, 2)
    assert names.unique().tolist() == list(range(11))
    assert symbols.unique().tolist() == [0, 1, 2]
    assert (names.sort(-1).values.diff() > 0).all()
    assert (asked[:, 0] != asked[:, 1]).all()
    there = names[:, None] == asked[:, :, None]  # (B, 2, S)
    assert (there.sum(-1) == 1).all()
    assert torch.equal((there * symbols[:, None]).sum(-1), answer)
    places = there.long().argmax(-1)
    assert places.unique().tolist() == list(range(7))
    assert (places[:, 0] > places[:, 1]).double().mean().sub(0.5).abs() < 0.1


def test_batches_of_boards_are_new_and_repeat_with_the_seed():
    """Draw from torch's random state."""
    torch.manual_seed(1)
    batches = endless_boards(5)
    first, second = next(batches), next(batches)
    assert not torch.equal(first[0], second[0])
    torch.manual_seed(1)
    again = next(endless_boards(5))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert first[0].shape == (5, 10)


def test_the_look_up_can_be_solved_by_hand():
    """Set two heads to find a name each: loss 0, all answers right."""
    layer, read = make(32, 2), nn.Linear(32, 16)
    model = LookUp(layer, read, num_names=16)
    with torch.no_grad():
        model.first.weight.copy_(torch.cat([200 * torch.eye(16), torch.zeros(16, 16)], 1))
        model.second.weight.copy_(torch.cat([torch.zeros(16, 16), 200 * torch.eye(16)], 1))
        model.name.weight.copy_(torch.eye(16).repeat(1, 2))
        model.symbol.weight.copy_(F.pad(100 * torch.eye(8), (0, 8)).repeat(1, 2))
        read.weight.copy_(F.pad(torch.eye(8), (0, 8)).repeat(2, 1).repeat(1, 2))
        read.weight[:8, 16:] = read.weight[8:, :16] = 0
        read.bias.zero_()
        identity(layer)
        boards = draw_boards(100, num_names=16)
        assert right_answers(model, boards).all()
        assert right_answers(model, boards).shape == (100, 2)
        first = *boards[:3], boards[3] + torch.tensor([1, 0])  # spoil one place
        assert right_answers(model, first).tolist() == [[False, True]] * 100
        assert look_up_loss(model, boards) < 1e-4
        _, weights = model(*boards[:3], need_weights=True)
        there = boards[0][:, None] == boards[2][:, :, None]
        close(weights, there.float())
        swapped = *boards[:3], boards[3].flip(-1)
        equal = boards[3][:, 0] == boards[3][:, 1]
        assert torch.equal(right_answers(model, swapped).all(-1), equal)


def test_the_look_up_takes_masks_and_gives_no_weights_unasked():
    """Pass the mask on; a head that is closed sees nothing."""
    model = LookUp(make(32, 4), nn.Linear(32, 16))
    boards = draw_boards(3)
    logits, none = model(*boards[:3])
    assert logits.shape == (3, 2, 8)
    assert none is None
    mask = torch.ones(3, 4, 1, 10, dtype=torch.bool)
    mask[:, 2] = False
    _, weights = model(*boards[:3], mask, True)
    assert weights.shape == (3, 4, 10)
    assert (weights[:, 2] == 0).all()
    loss = look_up_loss(model, boards)
    flat = logits.log_softmax(-1).gather(-1, boards[3][..., None])
    close(loss, -flat.mean())


# State and devices.


@pytest.mark.parametrize("num_kv_heads", (1, H))
def test_nothing_is_kept(num_kv_heads):
    """Hold no tensor after a call: copies and saves stay small (D16)."""
    layer = make(num_kv_heads=num_kv_heads, dropout=0.1)
    before = {id(module): set(vars(module)) for module in layer.modules()}
    inputs = [x.requires_grad_() for x in draw()]
    for need_weights in (False, True):
        layer(*inputs, make_mask("both"), need_weights, score_bias=torch.zeros(T, S))
    assert {id(module): set(vars(module)) for module in layer.modules()} == before
    for module in layer.modules():
        assert not any(torch.is_tensor(x) for x in vars(module).values())
    twin = copy.deepcopy(layer).eval()
    assert torch.equal(twin(*inputs)[0], layer.eval()(*inputs)[0])


def test_the_state_is_plain():
    """Save four matrices (and biases) and nothing else; load them again."""
    for bias, count in ((False, 4), (True, 8)):
        layer = make(bias=bias, num_kv_heads=1)
        assert len(layer.state_dict()) == count
        assert list(layer.buffers()) == []
        assert {name for name, _ in layer.named_parameters()} == set(layer.state_dict())
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        other = make(seed=1, bias=bias, num_kv_heads=1)
        other.load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(other(*draw())[0], layer(*draw())[0])


@pytest.mark.parametrize("num_kv_heads", (1, H))
@with_and_without_weights
def test_meta_device(num_kv_heads, need_weights):
    """Follow the device of the input, with every kind of mask (R29)."""
    with torch.device("meta"):
        layer = MultiHeadAttention(D, H, num_kv_heads=num_kv_heads, bias=True)
    assert all(p.is_meta for p in layer.parameters())
    inputs = [x.to("meta") for x in draw()]
    for kind in MASKS:
        mask = make_mask(kind)
        mask = None if mask is None else mask.to("meta")
        for shape in (None, (H, T, S)):
            bias = None if shape is None else torch.zeros(shape, device="meta")
            output, weights = layer(*inputs, mask, need_weights, score_bias=bias)
            assert output.is_meta
            assert output.shape == (B, T, D)
            assert not need_weights or weights.is_meta
    square = [x.to("meta") for x in draw(num_keys=T)]
    assert layer(*square, causal_mask(T, T, device="meta"), need_weights)[0].is_meta


def test_the_module_needs_no_later_section():
    """Import from the sections before, and from the shared code."""
    origins = {getattr(value, "__module__", None) for value in vars(section).values()}
    allowed = {
        "multihead_attention",
        "attention_scoring_functions",
        "attention_pooling",
        "queries_keys_values",
        "bahdanau_attention",
        "plotting",
        "training",
        "datasets",
    }
    found = {name for name in origins if name and name.startswith("snippets.")}
    assert found <= {f"snippets.{name}" for name in allowed}
