"""Prove that masks, scores, weights and outputs are what the section says."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from snippets import attention_scoring_functions as section
from snippets.attention_scoring_functions import (
    AdditiveAttention,
    AdditiveScore,
    BilinearAttention,
    DotProductAttention,
    add_tile,
    at_least_float32,
    blank_unused,
    causal_mask,
    check_mask,
    fused_attention,
    is_causal,
    length_mask,
    masked_softmax,
    peak_memory,
    scaled_dot_product_attention,
    show_batch,
    tiled_attention,
)

# Axes: a prime each, so that no swapped axis can pass.
B, H, T, S, D, V = 3, 2, 5, 7, 11, 13

# The largest error allowed, absolute and relative, by dtype.
TOLERANCE = {
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
    torch.float32: 2e-6,
    torch.float64: 1e-13,
}
DTYPES = tuple(TOLERANCE)
NAN = math.nan


def scratch_attention(*inputs, **options):
    """Give the output alone, as the other two versions do."""
    return scaled_dot_product_attention(*inputs, **options)[0]


def tiles_of_three(*inputs, **options):
    """Cut seven keys into three tiles, the last one short."""
    return tiled_attention(*inputs, tile_size=3, **options)


VERSIONS = {
    "scratch": scratch_attention,
    "tiled": tiles_of_three,
    "fused": fused_attention,
}
versions = pytest.mark.parametrize("attend", VERSIONS.values(), ids=VERSIONS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def layers(dropout=0.0):
    """Make one layer of each kind for widths D and D."""
    torch.manual_seed(5)
    return {
        "dot": DotProductAttention(dropout),
        "additive": AdditiveAttention(D, D, 17, dropout),
        "bilinear": BilinearAttention(D, D, dropout),
    }


every_layer = pytest.mark.parametrize("kind", layers())


def close(found, expected, dtype=torch.float32):
    """Assert equality within the tolerance of a dtype."""
    limit = TOLERANCE[dtype]
    assert_close(found.to(expected.dtype), expected, atol=limit, rtol=limit)


def draw(*lead, num_queries=T, num_keys=S, width=V, dtype=torch.float32):
    """Draw queries, keys and values."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((num_queries, D), (num_keys, D), (num_keys, width))
    return [torch.randn(*lead, *shape, generator=generator).to(dtype) for shape in shapes]


def reference(query, key, value, mask=None, scale=None):
    """Compute one query at a time, in float64, from the allowed keys only."""
    query, key, value = (x.double() for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    full = (*query.shape[:-1], key.shape[-2])
    if mask is None:
        mask = torch.ones(full, dtype=torch.bool)
    mask = mask.expand(full).reshape(-1, *full[-2:])
    flat = [x.reshape(-1, *x.shape[-2:]) for x in (query, key, value)]
    rows = []
    for q, k, v, m in zip(*flat, mask, strict=True):
        for t in range(len(q)):
            seen = m[t].nonzero().squeeze(-1)
            exps = torch.exp((k[seen] * q[t]).sum(-1) * scale)
            pooled = (exps[:, None] * v[seen]).sum(0)
            rows.append(pooled / exps.sum() if len(seen) else pooled)
    return torch.stack(rows).reshape(*full[:-1], value.shape[-1])


def gradients(attend, inputs, *arguments):
    """Give the output, and the gradient of a weighted sum of it."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = attend(*leaves, *arguments)
    slope = torch.cos(torch.arange(output.numel())).reshape(output.shape)
    (output.double() * slope).sum().backward()
    return output.detach(), *(leaf.grad for leaf in leaves)


def make_mask(kind, batch, num_queries, num_keys):
    """Make one mask of each kind; some queries may see nothing."""
    lens = torch.tensor([num_keys - 2, num_keys, 2][:batch])
    padding = length_mask(lens, num_keys)
    causal = causal_mask(num_queries, num_keys)
    if kind == "boolean":
        generator = torch.Generator().manual_seed(7)
        shape = batch, num_queries, num_keys
        mask = torch.rand(shape, generator=generator) < 0.6
        mask[..., 1] = True
        return mask
    if kind == "empty row":
        mask = (padding & causal).clone()
        mask[:, 2] = False
        mask[-1] = False
        return mask
    return {"none": None, "causal": causal, "padding": padding, "both": padding & causal}[kind]


MASKS = ("none", "boolean", "causal", "padding", "both", "empty row")


# The matrix: versions × masks × dtypes × batch sizes, forward and gradient.


@versions
@dtypes
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("batch", (1, B))
@pytest.mark.parametrize("num_queries", (T, S), ids="T={}".format)
def test_versions_agree_with_the_reference(attend, dtype, kind, batch, num_queries):
    """Compare outputs and gradients with one query at a time in float64."""
    inputs = draw(batch, num_queries=num_queries, dtype=dtype)
    mask = make_mask(kind, batch, num_queries, S)
    expected = gradients(reference, [x.double() for x in inputs], mask)
    for found, right in zip(gradients(attend, inputs, mask), expected, strict=True):
        assert found.dtype == dtype
        close(found, right, dtype)
    if kind == "empty row":
        assert (attend(*inputs, mask)[:, 2] == 0).all()


@versions
@dtypes
@pytest.mark.parametrize("kind", MASKS)
def test_versions_agree_with_heads(attend, dtype, kind):
    """Take (B, H, T, D) with a mask (T, S), (B, 1, T, S) or (B, H, T, S)."""
    inputs = draw(B, H, width=D, dtype=dtype)  # V = D: the fast kernel
    mask = make_mask(kind, B, T, S)
    if mask is not None and mask.ndim > 2:
        mask = mask.expand(B, T, S)[:, None]
        if kind == "boolean":
            mask = torch.cat([mask, mask.flip(-1)], dim=1)
    expected = gradients(reference, [x.double() for x in inputs], mask)
    for found, right in zip(gradients(attend, inputs, mask), expected, strict=True):
        close(found, right, dtype)


@versions
def test_versions_take_two_axes(attend):
    """Take (T, D) with a mask (T, S), too."""
    inputs = draw()
    mask = causal_mask(T, S)
    close(attend(*inputs, mask), reference(*inputs, mask).float())


def test_scratch_agrees_with_torch():
    """Compare with torch's function itself, not with our use of it (R04)."""
    query, key, value = draw(2, 4, num_queries=5, num_keys=5)
    for mask in (None, causal_mask(5, 5), torch.eye(5, dtype=torch.bool)):
        expected = F.scaled_dot_product_attention(query, key, value, mask)
        close(scratch_attention(query, key, value, mask), expected)


@pytest.mark.parametrize("scale", (0.0, 0.1, 1.0))
def test_scale_can_be_chosen(scale):
    """Pass a scale to the versions that take one."""
    inputs = draw(B)
    expected = reference(*inputs, scale=scale).float()
    close(scratch_attention(*inputs, scale=scale), expected)
    close(tiles_of_three(*inputs, scale=scale), expected)


@pytest.mark.parametrize("name", (*VERSIONS, *layers()))
def test_gradcheck(name):
    """Compare gradients with finite differences, an empty row included."""
    shapes = ((1, 3, D), (1, 5, D), (1, 5, 2))
    inputs = [torch.randn(*x, dtype=torch.float64, requires_grad=True) for x in shapes]
    mask = make_mask("empty row", 1, 3, 5).clone()
    mask[:, 0, :2] = True
    attend = VERSIONS.get(name) or layers()[name].double()

    def output(*inputs):
        return attend(*inputs, mask) if name in VERSIONS else attend(*inputs, mask, True)

    assert torch.autograd.gradcheck(output, inputs, fast_mode=True)
    if name in VERSIONS:
        assert torch.autograd.gradgradcheck(output, inputs, fast_mode=True)


def test_gradcheck_of_the_softmax():
    """Compare the slopes of the weights, to the second order."""
    scores = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    mask = make_mask("empty row", 2, 3, 5)
    assert torch.autograd.gradcheck(lambda x: masked_softmax(x, mask), scores)
    assert torch.autograd.gradgradcheck(lambda x: masked_softmax(x, mask), scores)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_no_nan_even_in_between():
    """Let torch look for NaN at every step backward from an empty row."""
    mask = make_mask("empty row", B, T, S)
    with torch.autograd.detect_anomaly(check_nan=True):
        scores = torch.randn(B, T, S, requires_grad=True)
        masked_softmax(scores, mask).square().sum().backward()
        for attend in VERSIONS.values():
            gradients(attend, draw(B), mask)


# Hand cases.


def test_softmax_by_hand():
    """Keep two of four scores, then none (R01)."""
    scores = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    two = masked_softmax(scores, length_mask(torch.tensor([2]), 4))
    close(two, torch.tensor([[[0.26894142, 0.73105858, 0, 0]]]))
    none = masked_softmax(scores, length_mask(torch.tensor([0]), 4))
    assert (none == 0).all()


@dtypes
def test_softmax_of_hugely_negative_scores(dtype):
    """Let no masked key win, however low the others are (R01, R06)."""
    low = -5e4 if dtype == torch.float16 else -2e6
    scores = torch.tensor([[low, low, 0.0]], dtype=dtype)
    mask = torch.tensor([[True, True, False]])
    right = torch.tensor([[0.5, 0.5, 0.0]], dtype=dtype)
    assert torch.equal(masked_softmax(scores, mask), right)
    scores = torch.full((1, 3), torch.finfo(dtype).min, dtype=dtype)
    assert torch.equal(masked_softmax(scores, mask), right)
    assert (masked_softmax(scores, mask & False) == 0).all()


def test_softmax_of_one_axis():
    """Take a single row of scores with a mask of the same shape."""
    weights = masked_softmax(torch.zeros(3), torch.tensor([True, True, False]))
    assert weights.tolist() == [0.5, 0.5, 0.0]


def test_softmax_runs_over_the_keys():
    """Sum to one on the last axis (R11)."""
    weights = masked_softmax(torch.arange(6.0).reshape(1, 2, 3))
    close(weights.sum(-1), torch.ones(1, 2))
    mask = torch.ones(1, 2, 3, dtype=torch.bool)
    close(masked_softmax(torch.arange(6.0).reshape(1, 2, 3), mask), weights)


@pytest.mark.parametrize("attend", (scratch_attention, fused_attention, tiles_of_three))
def test_causal_by_hand(attend):
    """Average what has been seen so far (R03)."""
    query = torch.zeros(1, 3, 2)
    value = torch.tensor([[[1.0], [2.0], [3.0]]])
    output = attend(query, query, value, causal_mask(3, 3))
    close(output, torch.tensor([[[1.0], [1.5], [2.0]]]))


@versions
def test_fewer_queries_than_keys_by_hand(attend):
    """Stand the last query at the last key (R21)."""
    key, value = torch.zeros(1, 4, 2), torch.arange(4.0).reshape(1, 4, 1)
    one = attend(key[:, :1], key, value, causal_mask(1, 4))
    close(one, torch.tensor([[[1.5]]]))
    two = attend(key[:, :2], key, value, causal_mask(2, 4))
    close(two, torch.tensor([[[1.0], [1.5]]]))


@versions
def test_scale_by_hand(attend):
    """Divide by the root of the width of these vectors (R10)."""
    query = torch.ones(1, 1, 4)
    key = torch.stack([torch.ones(4), torch.zeros(4)])[None]
    weights = attend(query, key, torch.eye(2)[None])
    right = torch.tensor([[[0.8807971, 0.1192029]]])
    close(weights, right)


def test_weights_after_scaling_have_unit_variance():
    """Find Var(q·k) = D, and 1 after the scale (R62)."""
    torch.manual_seed(0)
    query, key = torch.randn(400, 64), torch.randn(500, 64)
    _, weights = scaled_dot_product_attention(query, key, key)
    assert abs((query @ key.mT).var() / 64 - 1) < 0.05
    assert abs(weights.log().var() - 1) < 0.05


# Masks.


def test_length_mask_of_one_and_two_axes():
    """Mark the first keys; one length a sample, or one a query."""
    mask = length_mask(torch.tensor([2, 0, 3]), 3)
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[[1, 1, 0]], [[0, 0, 0]], [[1, 1, 1]]]
    lens = torch.arange(1, 6).expand(B, 5)
    assert torch.equal(length_mask(lens, 5), causal_mask(5, 5).expand(B, 5, 5))
    assert length_mask(torch.zeros(0, dtype=torch.int32), 4).shape == (0, 1, 4)
    assert length_mask(torch.tensor([0, 0]), 0).shape == (2, 1, 0)


def test_length_mask_refuses_what_is_no_length():
    """Say what was wrong, with the numbers."""
    for lens in (torch.tensor([1.0]), [1, 2], 3, torch.tensor([True])):
        with pytest.raises(TypeError, match="integers"):
            length_mask(lens, 4)
    for lens in ([5], [-1], [[1, 2], [3, 9]]):
        with pytest.raises(ValueError, match="be 0 to 4"):
            length_mask(torch.tensor(lens), 4)
    for shape in ((), (1, 2, 3)):
        with pytest.raises(ValueError, match="valid_lens"):
            length_mask(torch.ones(shape, dtype=torch.long), 4)
    with pytest.raises(ValueError, match="-1 keys"):
        length_mask(torch.zeros(0, dtype=torch.long), -1)


@pytest.mark.parametrize("dtype", (torch.uint8, torch.int8, torch.int16, torch.int32))
def test_short_integers_count_many_keys(dtype):
    """Compare lengths with a number of keys that their dtype cannot hold."""
    mask = length_mask(torch.tensor([5, 100], dtype=dtype), 300)
    assert mask.sum(-1).tolist() == [[5], [100]]
    with pytest.raises(ValueError, match=r"not \[101\]"):
        length_mask(torch.tensor([101], dtype=dtype), 100)


def test_causal_mask_stands_at_the_last_key():
    """Align at the end; with fewer keys the first queries see nothing."""
    assert causal_mask(2, 4).tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert causal_mask(3, 2).tolist() == [[0, 0], [1, 0], [1, 1]]
    assert causal_mask(1, 4).all()
    assert causal_mask(0, 3).shape == (0, 3)
    assert causal_mask(3, 0).shape == (3, 0)
    with pytest.raises(ValueError, match="-1"):
        causal_mask(-1, 3)


@versions
def test_empty_first_row_of_a_causal_mask(attend):
    """Give zero where three queries meet two keys."""
    inputs = draw(B, num_queries=3, num_keys=2)
    output, *grads = gradients(attend, inputs, causal_mask(3, 2))
    assert (output[:, 0] == 0).all()
    assert (output[:, 1:] != 0).all()
    assert (grads[0][:, 0] == 0).all()
    assert all(grad.isfinite().all() for grad in grads)


def test_only_the_square_causal_mask_is_causal():
    """Use torch's flag where it means the same, and nowhere else (R21)."""
    assert is_causal(causal_mask(5, 5))
    assert is_causal(causal_mask(1, 1))
    assert not is_causal(causal_mask(2, 4))
    assert not is_causal(causal_mask(4, 2))
    assert not is_causal(causal_mask(5, 5).mT)
    assert not is_causal(torch.ones(5, 5, dtype=torch.bool))
    almost = causal_mask(5, 5)
    almost[3, 1] = False
    assert not is_causal(almost)
    assert not is_causal(causal_mask(5, 5)[None])


def test_causal_detection_reaches_the_kernel(monkeypatch):
    """Hand the kernel the flag and no mask when causal is all there is."""
    seen = []
    kernel = F.scaled_dot_product_attention

    def spy(query, key, value, mask, *, dropout_p, is_causal):
        seen.append((mask is None, is_causal, dropout_p, query.ndim))
        return kernel(query, key, value, mask, dropout_p=dropout_p, is_causal=is_causal)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    layer = DotProductAttention(0.5).eval()
    layer(*draw(B, num_keys=T), causal_mask(T, T))
    layer(*draw(B), causal_mask(T, S))
    layer(*draw(B))
    layer(*draw(B), need_weights=True)
    assert seen == [(True, True, 0.0, 4), (False, False, 0.0, 4), (True, False, 0.0, 4)]


WRONG_MASKS = {
    (B, T, D): [
        (B, S),
        (1, T, S),
        (T, B, S),
        (B, T, 1),
        (T, 1),
        (1, S),
        (S,),
        (),
        (B, S, T),
        (S, T),
        (B, 1, T, S),
        (1, 1, S),
        (B, 2, S),
    ],
    (1, T, D): [(2, T, S), (B, 1, S), (1, 1, T, S), (1, S, T)],
    (B, H, T, D): [
        (B, T, S),
        (H, T, S),
        (B, 1, S),
        (1, T, S),
        (B, 1, 1, S),
        (1, H, T, S),
        (1, 1, T, S),
        (B, B, T, S),
        (H, B, T, S),
    ],
    (B, B, T, D): [(B, T, S), (B, 1, S), (1, B, T, S)],
    (1, 1, T, D): [(1, T, S), (1, 1, S), (1, 1, 1, S)],
    (T, D): [(1, T, S), (S,), (1, S)],
}


@versions
@pytest.mark.parametrize("shape", WRONG_MASKS, ids=str)
def test_wrong_shapes_of_masks_are_refused(attend, shape):
    """Refuse what would broadcast by accident, B = H and B = 1 too (R08)."""
    inputs = draw(*shape[:-2])
    scores = torch.zeros(*shape[:-1], S)
    for wrong in WRONG_MASKS[shape]:
        mask = torch.ones(wrong, dtype=torch.bool)
        with pytest.raises(ValueError, match="does not fit") as error:
            attend(*inputs, mask)
        assert str(tuple(wrong)) in str(error.value)
        assert str(tuple(scores.shape)) in str(error.value)
        with pytest.raises(ValueError, match="does not fit"):
            masked_softmax(scores, mask)


@versions
def test_masks_that_are_not_boolean_are_refused(attend):
    """Refuse float and integer masks: nobody knows what they mean."""
    for dtype in (torch.float32, torch.int64, torch.uint8):
        mask = torch.ones(T, S, dtype=dtype)
        with pytest.raises(TypeError, match="boolean"):
            attend(*draw(B), mask)
        with pytest.raises(TypeError, match="boolean"):
            masked_softmax(torch.zeros(B, T, S), mask)
    with pytest.raises(TypeError, match="boolean"):
        check_mask([[True]], (1, 1))
    for layer in layers().values():
        for need_weights in (False, True):
            with pytest.raises(TypeError, match="boolean"):
                layer(*draw(B), torch.ones(T, S), need_weights)
            with pytest.raises(ValueError, match="does not fit"):
                layer(*draw(B), torch.ones(B, S) > 0, need_weights)


@pytest.mark.parametrize("batch", (1, 2, H, B, T, S))
def test_a_batch_equals_its_samples(batch):
    """Compute each sample alone: nothing may leak between them (R08)."""
    query, key, value = draw(batch)
    lens = 1 + torch.arange(batch) % S
    mask = length_mask(lens, S) & causal_mask(T, S)
    for attend in VERSIONS.values():
        whole = attend(query, key, value, mask)
        for i in range(batch):
            alone = attend(*(x[i : i + 1] for x in (query, key, value)), mask[i : i + 1])
            close(whole[i : i + 1], alone)


# What stands at keys that nobody may attend to.


@versions
@dtypes
@pytest.mark.parametrize("bad", (NAN, math.inf, -math.inf))
def test_unused_keys_reach_neither_output_nor_gradient(attend, dtype, bad):
    """Put NaN or infinity into the padding of keys and values (D6, D7)."""
    clean = draw(B, dtype=dtype)
    lens = torch.tensor([4, 0, S])
    mask = length_mask(lens, S)
    poisoned = [x.clone() for x in clean]
    for x in poisoned[1:]:
        x.masked_fill_(~mask.mT, bad)
    poisoned[0][1] = bad  # a query that may attend to nothing
    for found, right in zip(
        gradients(attend, poisoned, mask), gradients(attend, clean, mask), strict=True
    ):
        assert torch.equal(found, right)
        assert (found[1] == 0).all()


@every_layer
@pytest.mark.parametrize("need_weights", (False, True))
def test_layers_ignore_nan_in_the_padding(kind, need_weights):
    """Let no NaN reach outputs, weights or the gradients of parameters."""
    layer, (query, key, value) = layers()[kind], draw(B)
    mask = length_mask(torch.tensor([4, 0, S]), S)
    idle = torch.tensor([False, True, False])[:, None, None]
    results = []
    for filler in (0.0, NAN):
        layer.zero_grad()
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        filled = [x.masked_fill(~mask.mT, filler) for x in leaves[1:]]
        filled.insert(0, leaves[0].masked_fill(idle, filler))
        output, weights = layer(*filled, mask, need_weights)
        output.square().sum().backward()
        results.append([output, *(x.grad for x in leaves), *(p.grad for p in layer.parameters())])
        if need_weights:
            assert (weights[1] == 0).all()
            assert (weights.masked_select(~mask) == 0).all()
    for found, right in zip(*results, strict=True):
        assert torch.equal(found, right)
    assert all((x[1] == 0).all() for x in results[0][:4])


@versions
@pytest.mark.parametrize("lead", ((), (B,), (B, H), (H, H), (1, 1)), ids=str)
def test_unused_keys_with_every_kind_of_mask(attend, lead):
    """Close a key to all queries, and a query to all keys, in (T, S) and more."""
    full = torch.ones(T, S, dtype=torch.bool)
    full[:, 3] = False
    full[2] = False
    masks = [full]
    if lead:
        masks.append(full.expand(*lead, T, S))
    if len(lead) == 2:
        masks.append(full.expand(lead[0], 1, T, S))
    clean = draw(*lead)
    poisoned = [x.clone() for x in clean]
    poisoned[0][..., 2, :] = NAN
    for x in poisoned[1:]:
        x[..., 3, :] = NAN
    for mask in masks:
        found, right = (gradients(attend, x, mask) for x in (poisoned, clean))
        for x, y in zip(found, right, strict=True):
            assert torch.equal(x, y)
        assert (found[0][..., 2, :] == 0).all()


@versions
def test_a_nan_that_is_attended_is_not_hidden(attend):
    """Show a NaN that some query may attend to."""
    for place in (1, 2):
        inputs = draw(B)
        inputs[place][0, 2] = NAN
        mask = length_mask(torch.tensor([4, 2, 7]), S)
        output = attend(*inputs, mask)
        assert output[0].isnan().any()
        assert output[1:].isfinite().all()


@every_layer
def test_padded_width_does_not_matter(kind):
    """Append two keys that are masked: nothing changes."""
    layer, (query, key, value) = layers()[kind], draw(B)
    lens = torch.tensor([4, 0, S])
    for need_weights in (False, True):
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


@every_layer
def test_a_fully_masked_sample_leaves_the_others_alone(kind):
    """Keep outputs and gradients finite with a sample of padding (R02)."""
    layer, inputs = layers()[kind], draw(2)
    mask = length_mask(torch.tensor([S, 0]), S)
    for need_weights in (False, True):
        output, _ = layer(*inputs, mask, need_weights)
        assert (output[1] == 0).all()
        if kind != "dot":
            output[0].sum().backward()
            assert all(p.grad.isfinite().all() for p in layer.parameters())
        close(output[:1], layer(*(x[:1] for x in inputs))[0])


def test_blanking_keeps_what_is_used():
    """Change only rows that the mask leaves unused."""
    query, key, value = draw(B, H)
    mask = torch.ones(B, 1, T, S, dtype=torch.bool)
    mask[0, 0, 1] = False
    mask[1, 0, :, 3] = False
    mask[2, 0, 0, 0] = False  # key 0 is still read by the other queries
    blank = blank_unused(query, key, value, mask)
    changed = [
        (new != old).any(-1).nonzero().tolist()
        for new, old in zip(blank, (query, key, value), strict=True)
    ]
    assert changed == [[[0, 0, 1], [0, 1, 1]], [[1, 0, 3], [1, 1, 3]], [[1, 0, 3], [1, 1, 3]]]
    assert blank_unused(query, key, value, None) == (query, key, value)


# Sizes, dtypes, devices.


@versions
def test_no_keys_and_no_queries(attend):
    """Pool nothing to zero, and zero queries to zero outputs."""
    assert torch.equal(attend(*draw(B, num_keys=0)), torch.zeros(B, T, V))
    assert attend(*draw(B, num_queries=0)).shape == (B, 0, V)
    assert attend(*draw(B, num_queries=0, num_keys=0)).shape == (B, 0, V)
    empty = torch.ones(T, 0, dtype=torch.bool)
    for mask in (None, empty):
        output, *grads = gradients(attend, draw(B, num_keys=0), mask)
        assert torch.equal(output, torch.zeros(B, T, V))
        assert (grads[0] == 0).all()
    assert attend(*draw(0)).shape == (0, T, V)


@every_layer
def test_layers_with_no_keys(kind):
    """Let the layers pool nothing, too."""
    for need_weights in (False, True):
        output, weights = layers()[kind](*draw(B, num_keys=0), need_weights=need_weights)
        assert torch.equal(output, torch.zeros(B, T, V))
        assert not need_weights or weights.shape == (B, T, 0)


@versions
def test_wrong_shapes_are_refused(attend):
    """Name the shapes in the message."""
    query, key, value = draw(B)
    cases = [
        (query[..., :-1], key, value),  # widths differ
        (query[..., :0], key[..., :0], value),  # no width at all
        (query, key, value[:, :-1]),  # a key without a value
        (query[:1], key, value),  # would broadcast
        (query, key[0], value[0]),
        (query[0, 0], key[0, 0], value[0, 0]),
        (query[None, None], key[None, None], value[None, None]),
    ]
    for case in cases:
        with pytest.raises(ValueError, match=r"\d"):
            attend(*case)
    with pytest.raises(ValueError, match="10 wide, not 11"):
        attend(*cases[0])
    with pytest.raises(ValueError, match=r"\(3, 7, 11\).*\(3, 6, 13\)"):
        attend(*cases[2])


def test_wrong_sizes_of_layers_are_refused():
    """Name the sizes in the message."""
    query, key, value = draw(B)
    for need_weights in (False, True):
        for layer in (
            AdditiveAttention(D + 1, D, 4),
            AdditiveAttention(D, D - 1, 4),
            BilinearAttention(D + 1, D),
            BilinearAttention(D, 9),
        ):
            with pytest.raises(ValueError, match="11"):
                layer(query, key, value, None, need_weights)
    for sizes in ((0, 2, 3), (2, -1, 3), (2, 3, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            AdditiveAttention(*sizes)
    with pytest.raises(ValueError, match="at least 1"):
        BilinearAttention(0, 2)
    with pytest.raises(ValueError, match="at least 1"):
        tiled_attention(query, key, value, tile_size=0)
    with pytest.raises(ValueError, match="dropout"):
        DotProductAttention(1.5)


@dtypes
@every_layer
def test_dtypes_follow_the_input(kind, dtype):
    """Return the dtype that came in; agree with float64 (R06)."""
    layer = layers()[kind].to(dtype)
    inputs = draw(B, dtype=dtype)
    mask = make_mask("empty row", B, T, S)
    output, weights = layer(*inputs, mask, True)
    assert output.dtype == weights.dtype == dtype
    double = copy.deepcopy(layer).double()
    right, _ = double(*(x.double() for x in inputs), mask, True)
    close(output, right, dtype)
    close(layer(*inputs, mask)[0], right, dtype)


def test_half_precision_neither_overflows_nor_rounds_twice():
    """Compute products of halves in float32."""
    query = torch.full((1, 2, 64), 300.0, dtype=torch.float16)
    for attend in VERSIONS.values():
        assert torch.equal(attend(query, query, query), query)
    inputs = draw(B, dtype=torch.bfloat16)
    right = reference(*inputs)
    wide = query[..., :3]  # V other than D: not the fast kernel
    for attend in VERSIONS.values():
        assert torch.equal(attend(query, query, wide, causal_mask(2, 2)), wide)
        error = (attend(*inputs).double() - right).abs() / right.abs()
        assert error.max() < 0.005
    assert at_least_float32(inputs[0]).dtype == torch.float32
    assert at_least_float32(right) is right


def test_meta_device():
    """Follow the device of the input; keep no tensor of their own (R29)."""
    for layer in layers().values():
        layer.to("meta")
        left = [
            name
            for module in layer.modules()
            for name, value in vars(module).items()
            if torch.is_tensor(value)
        ]
        assert left == []
        assert list(layer.buffers()) == []
        inputs = [x.to("meta") for x in draw(B)]
        lens = torch.tensor([1, 2, 3], device="meta")
        masks = (None, length_mask(lens, S), causal_mask(T, S, device="meta"))
        for mask in masks:
            for need_weights in (False, True):
                output, weights = layer(*inputs, mask, need_weights)
                assert output.shape == (B, T, V)
                assert output.is_meta
                assert not need_weights or weights.shape == (B, T, S)
    mask = causal_mask(T, S, device="meta")
    assert tiled_attention(*inputs, mask).is_meta
    square = draw(B, num_keys=T)
    mask = causal_mask(T, T, device="meta")
    assert fused_attention(*(x.to("meta") for x in square), mask).is_meta


@every_layer
def test_arguments_are_not_changed(kind):
    """Change nothing that came in; accept leaves (D8)."""
    inputs = [x.requires_grad_() for x in draw(B)]
    mask = make_mask("empty row", B, T, S)
    kept = [x.detach().clone() for x in (*inputs, mask)]
    for need_weights in (False, True):
        layers()[kind](*inputs, mask, need_weights)
    scaled_dot_product_attention(*inputs, mask)
    tiled_attention(*inputs, mask)
    scores = torch.randn(B, T, S, requires_grad=True)
    before = scores.detach().clone()
    masked_softmax(scores, mask)
    for x, old in zip((*inputs, mask, scores), (*kept, before), strict=True):
        assert torch.equal(x.detach(), old)


def test_views_are_taken():
    """Take tensors that are not contiguous, as heads are."""
    query, key, value = (x.transpose(1, 2) for x in draw(B, T, num_queries=H, num_keys=H))
    copies = [x.contiguous() for x in (query, key, value)]
    for attend in VERSIONS.values():
        close(attend(query, key, value), attend(*copies))


# Permutations.


@every_layer
def test_permutations(kind):
    """Ignore the order of the keys; follow that of the queries."""
    layer, (query, key, value) = layers()[kind], draw(B)
    mask = make_mask("boolean", B, T, S)
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    turn = torch.tensor([4, 2, 0, 1, 3])
    for need_weights in (False, True):
        output, weights = layer(query, key, value, mask, need_weights)
        moved, new = layer(
            query[:, turn], key[:, order], value[:, order], mask[:, turn][..., order], need_weights
        )
        close(moved, output[:, turn])
        if need_weights:
            close(new, weights[:, turn][..., order])


@versions
def test_no_query_sees_the_future(attend):
    """Change the last key and value: earlier outputs keep every bit."""
    query, key, value = draw(B, num_keys=T)
    before = attend(query, key, value, causal_mask(T, T))
    key, value = key.clone(), value.clone()
    key[:, -1] += 3
    value[:, -1] += 3
    after = attend(query, key, value, causal_mask(T, T))
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


# Bias.


def test_score_bias_is_added_after_the_scale():
    """Add a bias that broadcasts to the scores, masked like them."""
    query, key, value = draw(B, H)
    bias = torch.linspace(-2, 2, H * T * S).reshape(H, T, S)
    mask = causal_mask(T, S)
    _, weights = scaled_dot_product_attention(query, key, value, mask, score_bias=bias)
    scores = query @ key.mT / math.sqrt(D) + bias
    right = scores.masked_fill(~mask, -math.inf).softmax(-1)
    close(weights, right)
    for shape in ((), (S,), (T, 1), (1, T, S), (B, 1, 1, S)):
        part = torch.ones(shape, dtype=torch.float64)
        output, weights = scaled_dot_product_attention(query, key, value, score_bias=part)
        assert weights.shape == (B, H, T, S)
        assert output.dtype == weights.dtype == torch.float32


def test_score_bias_is_checked():
    """Refuse a mask in the place of the bias, and what enlarges the scores."""
    inputs = draw(1)
    for wrong in (causal_mask(T, S), torch.ones(T, S).long(), 0.5):
        with pytest.raises(TypeError, match="floats"):
            scaled_dot_product_attention(*inputs, score_bias=wrong)
    for shape in ((B, T, S), (1, 1, T, S), (S, T), (2,)):
        with pytest.raises(ValueError, match="does not broadcast"):
            scaled_dot_product_attention(*inputs, score_bias=torch.ones(shape))


def test_a_bias_at_a_masked_pair_does_not_matter():
    """Let no NaN of the bias through the mask."""
    inputs, mask = draw(B), make_mask("empty row", B, T, S)
    bias = torch.zeros(B, T, S).masked_fill(~mask, NAN).requires_grad_()
    output, _ = scaled_dot_product_attention(*inputs, mask, score_bias=bias)
    assert torch.equal(output, scratch_attention(*inputs, mask))
    output.sum().backward()
    assert bias.grad.isfinite().all()


def test_a_bias_of_minus_infinity_closes_a_pair():
    """Give zeros, not NaN, where bias, or bias and mask, leave nothing."""
    inputs = [x.requires_grad_() for x in draw(B)]
    allowed = make_mask("empty row", B, T, S)
    bias = torch.zeros(B, T, S).masked_fill(~allowed, -math.inf)
    right, right_weights = scaled_dot_product_attention(*inputs, allowed)
    for mask in (None, length_mask(torch.tensor([S, S, S]), S)):
        leaf = bias.clone().requires_grad_()
        output, weights = scaled_dot_product_attention(*inputs, mask, score_bias=leaf)
        close(output, right)
        close(weights, right_weights)
        output.square().sum().backward()
        assert all(x.grad.isfinite().all() for x in (*inputs, leaf))
    shut = torch.full((S,), -math.inf)
    output, _ = scaled_dot_product_attention(*inputs, score_bias=shut)
    assert (output == 0).all()


def test_a_bias_that_is_not_a_number_is_not_hidden():
    """Let NaN in an open pair be seen."""
    bias = torch.zeros(T, S)
    bias[1, 2] = NAN
    output, _ = scaled_dot_product_attention(*draw(B), score_bias=bias)
    assert output[:, 1].isnan().all()
    assert output[:, 0].isfinite().all()


# Layers: weights, dropout, state.


@every_layer
@pytest.mark.parametrize("mask_kind", MASKS)
def test_weights_on_demand_do_not_change_the_output(kind, mask_kind):
    """Agree with and without weights, forward and gradient (R24)."""
    layer, mask = layers()[kind], make_mask(mask_kind, B, T, S)

    def output(need_weights):
        return gradients(lambda *x: layer(*x, mask, need_weights)[0], draw(B))

    for fused, scratch in zip(output(False), output(True), strict=True):
        close(fused, scratch)
    assert layer(*draw(B), mask)[1] is None
    _, weights = layer(*draw(B), mask, need_weights=True)
    seen = torch.ones(B, T) if mask is None else mask.any(-1).expand(B, T)
    close(weights.sum(-1), seen.float())


@every_layer
def test_autocast(kind):
    """Keep to one dtype, weights or not, training or not, and stay close."""
    layer, mask = layers()[kind], make_mask("empty row", B, T, S)
    right, _ = layer(*draw(B), mask)
    seen = set()
    for training in (True, False):
        for need_weights in (True, False):
            layer.train(training)
            with torch.autocast("cpu", torch.bfloat16):
                output, _ = layer(*draw(B), mask, need_weights)
            close(output, right, torch.bfloat16)
            seen.add(output.dtype)
    assert len(seen) == 1


@every_layer
def test_dropout_is_off_in_eval(kind):
    """Give the same bits twice, fused or not (R15)."""
    layer = layers(dropout=0.5)[kind].eval()
    plain = layers(dropout=0.0)[kind].eval()
    for need_weights in (False, True):
        first, _ = layer(*draw(B), need_weights=need_weights)
        second, _ = layer(*draw(B), need_weights=need_weights)
        assert torch.equal(first, second)
        close(first, plain(*draw(B), need_weights=need_weights)[0])


@every_layer
def test_dropout_is_on_in_training(kind):
    """Drop weights, not outputs, and keep the mean (R14)."""
    layer = layers(dropout=0.25)[kind].train()
    query, key, _ = draw(1, num_queries=300)
    value = torch.eye(S)[None]  # the output shows the weights in use
    torch.manual_seed(0)
    for need_weights in (False, True):
        used, weights = layer(query, key, value, None, need_weights)
        dropped = (used == 0).float().mean()
        assert abs(dropped - 0.25) < 0.04
        if need_weights:
            close(weights.sum(-1), torch.ones(1, 300))
            kept = used != 0
            close(used[kept], weights[kept] / 0.75)
        again, _ = layer(query, key, value, None, need_weights)
        assert not torch.equal(used, again)


@every_layer
def test_dropout_falls_on_weights_not_on_outputs(kind):
    """Drop single weights: the sum of a row takes more than two values."""
    layer = layers(dropout=0.5)[kind].train()
    query, key, _ = draw(1)
    torch.manual_seed(0)
    for need_weights in (False, True):
        sums, _ = layer(query, key, torch.ones(1, S, 1), None, need_weights)
        assert len(sums.round(decimals=3).unique()) > 2


def test_dropout_of_everything():
    """Return zeros, not NaN, when all weights are dropped."""
    for layer in layers(dropout=1.0).values():
        for need_weights in (False, True):
            output, _ = layer(*draw(B), need_weights=need_weights)
            assert (output == 0).all()


def test_returned_weights_are_those_before_dropout():
    """Return exactly 1 for a single key, in training too (R14)."""
    for layer in layers(dropout=0.2).values():
        _, weights = layer(*draw(B, num_keys=1), need_weights=True)
        assert torch.equal(weights, torch.ones(B, T, 1))


def test_training_with_dropout_ignores_nan_in_the_padding():
    """Blank the values before the dropped weights meet them."""
    mask = length_mask(torch.tensor([4, 0, S]), S)
    query, key, value = draw(B)
    value = value.masked_fill(~mask.mT, NAN)
    for layer in layers(dropout=0.5).values():
        for need_weights in (False, True):
            output, _ = layer(query, key, value, mask, need_weights)
            assert output.isfinite().all()


@every_layer
def test_nothing_is_kept(kind):
    """Hold no tensor after the call: copies and saves stay small (D16)."""
    layer = layers()[kind]
    before = set(vars(layer))
    inputs = [x.requires_grad_() for x in draw(B)]
    layer(*inputs, make_mask("both", B, T, S), True)
    assert set(vars(layer)) == before
    copy.deepcopy(layer)
    assert not any(torch.is_tensor(x) for x in vars(layer).values())


# Additive and bilinear scores.


def test_additive_shapes():
    """Broadcast keys and queries as the text says (R107)."""
    seen = []
    score = AdditiveScore(20, 2, 8)
    score.score_layer.register_forward_pre_hook(
        lambda _, inputs: seen.append(tuple(inputs[0].shape))
    )
    assert score(torch.ones(2, 1, 20), torch.ones(2, 10, 2)).shape == (2, 1, 10)
    assert score(torch.ones(B, H, T, 20), torch.ones(B, H, S, 2)).shape == (B, H, T, S)
    assert seen == [(2, 1, 10, 8), (B, H, T, S, 8)]


def test_additive_score_is_a_network_on_the_joined_pair():
    """Compute each pair alone: w · tanh(W [q; k])."""
    score = AdditiveScore(D, 3, 17)
    query, key = torch.randn(B, T, D), torch.randn(B, S, 3)
    joined = torch.cat([score.query_layer.weight, score.key_layer.weight], 1)
    for b, t, s in ((0, 0, 0), (1, 4, 2), (2, 3, 6)):
        pair = torch.cat([query[b, t], key[b, s]])
        alone = score.score_layer.weight @ torch.tanh(joined @ pair)
        close(score(query, key)[b, t, s], alone[0])
    names = {name for name, _ in score.named_parameters()}
    assert names == {f"{part}_layer.weight" for part in ("query", "key", "score")}


def test_additive_by_hand():
    """Weigh two keys by tanh(q + k)."""
    layer = AdditiveAttention(1, 1, 1)
    for parameter in layer.parameters():
        nn.init.ones_(parameter)
    query, key = torch.tensor([[[1.0]]]), torch.tensor([[[1.0], [-1.0]]])
    _, weights = layer(query, key, key, need_weights=True)
    assert_close(weights[0, 0, 0].item(), 1 / (1 + math.exp(-math.tanh(2))))


def test_additive_attention_with_unequal_sizes():
    """Agree with the scores pooled one query at a time."""
    layer = AdditiveAttention(19, 3, 17)
    query, key, value = (torch.randn(B, n, w) for n, w in ((T, 19), (S, 3), (S, V)))
    mask = make_mask("empty row", B, T, S)
    output, weights = layer(query, key, value, mask, True)
    right = masked_softmax(layer.score(query, key), mask)
    close(weights, right)
    close(output, right @ value)
    heads = [x[:, None].expand(-1, H, -1, -1) for x in (query, key, value)]
    many, _ = layer(*heads, mask[:, None])
    close(many[:, 1], output)


def test_bilinear_is_a_dot_product_through_a_matrix():
    """Score qᵀMk, over the root of the width of the keys."""
    layer = BilinearAttention(19, D)
    query = torch.randn(B, T, 19)
    _, key, value = draw(B)
    _, weights = layer(query, key, value, need_weights=True)
    matrix = layer.project.weight.mT  # (19, D)
    scores = torch.einsum("btq,qd,bsd->bts", query, matrix, key)
    close(weights, torch.softmax(scores / math.sqrt(D), -1))


# The online softmax.


@given(
    st.lists(st.floats(-700, 700), min_size=1, max_size=12),
    st.integers(1, 5),
    st.randoms(),
)
@settings(max_examples=60, deadline=None)
def test_online_softmax_in_any_tiles(scores, tile_size, random):
    """Give the softmax whatever the order and the size of the tiles."""
    random.shuffle(scores)
    row = torch.tensor([scores], dtype=torch.float64)
    value = torch.eye(len(scores), dtype=torch.float64)
    top = torch.full((1, 1), -math.inf, dtype=torch.float64)
    state = top, torch.zeros_like(top), torch.zeros_like(row)
    for start in range(0, len(scores), tile_size):
        tile = slice(start, start + tile_size)
        state = add_tile(*state, row[:, tile], value[tile])
    top, total, output = state
    assert top.item() == max(scores)
    close(top + total.log(), row.logsumexp(-1, keepdim=True), torch.float64)
    close(output / total, row.softmax(-1), torch.float64)


@given(
    st.integers(1, 4),
    st.integers(0, 6),
    st.integers(0, 9),
    st.integers(1, 11),
    st.integers(0, 10**6),
)
@settings(max_examples=40, deadline=None)
def test_versions_agree_on_any_mask(batch, queries, keys, tile_size, seed):
    """Draw sizes and masks at random: versions agree, rows sum to 1 or 0."""
    torch.manual_seed(seed)
    query, key, value = (torch.randn(batch, n, 3) for n in (queries, keys, keys))
    mask = torch.rand(batch, queries, keys) < torch.rand(())
    output, weights = scaled_dot_product_attention(query, key, value, mask)
    close(weights.sum(-1), mask.any(-1).float())
    assert (weights[~mask] == 0).all()
    close(tiled_attention(query, key, value, mask, tile_size=tile_size), output)
    close(fused_attention(query, key, value, mask), output)


@given(st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=9), st.floats(-100, 100))
@settings(max_examples=60, deadline=None)
def test_a_constant_does_not_change_the_weights(scores, constant):
    """Add one number to all scores of a row."""
    row = torch.tensor([scores], dtype=torch.float64)
    mask = torch.arange(len(scores))[None] % 3 != 1
    assert_close(
        masked_softmax(row + constant, mask), masked_softmax(row, mask), atol=1e-9, rtol=1e-9
    )


@pytest.mark.parametrize("tile_size", (1, 2, 6, 7, 8, 100))
def test_every_tile_size_gives_the_same(tile_size):
    """Cut seven keys in every way."""
    inputs, mask = draw(B, H), causal_mask(T, S)
    close(tiled_attention(*inputs, mask, tile_size=tile_size), scratch_attention(*inputs, mask))


def test_tiles_with_scores_far_apart():
    """Survive scores whose exponential no float can hold."""
    query = torch.tensor([[[1000.0]]])
    key = torch.tensor([[[-1.0], [1.0], [0.999]]])
    value = torch.tensor([[[5.0], [1.0], [3.0]]])
    right = torch.tensor([[[(1 + 3 / math.e) / (1 + 1 / math.e)]]])
    for attend in VERSIONS.values():
        close(attend(query, key, value), right, torch.float16)


def test_peak_memory_measures_all_three():
    """Name the versions; the numbers are the page's business."""
    peaks = peak_memory([64, 128])
    assert list(peaks) == ["fused", "tiled", "naive"]
    marks = [mark for row in peaks.values() for mark in row]
    assert len(marks) == 6
    assert marks == sorted(marks)


# Figures.


def test_heat_maps_show_queries_down_and_keys_across():
    """Draw the very weights, labelled with the tokens (R16)."""
    mask = causal_mask(4, 4).expand(2, 4, 4)
    words = [["a", "b", "c", "d"], ["e", "f", "g", "h"]]
    figure = show_batch([mask, mask.float() / 2], words, ["one", "two"])
    panels = [axes for axes in figure.axes if axes.collections][:4]
    drawn = panels[1].collections[0].get_array()
    assert drawn.tolist() == (mask[0].float() / 2).tolist()
    assert panels[1].yaxis_inverted()  # the first query at the top
    for panel, across, down in ((0, 0, 0), (2, 1, 1), (3, 1, None)):
        for axis, row in ((panels[panel].xaxis, across), (panels[panel].yaxis, down)):
            labels = [label.get_text() for label in axis.get_ticklabels()]
            assert labels == ([""] * 4 if row is None else words[row])
    assert [axes.get_title() for axes in panels] == ["one", "two", "", ""]
    assert len(figure.axes) == 5, "weights come with a bar"
    assert len(show_batch([mask], words, ["mask"]).axes) == 2, "masks without"


def test_the_module_needs_no_later_section():
    """Import from torch, the standard library and the plots alone."""
    origins = {
        getattr(value, "__module__", None) for value in vars(section).values() if callable(value)
    }
    assert {name for name in origins if name and "snippets" in name} <= {
        section.__name__,
        "snippets.plotting",
    }
