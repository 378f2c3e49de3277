"""Attention as a soft look-up in a table of keys and values.

The code of the section "Queries, keys, and values". The weighted sum goes
back to Bahdanau, Cho, and Bengio (2015), "Neural Machine Translation by
Jointly Learning to Align and Translate"; it is written in queries, keys and
values as in Vaswani et al. (2017), "Attention Is All You Need".
"""

import numpy as np
import torch
from torch.nn import functional as F

from snippets.plotting import colour_bar, heatmap, new_figure


# --8<-- [start:weather_stations]
def weather_stations():
    """Give the made-up weather stations of this section.

    Returns names (S), places (S, 2) in kilometres east and north, and
    readings (S, 2): temperature in degrees Celsius, rain in millimetres.
    """
    stations = {
        "Harbour": (1.0, 1.0, 15.0, 1.0),
        "Mill": (3.5, 2.5, 12.0, 4.0),
        "Orchard": (6.5, 1.0, 17.0, 3.0),
        "Lake": (2.0, 5.5, 10.0, 5.0),
        "Moor": (8.5, 3.5, 8.0, 7.0),
        "Ridge": (5.0, 6.0, 6.0, 9.0),
        "Summit": (8.0, 7.0, 2.0, 6.0),
    }
    records = torch.tensor(list(stations.values()))  # (S, 4)
    return list(stations), records[:, :2], records[:, 2:]


# --8<-- [end:weather_stations]


# --8<-- [start:closeness]
def closeness(query, key):
    """Score each key by its distance from each query.

    query (T, D), key (S, D) -> scores (T, S): minus half the squared
    distance, so 0 for a key at the query itself and less the farther off.
    """
    steps = query[:, None, :] - key[None, :, :]  # (T, S, D)
    return -0.5 * (steps**2).sum(dim=-1)


# --8<-- [end:closeness]


# --8<-- [start:nearest]
def nearest(query, key, value):
    """Look up the value whose key is nearest to each query.

    query (T, D), key (S, D), value (S, V) -> values (T, V).
    """
    return value[closeness(query, key).argmax(dim=-1)]


# --8<-- [end:nearest]


# --8<-- [start:softmax]
def softmax(scores):
    """Turn scores into weights: not negative, and one in sum.

    scores (..., S) -> weights (..., S), normalised over the last axis, the
    keys. A score of -inf gives a weight of 0; where every score is -inf, or
    where there is no key, every weight is 0.
    """
    # The lowest finite number joins each row: so every row has a peak, even
    # an empty one, and a row of -inf has a finite one.
    lowest = torch.finfo(scores.dtype).min
    peak = F.pad(scores.detach(), (0, 1), value=lowest).amax(-1, keepdim=True)
    powers = torch.exp(scores - peak)  # (..., S), at most 1
    total = powers.sum(dim=-1, keepdim=True)  # at least 1, or 0 if no key
    return powers / total.clamp(min=1)


# --8<-- [end:softmax]


# --8<-- [start:attention]
def attention(query, key, value, score):
    """Pool the values, weighted by how well their keys suit each query.

    query (T, D), key (S, D), value (S, V) -> output (T, V), weights (T, S).
    `score(query, key)` gives scores (T, S): any numbers; -inf bars a key,
    and what stands at a key that all queries bar is never read.
    Raises ValueError, with the shapes, where these do not fit together.

    In the terms of Bahdanau, Cho, and Bengio (2015), section 3.1, `score`
    is the alignment model a and a row of the output a context vector c.
    """
    check_shapes(query, key, value)
    scores = score(query, key)
    expected = (query.shape[0], key.shape[0])
    if scores.shape != expected:
        raise ValueError(
            f"scores have shape {tuple(scores.shape)}, not {expected}"
        )
    weights = softmax(scores)  # (T, S)
    barred = (scores == -torch.inf).all(dim=0)  # (S,)
    value = value.masked_fill(barred[:, None], 0)  # as 0 times NaN is NaN
    return weights @ value, weights  # (T, V), (T, S)


# --8<-- [end:attention]


# --8<-- [start:check_shapes]
def check_shapes(query, key, value):
    """Compare the shapes query (T, D), key (S, D), value (S, V).

    Raises ValueError, with the shapes, where they do not fit together.
    """
    shapes = ", ".join(
        f"{name} {tuple(tensor.shape)}"
        for name, tensor in [("query", query), ("key", key), ("value", value)]
    )
    if not query.ndim == key.ndim == value.ndim == 2:
        raise ValueError(f"each must have two axes: {shapes}")
    if query.shape[1] != key.shape[1]:
        raise ValueError(f"queries and keys differ in width: {shapes}")
    if key.shape[0] != value.shape[0]:
        raise ValueError(f"every key needs one value: {shapes}")


# --8<-- [end:check_shapes]


# --8<-- [start:at_temperature]
def at_temperature(score, temperature):
    """Make a score function that divides `score` by a temperature.

    The result takes query (T, D), key (S, D) -> scores (T, S).
    Raises ValueError for a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    return lambda query, key: score(query, key) / temperature


# --8<-- [end:at_temperature]


# --8<-- [start:convex_hull]
def convex_hull(points):
    """List the corners of the convex hull of points in the plane.

    points (S, 2) -> indices of the corners from the leftmost one, walking
    round counter-clockwise: all other points stay on the left. This is the
    monotone chain of Andrew (1979).
    """
    spots = points.tolist()

    def turns_left(i, j, k):
        (ax, ay), (bx, by), (cx, cy) = spots[i], spots[j], spots[k]
        return (bx - ax) * (cy - ay) > (by - ay) * (cx - ax)

    eastwards = sorted(range(len(spots)), key=spots.__getitem__)
    corners = []
    for way in (eastwards, eastwards[::-1]):  # the lower side, the upper one
        side = []
        for k in way:
            while len(side) > 1 and not turns_left(side[-2], side[-1], k):
                side.pop()
            side.append(k)
        corners += side[:-1]  # the last one begins the other side
    return corners or eastwards


# --8<-- [end:convex_hull]


# --8<-- [start:show_heatmaps]
def show_heatmaps(
    weights, xlabel="Keys", ylabel="Queries", titles=None, *, vmax=1.0
):
    """Draw attention weights as a grid of heat maps on one common scale.

    weights (rows, columns, T, S) -> Figure; each panel has a row for each
    query and a column for each key. `titles` has one title a column; `vmax`
    is the weight at the end of the scale. Raises ValueError as
    `check_weights` does, and for another number of titles than columns.
    """
    weights = check_weights(weights, vmax)
    rows, columns, num_queries, num_keys = weights.shape
    if titles is not None and len(titles) != columns:
        raise ValueError(f"{len(titles)} titles for {columns} columns")
    figure, axes = panel_grid(rows, columns, num_queries, num_keys)
    for row, column in np.ndindex(rows, columns):
        heatmap(axes[row, column], weights[row, column], vmax=vmax)
        axes[row, 0].set_ylabel(ylabel)
        axes[-1, column].set_xlabel(xlabel)
        if titles is not None:
            axes[0, column].set_title(titles[column], fontsize=9)
    colour_bar(figure, list(axes.flat), vmax=vmax)
    return figure


# --8<-- [end:show_heatmaps]


# --8<-- [start:panel_grid]
def panel_grid(rows, columns, num_queries, num_keys):
    """Make a grid of panels for heat maps of num_queries by num_keys squares.

    Panels grow with the number of keys, until the figure is 7 inches wide,
    and are at most 6 inches high. Returns the figure and axes (rows, columns).
    """
    width = min(max(1.4, 0.2 * num_keys), 5.8 / columns)  # inches, of a panel
    height = min(width * num_queries / num_keys, 6.0)
    return new_figure(
        rows,
        columns,
        width=1.2 + columns * width,  # 1.2 for the colour bar and labels
        height=0.4 + rows * (height + 0.3),
        squeeze=False,
    )


# --8<-- [end:panel_grid]


# --8<-- [start:check_weights]
def check_weights(weights, vmax):
    """Give weights as a NumPy array if a heat map can show them truly.

    weights (rows, columns, T, S), a tensor of any floating type or what
    NumPy takes -> array of that shape. Raises ValueError unless there are
    four axes, none empty, and every weight is a number from 0 to `vmax`.
    """
    if isinstance(weights, torch.Tensor):
        weights = weights.detach().cpu().double().numpy()
    weights = np.asarray(weights, dtype=float)
    if weights.ndim != 4 or weights.size == 0:
        raise ValueError(
            f"weights need four axes (rows, columns, T, S), none empty; "
            f"their shape is {weights.shape}"
        )
    if np.isnan(weights).any():
        raise ValueError(f"{np.isnan(weights).sum()} weights are NaN")
    if weights.min() < -1e-3 or weights.max() > vmax + 1e-3:
        raise ValueError(
            f"weights reach from {weights.min():.3g} to {weights.max():.3g}, "
            f"outside the scale from 0 to {vmax:g}"
        )
    return weights


# --8<-- [end:check_weights]
