# %% [markdown]
# # Solutions: Attention scoring functions
#
# [Back to the section](../attention-scoring-functions.md#exercises)
#
# All solutions use the functions of the section and its batch of three sentences with 4, 3 and 2 words.

# %%
import itertools
import math
import random
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from snippets.attention_scoring_functions import (
    AdditiveScore,
    BilinearAttention,
    add_tile,
    length_mask,
    masked_softmax,
    scale_for,
    scaled_dot_product_attention,
    tiled_attention,
)
from snippets.plotting import table

torch.manual_seed(3)
query, key = torch.randn(2, 3, 4, 64)  # (B, T, D), (B, S, D)
value = torch.randn(3, 4, 8)  # (B, S, V)
padding = length_mask(torch.tensor([4, 3, 2]), 4)  # (B, 1, S)

# %% [markdown]
# ## Exercise 1: Distance attention from a dot product
#
# *Add one coordinate so that a dot product has the weights of the Gaussian score.*
# [Exercise](../attention-scoring-functions.md#exercise-1)
#
# By @eq-distance-expanded the weights only need $\mathbf{q}^\top\mathbf{k} - \tfrac12\lVert\mathbf{k}\rVert^2$, since the query's term cancels. Let
#
# $$
# \mathbf{q}' = \begin{bmatrix} \mathbf{q} \\ 1 \end{bmatrix}, \qquad
# \mathbf{k}' = \begin{bmatrix} \mathbf{k} \\ -\tfrac12 \lVert\mathbf{k}\rVert^2 \end{bmatrix}, \qquad
# \mathbf{q}'^\top \mathbf{k}' = \mathbf{q}^\top\mathbf{k} - \tfrac12\lVert\mathbf{k}\rVert^2 .
# $$
#
# The Gaussian score has no $1/\sqrt{D}$, so the scale is 1. Only the norms of the keys are computed, none of the queries.

# %%
one = torch.ones(*query.shape[:-1], 1)
half_norm = -key.square().sum(-1, keepdim=True) / 2
_, weights = scaled_dot_product_attention(
    torch.cat([query, one], dim=-1),
    torch.cat([key, half_norm], dim=-1),
    value,
    padding,
    scale=1.0,
)
gaussian = masked_softmax(-torch.cdist(query, key).square() / 2, padding)
print(f"largest difference: {(weights - gaussian).abs().max():.0e}")
assert torch.allclose(weights, gaussian, atol=1e-4)

# %% [markdown]
# A constant coordinate of the query and a free coordinate of the key are just what linear maps with a bias can make. This is the sense in which a
# model loses nothing with the key term.

# %% [markdown]
# ## Exercise 2: A matrix between query and key
#
# *Count the parameters of a bilinear score, factor its matrix, and find the head in it.*
# [Exercise](../attention-scoring-functions.md#exercise-2)
#
# $\mathbf{M}$ has a number for every pair of coordinates, $20 \cdot 64$. The factors have $8 \cdot 20$ and $8 \cdot 64$ numbers, and the
# rank of a product is at most the smaller side, 8. The two ways to bracket are
# $\mathbf{q}^\top (\mathbf{W}_q^\top \mathbf{W}_k) \mathbf{k} = (\mathbf{W}_q \mathbf{q})^\top (\mathbf{W}_k \mathbf{k})$: a bilinear score
# on the left, a dot product of two projections of width 8 on the right. The right one is what a head computes.

# %%
full = BilinearAttention(20, 64)
count = sum(p.numel() for p in full.parameters())
torch.manual_seed(0)
query_map, key_map = torch.randn(8, 20), torch.randn(8, 64)  # W_q, W_k
matrix = query_map.T @ key_map  # M (20, 64)
thin = query_map.numel() + key_map.numel()
rank = torch.linalg.matrix_rank(matrix).item()
print(f"{count} parameters, factored {thin}; rank {rank}")

wide_query = torch.randn(3, 4, 20)
bilinear = torch.einsum("btq,qk,bsk->bts", wide_query, matrix, key)
head = (wide_query @ query_map.T) @ (key @ key_map.T).mT
assert (count, thin, rank) == (1280, 672, 8)
assert torch.allclose(bilinear, head, rtol=1e-4, atol=1e-2)

# %% [markdown]
# The layer of the section gives the same weights when its matrix is $\mathbf{M}$. Only the scale differs: $\mathbf{M}^\top\mathbf{q}$ and
# $\mathbf{k}$ are 64 wide, the projections of a head are 8 wide.

# %%
with torch.no_grad():
    full.project.weight.copy_(matrix.T * math.sqrt(64 / 8))
_, layer_weights = full(wide_query, key, value, padding, need_weights=True)
_, head_weights = scaled_dot_product_attention(
    wide_query @ query_map.T, key @ key_map.T, value, padding
)
assert torch.allclose(layer_weights, head_weights, atol=1e-4)

# %% [markdown]
# ## Exercise 3: Count before you run
#
# *Count operations and bytes; when does the score matrix pass 1 GiB in float16, and when the inputs and the output together?*
# [Exercise](../attention-scoring-functions.md#exercise-3)
#
# A multiplication and an addition are two operations. Row by row, the softmax takes the maximum, subtracts it, takes exponentials, adds them and
# divides: about five operations a score. For values of width $D$:
#
# | step | operations | bytes written, $b$ a number |
# |---|---|---|
# | scores | $2BTSD$ | $bBTS$ |
# | softmax | $\approx 5BTS$ | $bBTS$ |
# | output | $2BTSD$ | $bBTD$ |
#
# With $B = 1$, $b = 2$ and $T = S$ the score matrix has $2T^2$ bytes. $2T^2 > 2^{30}$ means $T > \sqrt{2^{29}}$. Queries, keys, values and
# output together have $4TD$ numbers, so the scores need more from $T > 4D$ on. At a head's width of 64 that is a short text.


# %%
def first(condition):
    """Find the smallest T for which a condition holds."""
    return next(length for length in itertools.count(1) if condition(length))


gibibyte = first(lambda length: 2 * length**2 > 2**30)
crossing = first(lambda length: 2 * length**2 > 2 * 4 * length * 64)
print(f"over 1 GiB from T = {gibibyte:,}; over the rest from T = {crossing}")
assert gibibyte == math.isqrt(2**29) + 1
assert crossing == 4 * 64 + 1

# %% [markdown]
# The count of bytes can be checked on tensors that exist only as shapes, on PyTorch's `meta` device.

# %%
x = torch.empty(1, gibibyte, 64, dtype=torch.float16, device="meta")
scores = x @ x.mT
assert scores.nbytes > 2**30 >= 2 * (gibibyte - 1) ** 2
print(
    f"{scores.nbytes / 2**30:.4f} GiB for the scores alone,",
    f"{4 * x.nbytes / 2**20:.0f} MiB for all the rest",
)

# %% [markdown]
# ## Exercise 4: After training
#
# *Mean and variance of the score when each coordinate of the query is correlated with that of its key; when is $1/D$ the better scale?*
# [Exercise](../attention-scoring-functions.md#exercise-4)
#
# With $q = \rho k + \sqrt{1 - \rho^2}\, e$ one coordinate contributes $qk = \rho k^2 + \sqrt{1 - \rho^2}\, e k$. Its mean is $\rho$. Its
# square has the mean $\rho^2\, \mathbb{E}[k^4] + (1 - \rho^2)\, \mathbb{E}[e^2]\, \mathbb{E}[k^2] = 3\rho^2 + 1 - \rho^2 = 1 + 2\rho^2$ (the mixed term has mean 0), so
# its variance is $1 + 2\rho^2 - \rho^2 = 1 + \rho^2$. Coordinates are independent, so means and variances add up to $D\rho$ and $D(1 + \rho^2)$.


# %%
def matched(width, rho, count=20_000):
    """Draw scores of queries with the keys they are correlated with."""
    generator = torch.Generator().manual_seed(width)
    key, noise = torch.randn(2, count, width, generator=generator)
    query = rho * key + math.sqrt(1 - rho**2) * noise
    return query, key, (query * key).sum(-1)


# %%
rows = []
for width, rho in ((16, 0.0), (16, 0.5), (64, 0.5), (64, 0.9)):
    *_, scores = matched(width, rho)
    rows.append(
        (
            width,
            rho,
            width * rho,
            f"{scores.mean():.1f}",
            f"{width * (1 + rho**2):.1f}",
            f"{scores.var():.1f}",
        )
    )
    assert abs(scores.mean() - width * rho) < 0.2
    assert abs(scores.var() / (width * (1 + rho**2)) - 1) < 0.05
table(
    ["D", "ρ", "mean, predicted", "found", "variance, predicted", "found"],
    rows,
)

# %% [markdown]
# Scaled by $1/\sqrt{D}$, the matching key is ahead of the others by about $\rho\sqrt{D}$, while the other scores spread by 1. This lead grows with
# the width. As soon as it is well above $\ln S$, the weights are one-hot and the gradient dies, just as without any scale at the start. Scaled by
# $1/D$ the lead is $\rho$ at every width, and the spread of the others, $1/\sqrt{D}$, vanishes. So $1/\sqrt{D}$ suits vectors that are
# *independent*, as at the start of training, and $1/D$ (times a constant) vectors that are *aligned*, if the same setting is to serve for several widths.
# This is why recipes that carry settings from narrow models to wide ones use it [@yang2022].


# %%
def weight_of_match(width, scale, rho=0.5, num_keys=64):
    """Give the median weight that queries give to their own key."""
    query, key, _ = matched(width, rho, num_keys)
    _, weights = scaled_dot_product_attention(query, key, key, scale=scale)
    return weights.diagonal().median().item()


rows = []
for width in (16, 64, 256, 1024):
    root = weight_of_match(width, width**-0.5)
    whole = weight_of_match(width, 8 / width)  # equal at width 64
    rows.append((width, f"{root:.2f}", f"{whole:.2f}"))
    if width == 1024:
        assert root > 0.999
        assert whole < 0.7
table(["D", "weight of the match, scale 1/√D", "scale 8/D"], rows)

# %% [markdown]
# ## Exercise 5: Six broken masks
#
# *Find an input on which each masked softmax fails, and mend it.*
# [Exercise](../attention-scoring-functions.md#exercise-5)
#
# First the judge: a list of probes. Each takes a masked softmax and says whether it survived.


# %%
def probe_values(softmax, rows, mask, expected, dtype=torch.float32):
    """Compare weights with what they should be; no NaN in the gradient."""
    scores = torch.tensor([rows], dtype=dtype, requires_grad=True)
    weights = softmax(scores * 1, torch.tensor([mask]))
    weights.square().sum().backward()
    right = torch.tensor([expected], dtype=dtype)
    same = torch.allclose(weights, right, atol=1e-3)
    return same and bool(scores.grad.isfinite().all())


def keeps_its_arguments(softmax):
    """Pass scores that must not change."""
    scores = torch.arange(6.0).reshape(1, 2, 3)
    softmax(scores, torch.tensor([[[True, False, True]] * 2]))
    return torch.equal(scores, torch.arange(6.0).reshape(1, 2, 3))


# %%
first_two = [[True, True, False]] * 2  # two queries, three keys
even, none = [[0.5, 0.5, 0.0]] * 2, [[0.0] * 3] * 2
probes = {
    "empty row": lambda f: probe_values(
        f, [[1.0, 2.0, 3.0]] * 2, [[False] * 3] * 2, none
    ),
    "large": lambda f: probe_values(
        f, [[200.0, 200.0, 0.0]] * 2, first_two, even
    ),
    "low": lambda f: probe_values(f, [[-2e6, -2e6, 0.0]] * 2, first_two, even),
    "half": lambda f: probe_values(
        f, [[-30.0, -30.0, 0.0]] * 2, first_two, even, torch.float16
    ),
    "two queries": lambda f: probe_values(
        f, [[0.0, 0.0, 0.0], [9.0, 9.0, 9.0]], first_two, even
    ),
    "arguments": keeps_its_arguments,
}


# %% [markdown]
# The six, as in the exercise:


# %%
def one(scores, mask):
    return torch.softmax(scores.masked_fill(~mask, -1e6), dim=-1)


def two(scores, mask):
    return torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)


def three(scores, mask):
    return torch.softmax(scores, dim=-1) * mask


# %%
def four(scores, mask):
    return torch.softmax(scores.masked_fill_(~mask, -torch.inf), dim=-1)


def five(scores, mask):
    exps = torch.exp(scores) * mask
    return exps / exps.sum(dim=-1, keepdim=True).clamp(min=1e-9)


def six(scores, mask):
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=1)
    return weights.nan_to_num()


# %%
def failures(softmax):
    """List the probes that a masked softmax does not survive."""
    failed = []
    for name, probe in probes.items():
        try:
            survived = probe(softmax)
        except RuntimeError:  # -1e6 in half precision, for one
            survived = False
        if not survived:
            failed.append(name)
    return failed


broken = {
    "one": one,
    "two": two,
    "three": three,
    "four": four,
    "five": five,
    "six": six,
}
table(
    ["", "fails on"],
    [(name, ", ".join(failures(f))) for name, f in broken.items()],
)

# %%
assert all(failures(f) for f in broken.values())
assert failures(two) == ["empty row"]
assert failures(masked_softmax) == []

# %% [markdown]
# Now the mends. *One* and *two* need $-\infty$ before the softmax and zeros after it; the zeros written by `masked_fill` also replace the NaN of an empty row, in the
# gradient too. (A NaN still passes in between; the guard of the section avoids even that.) *Three* normalises again what is left, but only after masking, or a high masked score would leave nothing to normalise. *Four* must not write into its argument: one underscore.
# *Five* has to subtract the maximum of the *allowed* scores; then the largest term is 1 and a sum below 1 can only be that of an empty row. *Six* needs the last axis, and zeros where the mask
# says so instead of wherever a NaN turns up: `nan_to_num` would hide a NaN that is really there.


# %%
def one_mended(scores, mask):
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)
    return weights.masked_fill(~mask, 0)


two_mended = one_mended


def three_mended(scores, mask):
    guarded = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = torch.softmax(guarded, dim=-1) * mask
    total = weights.sum(dim=-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1)


# %%
def four_mended(scores, mask):
    barred = scores.masked_fill(~mask, -torch.inf)
    barred = barred.masked_fill(~mask.any(dim=-1, keepdim=True), 0)
    return torch.softmax(barred, dim=-1) * mask


def five_mended(scores, mask):
    least = torch.finfo(scores.dtype).min
    top = scores.masked_fill(~mask, least).amax(dim=-1, keepdim=True)
    exps = torch.exp((scores - top).masked_fill(~mask, -torch.inf))
    return exps / exps.sum(dim=-1, keepdim=True).clamp(min=1)


def six_mended(scores, mask):
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)
    return weights.masked_fill(~mask, 0)


# %%
mended = (
    one_mended,
    two_mended,
    three_mended,
    four_mended,
    five_mended,
    six_mended,
)
for softmax in mended:
    assert failures(softmax) == [], (softmax.__name__, failures(softmax))
    assert torch.allclose(
        softmax(query @ key.mT, padding),
        masked_softmax(query @ key.mT, padding),
        atol=1e-6,
    )
print(len(mended), "mended, no probe fails")

# %% [markdown]
# ## Exercise 6: Additive is not bilinear
#
# *Order two keys in a way that no bilinear score can.*
# [Exercise](../attention-scoring-functions.md#exercise-6)
#
# Take the keys 1 and $-1$ and two hidden units. The first computes $\tanh(q + k)$, the second $\tanh(-k)$, which does not look at the query; they enter with the weights 1 and
# $\tfrac12$. The difference of the two scores is
#
# $$
# a(q, 1) - a(q, -1) = \underbrace{\tanh(q + 1) - \tanh(q - 1)}_{\text{near 0 once both are saturated}} - \tanh(1) .
# $$
#
# For $q = 0.5$ the first part is larger than $\tanh(1)$ and the key 1 wins. For $q = 3$ both tangents are close to 1, their difference is nearly 0, and the key
# $-1$ wins. A bilinear score has the difference $q\,m\,(1 - (-1)) = 2qm$. Its sign is the same for all positive $q$, whatever $m$ is.

# %%
score = AdditiveScore(1, 1, 2)
with torch.no_grad():
    score.query_layer.weight.copy_(torch.tensor([[1.0], [0.0]]))
    score.key_layer.weight.copy_(torch.tensor([[1.0], [-1.0]]))
    score.score_layer.weight.copy_(torch.tensor([[1.0, 0.5]]))
    queries, keys = torch.tensor([[0.5], [3.0]]), torch.tensor([[1.0], [-1.0]])
    first_key, second_key = score(queries, keys).T
    gaps = first_key - second_key
for q, gap in zip(queries.flatten().tolist(), gaps.tolist(), strict=True):
    print(f"q = {q}: the key {1 if gap > 0 else -1} wins by {abs(gap):.2f}")

# %%
assert gaps[0] > 0 > gaps[1]
wanted = torch.tanh(queries + 1) - torch.tanh(queries - 1) - math.tanh(1)
assert torch.allclose(gaps, wanted.flatten(), atol=1e-6)
for m in torch.linspace(-5, 5, 101):
    bilinear = (queries * m) @ (keys[:1] - keys[1:]).T
    assert bilinear[0].sign() == bilinear[1].sign()

# %% [markdown]
# ## Exercise 7: One score at a time
#
# *The online softmax for one query in plain Python; its invariant, with proof; and that order and tiles make no difference.*
# [Exercise](../attention-scoring-functions.md#exercise-7)
#
# **Invariant.** After the scores $s_1, \dots, s_n$: $m = \max_i s_i$, $\ell = \sum_i e^{s_i - m}$ and $o = \sum_i e^{s_i - m} v_i$.
#
# **Start.** With no scores, $m = -\infty$ and both sums are empty, 0.
#
# **Step.** Let $s$ be the next score and $m' = \max(m, s)$, the maximum of all $n + 1$ scores. Multiply the old sum by $e^{m - m'}$:
#
# $$
# e^{m - m'} \sum_{i \le n} e^{s_i - m} + e^{s - m'} = \sum_{i \le n} e^{s_i - m'} + e^{s - m'} = \sum_{i \le n + 1} e^{s_i - m'} ,
# $$
#
# which is the invariant for $\ell$; the same line with values is that for $o$.
#
# **End.** $o / \ell = \sum_i e^{s_i - m} v_i / \sum_i e^{s_i - m}$, where $e^{-m}$ cancels: the softmax average. A tile of several scores is
# several steps at once, so cutting does not matter; the sums do not depend on the order of their terms, so neither does the order of the keys.


# %%
def online_average(scores, values):
    """Average values by the softmax of scores, seen one at a time."""
    top, total, output = -math.inf, 0.0, 0.0
    for score, value in zip(scores, values, strict=True):
        new_top = max(top, score)
        decay = math.exp(top - new_top)
        total = decay * total + math.exp(score - new_top)
        output = decay * output + math.exp(score - new_top) * value
        top = new_top
    return output / total


# %%
def in_tiles(scores, values, cuts):
    """Do the same with `add_tile`, for any places to cut."""
    scores = torch.tensor([scores], dtype=torch.float64)
    values = torch.tensor(values, dtype=torch.float64)[:, None]
    top = torch.full((1, 1), -math.inf, dtype=torch.float64)
    state = top, torch.zeros_like(top), torch.zeros_like(top)
    for start, end in itertools.pairwise([0, *cuts, scores.shape[1]]):
        state = add_tile(*state, scores[:, start:end], values[start:end])
    return (state[2] / state[1]).item()


# %%
draw = random.Random(0)
scores = [draw.gauss(0, 30) for _ in range(40)]
values = [draw.gauss(0, 1) for _ in range(40)]
weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
right = (weights * torch.tensor(values, dtype=torch.float64)).sum().item()
worst = 0.0
for _ in range(100):
    order = draw.sample(range(40), 40)
    mixed = [scores[i] for i in order], [values[i] for i in order]
    cuts = sorted(draw.sample(range(1, 40), 7))
    for found in (online_average(*mixed), in_tiles(*mixed, cuts)):
        worst = max(worst, abs(found - right))
assert worst < 1e-12
print(f"100 orders and cuts, largest error {worst:.0e}")

# %% [markdown]
# ## Exercise 8: Forget and recompute
#
# *Tiled attention that keeps its inputs, its output and one number a query, and builds each tile again in the backward pass.*
# [Exercise](../attention-scoring-functions.md#exercise-8)
#
# Let $\mathbf{g}$ be the gradient of the loss with respect to the output $\mathbf{o} = \sum_i \alpha_i \mathbf{v}_i$ of one query. The gradient of a weight is
# $\mathbf{g}^\top\mathbf{v}_i$. The Jacobian of the softmax turns it into that of a score,
#
# $$
# \frac{\partial L}{\partial s_i} = \alpha_i \Big( \mathbf{g}^\top \mathbf{v}_i - \sum_j \alpha_j\, \mathbf{g}^\top \mathbf{v}_j \Big)
# = \alpha_i \left( \mathbf{g}^\top \mathbf{v}_i - \mathbf{g}^\top \mathbf{o} \right) .
# $$
#
# The sum over all keys has become a product with the output, which is there already. This is what makes a backward pass by tiles possible. With the row's log-sum-exp
# $\lambda = m + \ln \ell$ the weights of any tile are $e^{\mathbf{s} - \lambda}$, without a second search for the maximum. What remains are the gradients of products of matrices.


# %%
def tiles(length, size):
    """Cut `length` keys into slices."""
    return [slice(i, i + size) for i in range(0, length, size)]


def go_forward(query, key, value, tile_size):
    """Give the output (..., T, V) and the log-sum-exp of each row."""
    query = scale_for(query, key) * query
    top = query.new_full((*query.shape[:-1], 1), -math.inf)
    output = query.new_zeros(*query.shape[:-1], value.shape[-1])
    state = top, torch.zeros_like(top), output
    for tile in tiles(key.shape[-2], tile_size):
        scores = query @ key[..., tile, :].mT
        state = add_tile(*state, scores, value[..., tile, :])
    top, total, output = state
    return output / total, top + total.log()


# %%
def go_backward(slope, query, key, value, output, log_sum, tile_size):
    """Give the gradients of query, key and value, tile by tile."""
    scale = scale_for(query, key)
    mean = (slope * output).sum(-1, keepdim=True)  # g · o
    query_grad, key_grads, value_grads = torch.zeros_like(query), [], []
    for tile in tiles(key.shape[-2], tile_size):
        near, held = key[..., tile, :], value[..., tile, :]
        weights = torch.exp(scale * query @ near.mT - log_sum)
        steps = scale * weights * (slope @ held.mT - mean)
        query_grad += steps @ near
        key_grads.append(steps.mT @ query)
        value_grads.append(weights.mT @ slope)
    return query_grad, torch.cat(key_grads, -2), torch.cat(value_grads, -2)


# %%
class RecomputedAttention(torch.autograd.Function):
    """Tiled attention without a mask that rebuilds its tiles backward."""

    @staticmethod
    def forward(ctx, query, key, value, tile_size):
        """Keep the inputs, the output and one number a query."""
        output, log_sum = go_forward(query, key, value, tile_size)
        ctx.save_for_backward(query, key, value, output, log_sum)
        ctx.tile_size = tile_size
        return output

    @staticmethod
    def backward(ctx, slope):
        """Build each tile of weights again, use it, forget it."""
        grads = go_backward(slope, *ctx.saved_tensors, ctx.tile_size)
        return *grads, None  # the size of a tile has no gradient


# %%
torch.manual_seed(0)
small = [
    torch.randn(2, n, w, dtype=torch.float64, requires_grad=True)
    for n, w in ((5, 11), (7, 11), (7, 3))
]
for size in (1, 3, 7, 20):
    assert torch.autograd.gradcheck(
        lambda *x, size=size: RecomputedAttention.apply(*x, size), small
    )
output, _ = scaled_dot_product_attention(*small)
assert torch.allclose(RecomputedAttention.apply(*small, 3), output)
print("gradcheck passes for tiles of 1, 3, 7 and 20")

# %% [markdown]
# For the memory, a counter: PyTorch lets one look at every operation as it runs, forward and backward. The counter adds the bytes of each new
# block of memory and subtracts them when the block is freed.


# %%
class LiveBytes(TorchDispatchMode):
    """Count the bytes of the tensors that are alive, and their peak."""

    def __init__(self):
        """Start at zero: what is there already does not count."""
        super().__init__()
        self.blocks, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operation and note the blocks of its results."""
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if torch.is_tensor(x):
                self.note(x.untyped_storage())
        self.peak = max(self.peak, sum(self.blocks.values()))
        return result

    def note(self, block):
        """Count a block of memory until it is freed."""
        place = block.data_ptr()
        if place and place not in self.blocks:
            self.blocks[place] = block.nbytes()
            weakref.finalize(block, self.blocks.pop, place, None)


# %%
def peak_of(attend, length):
    """Give the peak in MiB of a forward and a backward pass."""
    torch.manual_seed(0)
    inputs = [
        torch.randn(1, 1, length, 64, requires_grad=True) for _ in range(3)
    ]
    with LiveBytes() as counter:
        attend(*inputs).sum().backward()
    return counter.peak / 2**20


# %%
versions = {
    "naive": lambda *x: scaled_dot_product_attention(*x)[0],
    "tiled, autograd": tiled_attention,
    "tiled, recomputed": lambda *x: RecomputedAttention.apply(*x, 128),
}
peaks = {
    name: [peak_of(attend, length) for length in (1024, 2048)]
    for name, attend in versions.items()
}
table(
    ["", "T = 1,024: MiB", "T = 2,048: MiB"],
    [
        (name, *(f"{each:.1f}" for each in found))
        for name, found in peaks.items()
    ],
)

# %%
naive, tiled, recomputed = peaks.values()
assert naive[1] / naive[0] > 3.3
assert recomputed[1] / recomputed[0] < 2.2
assert recomputed[1] < naive[1] / 4
assert tiled[1] / tiled[0] > 2.7
assert tiled[1] > recomputed[1] * 2

# %% [markdown]
# Twice the length costs the first two versions three to four times the memory and the last one twice. The price is one more product of queries and keys in
# the backward pass.
