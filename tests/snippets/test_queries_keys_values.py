"""Proof of `snippets.queries_keys_values`; sizes are distinct primes."""

import math

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from torch.nn import functional as F

from snippets.queries_keys_values import (
    at_temperature,
    attention,
    check_weights,
    closeness,
    convex_hull,
    nearest,
    show_heatmaps,
    softmax,
    weather_stations,
)

T, S, D, V = 3, 7, 5, 2
TOLERANCE = {
    torch.float16: 4e-3,
    torch.bfloat16: 4e-2,
    torch.float32: 1e-5,
    torch.float64: 1e-12,
}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
rows_of_scores = st.lists(st.floats(-50, 50), min_size=1, max_size=11)


def normal(*shape, seed=0, dtype=torch.double):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def scaled_dot_product(query, key):
    return query @ key.T / math.sqrt(query.shape[1])


@pytest.fixture
def records():
    return normal(T, D), normal(S, D, seed=1), normal(S, V, seed=2)


# softmax


def test_softmax_of_a_hand_case():
    scores = torch.tensor([[0.0, math.log(3.0)], [5.0, 5.0]])
    expected = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    torch.testing.assert_close(softmax(scores), expected)


@every_dtype
def test_softmax_agrees_with_torch(dtype):
    scores = (4 * normal(2, T, S)).to(dtype)
    expected = torch.softmax(scores, dim=-1)
    torch.testing.assert_close(softmax(scores), expected, atol=TOLERANCE[dtype], rtol=0)


def test_softmax_normalises_the_last_axis():
    weights = softmax(normal(2, T, S))
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, T, dtype=torch.double))
    assert (weights.sum(dim=-2) - 1).abs().min() > 0.01


@settings(deadline=None)
@given(rows_of_scores)
def test_weights_are_positive_and_sum_to_one(row):
    weights = softmax(torch.tensor(row, dtype=torch.double))
    assert (weights > 0).all()
    assert abs(float(weights.sum()) - 1) < 1e-12


@settings(deadline=None)
@given(rows_of_scores, st.floats(-1000, 1000))
def test_a_constant_added_to_all_scores_changes_nothing(row, constant):
    scores = torch.tensor(row, dtype=torch.double)
    torch.testing.assert_close(softmax(scores + constant), softmax(scores), atol=1e-9, rtol=0)


@settings(deadline=None)
@given(rows_of_scores)
def test_a_higher_score_never_gets_a_smaller_weight(row):
    scores = torch.tensor(row, dtype=torch.double)
    assert (softmax(scores)[scores.argsort()].diff() >= 0).all()


@every_dtype
@pytest.mark.parametrize("height", [1e4, -1e4])
def test_extreme_scores_do_not_overflow(dtype, height):
    scores = torch.tensor([[height, height, height - 100]], dtype=dtype)
    expected = torch.tensor([[0.5, 0.5, 0.0]], dtype=dtype)
    torch.testing.assert_close(softmax(scores), expected, atol=1e-6, rtol=0)


@every_dtype
def test_a_barred_key_gets_exactly_no_weight(dtype):
    weights = softmax(torch.tensor([[0.0, -torch.inf, 0.0]], dtype=dtype))
    assert weights.tolist() == [[0.5, 0.0, 0.5]]


@every_dtype
def test_a_row_without_any_key_gets_zeros_forward_and_backward(dtype):
    scores = torch.tensor([[-torch.inf] * 3, [1.0, 2.0, 3.0]], dtype=dtype)
    scores.requires_grad_()
    weights = softmax(scores)
    (gradient,) = torch.autograd.grad((weights * normal(2, 3).to(dtype)).sum(), scores)
    assert weights[0].tolist() == [0, 0, 0]
    assert gradient[0].tolist() == [0, 0, 0]
    assert gradient[1].isfinite().all() and gradient[1].abs().sum() > 0


def test_a_score_that_is_nan_spoils_its_own_row_alone():
    weights = softmax(torch.tensor([[0.0, torch.nan], [2.0, 2.0]]))
    assert weights[0].isnan().all() and weights[1].tolist() == [0.5, 0.5]


def test_whole_numbers_are_no_scores():
    with pytest.raises(TypeError, match="floating"):
        softmax(torch.tensor([[1, 2]]))


@every_dtype
def test_many_equal_scores_still_sum_to_one(dtype):
    weights = softmax(torch.zeros(2, 20_011, dtype=dtype)).double()
    assert (weights.sum(dim=-1) - 1).abs().max() < TOLERANCE[dtype]


def test_softmax_over_no_key_is_empty():
    assert softmax(torch.zeros(T, 0)).shape == (T, 0)


def test_softmax_gradients():
    scores = normal(T, S).requires_grad_()
    assert torch.autograd.gradcheck(softmax, scores)
    assert torch.autograd.gradgradcheck(softmax, scores)


def test_softmax_gradient_agrees_with_torch_where_one_weight_is_all():
    for gap in (0.0, 5.0, 16.0, 17.0, 30.0):
        scores = torch.tensor([[gap, 0.0, -1.0]], requires_grad=True)
        slope = torch.tensor([[1.0, -2.0, 0.5]])
        ours, theirs = (
            torch.autograd.grad((weights * slope).sum(), scores)[0]
            for weights in (softmax(scores), torch.softmax(scores, dim=-1))
        )
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_floats_lose_the_gradient_at_a_gap_of_17_and_the_weight_at_104():
    def weights_and_slope(gap):
        scores = torch.tensor([gap, 0.0], requires_grad=True)
        weights = softmax(scores)
        return weights, torch.autograd.grad(weights[0], scores)[0][0]

    weights, slope = weights_and_slope(16.0)
    assert weights[0] < 1 and slope > 0
    weights, slope = weights_and_slope(17.0)
    assert weights[0] == 1 and slope == 0 and weights[1] > 0
    assert weights_and_slope(103.0)[0][1] > 0
    assert weights_and_slope(104.0)[0][1] == 0


# attention


def test_attention_of_a_hand_case():
    query = torch.tensor([[1.0], [0.0]])
    key = torch.tensor([[0.0], [math.log(3.0)]])
    value = torch.tensor([[0.0, 4.0], [8.0, 0.0]])
    output, weights = attention(query, key, value, lambda q, k: q @ k.T)
    torch.testing.assert_close(weights, torch.tensor([[0.25, 0.75], [0.5, 0.5]]))
    torch.testing.assert_close(output, torch.tensor([[6.0, 1.0], [4.0, 2.0]]))


def test_one_query_does_not_get_weights_of_one(records):
    query, key, value = records
    _, weights = attention(query[:1], key, value, closeness)
    assert weights.shape == (1, S)
    assert weights.max() < 1
    assert abs(float(weights.sum()) - 1) < 1e-12


@every_dtype
def test_attention_agrees_with_torch(dtype, records):
    inputs = [tensor.to(dtype) for tensor in records]
    output, weights = attention(*inputs, scaled_dot_product)
    expected = F.scaled_dot_product_attention(*(tensor[None] for tensor in inputs))[0]
    assert output.dtype == weights.dtype == dtype
    assert output.shape == (T, V) and weights.shape == (T, S)
    torch.testing.assert_close(output, expected, atol=TOLERANCE[dtype], rtol=0)


@every_dtype
def test_attention_gradients_agree_with_torch(dtype, records):
    inputs = [tensor.to(dtype).requires_grad_() for tensor in records]
    slope = normal(T, V, seed=3).to(dtype)
    ours = torch.autograd.grad((attention(*inputs, scaled_dot_product)[0] * slope).sum(), inputs)
    expected = F.scaled_dot_product_attention(*(tensor[None] for tensor in inputs))[0]
    theirs = torch.autograd.grad((expected * slope).sum(), inputs)
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, atol=3 * TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("score", [closeness, scaled_dot_product], ids=["closeness", "dot"])
def test_attention_passes_gradcheck(score, records):
    inputs = [tensor.requires_grad_() for tensor in records]
    assert torch.autograd.gradcheck(lambda *tensors: attention(*tensors, score), inputs)


def test_weights_depend_on_query_and_keys_not_on_values(records):
    query, key, value = records
    _, weights = attention(query, key, value, closeness)
    _, others = attention(query, key, -5 * value, closeness)
    assert torch.equal(weights, others)
    torch.testing.assert_close(weights, torch.softmax(closeness(query, key), dim=-1))


def test_the_order_of_the_records_does_not_matter(records):
    query, key, value = records
    order = torch.tensor([4, 2, 6, 0, 3, 5, 1])
    output, weights = attention(query, key, value, closeness)
    shuffled, moved = attention(query, key[order], value[order], closeness)
    torch.testing.assert_close(shuffled, output)
    torch.testing.assert_close(moved, weights[:, order])


def test_shuffling_the_keys_alone_changes_the_output(records):
    query, key, value = records
    output, _ = attention(query, key, value, closeness)
    wrong, _ = attention(query, key.flip(0), value, closeness)
    assert (wrong - output).abs().max() > 0.1


def test_each_query_is_answered_for_itself(records):
    query, key, value = records
    output, weights = attention(query, key, value, closeness)
    for row in range(T):
        alone, its_weights = attention(query[row : row + 1], key, value, closeness)
        torch.testing.assert_close(alone[0], output[row])
        torch.testing.assert_close(its_weights[0], weights[row])


@settings(deadline=None)
@given(st.lists(st.floats(-30, 30), min_size=S, max_size=S), st.integers(0, 99))
def test_the_output_stays_inside_every_half_plane_around_the_values(row, seed):
    scores, value = torch.tensor([row], dtype=torch.double), normal(S, V, seed=seed)
    output, _ = attention(torch.zeros(1, D), torch.zeros(S, D), value, lambda q, k: scores)
    angles = torch.linspace(0, 2 * math.pi, 31, dtype=torch.double)
    normals = torch.stack([angles.cos(), angles.sin()])  # (2, 31)
    assert ((output @ normals)[0] <= (value @ normals).amax(dim=0) + 1e-12).all()


def test_equal_keys_share_their_weight(records):
    query, key, value = records
    key[4] = key[1]
    _, weights = attention(query, key, value, closeness)
    torch.testing.assert_close(weights[:, 4], weights[:, 1])


def test_a_barred_record_does_not_count(records):
    query, key, value = records
    bar = torch.zeros(S, dtype=torch.double)
    bar[2] = -torch.inf
    output, weights = attention(query, key, value, lambda q, k: closeness(q, k) + bar)
    rest = [0, 1, 3, 4, 5, 6]
    expected, _ = attention(query, key[rest], value[rest], closeness)
    assert (weights[:, 2] == 0).all()
    torch.testing.assert_close(output, expected)


@every_dtype
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_value_that_no_query_may_read_does_not_reach_the_output(dtype, number, records):
    query, key, value = (tensor.to(dtype) for tensor in records)
    bar = torch.zeros(S, dtype=dtype)
    bar[2] = -torch.inf
    broken = value.clone()
    broken[2] = number
    inputs = [tensor.requires_grad_() for tensor in (query, key, broken)]
    output, _ = attention(*inputs, lambda q, k: closeness(q, k) + bar)
    expected, _ = attention(query, key, value, lambda q, k: closeness(q, k) + bar)
    assert torch.equal(output, expected) and output.isfinite().all()
    gradients = torch.autograd.grad(output.sum(), inputs)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[2][2] == 0).all()
    assert broken[2].ne(0).all()  # the caller's own values are left alone


def test_a_nan_that_some_query_reads_is_not_hidden(records):
    query, key, value = records
    value[2] = torch.nan
    bar = torch.zeros(T, S, dtype=torch.double)
    bar[0, 2] = -torch.inf
    output, _ = attention(query, key, value, lambda q, k: closeness(q, k) + bar)
    assert output[1:].isnan().all()


def test_a_query_that_may_attend_to_nothing_gets_zeros(records):
    def bar_first(query, key):
        scores = query @ key.T
        return torch.cat([torch.full_like(scores[:1], -torch.inf), scores[1:]])

    inputs = [tensor.requires_grad_() for tensor in records]
    output, weights = attention(*inputs, bar_first)
    assert (output[0] == 0).all() and (weights[0] == 0).all()
    gradients = torch.autograd.grad(output.sum(), inputs)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_an_empty_database_gives_zeros():
    output, weights = attention(
        torch.ones(T, D), torch.ones(0, D), torch.ones(0, V), scaled_dot_product
    )
    assert output.tolist() == [[0.0] * V] * T and weights.shape == (T, 0)


@pytest.mark.parametrize(("queries", "keys"), [(0, S), (1, S), (S, S), (S, 1), (11, S)])
def test_any_number_of_queries_and_keys_will_do(queries, keys):
    query, key, value = normal(queries, D), normal(keys, D, seed=1), normal(keys, V, seed=2)
    output, weights = attention(query, key, value, closeness)
    assert output.shape == (queries, V) and weights.shape == (queries, keys)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(queries, dtype=torch.double))
    if keys == 1:
        torch.testing.assert_close(output, value.expand(queries, V))


def test_the_layout_in_memory_does_not_matter(records):
    turned = [tensor.T.contiguous().T for tensor in records]
    assert not any(tensor.is_contiguous() for tensor in turned)
    for one, other in zip(
        attention(*turned, closeness), attention(*records, closeness), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_attention_stays_on_the_device_of_its_inputs():
    shapes = [(T, D), (S, D), (S, V)]
    inputs = [torch.zeros(shape, device="meta") for shape in shapes]
    output, weights = attention(*inputs, closeness)
    assert output.device.type == weights.device.type == "meta"
    assert output.shape == (T, V) and weights.shape == (T, S)


def test_attention_changes_none_of_its_arguments(records):
    before = [tensor.clone() for tensor in records]
    scores = normal(T, S, seed=5)
    kept = scores.clone()
    attention(*records, lambda q, k: scores)
    assert torch.equal(scores, kept)
    assert all(torch.equal(old, new) for old, new in zip(before, records))


@pytest.mark.parametrize(
    ("shapes", "named"),
    [
        (((T, D), (S, D + 1), (S, V)), "(7, 6)"),
        (((T, D), (S, D), (S - 1, V)), "(6, 2)"),
        (((D,), (S, D), (S, V)), "(5,)"),
        (((T, D), (S, D), (S,)), "(7,)"),
        (((2, T, D), (2, S, D), (2, S, V)), "(2, 3, 5)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes, named):
    with pytest.raises(ValueError) as caught:
        attention(*(torch.zeros(shape) for shape in shapes), closeness)
    assert named in str(caught.value)
    assert all(str(tuple(shape)) in str(caught.value) for shape in shapes)


@pytest.mark.parametrize("shape", [(S, T), (T,), (T, 1), (1, T, S)])
def test_a_score_of_another_shape_is_named(shape, records):
    with pytest.raises(ValueError, match=r"\(3, 7\)") as caught:
        attention(*records, lambda q, k: torch.zeros(shape))
    assert str(shape) in str(caught.value)


# the gradient is a covariance


@pytest.mark.parametrize("held", ["values", "keys"])
def test_the_jacobian_is_the_covariance_over_the_root_of_the_width(held, records):
    query, key, value = records
    value = {"values": value, "keys": key}[held]
    measured = torch.autograd.functional.jacobian(
        lambda q: attention(q[None], key, value, scaled_dot_product)[0][0], query[0]
    )
    weights = torch.softmax(scaled_dot_product(query[:1], key), dim=-1)[0]
    covariance = (weights[:, None] * (value - weights @ value)).T @ (key - weights @ key)
    torch.testing.assert_close(measured, covariance / math.sqrt(D), atol=1e-12, rtol=0)


def test_the_jacobian_of_closeness_is_the_covariance_over_the_temperature(records):
    query, key, value = records
    score = at_temperature(closeness, 3.0)
    measured = torch.autograd.functional.jacobian(
        lambda q: attention(q[None], key, value, score)[0][0], query[0]
    )
    weights = torch.softmax(score(query[:1], key), dim=-1)[0]
    covariance = (weights[:, None] * (value - weights @ value)).T @ (key - weights @ key)
    torch.testing.assert_close(measured, covariance / 3.0, atol=1e-12, rtol=0)


# scores and look-ups


def test_closeness_of_a_hand_case():
    query, key = torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 1.0]])
    assert closeness(query, key).tolist() == [[-12.5, 0.0, -1.0]]


@every_dtype
def test_closeness_is_minus_half_the_squared_distance(dtype, records):
    query, key = (tensor.to(dtype) for tensor in records[:2])
    expected = -0.5 * torch.cdist(query.double(), key.double()) ** 2
    scores = closeness(query, key)
    assert scores.shape == (T, S) and scores.dtype == dtype
    torch.testing.assert_close(scores.double(), expected, atol=20 * TOLERANCE[dtype], rtol=0)


def test_closeness_has_a_gradient_at_a_key_itself():
    query = torch.zeros(1, D, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda q: closeness(q, torch.zeros(2, D).double()), query)


def test_nearest_returns_the_value_of_the_nearest_key(records):
    query, key, value = records
    found = nearest(query, key, value)
    assert torch.equal(found, value[torch.cdist(query, key).argmin(dim=1)])
    assert not nearest(query.requires_grad_(), key, value).requires_grad


def test_temperature_divides_scores(records):
    query, key, _ = records
    torch.testing.assert_close(
        at_temperature(closeness, 4.0)(query, key), closeness(query, key) / 4
    )


def test_temperature_leads_from_the_average_to_the_nearest(records):
    query, key, value = records
    hot, _ = attention(query, key, value, at_temperature(closeness, 1e9))
    cold, _ = attention(query, key, value, at_temperature(closeness, 1e-6))
    torch.testing.assert_close(hot, value.mean(dim=0).expand(T, V), atol=1e-6, rtol=0)
    torch.testing.assert_close(cold, nearest(query, key, value))


def test_entropy_grows_with_temperature(records):
    query, key, value = records
    spreads = torch.stack(
        [
            torch.special.entr(
                attention(query, key, value, at_temperature(closeness, heat))[1]
            ).sum(dim=-1)
            for heat in (0.1, 0.5, 2.0, 10.0, 100.0)
        ]
    )
    assert (spreads.diff(dim=0) > 0).all() and spreads.max() < math.log(S)


@pytest.mark.parametrize("temperature", [0, -1.0, math.nan])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    with pytest.raises(ValueError, match=str(temperature)):
        at_temperature(closeness, temperature)


def test_stations_are_distinct_records():
    names, places, readings = weather_stations()
    assert len(set(names)) == len(set(map(tuple, places.tolist()))) == 7
    assert places.shape == readings.shape == (7, 2)


def test_hull_of_a_square_with_a_point_inside():
    square = torch.tensor([[0.0, 0.0], [0.5, 0.4], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    corners = convex_hull(square)
    assert sorted(corners) == [0, 2, 3, 4]
    start = corners.index(0)
    assert corners[start:] + corners[:start] == [0, 4, 2, 3]  # counter-clockwise


@pytest.mark.parametrize(
    ("points", "corners"),
    [
        ([[0, 0], [1, 0], [2, 0], [0, 1]], [0, 2, 3]),  # three on a line
        ([[0.1, 0.1], [0.3, 0.3], [0.7, 0.7], [0.2, 0.2]], [0, 2]),  # all of them
        ([[0, 0], [0, 0], [1, 0], [0, 1]], [0, 2, 3]),  # one twice
        ([[2, 3]], [0]),
    ],
)
def test_hull_of_points_in_special_places(points, corners):
    found = convex_hull(torch.tensor(points))
    assert [points[i] for i in found] == [points[i] for i in corners]


@settings(deadline=None)
@given(st.integers(0, 999), st.integers(3, 13))
def test_all_points_are_left_of_every_edge_of_the_hull(seed, count):
    points = normal(count, 2, seed=seed)
    corners = points[convex_hull(points)]
    edges = corners.roll(-1, dims=0) - corners
    offsets = points[:, None] - corners
    side = edges[:, 0] * offsets[..., 1] - edges[:, 1] * offsets[..., 0]
    assert (side >= -1e-12).all()
    assert len({tuple(corner) for corner in corners.tolist()}) == len(corners) >= 3


# heat maps


def meshes(figure):
    return [axes.collections[0] for axes in figure.axes[:-1]]


def some_weights(rows=2, columns=3, dtype=torch.double):
    return torch.softmax(normal(rows, columns, T, S), dim=-1).to(dtype)


def test_heat_maps_are_a_grid_with_one_bar():
    figure = show_heatmaps(some_weights())
    assert isinstance(figure, Figure)
    assert len(figure.axes) == 2 * 3 + 1
    assert plt.get_fignums() == []


def test_rows_are_queries_and_columns_are_keys():
    weights = some_weights()
    figure = show_heatmaps(weights)
    for mesh, expected in zip(meshes(figure), weights.flatten(0, 1), strict=True):
        shown = np.asarray(mesh.get_array())
        np.testing.assert_allclose(shown, expected.numpy())
        np.testing.assert_allclose(shown.sum(axis=-1), np.ones(T))
        assert mesh.axes.get_xlim() == (0, S)
        assert mesh.axes.get_ylim() == (T, 0)  # the first query at the top


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 1, 1, 53), (1, 1, 101, 2), (2, 5, 3, 11)])
def test_heat_maps_of_any_shape_fit_a_page(shape):
    figure = show_heatmaps(torch.full(shape, 1 / shape[-1]))
    figure.draw_without_rendering()  # a warning that nothing is left of a panel is an error
    width, height = figure.get_size_inches()
    assert width <= 7.001 and height <= 0.4 + 6.3 * shape[0]
    panels = [axes.bbox for axes in figure.axes[:-1]]
    assert len({(round(panel.width), round(panel.height)) for panel in panels}) == 1
    squares = panels[0].height / shape[2], panels[0].width / shape[3]
    assert squares[0] == pytest.approx(squares[1], rel=1e-3)
    assert min(squares) > 4  # pixels, at 100 to the inch


def test_all_panels_share_one_scale_and_the_bar_has_it():
    weights = some_weights()
    weights[0, 0] = 1 / S
    figure = show_heatmaps(weights)
    assert {mesh.get_clim() for mesh in meshes(figure)} == {(0, 1)}
    assert figure.axes[-1].get_ylim() == (0, 1)
    assert len({mesh.get_cmap().name for mesh in meshes(figure)}) == 1


def test_the_end_of_the_scale_can_be_chosen():
    figure = show_heatmaps(some_weights() / 4, vmax=0.25)
    assert {mesh.get_clim() for mesh in meshes(figure)} == {(0, 0.25)}
    assert figure.axes[-1].get_ylim() == (0, 0.25)


def test_axes_are_labelled_at_the_edges_of_the_grid():
    panels = np.array(show_heatmaps(some_weights()).axes[:-1]).reshape(2, 3)
    assert [axes.get_xlabel() for axes in panels[-1]] == ["Keys"] * 3
    assert [axes.get_ylabel() for axes in panels[:, 0]] == ["Queries"] * 2
    panels = show_heatmaps(some_weights(1, 1), "Words read", "Words written").axes
    assert panels[0].get_xlabel() == "Words read"
    assert panels[0].get_ylabel() == "Words written"


def test_titles_stand_over_the_columns():
    panels = np.array(
        show_heatmaps(some_weights(), titles=["one", "two", "three"]).axes[:-1]
    ).reshape(2, 3)
    assert [axes.get_title() for axes in panels[0]] == ["one", "two", "three"]
    assert [axes.get_title() for axes in panels[1]] == [""] * 3


@pytest.mark.parametrize("titles", [[], ["one"], ["one", "two", "three", "four"]])
def test_titles_must_be_as_many_as_columns(titles):
    with pytest.raises(ValueError, match=f"{len(titles)} titles for 3 columns"):
        show_heatmaps(some_weights(), titles=titles)


@every_dtype
def test_tensors_of_every_type_can_be_shown(dtype):
    weights = some_weights(dtype=dtype).requires_grad_()
    shown = np.asarray(meshes(show_heatmaps(weights))[0].get_array())
    np.testing.assert_allclose(shown, weights[0, 0].detach().double().numpy())


def test_arrays_and_lists_can_be_shown():
    weights = some_weights().numpy()
    for given_weights in (weights, weights.tolist(), weights[..., ::-1]):
        shown = np.asarray(meshes(show_heatmaps(given_weights))[0].get_array())
        np.testing.assert_allclose(shown, np.asarray(given_weights)[0, 0])


def test_showing_weights_does_not_change_them():
    weights = some_weights()
    before = weights.clone()
    show_heatmaps(weights)
    assert torch.equal(weights, before)


@pytest.mark.parametrize("shape", [(T, S), (2, T, S), (1, 1, 2, T, S), (1, 1, T, 0), (0, 1, T, S)])
def test_weights_need_four_axes_none_empty(shape):
    with pytest.raises(ValueError) as caught:
        show_heatmaps(torch.zeros(shape))
    assert str(shape) in str(caught.value)


def test_nan_is_refused():
    weights = some_weights()
    weights[1, 2, 0, 3] = torch.nan
    with pytest.raises(ValueError, match="1 weights are NaN"):
        show_heatmaps(weights)


@pytest.mark.parametrize("weight", [-0.1, 1.25, torch.inf])
def test_weights_off_the_scale_are_refused(weight):
    weights = some_weights()
    weights[0, 1, 2, 3] = weight
    with pytest.raises(ValueError, match="outside the scale from 0 to 1"):
        check_weights(weights, 1.0)
