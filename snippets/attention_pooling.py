"""Pool values by the similarity of a query to keys: kernel regression.

Section 2 of the book. The estimator is that of Nadaraya, *Theory of
Probability and Its Applications* 9 (1964), and Watson, *Sankhya A* 26 (1964).
Kernels are functions of the scaled distance u = |query - key| / bandwidth.
"""

import torch
from torch import nn

from snippets.queries_keys_values import softmax


# --8<-- [start:gaussian]
def gaussian(distance):
    """Fall off smoothly and never reach zero: exp(-u²/2).

    distance (...) in bandwidths -> similarity (...).
    """
    return torch.exp(-distance * distance / 2)


# --8<-- [end:gaussian]


# --8<-- [start:boxcar]
def boxcar(distance):
    """Count everything within one bandwidth alike: 1 if |u| <= 1, else 0.

    distance (...) in bandwidths -> similarity (...).
    """
    return (distance.abs() <= 1).to(distance.dtype)


# --8<-- [end:boxcar]


# --8<-- [start:triangular]
def triangular(distance):
    """Fall off along a straight line: max(0, 1 - |u|).

    distance (...) in bandwidths -> similarity (...).
    """
    return (1 - distance.abs()).clamp(min=0)


# --8<-- [end:triangular]


# --8<-- [start:epanechnikov]
def epanechnikov(distance):
    """Fall off along a parabola: max(0, 3/4 (1 - u²)).

    distance (...) in bandwidths -> similarity (...). Epanechnikov (1969).
    """
    return 0.75 * (1 - distance * distance).clamp(min=0)


# --8<-- [end:epanechnikov]


# --8<-- [start:constant]
def constant(distance):
    """Count everything alike, wherever it is: 1.

    distance (...) in bandwidths -> similarity (...).
    """
    return torch.ones_like(distance)


# --8<-- [end:constant]


# --8<-- [start:distances]
def distances(queries, keys):
    """Measure how far each query is from each key.

    queries (T,) or (T, D), keys (S,) or (S, D) -> distance (T, S), half
    precision and integers in float32.
    """
    if queries.dim() == 1:
        queries, keys = queries[:, None], keys[:, None]  # (T, 1), (S, 1)
    exact = torch.promote_types(queries.dtype, torch.float32)
    # The faster mode, by a matrix product, rounds small distances away.
    mode = "donot_use_mm_for_euclid_dist"
    return torch.cdist(queries.to(exact), keys.to(exact), compute_mode=mode)


# --8<-- [end:distances]


# --8<-- [start:normalise]
def normalise(similarity):
    """Divide each row by its sum; a row of zeros stays a row of zeros.

    similarity (T, S), not negative -> weights (T, S), half precision and
    whole numbers in float32.
    """
    exact = torch.promote_types(similarity.dtype, torch.float32)
    similarity = similarity.to(exact)
    total = similarity.sum(dim=-1, keepdim=True)  # (T, 1)
    # Below this total, gradients would overflow: such a row sends none.
    limits = torch.finfo(exact)
    faint = total.abs() < limits.tiny / limits.eps
    similarity = torch.where(faint, similarity.detach(), similarity)
    total = torch.where(faint, total.detach(), total)
    return similarity / total.masked_fill(total == 0, 1)


# --8<-- [end:normalise]


# --8<-- [start:check_sizes]
def check_sizes(queries, keys, values, bandwidth):
    """Raise a `ValueError` with the numbers where something cannot fit."""
    same = queries.dim() == keys.dim() and queries.shape[1:] == keys.shape[1:]
    if keys.dim() not in (1, 2) or not same:
        raise ValueError(
            f"queries {tuple(queries.shape)} and keys {tuple(keys.shape)}"
            " must be (T,) and (S,), or (T, D) and (S, D)"
        )
    if values.dim() not in (1, 2) or len(values) != len(keys):
        raise ValueError(
            f"{len(keys)} keys need as many values,"
            f" not values of shape {tuple(values.shape)}"
        )
    # What is smaller than `tiny` may be 0 in float32.
    tiny = torch.finfo(torch.float32).tiny
    if torch.as_tensor(bandwidth).numel() != 1 or not bandwidth >= tiny:
        raise ValueError(f"bandwidth must be one positive number: {bandwidth}")


# --8<-- [end:check_sizes]


# --8<-- [start:pool]
def pool(weights, values):
    """Average the values, each with its weight.

    weights (T, S), values (S,) or (S, V) -> estimates (T,) or (T, V).
    """
    values = values.to(weights.dtype)
    unread = (weights == 0).all(dim=0)  # (S,)
    if values.dim() == 2:
        unread = unread[:, None]
    # 0 times NaN is NaN: what no query weighs must not be read.
    return weights @ values.masked_fill(unread & ~values.isfinite(), 0)


# --8<-- [end:pool]


# --8<-- [start:nadaraya_watson]
def nadaraya_watson(queries, keys, values, kernel, bandwidth=1.0):
    """Average the values, each weighted by how near its key is to the query.

    queries (T,) or (T, D), keys (S,) or (S, D), values (S,) or (S, V)
    -> estimates (T,) or (T, V), weights (T, S), in the queries' type.
    `bandwidth` has the unit of the keys. A query with no key in reach gets
    weights of zero and the estimate 0. Nadaraya (1964), Watson (1964): their
    x, x_i, y_i are our query, key, value. Raises `ValueError` for sizes that
    do not fit and for a bandwidth that is not positive.
    """
    check_sizes(queries, keys, values, bandwidth)
    weights = normalise(kernel(distances(queries, keys) / bandwidth))
    estimates = pool(weights, values)
    dtype = torch.result_type(queries, 1.0)  # integers become floats
    return estimates.to(dtype), weights.to(dtype)


# --8<-- [end:nadaraya_watson]


# --8<-- [start:others_mask]
def others_mask(keys):
    """Let each reading attend to all readings but itself.

    keys (S,) or (S, D) -> mask (S, S), True = this key may be attended to.
    """
    return ~torch.eye(len(keys), dtype=torch.bool, device=keys.device)


# --8<-- [end:others_mask]


# --8<-- [start:leave_one_out_error]
def leave_one_out_error(keys, values, kernel, bandwidth):
    """Estimate each value from all the others and square the misses.

    keys (S,) or (S, D), values (S,) or (S, V) -> mean squared error, ().
    A reading with no other in reach counts as estimated by 0. Raises
    `ValueError` as `nadaraya_watson` does. Stone (1974).
    """
    check_sizes(keys, keys, values, bandwidth)
    similarity = kernel(distances(keys, keys) / bandwidth)  # (S, S)
    weights = normalise(similarity.masked_fill(~others_mask(keys), 0))
    misses = pool(weights, values) - values
    return (misses * misses).mean().to(torch.result_type(keys, 1.0))


# --8<-- [end:leave_one_out_error]


# --8<-- [start:gaussian_scores]
def gaussian_scores(queries, keys, log_bandwidth):
    """Give the logarithm of the Gaussian kernel, the score -u²/2.

    queries (T,) or (T, D), keys (S,) or (S, D), log_bandwidth () or (D,)
    -> scores (T, S). A width per coordinate divides each coordinate. Raises
    `ValueError` for another number of widths.
    """
    widths = log_bandwidth.numel()
    if widths not in (1, *queries.shape[1:]):
        raise ValueError(f"{widths} widths, but keys {tuple(keys.shape)}")
    exact = torch.promote_types(queries.dtype, torch.float32)
    # Far beyond e^20 float32 overflows, and no width is so wrong.
    shrink = torch.exp(-log_bandwidth.to(exact).clamp(-20, 20))
    distance = distances(queries.to(exact) * shrink, keys.to(exact) * shrink)
    return -distance * distance / 2


# --8<-- [end:gaussian_scores]


# --8<-- [start:LearnedBandwidth]
class LearnedBandwidth(nn.Module):
    """Pool with a Gaussian kernel whose width is a parameter."""

    def __init__(self, bandwidth=1.0):
        """Start at one width, or at (D,) widths, one a coordinate."""
        super().__init__()
        start = torch.as_tensor(bandwidth, dtype=torch.get_default_dtype())
        if not ((start > 0) & start.isfinite()).all():
            raise ValueError(f"bandwidth must be positive, not {bandwidth}")
        self.log_bandwidth = nn.Parameter(start.log())

    def forward(self, queries, keys, values, leave_one_out=False):
        """Do as `nadaraya_watson` does; leaving one out, queries are keys."""
        check_sizes(queries, keys, values, 1.0)
        scores = gaussian_scores(queries, keys, self.log_bandwidth)  # (T, S)
        if leave_one_out:
            check_sizes(keys, keys, queries, 1.0)
            scores = scores.masked_fill(~others_mask(keys), -torch.inf)
        weights = softmax(scores)
        dtype = torch.result_type(queries, 1.0)
        return pool(weights, values).to(dtype), weights.to(dtype)


# --8<-- [end:LearnedBandwidth]
