"""Prove that positions enter attention as the section says."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from snippets.attention_scoring_functions import causal_mask, length_mask
from snippets.multihead_attention import MultiHeadAttention
from snippets.self_attention_and_positional_encoding import (
    AlibiAttention,
    CharacterBlock,
    CharacterModel,
    LearnedPositions,
    PositionalEncoding,
    RotaryAttention,
    alibi_bias,
    alibi_slopes,
    frequencies,
    position_parts,
    rotate,
    sinusoid,
)

# Axes: a prime each where nothing divides, so that no swapped axis can pass.
B, T, S = 3, 5, 7
HEADS, KV_HEADS, WIDTH = 6, 3, 24  # four coordinates, two pairs a head

TOLERANCE = {
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
    torch.float32: 3e-6,
    torch.float64: 1e-12,
}
DTYPES = tuple(TOLERANCE)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def close(found, expected, dtype=torch.float32, factor=1):
    """Assert equality within the tolerance of a dtype."""
    limit = TOLERANCE[dtype] * factor
    assert_close(found.to(expected.dtype), expected, atol=limit, rtol=limit)


def draw(*shape, seed=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


# Sinusoids.


def by_the_formula(position, column, width):
    """Compute one entry with the standard library alone."""
    angle = position / 10000 ** (2 * (column // 2) / width)
    return math.cos(angle) if column % 2 else math.sin(angle)


def test_sinusoid_by_hand_for_width_4():
    """Share a frequency between neighbours, not one for each column (R41b)."""
    right = [[0.0, 1, 0, 1], [0.8415, 0.5403, 0.0100, 0.9999], [0.9093, -0.4161, 0.0200, 0.9998]]
    assert_close(sinusoid(3, 4), torch.tensor(right), atol=6e-5, rtol=0)


def test_sinusoid_by_hand_for_an_odd_width():
    """Drop the last cosine, and nothing else (R41a)."""
    code = sinusoid(3, 5)
    right = torch.tensor([0.8415, 0.5403, 0.0251, 0.9997, 0.0006])
    assert code.shape == (3, 5)
    assert_close(code[1], right, atol=5e-5, rtol=0)


@pytest.mark.parametrize("width", (1, 2, 3, 7, 8, 13))
def test_sinusoid_is_the_formula_at_every_width(width):
    code = sinusoid(11, width, dtype=torch.float64)
    right = [[by_the_formula(i, c, width) for c in range(width)] for i in range(11)]
    close(code, torch.tensor(right, dtype=torch.float64), torch.float64)


def test_width_one_is_a_sine():
    close(sinusoid(9, 1)[:, 0], torch.arange(9.0).sin())


def test_far_positions_keep_their_digits():
    """Compute the angles in float64, whatever comes out (a float32 angle is off by 0.004)."""
    exact = sinusoid(100_003, 6, dtype=torch.float64)
    for position in (65_537, 100_002):
        right = [by_the_formula(position, c, 6) for c in range(6)]
        assert_close(exact[position].tolist(), right, atol=1e-9, rtol=0)
    for dtype in DTYPES:
        assert torch.equal(sinusoid(100_003, 6, dtype=dtype), exact.to(dtype))


@dtypes
def test_sinusoid_has_the_dtype_asked_for(dtype):
    code = sinusoid(7, 5, dtype=dtype)
    assert code.dtype == dtype
    close(code, sinusoid(7, 5), dtype)


def test_sinusoid_follows_the_default_dtype():
    assert sinusoid(2, 3).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert sinusoid(2, 3).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_sinusoid_on_another_device():
    code = sinusoid(7, 5, device="meta", dtype=torch.float16)
    assert (code.device.type, code.shape, code.dtype) == ("meta", (7, 5), torch.float16)
    assert sinusoid(7, 5, device=torch.device("cpu")).device.type == "cpu"


def test_sinusoid_needs_no_gradient():
    assert not sinusoid(2, 3).requires_grad


def test_more_positions_do_not_change_the_first():
    assert torch.equal(sinusoid(100, 8)[:7], sinusoid(7, 8))


def test_norms_and_dot_products_depend_on_the_distance_alone():
    """Norm² d/2 for even d; PE[i]·PE[i+5] = 11.7774 for d = 32 (R41)."""
    code = sinusoid(200, 32, dtype=torch.float64)
    close(code.square().sum(-1), torch.full((200,), 16.0).double(), torch.float64, 10)
    products = (code[:-5] * code[5:]).sum(-1)
    assert_close(products, torch.full_like(products, 11.7774), atol=5e-5, rtol=0)
    products = code @ code.T
    for shift in range(1, 50):
        band = products.diagonal(shift)
        assert_close(band, band[:1].expand_as(band), atol=1e-11, rtol=0)
        assert band[0] < products[0, 0]


@given(st.integers(0, 500), st.integers(-200, 200), st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_a_shift_is_a_rotation_of_every_pair(position, shift, pairs):
    """Turn each (sine, cosine) by shift · frequency, whatever the position."""
    width, other = 2 * pairs, position + shift
    if other < 0:
        return
    code = sinusoid(max(position, other) + 1, width, dtype=torch.float64)
    turn = torch.zeros(width, width, dtype=torch.float64)
    for j in range(pairs):
        angle = shift / 10000 ** (2 * j / width)
        cos, sin = math.cos(angle), math.sin(angle)
        rotation = torch.tensor([[cos, sin], [-sin, cos]], dtype=torch.float64)
        turn[2 * j : 2 * j + 2, 2 * j : 2 * j + 2] = rotation
    close(turn @ code[position], code[other], torch.float64, 10)


@pytest.mark.parametrize("width", (6, 7))
def test_sines_first_is_the_same_code_with_its_columns_permuted(width):
    """Interleave or concatenate: dot products are the same (R45)."""
    code = sinusoid(11, width)
    rates = 10000 ** (-torch.arange(0, width, 2).double() / width)
    angles = torch.arange(11).double()[:, None] * rates
    joined = torch.cat([angles.sin(), angles.cos()[:, : width // 2]], dim=1).float()
    order = [*range(0, width, 2), *range(1, width, 2)]
    close(code[:, order], joined)
    close(code @ code.T, joined @ joined.T, factor=5)


def test_no_two_positions_have_the_same_code():
    code = sinusoid(2000, 16, dtype=torch.float64)
    distances = torch.cdist(code, code) + 9 * torch.eye(2000)
    assert distances.min() > 0.1


@pytest.mark.parametrize("sizes", ((3, 0), (3, -2), (-1, 4)))
def test_sinusoid_refuses_sizes(sizes):
    with pytest.raises(ValueError, match=str(min(sizes))):
        sinusoid(*sizes)


@pytest.mark.parametrize("base", (10_000.0, 100.0))
def test_frequencies_fall_from_one_in_equal_ratios(base):
    for width in (6, 7):
        rates = frequencies(width, base)
        right = [base ** (-2 * j / width) for j in range((width + 1) // 2)]
        assert rates.dtype == torch.float64
        assert_close(rates.tolist(), right, atol=0, rtol=1e-14)
    assert torch.equal(frequencies(8), frequencies(8, 10_000.0))


# Layers that add positions: sinusoids, and learned rows.


def adders(width=WIDTH, max_len=S, dropout=0.0):
    torch.manual_seed(5)
    return {
        "sinusoids": PositionalEncoding(width, max_len, dropout),
        "learned": LearnedPositions(width, max_len, dropout),
    }


every_adder = pytest.mark.parametrize("kind", adders())


@pytest.mark.parametrize("width", (WIDTH, 5, 1))
@pytest.mark.parametrize("offset", (0, 2))
def test_positional_encoding_adds_the_sinusoids(width, offset):
    """Add rows offset … offset + T − 1, the same to every sample."""
    x = draw(B, T, width)
    layer = PositionalEncoding(width, S)
    right = x + sinusoid(S, width)[offset : offset + T]
    close(layer(x, offset), right)
    close(layer(x, offset=offset), right)
    if offset == 0:
        assert torch.equal(layer(x), layer(x, 0))


@every_adder
def test_adders_change_no_argument(kind):
    x = draw(B, T, WIDTH)
    before = x.clone()
    assert adders()[kind](x).shape == x.shape
    assert torch.equal(x, before)


@every_adder
def test_step_by_step_is_at_once(kind):
    """Give token t of a step-by-step run position t, not 0 (D2)."""
    layer, x = adders()[kind].eval(), draw(B, S, WIDTH)
    whole = layer(x)
    steps = [layer(x[:, t : t + 1], offset=t) for t in range(S)]
    assert torch.equal(torch.cat(steps, dim=1), whole)
    chunks = [layer(x[:, :2]), layer(x[:, 2:5], 2), layer(x[:, 5:], 5)]
    assert torch.equal(torch.cat(chunks, dim=1), whole)
    assert not torch.equal(layer(x[:, 1:2]), whole[:, 1:2])


@every_adder
def test_positions_are_the_same_for_every_sample_and_differ_along_time(kind):
    code = adders()[kind](torch.zeros(B, S, WIDTH))
    assert torch.equal(code, code[:1].expand_as(code))
    assert len(code[0].unique(dim=0)) == S


@every_adder
@pytest.mark.parametrize(("length", "offset"), ((S + 1, 0), (1, S), (T, 3), (1, 10**6)))
def test_adders_refuse_what_goes_past_the_last_position(kind, length, offset):
    """Name the position asked for and the limit (D14)."""
    with pytest.raises(ValueError, match=str(S)) as error:
        adders()[kind](torch.zeros(B, length, WIDTH), offset)
    assert str(length + offset) in str(error.value) or str(offset) in str(error.value)


@every_adder
def test_adders_take_all_positions_up_to_the_last(kind):
    layer = adders()[kind]
    assert layer(torch.zeros(B, S, WIDTH)).shape == (B, S, WIDTH)
    assert layer(torch.zeros(B, 1, WIDTH), S - 1).shape == (B, 1, WIDTH)
    assert layer(torch.zeros(0, T, WIDTH)).shape == (0, T, WIDTH)


@every_adder
@pytest.mark.parametrize("offset", (-1, -S))
def test_adders_refuse_a_negative_offset(kind, offset):
    """A negative index would quietly read from the end."""
    with pytest.raises(ValueError, match=str(offset)):
        adders()[kind](torch.zeros(B, 1, WIDTH), offset)


@every_adder
@pytest.mark.parametrize("width", (1, WIDTH + 1))
def test_adders_refuse_another_width(kind, width):
    """Width 1 would broadcast."""
    with pytest.raises(ValueError, match=str(WIDTH)):
        adders()[kind](torch.zeros(B, T, width))


@pytest.mark.parametrize("layer", (PositionalEncoding, LearnedPositions))
@pytest.mark.parametrize("sizes", ((0, 5), (5, 0), (-1, 5)))
def test_adders_refuse_sizes(layer, sizes):
    with pytest.raises(ValueError, match=str(min(sizes))):
        layer(*sizes)


@every_adder
def test_adders_have_dropout_in_training_only(kind):
    """Drop what is summed, keep the mean; nothing is dropped in eval (R15)."""
    layer, plain = adders(dropout=0.25)[kind], adders()[kind]
    x = draw(400, T, WIDTH)
    assert torch.equal(layer.eval()(x), plain.eval()(x))
    assert torch.equal(layer(x), layer(x))
    torch.manual_seed(0)
    dropped = layer.train()(x)
    lost = dropped == 0
    assert abs(lost.float().mean() - 0.25) < 0.01
    close(dropped[~lost], plain(x)[~lost] / 0.75)


def test_positional_encoding_has_no_state():
    """Keep what can be computed out of checkpoints, so that another limit can load them (D15)."""
    layer = PositionalEncoding(WIDTH, S)
    assert layer.state_dict() == {}
    assert list(layer.parameters()) == []
    layer.load_state_dict({}, strict=True)
    buffers = list(layer.buffers())
    assert [x.requires_grad for x in buffers] == [False] * len(buffers)
    plain = [x for x in vars(layer).values() if torch.is_tensor(x)]
    assert plain == [], "a plain attribute stays behind when the model moves"


def test_learned_positions_are_one_parameter():
    layer = LearnedPositions(WIDTH, S)
    assert [tuple(p.shape) for p in layer.parameters()] == [(S, WIDTH)]
    assert len(layer.state_dict()) == 1
    layer(torch.zeros(B, 2, WIDTH), 3).sum().backward()
    (rows,) = layer.parameters()
    used = torch.tensor([0, 0, 0, 1, 1, 0, 0])[:, None]
    assert torch.equal(rows.grad, used.expand(S, WIDTH) * float(B))


@every_adder
@dtypes
def test_adders_keep_the_dtype_of_the_input(kind, dtype):
    """A half input stays half, whether the layer was converted or not (D15)."""
    x, right = draw(B, T, WIDTH, dtype=dtype), adders()[kind](draw(B, T, WIDTH))
    converted = adders()[kind].to(dtype)
    assert converted(x).dtype == dtype
    close(converted(x), right, dtype, 1 if dtype != torch.float64 else 1e6)
    if kind == "sinusoids":
        assert adders()[kind](x).dtype == dtype
        close(adders()[kind](x), right, dtype, 1 if dtype != torch.float64 else 1e6)


@every_adder
def test_adders_refuse_ids(kind):
    """Positions are added to vectors: ids in their place are a mistake."""
    with pytest.raises(TypeError, match="float"):
        adders()[kind](torch.zeros(B, T, WIDTH, dtype=torch.long))


def test_learned_rows_begin_as_large_as_asked():
    """Begin about as large as sinusoids, 1/√2, or as `std` says: no signal is drowned."""
    torch.manual_seed(0)
    for std in (0.02, 1.0):
        (rows,) = LearnedPositions(64, 512, std=std).parameters()
        assert abs(rows.std() / std - 1) < 0.02
        assert abs(rows.mean()) < 0.02 * std
    torch.manual_seed(0)
    (default,) = LearnedPositions(64, 512).parameters()
    assert abs(default.std() - 0.5**0.5) < 0.03


@every_adder
def test_adders_take_one_sequence_or_many_axes(kind):
    layer, x = adders()[kind], draw(B, 2, T, WIDTH)
    close(layer(x)[1, 1], layer(x[1, 1]))


@every_adder
def test_adders_follow_the_device(kind):
    layer = adders()[kind].to("meta")
    out = layer(torch.zeros(B, T, WIDTH, device="meta"))
    assert (out.device.type, out.shape) == ("meta", (B, T, WIDTH))


@every_adder
def test_adders_pass_the_gradient_through(kind):
    x = draw(B, T, WIDTH).requires_grad_()
    slope = draw(B, T, WIDTH, seed=4)
    (adders()[kind](x) * slope).sum().backward()
    assert torch.equal(x.grad, slope)


# Rotation.


def complex_rotation(x, positions):
    """Multiply every pair, as a complex number, by e^(i · position · rate)."""
    width = x.shape[-1]
    rates = 10000 ** (-torch.arange(0, width, 2).double() / width)
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2).contiguous())
    angles = positions.double()[..., None] * rates
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


@dtypes
@pytest.mark.parametrize("width", (2, 4, 10))
def test_rotation_is_a_complex_product(dtype, width):
    """Agree with complex numbers in float64."""
    x = draw(B, T, width, dtype=dtype)
    found = rotate(x, torch.arange(T))
    assert (found.dtype, found.shape) == (dtype, x.shape)
    close(found, complex_rotation(x, torch.arange(T)), dtype)


def test_rotation_by_hand():
    """Turn (1, 0) by one radian, and the second pair by a hundredth."""
    x = torch.tensor([[1.0, 0.0, 1.0, 0.0]] * 2)
    right = [math.cos(1), math.sin(1), math.cos(0.01), math.sin(0.01)]
    close(rotate(x, torch.tensor([0, 1])), torch.tensor([[1.0, 0.0, 1.0, 0.0], right]))


@dtypes
def test_rotation_at_position_0_is_the_identity(dtype):
    x = draw(B, 4, T, 6, dtype=dtype)
    assert torch.equal(rotate(x, torch.zeros(T, dtype=torch.long)), x)


def test_rotation_keeps_norms_and_angles():
    x, positions = draw(B, T, 6, dtype=torch.float64), torch.tensor([0, 3, 999, 7, 10**5])
    turned = rotate(x, positions)
    close(turned.norm(dim=-1), x.norm(dim=-1), torch.float64)
    assert not torch.allclose(turned[:, 1:], x[:, 1:])


@given(st.integers(0, 4000), st.integers(0, 4000), st.integers(-4000, 4000), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_the_score_depends_on_the_distance_alone(m, n, shift, pairs):
    """Find q(m)·k(n) = q(m + s)·k(n + s), negative positions included."""
    query, key = draw(2, 1, 2 * pairs, dtype=torch.float64)

    def score(m, n):
        return rotate(query, torch.tensor([m])) @ rotate(key, torch.tensor([n])).mT

    close(score(m, n), score(m + shift, n + shift), torch.float64, 10)
    close(score(m, n), rotate(query, torch.tensor([m - n])) @ key.mT, torch.float64, 10)


def test_the_score_does_depend_on_the_distance():
    query, key = draw(2, 1, 6)
    scores = [(rotate(query, torch.tensor([m])) @ key.mT).item() for m in range(50)]
    assert len({round(score, 4) for score in scores}) == 50


def test_far_positions_do_not_spoil_the_rotation():
    """Keep the score within 1e-3 in float32 at position 100,000."""
    query, key = draw(2, 1, 8)
    near = rotate(query, torch.tensor([3])) @ key.mT
    for start in (4096, 100_000):
        far = rotate(query, torch.tensor([start + 3])) @ rotate(key, torch.tensor([start])).mT
        assert_close(far, near, atol=1e-3, rtol=0)


def test_rotations_add_up():
    """Turn by m and then by n: the same as by m + n; by m and −m: nothing."""
    x, ones = draw(B, T, 6, dtype=torch.float64), torch.ones(T, dtype=torch.long)
    close(rotate(rotate(x, 3 * ones), 8 * ones), rotate(x, 11 * ones), torch.float64, 10)
    close(rotate(rotate(x, 3 * ones), -3 * ones), x, torch.float64, 10)


def test_rotation_is_linear_and_acts_on_each_vector_alone():
    x, y = draw(2, B, T, 6, dtype=torch.float64)
    positions = torch.tensor([4, 0, 9, 1, 1])
    both = rotate(2 * x - y, positions)
    close(both, 2 * rotate(x, positions) - rotate(y, positions), torch.float64, 10)
    order = torch.tensor([2, 0, 4, 1, 3])
    assert torch.equal(rotate(x[:, order], positions[order]), rotate(x, positions)[:, order])
    close(rotate(x[1], positions), rotate(x, positions)[1], torch.float64)


def test_positions_of_every_sample():
    """Take (T,) for all, or (B, T) for samples that start elsewhere."""
    x = draw(B, T, 6)
    positions = torch.arange(T) + torch.tensor([[0], [2], [40]])
    found = rotate(x, positions)
    for b in range(B):
        close(found[b], rotate(x[b], positions[b]))
    heads = draw(B, 4, T, 6)
    found = rotate(heads, torch.arange(T))
    for h in range(4):
        close(found[:, h], rotate(heads[:, h], torch.arange(T)))
    for found in (rotate(heads, positions[:, None]), rotate(heads, positions)):
        for b in range(B):
            close(found[b], rotate(heads[b], positions[b]))
    close(rotate(heads, 3), rotate(heads, torch.full((T,), 3)))
    square = draw(T, T, T, 6)  # B = H = T: the two axes are (B, T)
    positions = torch.arange(T * T).reshape(T, T)
    close(rotate(square, positions)[2, 4], rotate(square[2, 4], positions[2]))


def test_positions_may_lie_between_integers():
    """Stretch positions: 0, ½, 1 … is a rotation, too."""
    x = draw(B, T, 6)
    half = torch.arange(T) / 2
    close(rotate(x, half), complex_rotation(x, half).float())
    close(rotate(x, torch.arange(T).int()), rotate(x, torch.arange(T)))
    close(rotate(x, torch.arange(T).float()), rotate(x, torch.arange(T)))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_half_vectors_are_rounded_once(dtype):
    """Compute float16 and bfloat16 in float32, then round."""
    x = draw(20, T, 6, dtype=dtype)
    positions = torch.arange(100, 100 + T)
    assert torch.equal(rotate(x, positions), rotate(x.float(), positions).to(dtype))


def test_half_positions_do_not_coarsen_the_angle():
    """Compute float16 inputs in float32: 2,049 is no float16 number."""
    x = draw(1, 1, 6, dtype=torch.float16)
    far = torch.tensor([2049])
    close(rotate(x, far), complex_rotation(x, far), torch.float16)


def test_the_gradient_is_turned_back():
    """A rotation's transpose is its inverse."""
    x = draw(B, T, 6, dtype=torch.float64).requires_grad_()
    slope, positions = draw(B, T, 6, seed=4, dtype=torch.float64), torch.arange(T)
    (rotate(x, positions) * slope).sum().backward()
    close(x.grad, rotate(slope, -positions), torch.float64)
    assert torch.autograd.gradcheck(lambda x: rotate(x, positions), x, fast_mode=True)


def test_rotation_leaves_its_argument_and_knows_the_device():
    x = draw(B, T, 6)
    before = x.clone()
    rotate(x, torch.arange(T))
    assert torch.equal(x, before)
    moved = rotate(x.to("meta"), torch.arange(T, device="meta"))
    assert (moved.device.type, moved.shape) == ("meta", x.shape)


@pytest.mark.parametrize("shape", ((T, B), (B, T, 1), (1, B, T), (B, 4, T)))
def test_rotation_refuses_positions_that_do_not_fit(shape):
    with pytest.raises(ValueError, match="do not fit"):
        rotate(torch.zeros(B, T, 6), torch.zeros(shape))


def test_rotation_refuses_integers():
    """A cosine cut to an integer would turn vectors into zeros."""
    with pytest.raises(TypeError, match="int64"):
        rotate(torch.ones(T, 6, dtype=torch.long), torch.arange(T))


@pytest.mark.parametrize("width", (1, 7))
def test_rotation_refuses_an_odd_width(width):
    with pytest.raises(ValueError, match=str(width)):
        rotate(torch.zeros(T, width), torch.arange(T))


@pytest.mark.parametrize("count", (T - 1, T + 1))
def test_rotation_refuses_another_number_of_positions(count):
    with pytest.raises(ValueError, match=str(count)):
        rotate(torch.zeros(B, T, 6), torch.arange(count))


def test_sinusoids_are_rotations_of_the_first():
    """The code of position i is that of position 0 turned by −i: (0, 1) → (sin, cos)."""
    code = sinusoid(S, 8, dtype=torch.float64)
    first = code[:1].expand(S, 8)
    close(rotate(first, -torch.arange(S)), code, torch.float64)


# Biases by distance.


def released_slopes(num_heads):
    """Compute the slopes by the rule of the paper's code, one head at a time."""
    power = 2 ** math.floor(math.log2(num_heads))
    first = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2 ** (-4 * h / power) for h in range(1, 2 * power + 1, 2)]
    return (first + between)[:num_heads]


def test_slopes_of_eight_heads():
    """Halve from head to head: 1/2 … 1/256."""
    bias = alibi_bias(8, 2, 2)
    assert (-bias[:, 1, 0]).tolist() == [2.0**-h for h in range(1, 9)]


def test_slopes_of_twelve_heads():
    """Continue with every other slope of sixteen heads, largest first."""
    slopes = -alibi_bias(12, 2, 2, dtype=torch.float64)[:, 1, 0]
    right = [2**-h for h in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert_close(slopes.tolist(), right, atol=1e-12, rtol=0)


@pytest.mark.parametrize("num_heads", (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 31, 32))
def test_slopes_of_any_number_of_heads(num_heads):
    slopes = -alibi_bias(num_heads, 2, 2, dtype=torch.float64)[:, 1, 0]
    assert_close(slopes.tolist(), released_slopes(num_heads), atol=1e-12, rtol=0)
    assert len(set(slopes.tolist())) == num_heads


def test_bias_by_hand():
    """Count the steps back, times 1/16 and 1/256 for two heads; 0 at the token itself."""
    bias = alibi_bias(2, 3, 3)
    steps = torch.tensor([[0.0, 0, 0], [1, 0, 0], [2, 1, 0]])
    past = torch.ones(3, 3).tril().bool()
    assert torch.equal(bias[0][past], -steps[past] / 16)
    assert torch.equal(bias[1][past], -steps[past] / 256)


@pytest.mark.parametrize(("num_queries", "num_keys"), ((1, 7), (5, 7), (7, 7)))
def test_bias_is_aligned_at_the_last_key(num_queries, num_keys):
    """Give a query of cached decoding the row it has in the whole pass (R21)."""
    whole, some = alibi_bias(3, num_keys, num_keys), alibi_bias(3, num_queries, num_keys)
    assert some.shape == (3, num_queries, num_keys)
    assert torch.equal(some, whole[:, -num_queries:])
    own = num_keys - num_queries
    assert (some[:, 0, own] == 0).all()
    assert (some[:, -1, -1] == 0).all()


def test_bias_is_no_mask():
    """Treat a key ahead as one that is as far behind, as the docstring says."""
    bias = alibi_bias(3, S, S)
    assert torch.equal(bias, bias.mT)
    assert torch.equal(alibi_bias(3, 2, 4)[0, 0] * 16, torch.tensor([-2.0, -1, 0, -1]))


def test_bias_falls_with_the_distance_into_the_past():
    bias = alibi_bias(5, S, S)
    for t in range(1, S):
        assert (bias[:, t, : t + 1].diff() > 0).all()


@dtypes
def test_bias_has_the_dtype_asked_for(dtype):
    bias = alibi_bias(3, T, S, dtype=dtype)
    assert (bias.dtype, bias.shape) == (dtype, (3, T, S))
    close(bias, alibi_bias(3, T, S), dtype)
    assert alibi_bias(3, T, S).dtype == torch.float32


def test_bias_of_far_keys_in_half_precision():
    """Round once, at the end: neither 2,049 nor the slopes of twelve heads are float16 numbers."""
    far = alibi_bias(12, 1, 4100, dtype=torch.float16)
    exact = alibi_bias(12, 1, 4100, dtype=torch.float64)
    assert torch.equal(far, exact.half())


def test_bias_on_another_device():
    bias = alibi_bias(3, T, S, device="meta", dtype=torch.bfloat16)
    assert (bias.device.type, bias.shape, bias.dtype) == ("meta", (3, T, S), torch.bfloat16)


@pytest.mark.parametrize("sizes", ((0, T, S), (-2, T, S), (2, -1, S), (2, T, -1)))
def test_bias_refuses_sizes(sizes):
    with pytest.raises(ValueError, match=str(min(sizes))):
        alibi_bias(*sizes)


# Rotary attention.


def rotary(kind=RotaryAttention, **options):
    torch.manual_seed(5)
    return kind(WIDTH, HEADS, **options)


def projections(layer):
    """Give the matrices and biases of the four linear maps."""
    maps = (layer.query_layer, layer.key_layer, layer.value_layer, layer.output_layer)
    return [(x.weight, x.bias) for x in maps]


def by_hand(layer, query, key, value, mask=None, score_bias=None, shift=0):
    """Attend head by head and query by query; positions start at `shift`."""
    (wq, bq), (wk, bk), (wv, bv), (wo, bo) = projections(layer)
    size, joined = WIDTH // HEADS, []
    num_queries, num_keys = query.shape[1], key.shape[1]
    key_at = shift + torch.arange(num_keys)
    query_at = key_at[num_keys - num_queries :]
    mask = torch.ones(len(query), 1, 1, 1, dtype=torch.bool) if mask is None else mask
    mask = (mask[:, None] if mask.ndim == 3 else mask).expand(-1, HEADS, num_queries, num_keys)
    groups = HEADS // (wk.shape[0] // size)  # query heads for each key head
    for head in range(HEADS):
        own = slice(head * size, (head + 1) * size)
        other = slice(head // groups * size, (head // groups + 1) * size)
        q = nn.functional.linear(query, wq, bq)[..., own]
        k = nn.functional.linear(key, wk, bk)[..., other]
        v = nn.functional.linear(value, wv, bv)[..., other]
        scores = complex_rotation(q, query_at) @ complex_rotation(k, key_at).mT / math.sqrt(size)
        scores = scores if score_bias is None else scores + score_bias[head]
        scores = scores.masked_fill(~mask[:, head], -math.inf)
        joined.append(scores.softmax(-1).nan_to_num().to(v.dtype) @ v)
    return nn.functional.linear(torch.cat(joined, -1), wo, bo)


OPTIONS = ({}, {"num_kv_heads": KV_HEADS}, {"num_kv_heads": 1, "bias": True})
every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


def masks(num_queries=T):
    padding = length_mask(torch.tensor([4, S, 2]), S)
    causal = causal_mask(num_queries, S)
    heads = torch.rand(B, HEADS, num_queries, S, generator=torch.Generator().manual_seed(2)) < 0.7
    heads[..., 0] = True
    return {"none": None, "causal": causal, "padding": padding, "both": padding & causal,
            "heads": heads}  # fmt: skip


@every_option
@pytest.mark.parametrize("kind", masks())
@pytest.mark.parametrize("num_queries", (1, T, S))
def test_rotary_attention_is_what_one_writes_by_hand(options, kind, num_queries):
    """Agree with a loop over heads and complex rotations, both ways to compute it."""
    layer, mask = rotary(**options).double(), masks(num_queries)[kind]
    key, value = draw(2, B, S, WIDTH, dtype=torch.float64)
    query = draw(B, num_queries, WIDTH, seed=4, dtype=torch.float64)
    if kind == "causal":
        right = by_hand(layer, query, key, value, mask[None].expand(B, -1, -1))
    else:
        right = by_hand(layer, query, key, value, mask)
    seen = torch.ones(B, num_queries, 1) if mask is None else mask.any(-1, keepdim=True)
    for need_weights in (False, True):
        found, weights = layer(query, key, value, mask, need_weights)
        close(found, right, torch.float64, 10)
        assert (weights is not None) == need_weights
    assert weights.shape == (B, HEADS, num_queries, S)
    total = weights.sum(-1)
    close(total, torch.ones_like(total) * (seen.all() or total.round()), torch.float64, 10)


def test_rotary_gradients_agree_with_and_without_weights():
    inputs, mask = draw(3, B, S, WIDTH), masks(S)["both"]
    found = []
    for need_weights in (False, True):
        layer, leaves = rotary(), [x.clone().requires_grad_() for x in inputs]
        output, _ = layer(*leaves, mask, need_weights)
        output.square().sum().backward()
        found.append([x.grad for x in (*leaves, *layer.parameters())])
    for fused, scratch in zip(*found, strict=True):
        close(fused, scratch, factor=20)


def test_rotary_attention_is_a_multi_head_attention():
    """Have the same parameters in the same order: weights of one load into the other."""
    plain = rotary(MultiHeadAttention, num_kv_heads=KV_HEADS, bias=True)
    turned = rotary(num_kv_heads=KV_HEADS, bias=True)
    assert isinstance(turned, MultiHeadAttention)
    assert list(turned.state_dict()) == list(plain.state_dict())
    assert all(map(torch.equal, turned.parameters(), plain.parameters()))
    turned.load_state_dict(plain.state_dict(), strict=True)
    assert list(turned.buffers()) == list(plain.buffers()) == []


def test_rotary_attention_to_a_single_token_is_plain_attention():
    """A turn that query and key share is no turn: at distance 0 nothing changes."""
    x = draw(B, 1, WIDTH)
    close(rotary()(x, x, x)[0], rotary(MultiHeadAttention)(x, x, x)[0])
    x = draw(B, S, WIDTH)
    alone = torch.eye(S, dtype=torch.bool)
    close(rotary()(x, x, x, alone)[0], rotary(MultiHeadAttention)(x, x, x, alone)[0])


def test_rotary_weights_differ_from_plain_ones_and_values_are_not_turned():
    """Equal keys: plain weights are uniform, and so is the output, wherever the values stand."""
    x = draw(B, S, WIDTH)
    _, weights = rotary()(x, x, x, need_weights=True)
    _, plain = rotary(MultiHeadAttention)(x, x, x, need_weights=True)
    assert (weights - plain).abs().max() > 0.01
    value = draw(B, 1, WIDTH, seed=9).expand(B, S, WIDTH)
    output, _ = rotary()(x, x, value)
    close(output, output[:, :1].expand_as(output))


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_shifting_all_positions_changes_nothing(options):
    """Put padding in front: every other token moves on, no weight changes."""
    layer, x = rotary(**options), draw(B, T, WIDTH)
    longer = torch.cat([draw(B, 11, WIDTH, seed=8), x], dim=1)
    mask = torch.zeros(1, T + 11, T + 11, dtype=torch.bool).expand(B, -1, -1).clone()
    mask[:, 11:, 11:] = causal_mask(T, T)
    close(layer(longer, longer, longer, mask)[0][:, 11:], layer(x, x, x, causal_mask(T, T))[0])
    close(
        by_hand(layer, x, x, x, shift=1000).float(),
        layer(x, x, x)[0],
        factor=20,
    )


@pytest.mark.parametrize("num_queries", range(1, S))
@pytest.mark.parametrize("need_weights", (False, True))
def test_fewer_queries_stand_at_the_last_positions(num_queries, need_weights):
    """Give the last rows of the whole pass: what cached decoding needs (D2, R21)."""
    layer, x = rotary(), draw(B, S, WIDTH)
    whole, all_weights = layer(x, x, x, causal_mask(S, S), need_weights)
    last = x[:, -num_queries:]
    some, weights = layer(last, x, x, causal_mask(num_queries, S), need_weights)
    close(some, whole[:, -num_queries:])
    if need_weights:
        close(weights, all_weights[:, :, -num_queries:])


def test_decoding_token_by_token_is_the_pass_at_once():
    layer, x = rotary(num_kv_heads=KV_HEADS), draw(B, S, WIDTH)
    whole, _ = layer(x, x, x, causal_mask(S, S))
    for t in range(S):
        seen = x[:, : t + 1]
        step, _ = layer(x[:, t : t + 1], seen, seen)
        close(step, whole[:, t : t + 1])


def test_rotary_attention_is_causal_under_a_causal_mask():
    """Change the last token: no bit of an earlier output changes."""
    layer, x = rotary(), draw(B, S, WIDTH)
    changed = x.clone()
    changed[:, -1] += 3
    for need_weights in (False, True):
        outputs = [layer(y, y, y, causal_mask(S, S), need_weights)[0] for y in (x, changed)]
        assert torch.equal(outputs[0][:, :-1], outputs[1][:, :-1])
        assert not torch.allclose(outputs[0][:, -1], outputs[1][:, -1])


def test_rotary_attention_keeps_samples_apart():
    layer, x = rotary(), draw(B, S, WIDTH)
    together, _ = layer(x, x, x)
    for b in range(B):
        close(layer(x[b : b + 1], x[b : b + 1], x[b : b + 1])[0], together[b : b + 1])


def test_padding_does_not_reach_the_rotary_output():
    """Ignore what stands at padding, NaN included, and how much of it there is."""
    layer, x, lens = rotary(), draw(B, S, WIDTH), torch.tensor([4, S, 2])
    mask = length_mask(lens, S)
    spoilt = x.masked_fill(~mask.mT, math.nan)
    for need_weights in (False, True):
        found, _ = layer(x, spoilt, spoilt, mask, need_weights)
        for b, n in enumerate(lens.tolist()):
            alone = x[b : b + 1, :n]
            close(found[b : b + 1, :n], layer(alone, alone, alone)[0])


@pytest.mark.parametrize("need_weights", (False, True))
def test_a_query_that_sees_nothing_gets_zero(need_weights):
    layer, x = rotary(), draw(B, S, WIDTH).requires_grad_()
    mask = causal_mask(S, S).clone()
    mask[2] = False
    output, weights = layer(x, x, x, mask, need_weights)
    assert (output[:, 2] == 0).all()
    if need_weights:
        assert (weights[:, :, 2] == 0).all()
    output.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in (x, *layer.parameters()))


@pytest.mark.parametrize("num_queries", (T, S))
def test_rotary_attention_takes_a_bias(num_queries):
    """Add a bias of each head to the scores of every sample."""
    layer, x = rotary().double(), draw(B, S, WIDTH, dtype=torch.float64)
    bias = draw(HEADS, num_queries, S, seed=6, dtype=torch.float64)
    query = x[:, -num_queries:]
    right = by_hand(layer, query, x, x, score_bias=bias)
    for need_weights in (False, True):
        found, _ = layer(query, x, x, None, need_weights, score_bias=bias)
        close(found, right, torch.float64, 10)


@dtypes
def test_rotary_attention_in_every_dtype(dtype):
    x, mask = draw(B, S, WIDTH), masks(S)["both"]
    right, _ = rotary()(x, x, x, mask)
    layer, y = rotary().to(dtype), x.to(dtype)
    for need_weights in (False, True):
        found, weights = layer(y, y, y, mask, need_weights)
        assert found.dtype == dtype
        close(found, right, dtype, 1 if dtype != torch.float64 else 1e6)
        assert weights is None or weights.dtype == dtype


def test_rotary_attention_drops_in_training_only():
    layer, plain, x = rotary(dropout=0.5), rotary(), draw(B, S, WIDTH)
    for need_weights in (False, True):
        right, _ = plain.eval()(x, x, x, None, need_weights)
        close(layer.eval()(x, x, x, None, need_weights)[0], right)
        torch.manual_seed(0)
        dropped, _ = layer.train()(x, x, x, None, need_weights)
        assert not torch.allclose(dropped, right, atol=1e-3)


def test_rotary_attention_keeps_nothing():
    """Hold no tensor after the call: copies and saves stay small (D16)."""
    layer, x = rotary(), draw(B, S, WIDTH).requires_grad_()
    before = set(vars(layer))
    layer(x, x, x, need_weights=True)
    assert set(vars(layer)) == before
    copy.deepcopy(layer)
    assert not any(torch.is_tensor(x) for x in vars(layer).values())


def test_rotary_attention_on_another_device():
    layer, x = rotary().to("meta"), torch.zeros(B, S, WIDTH, device="meta")
    assert layer(x, x, x)[0].shape == (B, S, WIDTH)


def test_rotary_attention_refuses_heads_of_odd_width():
    """A coordinate without a partner cannot be turned: say so when it is built."""
    with pytest.raises(ValueError, match="5"):
        RotaryAttention(15, 3)


def test_rotary_attention_refuses_what_multi_head_attention_refuses():
    with pytest.raises(ValueError, match="6"):
        RotaryAttention(25, 6)
    with pytest.raises(TypeError, match="bool"):
        rotary()(*[torch.zeros(B, S, WIDTH)] * 3, torch.zeros(S, S))
    with pytest.raises(ValueError, match="mask"):
        rotary()(*[torch.zeros(B, S, WIDTH)] * 3, torch.ones(S, T).bool())


# What attention knows of order.


def shuffled(x, seed=0, keep_last=False):
    """Permute the tokens of every sample alike, perhaps all but the last."""
    order = torch.randperm(x.shape[1] - keep_last, generator=torch.Generator().manual_seed(seed))
    order = torch.cat([order, torch.arange(len(order), x.shape[1])])
    return x[:, order], order


def plain(x, mask=None, bias=None):
    layer = rotary(MultiHeadAttention).double()
    return layer(x, x, x, mask, score_bias=bias)[0]


def test_attention_without_positions_commutes_with_every_order():
    x = draw(B, S, WIDTH, dtype=torch.float64)
    for seed in range(20):
        y, order = shuffled(x, seed)
        close(plain(y), plain(x)[:, order], torch.float64)


SCHEMES = {
    "sinusoids": lambda x: plain(PositionalEncoding(WIDTH, S)(x)),
    "learned": lambda x: plain(adders()["learned"].double()(x)),
    "rotary": lambda x: rotary().double()(x, x, x)[0],
    "alibi": lambda x: plain(x, bias=alibi_bias(HEADS, S, S, dtype=torch.float64)),
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_breaks_the_symmetry(scheme):
    """Build positions *and use them*: shuffled tokens give other outputs (R43)."""
    x = draw(B, S, WIDTH, dtype=torch.float64)
    y, order = shuffled(x)
    difference = SCHEMES[scheme](y) - SCHEMES[scheme](x)[:, order]
    assert difference.abs().max() > 1e-3


def test_one_causal_layer_sees_a_set_and_two_see_an_order():
    """Shuffle what stands before the last token."""
    x = draw(B, S, WIDTH, dtype=torch.float64)
    y, _ = shuffled(x, keep_last=True)
    mask = causal_mask(S, S)

    def two(x):
        between = x + plain(x, mask)
        return plain(between, mask)

    close(plain(y, mask)[:, -1], plain(x, mask)[:, -1], torch.float64)
    assert not torch.allclose(plain(y, mask)[:, 1], plain(x, mask)[:, 1], atol=1e-3)
    assert (two(y)[:, -1] - two(x)[:, -1]).abs().max() > 1e-3


# Attention with the bias of ALiBi.


def test_slopes_are_those_of_the_bias():
    for num_heads in (1, 6, 8, 12):
        slopes = alibi_slopes(num_heads)
        assert slopes.dtype == torch.float64
        assert_close(slopes.tolist(), released_slopes(num_heads), atol=1e-12, rtol=0)


@pytest.mark.parametrize("num_queries", (1, T, S))
def test_alibi_attention_is_attention_with_the_bias(num_queries):
    """Add the bias, and another one if there is; keep parameters and masks as they are."""
    plain, layer = rotary(MultiHeadAttention), rotary(AlibiAttention)
    assert list(layer.state_dict()) == list(plain.state_dict())
    x, more = draw(B, S, WIDTH), draw(B, HEADS, num_queries, S, seed=6)
    query, bias = x[:, -num_queries:], alibi_bias(HEADS, num_queries, S)
    for mask in masks(num_queries).values():
        for need_weights in (False, True):
            inputs = query, x, x, mask, need_weights
            for extra in (None, more):
                total = bias if extra is None else bias + extra
                found, weights = layer(*inputs, score_bias=extra)
                right, right_weights = plain(*inputs, score_bias=total)
                close(found, right, factor=5)
                assert (weights is not None) == need_weights
                if need_weights:
                    close(weights, right_weights, factor=5)


def test_alibi_attention_is_exact_in_double_precision():
    """Do not round the slopes of twelve heads, no powers of two, to float32."""
    torch.manual_seed(5)
    layer, plain = (kind(WIDTH, 12).double() for kind in (AlibiAttention, MultiHeadAttention))
    plain.load_state_dict(layer.state_dict())
    x = 9 * draw(B, S, WIDTH, dtype=torch.float64)
    bias = alibi_bias(12, S, S, dtype=torch.float64)
    for need_weights in (False, True):
        right, _ = plain(x, x, x, None, need_weights, score_bias=bias)
        close(layer(x, x, x, None, need_weights)[0], right, torch.float64)


@pytest.mark.parametrize("need_weights", (False, True))
def test_alibi_attention_refuses_what_is_no_bias(need_weights):
    """Check the bias before it is added: True would become 1, and a mask would pass."""
    layer, x = rotary(AlibiAttention), draw(B, S, WIDTH)
    for wrong in (causal_mask(S, S), torch.ones(S, S, dtype=torch.long), 1.0):
        with pytest.raises(TypeError, match="score_bias"):
            layer(x, x, x, None, need_weights, score_bias=wrong)
    for shape in ((T, S), (2, HEADS, S, S), (1, B, HEADS, S, S)):
        with pytest.raises(ValueError, match="score_bias"):
            layer(x, x, x, None, need_weights, score_bias=torch.zeros(shape))


def test_alibi_attention_attends_to_near_keys_if_all_are_equal():
    x = draw(1, 1, WIDTH).expand(1, S, WIDTH)
    _, weights = rotary(AlibiAttention)(x, x, x, causal_mask(S, S), need_weights=True)
    assert (weights[0, :, -1].diff() > 0).all()
    assert_close(weights[0, :, -1].diff().sum(-1), weights[0, :, -1, -1] - weights[0, :, -1, 0])


# The model of the comparison.

EVERY_SCHEME = ("none", "learned", "sinusoidal", "rotary", "ALiBi")
every_scheme = pytest.mark.parametrize("scheme", EVERY_SCHEME)


def character_model(scheme, **options):
    torch.manual_seed(5)
    return CharacterModel(scheme, **options)


def some_ids(batch=B, length=S, vocab_size=70):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(vocab_size, (batch, length), generator=generator)


def test_a_block_adds_what_it_finds_to_its_input():
    """Agree with the two sums written out; with maps of zero, change nothing."""
    torch.manual_seed(5)
    block = CharacterBlock(rotary(MultiHeadAttention), WIDTH)
    for norm in block.norms:
        nn.init.normal_(norm.weight)
    x, mask = draw(B, S, WIDTH), causal_mask(S, S)
    y = block.norms[0](x)
    between = x + by_plain_hand(block.attention, y, mask)
    close(block(x, mask), between + block.network(block.norms[1](between)), factor=5)
    nn.init.zeros_(block.attention.output_layer.weight)
    for parameter in block.network[-1].parameters():
        nn.init.zeros_(parameter)
    assert torch.equal(block(x, mask), x)


def by_plain_hand(layer, x, mask):
    """Attend with torch's own function, all three inputs the same."""
    size = WIDTH // HEADS
    heads = [part(x).unflatten(-1, (HEADS, size)).transpose(1, 2)
             for part in (layer.query_layer, layer.key_layer, layer.value_layer)]  # fmt: skip
    found = nn.functional.scaled_dot_product_attention(*heads, mask)
    return layer.output_layer(found.transpose(1, 2).flatten(2))


@every_scheme
def test_the_model_gives_logits_and_is_causal(scheme):
    """Change the last token: no bit of an earlier logit changes."""
    model, ids = character_model(scheme, vocab_size=19), some_ids(vocab_size=19)
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 19
    logits, others = model(ids), model(changed)
    assert logits.shape == (B, S, 19)
    assert torch.equal(logits[:, :-1], others[:, :-1])
    assert not torch.allclose(logits[:, -1], others[:, -1])
    close(model(ids[:, :3]), logits[:, :3], factor=10)


@every_scheme
def test_the_model_sees_the_order_of_what_came_before(scheme):
    """Two layers do, even without positions."""
    model, ids = character_model(scheme).double(), some_ids(length=11)
    moved = ids[:, [3, 0, 2, 1, 4, 6, 5, 9, 7, 8, 10]]
    gap = (model(ids) - model(moved))[:, -1].abs().max()
    assert gap > 1e-6, "the last token's logits do not depend on the order"


@every_scheme
def test_the_model_uses_the_scheme_that_it_names(scheme):
    model = character_model(scheme)
    added = {"learned": LearnedPositions, "sinusoidal": PositionalEncoding}
    inside = {"rotary": RotaryAttention, "ALiBi": AlibiAttention}
    assert type(model.positions) is added.get(scheme, nn.Identity)
    kinds = [type(block.attention) for block in model.blocks]
    assert kinds == [inside.get(scheme, MultiHeadAttention)] * 2
    layer, kind = position_parts(scheme, 8, 5)
    assert (type(layer), kind) == (type(model.positions), kinds[0])
    size = sum(p.numel() for p in model.parameters())
    extra = 128 * 64 if scheme == "learned" else 0
    assert size == sum(p.numel() for p in character_model("none").parameters()) + extra


def test_an_unknown_scheme_is_an_error():
    with pytest.raises(ValueError, match="alibi"):
        CharacterModel("alibi")


def test_embeddings_are_as_large_as_positions():
    """Draw them with deviation D^-1/2 *and* multiply by √D, once (R40, D3)."""
    model, seen = character_model("sinusoidal"), []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    ids = some_ids(50, 128)
    model(ids)
    embedded = seen[0] - sinusoid(128, 64)
    close(embedded, 8 * model.embedding.weight[ids], factor=5)
    assert abs(embedded.square().mean().sqrt() - 1) < 0.1
    assert abs(sinusoid(128, 64).square().mean().sqrt() - 0.5**0.5) < 1e-3


@every_scheme
def test_the_model_goes_as_far_as_its_positions(scheme):
    model, ids = character_model(scheme, max_len=S), some_ids(length=S + 1)
    assert model(ids[:, :S]).shape == (B, S, 70)
    if scheme in ("learned", "sinusoidal"):
        with pytest.raises(ValueError, match=str(S)):
            model(ids)
    else:
        assert model(ids).shape == (B, S + 1, 70)


@every_scheme
def test_every_parameter_of_the_model_learns(scheme):
    model = character_model(scheme, max_len=S)
    loss = nn.functional.cross_entropy(model(some_ids()).mT, some_ids().roll(-1, 1))
    loss.backward()
    assert abs(loss.item() - math.log(70)) < 0.5
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
