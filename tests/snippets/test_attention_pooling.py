"""Proof of `snippets.attention_pooling`; sizes are distinct primes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snippets.attention_pooling import (
    LearnedBandwidth,
    boxcar,
    constant,
    distances,
    epanechnikov,
    gaussian,
    gaussian_scores,
    leave_one_out_error,
    nadaraya_watson,
    normalise,
    others_mask,
    pool,
    triangular,
)

T, S, D, V = 3, 11, 5, 7
BOUNDED = [boxcar, triangular, epanechnikov]
KERNELS = [gaussian, *BOUNDED, constant]
TOLERANCE = {
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
    torch.float32: 1e-5,
    torch.float64: 1e-12,
}
every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
every_bounded = pytest.mark.parametrize("kernel", BOUNDED, ids=lambda kernel: kernel.__name__)
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
places = st.lists(st.floats(-5, 5), min_size=1, max_size=7)


def normal(*shape, seed=0, dtype=torch.double):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def by_loops(queries, keys, values, kernel, bandwidth, leave_out=False):
    """Compute the estimates one by one, in Python's own floats."""
    estimates = []
    for i, query in enumerate(queries):
        above = below = 0.0
        for j, (key, value) in enumerate(zip(keys, values)):
            if leave_out and i == j:
                continue
            similarity = kernel(math.dist(query, key) / bandwidth)
            above, below = above + similarity * value, below + similarity
        estimates.append(above / below if below else 0.0)
    return estimates


PLAIN = {
    "gaussian": lambda u: math.exp(-u * u / 2),
    "boxcar": lambda u: 1.0 if u <= 1 else 0.0,
    "triangular": lambda u: max(0.0, 1 - u),
    "epanechnikov": lambda u: max(0.0, 0.75 * (1 - u * u)),
    "constant": lambda u: 1.0,
}


# the kernels


def test_kernels_at_hand_picked_distances():
    u = torch.tensor([0.0, 0.5, 1.0, 2.0])
    expected = {
        gaussian: [1, 0.8825, 0.6065, 0.1353],
        boxcar: [1, 1, 1, 0],
        triangular: [1, 0.5, 0, 0],
        epanechnikov: [0.75, 0.5625, 0, 0],
        constant: [1, 1, 1, 1],
    }
    for kernel, values in expected.items():
        torch.testing.assert_close(
            kernel(u), torch.tensor(values, dtype=torch.float), atol=5e-5, rtol=0
        )


def test_boxcar_includes_its_edge():
    assert boxcar(torch.tensor(1.0)) == 1
    assert boxcar(torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))) == 0


def test_epanechnikov_and_triangular_are_two_kernels():
    u = torch.linspace(0.05, 0.95, 13)
    assert (epanechnikov(u) != triangular(u)).all()


@pytest.mark.parametrize(
    ("kernel", "area"),
    [(gaussian, math.sqrt(2 * math.pi)), (boxcar, 2), (triangular, 1), (epanechnikov, 1)],
)
def test_area_under_each_kernel(kernel, area):
    u = torch.linspace(-9, 9, 180_001, dtype=torch.double)
    assert torch.trapezoid(kernel(u), u).item() == pytest.approx(area, abs=2e-4)


@every_kernel
def test_kernels_are_even_never_negative_and_never_rise(kernel):
    u = torch.linspace(0, 4, 101, dtype=torch.double)
    assert (kernel(u) >= 0).all()
    assert (kernel(u).diff() <= 0).all()
    torch.testing.assert_close(kernel(u), kernel(-u))


@every_kernel
@every_dtype
def test_kernels_keep_the_dtype_and_shape_of_the_distance(kernel, dtype):
    similarity = kernel(torch.ones(T, S, dtype=dtype))
    assert similarity.dtype == dtype
    assert similarity.shape == (T, S)


@every_kernel
@pytest.mark.parametrize("far", [14.5, 1e3, 1e25])
def test_kernels_have_finite_gradients_far_away(kernel, far):
    u = torch.tensor([0.0, far], requires_grad=True)
    similarity = kernel(u)
    assert similarity.isfinite().all()
    if similarity.requires_grad:
        similarity.sum().backward()
        assert u.grad.isfinite().all()


# distances


def test_distances_agree_with_loops():
    queries, keys = normal(T, D), normal(S, D, seed=1)
    expected = [[math.dist(query, key) for key in keys] for query in queries]
    torch.testing.assert_close(distances(queries, keys), torch.tensor(expected).double())


def test_distances_of_places_on_a_road():
    found = distances(torch.tensor([0.0, 3.0]), torch.tensor([1.0, 0.0, -2.0]))
    assert found.tolist() == [[1, 0, 2], [2, 3, 5]]


def test_distances_do_not_round_small_distances_away():
    keys = 1000 + normal(53, D, dtype=torch.float)
    assert distances(keys, keys).diagonal().abs().max() == 0
    expected = distances(keys.double(), keys.double()).float()
    torch.testing.assert_close(distances(keys, keys), expected, atol=0, rtol=1e-5)


# normalise


def test_rows_sum_to_one_and_empty_rows_stay_empty():
    weights = normalise(torch.tensor([[1.0, 3.0, 0.0], [0.0, 0.0, 0.0]]))
    assert weights.tolist() == [[0.25, 0.75, 0], [0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_finite_however_small_a_row_is(dtype):
    smallest = torch.finfo(dtype).smallest_normal
    sizes = torch.tensor([0.0, smallest / 1000, smallest, 1e-25, 1.0], dtype=dtype)
    similarity = (sizes[:, None] * torch.tensor([1.0, 2.0, 5.0], dtype=dtype)).requires_grad_()
    weights = normalise(similarity)
    expected = torch.tensor([0.125, 0.25, 0.625], dtype=dtype).expand(4, 3)
    torch.testing.assert_close(weights[1:], expected, atol=1e-3, rtol=1e-3)
    (weights * torch.tensor([100.0, -300.0, 700.0], dtype=dtype)).sum().backward()
    assert similarity.grad.isfinite().all()
    assert (similarity.grad[0] == 0).all()


@pytest.mark.parametrize("size", [1e-25, 1e-3, 1.0, 1e3])
def test_small_rows_keep_their_gradient(size):
    similarity = torch.tensor([[1.0, 2.0, 5.0]]).mul(size).requires_grad_()
    (normalise(similarity) @ torch.tensor([1.0, -3.0, 7.0])).sum().backward()
    # The gradient of an average is (value - average) / total.
    expected = (torch.tensor([[1.0, -3.0, 7.0]]) - 3.75) / 8
    torch.testing.assert_close(similarity.grad * size, expected)


@pytest.mark.parametrize("sign", [1, -1])
def test_gradient_of_normalise_is_right(sign):
    similarity = (sign * normal(T, S).abs()).requires_grad_()
    assert torch.autograd.gradcheck(normalise, similarity)


# pool


def test_pool_is_the_sum_of_weights_times_values():
    weights, values = normal(T, S), normal(S, V, seed=1)
    expected = torch.einsum("ts,sv->tv", weights, values)
    torch.testing.assert_close(pool(weights, values), expected)
    torch.testing.assert_close(pool(weights, values[:, 0]), expected[:, 0])


def test_a_weight_of_zero_keeps_its_gradient():
    weights = normal(T, S).index_fill(1, torch.tensor(2), 0).requires_grad_()
    assert torch.autograd.gradcheck(pool, (weights, normal(S, V, seed=1).requires_grad_()))


# nadaraya_watson


def test_hand_case_of_the_gaussian():
    keys = torch.tensor([0.0, 1.0, 2.0])
    estimates, weights = nadaraya_watson(torch.zeros(1), keys, keys, gaussian)
    expected = torch.tensor([[0.5741, 0.3482, 0.0777]])
    torch.testing.assert_close(weights, expected, atol=5e-5, rtol=0)
    assert estimates.item() == pytest.approx(0.3482 + 2 * 0.0777, abs=1e-4)


def test_bandwidth_divides_the_distance():
    keys = torch.tensor([0.0, 1.0, 2.0])
    _, once = nadaraya_watson(torch.zeros(1), keys, keys, gaussian, 1.0)
    _, scaled = nadaraya_watson(torch.zeros(1), 3 * keys, keys, gaussian, 3.0)
    torch.testing.assert_close(once, scaled)


@every_kernel
def test_agrees_with_loops(kernel):
    queries, keys, values = normal(T, D), normal(S, D, seed=1), normal(S, seed=2)
    estimates, weights = nadaraya_watson(queries, keys, values, kernel, 2.5)
    expected = by_loops(queries, keys, values, PLAIN[kernel.__name__], 2.5)
    torch.testing.assert_close(estimates, torch.tensor(expected).double())
    assert estimates.shape == (T,)
    assert weights.shape == (T, S)


@every_kernel
def test_places_on_a_road_are_vectors_of_width_one(kernel):
    queries, keys, values = normal(T), normal(S, seed=1), normal(S, seed=2)
    on_road = nadaraya_watson(queries, keys, values, kernel, 0.7)
    as_vectors = nadaraya_watson(queries[:, None], keys[:, None], values, kernel, 0.7)
    torch.testing.assert_close(on_road, as_vectors)


def test_values_may_be_vectors():
    queries, keys, values = normal(T, D), normal(S, D, seed=1), normal(S, V, seed=2)
    estimates, weights = nadaraya_watson(queries, keys, values, gaussian, 2.0)
    assert estimates.shape == (T, V)
    for column in range(V):
        alone, same = nadaraya_watson(queries, keys, values[:, column], gaussian, 2.0)
        torch.testing.assert_close(estimates[:, column], alone)
        torch.testing.assert_close(weights, same)


def test_gaussian_agrees_with_softmax_of_the_log_kernel():
    queries, keys, values = normal(T, D), normal(S, D, seed=1), normal(S, seed=2)
    _, weights = nadaraya_watson(queries, keys, values, gaussian, 1.3)
    squares = ((queries[:, None] - keys) ** 2).sum(-1)
    torch.testing.assert_close(weights, torch.softmax(-squares / (2 * 1.3**2), dim=-1))


@pytest.mark.parametrize(
    ("kernel", "name"),
    [(gaussian, "gaussian"), (triangular, "linear"), (epanechnikov, "epanechnikov")],
)
def test_sums_of_kernels_agree_with_the_densities_of_scikit_learn(kernel, name):
    neighbors = pytest.importorskip("sklearn.neighbors", reason="a package of section 2")
    queries, keys = normal(13, 1), normal(S, 1, seed=1)
    ours = kernel(distances(queries, keys) / 0.8).sum(dim=1)
    model = neighbors.KernelDensity(bandwidth=0.8, kernel=name).fit(keys.numpy())
    theirs = torch.from_numpy(np.exp(model.score_samples(queries.numpy())))
    torch.testing.assert_close(ours / ours.max(), theirs / theirs.max(), atol=1e-9, rtol=1e-6)


def test_boxcar_agrees_with_the_radius_neighbours_of_scikit_learn():
    neighbors = pytest.importorskip("sklearn.neighbors", reason="a package of section 2")
    queries, keys, values = normal(13, 2), normal(S, 2, seed=1), normal(S, seed=2)
    estimates, weights = nadaraya_watson(queries, keys, values, boxcar, 0.9)
    reached = weights.sum(dim=1) > 0
    assert 0 < reached.sum() < 13
    model = neighbors.RadiusNeighborsRegressor(radius=0.9).fit(keys, values)
    theirs = torch.from_numpy(model.predict(queries[reached]))
    torch.testing.assert_close(estimates[reached], theirs)


@every_kernel
def test_weights_sum_to_one_over_the_keys(kernel):
    for num_queries in (T, S):  # a square matrix hides a wrong axis
        queries, keys = normal(num_queries), normal(S, seed=1)
        _, weights = nadaraya_watson(queries, keys, keys, kernel, 4.0)
        torch.testing.assert_close(weights.sum(dim=1), torch.ones(num_queries).double())
        assert (weights >= 0).all()


@every_bounded
def test_a_query_with_no_key_in_reach_gets_zeros(kernel):
    queries, keys = torch.tensor([0.0, 9.0]), torch.tensor([-0.5, 0.2, 0.5])
    estimates, weights = nadaraya_watson(queries, keys, keys + 7, kernel)
    assert estimates[1] == 0
    assert weights[1].tolist() == [0, 0, 0]
    assert weights[0].sum().item() == pytest.approx(1)


@pytest.mark.parametrize("distance", [13.0, 14.0, 14.4, 15.0, 1e6])
def test_underflow_of_the_gaussian_gives_the_nearest_key_or_zeros(distance):
    queries = torch.tensor([distance], requires_grad=True)
    keys = torch.tensor([0.0, -5.0], requires_grad=True)
    values = torch.tensor([3.0, 8.0], requires_grad=True)
    estimates, weights = nadaraya_watson(queries, keys, values, gaussian)
    reached = distance < 14.41
    assert weights[0].tolist() == ([1, 0] if reached else [0, 0])
    assert estimates.item() == (3 if reached else 0)
    (1e3 * estimates).sum().backward()
    for tensor in (queries, keys, values):
        assert tensor.grad.isfinite().all()


@every_kernel
@every_dtype
def test_no_nan_at_an_empty_neighbourhood_in_any_dtype(kernel, dtype):
    queries = torch.tensor([0.0, 0.3, 900.0], dtype=dtype, requires_grad=True)
    keys = torch.tensor([0.0, 0.25, -0.5, 300.0], dtype=dtype, requires_grad=True)
    values = torch.tensor([1.0, -2.0, 3.0, 4.0], dtype=dtype, requires_grad=True)
    estimates, weights = nadaraya_watson(queries, keys, values, kernel, 0.5)
    error = leave_one_out_error(keys, values, kernel, 0.5)
    assert estimates.isfinite().all()
    assert weights.isfinite().all()
    assert error.isfinite()
    (estimates.sum() + error).backward()
    for tensor in (queries, keys, values):
        assert tensor.grad is None or tensor.grad.isfinite().all()


@every_kernel
@every_dtype
def test_results_follow_the_dtype_and_agree_with_double(kernel, dtype):
    queries, keys, values = (normal(T, D), normal(S, D, seed=1), normal(S, seed=2))
    rounded = [tensor.to(dtype) for tensor in (queries, keys, values)]
    estimates, weights = nadaraya_watson(*rounded, kernel, 3.0)
    error = leave_one_out_error(*rounded[1:], kernel, 3.0)
    assert estimates.dtype == weights.dtype == error.dtype == dtype
    exact = [tensor.double() for tensor in rounded]
    expected = nadaraya_watson(*exact, kernel, 3.0)
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(estimates.double(), expected[0], **tolerance)
    torch.testing.assert_close(weights.double(), expected[1], **tolerance)
    torch.testing.assert_close(
        error.double(), leave_one_out_error(*exact[1:], kernel, 3.0), **tolerance
    )


def test_whole_numbers_give_floating_point_weights():
    keys = torch.arange(4)
    estimates, weights = nadaraya_watson(torch.tensor([0, 3]), keys, keys, triangular, 2)
    assert weights.dtype == estimates.dtype == torch.float32
    torch.testing.assert_close(weights[0], torch.tensor([2 / 3, 1 / 3, 0, 0]))


@pytest.mark.parametrize("kernel", [gaussian, triangular, epanechnikov])
def test_gradients_agree_with_finite_differences(kernel):
    inputs = [normal(T, D), normal(S, D, seed=1), normal(S, V, seed=2)]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    assert torch.autograd.gradcheck(lambda q, k, v: nadaraya_watson(q, k, v, kernel, 3.7), inputs)


@every_kernel
def test_order_of_the_keys_does_not_matter(kernel):
    queries, keys, values = normal(T, D), normal(S, D, seed=1), normal(S, seed=2)
    order = torch.randperm(S, generator=torch.Generator().manual_seed(3))
    estimates, weights = nadaraya_watson(queries, keys, values, kernel, 3.0)
    shuffled = nadaraya_watson(queries, keys[order], values[order], kernel, 3.0)
    torch.testing.assert_close(shuffled, (estimates, weights[:, order]))


@every_kernel
def test_each_query_is_answered_on_its_own(kernel):
    queries, keys, values = normal(T, D), normal(S, D, seed=1), normal(S, seed=2)
    together, _ = nadaraya_watson(queries, keys, values, kernel, 3.0)
    alone = [nadaraya_watson(query[None], keys, values, kernel, 3.0)[0] for query in queries]
    torch.testing.assert_close(together, torch.cat(alone))


@every_kernel
@given(queries=places, keys=places, bandwidth=st.floats(0.01, 100))
@settings(deadline=None, max_examples=60)
def test_an_estimate_is_an_average_or_zero(kernel, queries, keys, bandwidth):
    queries, keys = torch.tensor(queries), torch.tensor(keys)
    values = torch.sin(7 * keys) + 2
    estimates, weights = nadaraya_watson(queries, keys, values, kernel, bandwidth)
    totals = weights.sum(dim=1)
    assert ((totals - 1).abs().minimum(totals) < 1e-5).all()
    reached = totals > 0.5
    assert (estimates[~reached] == 0).all()
    assert (estimates[reached] >= values.min() - 1e-4).all()
    assert (estimates[reached] <= values.max() + 1e-4).all()


@every_kernel
@given(shift=st.floats(-20, 20), angle=st.floats(0, 2 * math.pi))
@settings(deadline=None, max_examples=20)
def test_weights_survive_a_shift_and_a_turn_of_the_map(kernel, shift, angle):
    queries, keys, values = normal(T, 2), normal(S, 2, seed=1), normal(S, seed=2)
    cosine, sine = math.cos(angle), math.sin(angle)
    turn = torch.tensor([[cosine, -sine], [sine, cosine]], dtype=torch.double)
    before = nadaraya_watson(queries, keys, values, kernel, 2.1)
    after = nadaraya_watson(queries @ turn + shift, keys @ turn + shift, values, kernel, 2.1)
    torch.testing.assert_close(before, after, atol=1e-9, rtol=1e-9)


def test_a_constant_factor_of_the_kernel_cancels():
    queries, keys, values = normal(T), normal(S, seed=1), normal(S, seed=2)
    torch.testing.assert_close(
        nadaraya_watson(queries, keys, values, lambda u: 8 * epanechnikov(u), 0.9),
        nadaraya_watson(queries, keys, values, epanechnikov, 0.9),
    )


def test_limits_of_the_width_are_the_nearest_value_and_the_mean():
    queries, keys, values = normal(T), normal(S, seed=1), normal(S, seed=2)
    wide, _ = nadaraya_watson(queries, keys, values, gaussian, 1e6)
    torch.testing.assert_close(wide, values.mean().expand(T))
    model = LearnedBandwidth(1e-6).double()
    nearest = values[distances(queries, keys).argmin(dim=1)]
    torch.testing.assert_close(model(queries, keys, values)[0], nearest)


@pytest.mark.parametrize("bandwidth", [0, -1.0, math.nan, 1e-300])
def test_a_bandwidth_that_is_not_positive_is_refused(bandwidth):
    keys = torch.arange(3.0)
    with pytest.raises(ValueError, match=f"positive number: {bandwidth}"):
        nadaraya_watson(keys, keys, keys, gaussian, bandwidth)
    with pytest.raises(ValueError, match="positive"):
        leave_one_out_error(keys, keys, gaussian, bandwidth)


@pytest.mark.parametrize(
    ("queries", "keys", "values", "numbers"),
    [
        ((T, D), (S, D + 2), (S,), r"\(3, 5\).*\(11, 7\)"),
        ((T,), (S, D), (S,), r"\(3,\).*\(11, 5\)"),
        ((T, D), (S, D), (V,), r"11 keys.*\(7,\)"),
        ((T,), (S,), (T,), r"11 keys.*\(3,\)"),
        ((2, T, D), (S, D), (S,), r"\(2, 3, 5\)"),
        ((), (S,), (S,), r"queries \(\) and keys \(11,\)"),
        ((T,), (), (1,), r"queries \(3,\) and keys \(\)"),
        ((T,), (S,), (), r"11 keys.*\(\)"),
        ((T,), (S,), (S, V, 2), r"\(11, 7, 2\)"),
    ],
)
def test_sizes_that_do_not_fit_are_named(queries, keys, values, numbers):
    inputs = [torch.ones(shape) for shape in (queries, keys, values)]
    with pytest.raises(ValueError, match=numbers):
        nadaraya_watson(*inputs, gaussian)
    with pytest.raises(ValueError, match=numbers):
        LearnedBandwidth()(*inputs)


def test_a_bandwidth_is_one_number_or_a_tensor_of_one():
    queries, keys = normal(T), normal(S, seed=1)
    width = torch.tensor(0.7, dtype=torch.double, requires_grad=True)
    expected = nadaraya_watson(queries, keys, keys, gaussian, 0.7)
    for one in (width, width[None]):
        torch.testing.assert_close(nadaraya_watson(queries, keys, keys, gaussian, one), expected)
    assert torch.autograd.gradcheck(
        lambda width: nadaraya_watson(queries, keys, keys, gaussian, width), width
    )
    with pytest.raises(ValueError, match="one positive number"):
        nadaraya_watson(queries, keys, keys, gaussian, torch.ones(S))


@every_kernel
@pytest.mark.parametrize("width", [(), (V,)])
def test_nothing_to_ask_and_nothing_to_ask_about(kernel, width):
    none, keys, values = torch.zeros(0, D), torch.ones(S, D), torch.ones(S, *width)
    for pooled in (lambda *inputs: nadaraya_watson(*inputs, kernel), LearnedBandwidth()):
        estimates, weights = pooled(none, keys, values)
        assert estimates.shape == (0, *width)
        assert weights.shape == (0, S)
        estimates, weights = pooled(keys, none, values[:0])
        assert estimates.tolist() == torch.zeros(S, *width).tolist()
        assert weights.shape == (S, 0)


@every_bounded
@pytest.mark.parametrize("width", [(), (V,)])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_reading_that_no_query_reaches_does_no_harm(kernel, width, broken):
    queries, keys = torch.tensor([0.0, 1.0]), torch.tensor([0.2, 9.0, 0.7])
    values = normal(3, *width).index_fill(0, torch.tensor(1), broken).requires_grad_()
    estimates, _ = nadaraya_watson(queries, keys, values, kernel, 1.5)
    expected, _ = nadaraya_watson(queries, keys[[0, 2]], values[[0, 2]], kernel, 1.5)
    torch.testing.assert_close(estimates, expected)
    estimates.sum().backward()
    assert (values.grad[1] == 0).all()
    # Who reaches it is told.
    assert not nadaraya_watson(keys, keys, values, kernel, 1.5)[0][1].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float16])
def test_a_kernel_may_count_or_be_coarse(dtype):
    queries, keys, values = normal(T), normal(S, seed=1), normal(S, seed=2)
    found = nadaraya_watson(queries, keys, values, lambda u: (u <= 1).to(dtype), 0.9)
    expected = nadaraya_watson(queries, keys, values, boxcar, 0.9)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_large_similarities_in_half_precision_do_not_overflow():
    weights = normalise(torch.full((1, 1000), 900.0, dtype=torch.half))
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, torch.full((1, 1000), 0.001))


def test_views_with_any_strides_are_taken():
    queries, keys, values = normal(D, 2 * T).T[::2], normal(D, S, seed=1).T, normal(V, S, seed=2).T
    copies = [tensor.contiguous() for tensor in (queries, keys, values)]
    torch.testing.assert_close(
        nadaraya_watson(queries, keys, values, gaussian, 2.0),
        nadaraya_watson(*copies, gaussian, 2.0),
    )


@every_kernel
def test_at_distance_zero_gradients_are_finite_and_no_direction_is_preferred(kernel):
    queries = torch.zeros(1, 2, requires_grad=True)
    keys = torch.tensor([[0.0, 0.0], [0.0, 0.5], [0.0, -0.5]], requires_grad=True)
    values = torch.tensor([1.0, 2.0, 2.0], requires_grad=True)
    nadaraya_watson(queries, keys, values, kernel)[0].sum().backward()
    if kernel not in (boxcar, constant):  # which have no slope to follow
        torch.testing.assert_close(queries.grad, torch.zeros(1, 2))
        assert keys.grad.isfinite().all()


def test_inputs_are_left_as_they_were():
    inputs = [normal(T, D), normal(S, D, seed=1), normal(S, seed=2)]
    copies = [tensor.clone() for tensor in inputs]
    nadaraya_watson(*inputs, gaussian)
    leave_one_out_error(*inputs[1:], boxcar, 1.0)
    LearnedBandwidth()(inputs[1], inputs[1], inputs[2], leave_one_out=True)
    assert all(map(torch.equal, inputs, copies))


# leave_one_out_error


def test_hand_case_of_leaving_one_out():
    keys, values = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, 6.0])
    # Each is estimated by its neighbours within 1: 2, (1 + 6) / 2, 2.
    error = leave_one_out_error(keys, values, boxcar, 1.0)
    assert error.item() == pytest.approx(((2 - 1) ** 2 + (3.5 - 2) ** 2 + (2 - 6) ** 2) / 3)


@every_kernel
@pytest.mark.parametrize("bandwidth", [0.05, 0.5, 5.0])
def test_leaving_one_out_agrees_with_loops(kernel, bandwidth):
    keys, values = normal(S, 1), normal(S, seed=2)
    plain = PLAIN[kernel.__name__]
    estimates = by_loops(keys, keys, values, plain, bandwidth, leave_out=True)
    expected = np.mean((np.array(estimates) - values.numpy()) ** 2)
    assert leave_one_out_error(keys, values, kernel, bandwidth).item() == pytest.approx(expected)


@every_kernel
def test_leaving_one_out_is_pooling_over_the_others(kernel):
    keys, values = normal(S, D), normal(S, seed=2)
    misses = []
    for i in range(S):
        rest = [j for j in range(S) if j != i]
        estimate, _ = nadaraya_watson(keys[[i]], keys[rest], values[rest], kernel, 2.9)
        misses.append((estimate - values[i]) ** 2)
    found = leave_one_out_error(keys, values, kernel, 2.9)
    torch.testing.assert_close(found, torch.cat(misses).mean())


@every_bounded
def test_a_reading_without_company_counts_as_estimated_by_zero(kernel):
    keys, values = torch.tensor([0.0, 10.0, 20.0]), torch.tensor([3.0, 4.0, 5.0])
    assert leave_one_out_error(keys, values, kernel, 1.0).item() == pytest.approx(50 / 3)
    assert leave_one_out_error(keys[:1], values[:1], kernel, 1.0).item() == pytest.approx(9)


def test_the_error_of_vectors_is_the_mean_over_their_columns():
    keys, values = normal(S, D), normal(S, V, seed=2)
    columns = [leave_one_out_error(keys, column, gaussian, 2.0) for column in values.T]
    found = leave_one_out_error(keys, values, gaussian, 2.0)
    assert found.shape == ()
    torch.testing.assert_close(found, torch.stack(columns).mean())


def test_the_error_has_a_gradient():
    keys, values = normal(S).requires_grad_(), normal(S, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda keys, values: leave_one_out_error(keys, values, gaussian, 0.8), (keys, values)
    )


def test_others_mask_lets_all_but_oneself():
    assert others_mask(torch.zeros(3)).tolist() == [
        [False, True, True],
        [True, False, True],
        [True, True, False],
    ]


# scores


def test_scores_are_the_logarithm_of_the_gaussian():
    queries, keys = normal(T, D), normal(S, D, seed=1)
    scores = gaussian_scores(queries, keys, torch.tensor(1.7).log())
    torch.testing.assert_close(scores, gaussian(distances(queries, keys) / 1.7).log())


def test_a_width_per_coordinate_divides_each_coordinate():
    queries, keys, widths = normal(T, D), normal(S, D, seed=1), normal(D, seed=2).exp()
    expected = -(((queries[:, None] - keys) / widths) ** 2).sum(-1) / 2
    torch.testing.assert_close(gaussian_scores(queries, keys, widths.log()), expected)


@pytest.mark.parametrize(
    ("queries", "widths", "numbers"), [((T, D), 3, "3 widths.*5"), ((S,), S, "11 widths")]
)
def test_another_number_of_widths_is_refused(queries, widths, numbers):
    places = torch.ones(queries)
    with pytest.raises(ValueError, match=numbers):
        gaussian_scores(places, places, torch.zeros(widths))


# LearnedBandwidth


@pytest.mark.parametrize("bandwidth", [0.3, 1.0, 4.0])
def test_the_module_agrees_with_the_function(bandwidth):
    queries, keys, values = normal(T, D), normal(S, D, seed=1), normal(S, seed=2)
    found = LearnedBandwidth(bandwidth).double()(queries, keys, values)
    expected = nadaraya_watson(queries, keys, values, gaussian, bandwidth)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_the_module_leaves_out_each_readings_own_key():
    keys, values = normal(S), normal(S, seed=2)
    estimates, weights = LearnedBandwidth(0.6).double()(keys, keys, values, leave_one_out=True)
    assert (weights.diagonal() == 0).all()
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(S).double())
    expected = leave_one_out_error(keys, values, gaussian, 0.6)
    error = ((estimates - values) ** 2).mean()
    torch.testing.assert_close(error, expected, atol=1e-6, rtol=1e-5)


def test_an_only_reading_left_out_gives_zeros():
    model = LearnedBandwidth()
    one = torch.ones(1, requires_grad=True)
    estimates, weights = model(one, one, one, leave_one_out=True)
    assert estimates.item() == weights.item() == 0
    estimates.sum().backward()
    assert model.log_bandwidth.grad.isfinite()
    assert one.grad.isfinite()


def test_leaving_one_out_needs_the_keys_as_queries():
    with pytest.raises(ValueError, match=r"11 keys.*\(3,\)"):
        LearnedBandwidth()(normal(T), normal(S), normal(S), leave_one_out=True)


def test_the_parameter_is_the_logarithm_of_the_width():
    model = LearnedBandwidth(3.0)
    assert [name for name, _ in model.named_parameters()] == ["log_bandwidth"]
    assert model.log_bandwidth.item() == pytest.approx(math.log(3))
    assert LearnedBandwidth(torch.ones(D)).log_bandwidth.shape == (D,)
    assert LearnedBandwidth().log_bandwidth.item() == 0


@pytest.mark.parametrize("bandwidth", [0.0, -2.0, math.nan, math.inf, [1.0, 0.0]])
def test_the_module_refuses_a_width_that_is_not_positive(bandwidth):
    with pytest.raises(ValueError, match="positive"):
        LearnedBandwidth(bandwidth)


@pytest.mark.parametrize("widths", [0.8, [0.5, 0.9, 2.0, 1.4, 1.1]])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_the_gradient_of_the_width_agrees_with_finite_differences(widths, leave_one_out):
    keys, values = normal(S, D), normal(S, seed=2)
    model = LearnedBandwidth(widths).double()

    def pool(log_bandwidth):
        return torch.func.functional_call(
            model, {"log_bandwidth": log_bandwidth}, (keys, keys, values, leave_one_out)
        )

    start = model.log_bandwidth.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(pool, start)


@every_dtype
@pytest.mark.parametrize("log_bandwidth", [-1e4, -50.0, -12.0, 12.0, 50.0, 1e4])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_no_nan_at_any_width_in_any_dtype(dtype, log_bandwidth, leave_one_out):
    model = LearnedBandwidth().to(dtype)
    with torch.no_grad():
        model.log_bandwidth.fill_(log_bandwidth)
    keys = torch.tensor([0.0, 0.0, 0.25, 7.0, -300.0], dtype=dtype, requires_grad=True)
    values = torch.tensor([1.0, 2.0, -3.0, 4.0, 5.0], dtype=dtype)
    estimates, weights = model(keys, keys, values, leave_one_out=leave_one_out)
    assert estimates.dtype == weights.dtype == dtype
    assert weights.isfinite().all()
    torch.testing.assert_close(
        weights.double().sum(dim=1), torch.ones(5).double(), atol=1e-2, rtol=0
    )
    ((estimates - values) ** 2).mean().backward()
    assert model.log_bandwidth.grad.isfinite()
    # Two keys tie for the third at a tiny width: the true gradient is beyond float16.
    assert not keys.grad.isnan().any()


def test_a_narrow_width_still_finds_the_nearest_key():
    queries, keys = torch.tensor([0.4, 90.0]), torch.tensor([0.0, 1.0, 2.0])
    _, weights = LearnedBandwidth(1e-3)(queries, keys, keys)
    assert weights.tolist() == [[1, 0, 0], [0, 0, 1]]


def train(keys, values, leave_one_out, steps=120):
    model = LearnedBandwidth(1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        estimates, _ = model(keys, keys, values, leave_one_out=leave_one_out)
        loss = ((estimates - values) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.log_bandwidth.exp().item()


def test_the_width_settles_with_one_left_out_and_collapses_without():
    keys = torch.linspace(0, 5, 29)
    values = torch.sin(2 * keys) + 0.3 * normal(29).float()
    honest, cheating = train(keys, values, True), train(keys, values, False)
    widths = torch.logspace(-1, 0.5, 61).tolist()
    errors = [leave_one_out_error(keys, values, gaussian, width).item() for width in widths]
    assert honest == pytest.approx(widths[errors.index(min(errors))], rel=0.1)
    assert cheating < honest / 3
