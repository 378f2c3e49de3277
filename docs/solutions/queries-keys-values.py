# %% [markdown]
# # Solutions: Queries, keys, and values
#
# [Back to the section](../queries-keys-values.md#exercises)
#
# All solutions use the functions of the section and its weather stations.

# %%
import torch

from snippets.plotting import table
from snippets.queries_keys_values import (
    at_temperature,
    attention,
    closeness,
    convex_hull,
    nearest,
    softmax,
    weather_stations,
)

names, places, readings = weather_stations()
query = torch.tensor([[4.5, 4.5]])

# %% [markdown]
# ## Exercise 1: Range and top-k queries
#
# *Which scores turn attention into the average of all records within a radius, and into a soft average of the $k$ best?*
# [Exercise](../queries-keys-values.md#exercise-1)
#
# For the range query let the score be the logarithm of an indicator: 0 for each record within the radius and $-\infty$ outside. Then
# $\exp a$ is 1 or 0, and the softmax divides by the number of ones:
#
# $$
# a(\mathbf{q}, \mathbf{k}) = \begin{cases} 0 & \text{if } \lVert \mathbf{q} - \mathbf{k} \rVert \le r, \\ -\infty & \text{else.} \end{cases}
# $$
#
# For the top-$k$ query keep the $k$ highest scores of each row and put $-\infty$ in place of the others, *before* the softmax, so that what remains is
# normalised among itself. This score of one key depends on the other keys, which `attention` allows, since it asks for all scores at once. With $k = 1$ it is
# the nearest look-up. (Keys that tie for the last place all stay in, so that the order of the records does not matter.)


# %%
def within(radius):
    """Make the score of a range query."""

    def score(query, key):
        distance = (-2 * closeness(query, key)).sqrt()
        return torch.where(distance <= radius, 0.0, -torch.inf)

    return score


def best(count, score):
    """Make a score that bars all but the `count` best keys."""

    def masked(query, key):
        scores = score(query, key)
        last = scores.topk(count, dim=-1).values[:, -1:]  # (T, 1)
        return scores.where(scores >= last, -torch.inf)

    return masked


# %%
_, ranged = attention(query, places, readings, within(3.0))
_, topped = attention(query, places, readings, best(2, closeness))
table(
    ["station", "within 3 km", "best two"],
    [
        [name, f"{near:.2f}", f"{top:.2f}"]
        for name, near, top in zip(
            names, ranged[0].tolist(), topped[0].tolist(), strict=True
        )
    ],
)

# %% [markdown]
# If no record lies within the radius all scores are $-\infty$. An average of nothing does not exist; the `softmax` of the section returns weights of zero, hence an output
# of zero, and not NaN. Since zero is also a possible reading, a careful caller looks at the sum of the weights.

# %%
chosen = (query - places).norm(dim=-1) <= 3.0
assert torch.allclose(ranged @ readings, readings[chosen].mean(dim=0))
first, second = closeness(query, places)[0].topk(2).indices.tolist()
full = softmax(closeness(query, places))[0]
assert torch.isclose(
    topped[0, first] / topped[0, second], full[first] / full[second]
)
assert (topped > 0).sum() == 2
alone, _ = attention(query, places, readings, best(1, closeness))
assert torch.equal(alone, nearest(query, places, readings))
lost, weights = attention(query, places, readings, within(0.5))
assert weights.sum() == 0 and lost.abs().sum() == 0

# %% [markdown]
# ## Exercise 2: The Jacobian
#
# *Prove that the derivative of the output with respect to the query is a covariance.*
# [Exercise](../queries-keys-values.md#exercise-2)
#
# Write the output as $\mathbf{o} = \mathbf{V}^\top \boldsymbol{\alpha}$, where row $i$ of $\mathbf{V}$ is $\mathbf{v}_i$, and let row $i$ of $\mathbf{G}$ be the slope
# $\mathbf{g}_i = \partial s_i / \partial \mathbf{q}$ of the score $s_i = a(\mathbf{q}, \mathbf{k}_i)$. From $\ln \alpha_i = s_i - \ln \sum_j e^{s_j}$ follows
# $\partial \ln\alpha_i / \partial s_j = \delta_{ij} - \alpha_j$, so the Jacobian of the softmax is
# $\operatorname{diag}(\boldsymbol{\alpha}) - \boldsymbol{\alpha}\boldsymbol{\alpha}^\top$. The chain rule gives
#
# $$
# \frac{\partial \mathbf{o}}{\partial \mathbf{q}}
# = \mathbf{V}^\top \bigl(\operatorname{diag}(\boldsymbol{\alpha}) - \boldsymbol{\alpha}\boldsymbol{\alpha}^\top\bigr) \mathbf{G}
# = \sum_i \alpha_i \mathbf{v}_i \mathbf{g}_i^\top - \bar{\mathbf{v}} \bar{\mathbf{g}}^\top ,
# $$ {#eq-jacobian}
#
# with $\bar{\mathbf{v}} = \mathbf{V}^\top\boldsymbol{\alpha}$ and $\bar{\mathbf{g}} = \mathbf{G}^\top\boldsymbol{\alpha}$. "The mean of the products minus the product of the
# means" is the covariance of $\mathbf{v}$ and $\mathbf{g}$ under the probabilities $\alpha_i$, which is @thm-covariance. For
# $s_i = \mathbf{q}^\top\mathbf{k}_i / \sqrt{D}$ the slopes are $\mathbf{g}_i = \mathbf{k}_i/\sqrt{D}$, and the constant comes out of the covariance. For
# $\mathbf{v}_i = \mathbf{k}_i$ we get $\operatorname{Cov}(\mathbf{k}, \mathbf{k})/\sqrt{D}$, which is symmetric, and for each vector $\mathbf{u}$ the number
# $\mathbf{u}^\top \operatorname{Cov}(\mathbf{k}, \mathbf{k})\, \mathbf{u} = \operatorname{Var}(\mathbf{u}^\top\mathbf{k})$ is not negative.
#
# Now a score that the section does not have. For $a(\mathbf{q}, \mathbf{k}) = \mathbf{w}^\top \tanh(\mathbf{q} + \mathbf{k})$ the slope is
# $\mathbf{w} \odot (1 - \tanh^2(\mathbf{q} + \mathbf{k}))$, with the product taken number by number.

# %%
random = torch.Generator().manual_seed(1)


def normal(*shape):
    """Draw standard normal numbers in double precision."""
    return torch.randn(*shape, generator=random, dtype=torch.double)


keys, values, mix, asked = normal(7, 5), normal(7, 3), normal(5), normal(5)


def additive(query, key):
    """Score by tanh: (T, D), (S, D) -> (T, S)."""
    return torch.tanh(query[:, None] + key) @ mix


weights = softmax(additive(asked[None], keys))[0]  # (S,)
slopes = mix * (1 - torch.tanh(asked + keys) ** 2)  # (S, D)
predicted = (weights[:, None] * values).T @ slopes
predicted -= torch.outer(weights @ values, weights @ slopes)  # (V, D)
measured = torch.autograd.functional.jacobian(
    lambda q: attention(q[None], keys, values, additive)[0][0], asked
)
print(f"largest difference: {(predicted - measured).abs().max():.0e}")
assert torch.allclose(predicted, measured, rtol=0, atol=1e-12)

# %% [markdown]
# The same for the scaled dot product with values that are the keys: the Jacobian is the covariance matrix of the keys, divided by $\sqrt{D}$.


# %%
def scaled_dot_product(query, key):
    """Score by the scaled dot product: (T, D), (S, D) -> (T, S)."""
    return query @ key.T / key.shape[1] ** 0.5


measured = torch.autograd.functional.jacobian(
    lambda q: attention(q[None], keys, keys, scaled_dot_product)[0][0], asked
)
weights = softmax(scaled_dot_product(asked[None], keys))[0]
offsets = keys - weights @ keys
covariance = (weights[:, None] * offsets).T @ offsets
assert torch.allclose(measured, covariance / 5**0.5, rtol=0, atol=1e-12)
assert torch.allclose(measured, measured.T, rtol=0, atol=1e-12)
assert torch.linalg.eigvalsh(measured).min() > 0

# %% [markdown]
# ## Exercise 3: Inside the hull
#
# *Show that outputs lie in the convex hull of the values. Can they reach a corner? What if weights may be negative?*
# [Exercise](../queries-keys-values.md#exercise-3)
#
# The convex hull of the values is the set of all $\sum_i \alpha_i \mathbf{v}_i$ with $\alpha_i \ge 0$ and $\sum_i \alpha_i = 1$. Softmax weights have both properties, so there is
# nothing more to prove. Seen from outside: let $\mathbf{u}^\top\mathbf{x} \le c$ be any half-plane that contains all values. Then
# $\mathbf{u}^\top\mathbf{o} = \sum_i \alpha_i \mathbf{u}^\top\mathbf{v}_i \le c$ as well.
#
# A corner $\mathbf{v}_c$ is a value that no average of the *others* can give, so it is reached only with $\alpha_c = 1$. With scores $s_c = g$ and $s_i = 0$ for
# the six others,
#
# $$
# \alpha_c = \frac{1}{1 + 6 e^{-g}},
# $$
#
# which tends to 1 as $g \to \infty$ and is less than 1 for each real $g$. The corner is approached and never reached, except by rounding.


# %%
def sides(points, corners):
    """Tell on which side of each edge points (N, 2) are: (N, corners).

    Positive is inside, for corners (C, 2) in counter-clockwise order.
    """
    edges = corners.roll(-1, dims=0) - corners
    offsets = points[:, None, :] - corners
    return edges[:, 0] * offsets[..., 1] - edges[:, 1] * offsets[..., 0]


corners = readings[convex_hull(readings)]
scores = torch.randn(1000, 7, generator=torch.Generator().manual_seed(2)) * 3
assert (sides(softmax(scores) @ readings, corners) > 0).all()

rows = []
for gap in (2.0, 5.0, 10.0, 30.0):
    scores = torch.zeros(7)
    scores[6] = gap  # the Summit
    single, double = [
        (softmax(scores.to(kind)) @ readings.to(kind) - readings[6]).norm()
        for kind in (torch.float32, torch.float64)
    ]
    rows.append([f"{gap:g}", f"{single:.1e}", f"{double:.1e}"])
table(["gap", "distance to the Summit, float32", "float64"], rows)

# %%
assert rows[-1][1] == "0.0e+00" and rows[-1][2] != "0.0e+00"
expected = 6 * torch.exp(torch.tensor(-10.0, dtype=torch.double))
weights = softmax(torch.tensor([10.0] + [0.0] * 6, dtype=torch.double))
assert torch.isclose(weights[0], 1 / (1 + expected))

# %% [markdown]
# If weights may be negative and still sum to one, outputs fill the *affine hull* of the values, the smallest point, line, plane and so on that contains them: here the whole
# plane. For example twice the Summit minus once the Ridge is colder than any station.

# %%
weights = torch.zeros(1, 7)
weights[0, 6], weights[0, 5] = 2.0, -1.0
outside = weights @ readings
print("temperature, rain:", outside[0].tolist())
assert weights.sum() == 1 and outside[0, 0] < readings[:, 0].min()
assert (sides(outside, corners) < 0).any()

# %% [markdown]
# ## Exercise 4: A differentiable search engine
#
# *Learn the matrix of the score* $\mathbf{q}^\top\mathbf{M}\,\mathbf{k}$ *from 20 clicks.*
# [Exercise](../queries-keys-values.md#exercise-4)
#
# The collection is made up. There are eight topics; documents name a topic by a technical word, people by an everyday word. Each of the 28 documents is about two topics
# and holds the technical word of each twice, and two filling words. A query names two topics in everyday words, with one filling word. The 20 documents that get a click in
# training and the 8 whose queries are held out share words but no combination: the model has to learn words.

# %%
from itertools import combinations

everyday = ["rain", "wind", "frost", "fog", "heat", "hail", "tide", "dust"]
technical = [
    "precipitation", "velocity", "freezing", "visibility",
    "temperature", "convection", "amplitude", "aerosol",
]  # fmt: skip
filling = ["report", "today", "summary"]
vocabulary = everyday + technical + filling
pairs = list(combinations(range(8), 2))  # 28 documents


def count_words(words):
    """Count words over the vocabulary: (19,)."""
    return torch.tensor([float(words.count(word)) for word in vocabulary])


# %%
def make_collection(seed):
    """Make keys (28, 19), queries (28, 19) and an order of documents."""
    random = torch.Generator().manual_seed(seed)
    fill = torch.randint(3, (28, 3), generator=random).tolist()
    documents, queries = [], []
    for (one, two), (a, b, c) in zip(pairs, fill, strict=True):
        named = [technical[one], technical[two]] * 2
        documents.append(count_words([*named, filling[a], filling[b]]))
        asked = [everyday[one], everyday[two], filling[c]]
        queries.append(count_words(asked))
    order = torch.randperm(28, generator=random)
    return torch.stack(documents), torch.stack(queries), order


# %% [markdown]
# The keys are the documents. The value that we want back is the document itself, and the weight of the clicked one should be large, so the loss is minus the logarithm of that
# weight. The rank of a document is one more than the number of documents with a higher score; those with an equal score count half.


# %%
def bilinear(matrix):
    """Make the score with this matrix (D, D)."""
    return lambda query, key: query @ matrix @ key.T


def mean_rank(queries, wanted, documents, matrix):
    """Average the ranks of the wanted documents; ties count half."""
    scores = bilinear(matrix)(queries, documents)  # (T, S)
    own = scores.gather(1, wanted[:, None])
    higher, equal = (scores > own + 1e-6), (scores - own).abs() <= 1e-6
    ranks = 1 + higher.sum(dim=1) + (equal.sum(dim=1) - 1) / 2
    return float(ranks.mean())


# %%
def learn_matrix(queries, wanted, documents, steps=150):
    """Learn the matrix from clicks; returns it and the losses."""
    matrix = torch.eye(queries.shape[1], requires_grad=True)
    optimizer = torch.optim.Adam([matrix], lr=0.05)
    losses = []
    for _ in range(steps):
        _, weights = attention(queries, documents, documents, bilinear(matrix))
        clicked = weights.gather(1, wanted[:, None])
        loss = -clicked.log().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return matrix.detach(), losses


# %%
results = []
for seed in range(5):
    documents, queries, order = make_collection(seed)
    clicks, held_out = order[:20], order[20:]
    matrix, losses = learn_matrix(queries[clicks], clicks, documents)
    before = mean_rank(queries[held_out], held_out, documents, torch.eye(19))
    after = mean_rank(queries[held_out], held_out, documents, matrix)
    assert losses[-1] < losses[0] / 10
    assert after < before / 2
    results.append(
        [
            seed,
            f"{losses[0]:.2f}",
            f"{losses[-1]:.3f}",
            f"{before:.1f}",
            f"{after:.1f}",
        ]
    )
table(
    ["seed", "first loss", "last loss", "held-out rank before", "after"],
    results,
)

# %% [markdown]
# On each of five made-up collections the loss falls, and the mean rank of the wanted document among 28 improves for queries that were never clicked. (With
# $\mathbf{M} = \mathbf{I}$ it is about what guessing gives, 14.5: only filling words match.) What was learned can be read off: for each everyday word, which technical word has the
# largest entry in its row of $\mathbf{M}$?

# %%
block = matrix[:8, 8:16]  # everyday words by technical words
for word, column in zip(everyday, block.argmax(dim=1).tolist(), strict=True):
    print(f"{word:6} {technical[column]}")
assert (block.argmax(dim=1) == torch.arange(8)).sum() >= 7

# %% [markdown]
# ## Exercise 5: Squeeze and excitation
#
# *Name query, key, value, score and weight of a squeeze-and-excitation block* [@hu2018]*, and two differences from attention.*
# [Exercise](../queries-keys-values.md#exercise-5)
#
# Let $\mathbf{z}$ hold the average of each of $C$ channels. The block computes gates $\sigma(\mathbf{W}_2 \operatorname{ReLU}(\mathbf{W}_1 \mathbf{z}))$ and multiplies channel
# $c$ by gate $c$.

# %%
table(
    ["attention", "squeeze and excitation"],
    [
        ["query", "hidden layer ReLU(W₁ z): one, made from the whole image"],
        ["keys", "the C rows of W₂: learned, the same for every image"],
        ["values", "the C channels of the image"],
        ["score", "dot product of query and key"],
        ["weights", "sigmoid of each score by itself; no sum to one"],
        ["output", "all weighted values side by side; they are not summed"],
    ],
)

# %% [markdown]
# The two differences are the last two rows. The gates do not compete: an image may keep all its channels, or none. And nothing is pooled: the result has as many channels as
# before. Written with the dot product as score, the block is this; it agrees with the usual way to write it.

# %%
from torch.nn import functional as F

random = torch.Generator().manual_seed(3)
image = torch.rand(7, 5, 3, generator=random)  # channels, rows, columns
first = torch.randn(2, 7, generator=random)
second = torch.randn(7, 2, generator=random)

query_se = torch.relu(image.mean(dim=(1, 2))[None] @ first.T)  # (1, 2)
scores = query_se @ second.T  # (1, 7): keys are the rows of `second`
gates = torch.sigmoid(scores)[0]
output = gates[:, None, None] * image

usual = image.mean(dim=(1, 2))
usual = F.linear(F.relu(F.linear(usual, first)), second).sigmoid()
assert torch.allclose(output, usual.view(7, 1, 1) * image)
assert output.shape == image.shape
assert (gates.sum() - 1).abs() > 0.5
assert torch.isclose(softmax(scores).sum(), torch.tensor(1.0))

# %% [markdown]
# ## Exercise 6: Two identical keys
#
# *What do two records with one key return? What does a duplicate do to the others? Which number replaces $n$ copies?*
# [Exercise](../queries-keys-values.md#exercise-6)
#
# Equal keys have equal scores and so equal weights: attention returns their values in equal parts, that is, their average with the weight of both. If the record with score $s_d$
# stands in the database $n$ times, the weight of any other record is
#
# $$
# \alpha_i = \frac{e^{s_i}}{n e^{s_d} + \sum_{j \ne d} e^{s_j}}
# = \frac{e^{s_i}}{e^{s_d + \ln n} + \sum_{j \ne d} e^{s_j}} .
# $$
#
# All other weights shrink by one common factor, so that their ratios stay as they were. One record whose score is raised by $\ln n$ has the same effect as $n$ copies. Such a number
# that is added to the scores of a key, whatever the query, is called a *key bias*: it says how much a key counts before anybody asks.

# %%
at_mill = places[1:2]
twins = torch.cat([places, at_mill])  # a second station at the Mill,
held = torch.cat([readings, torch.tensor([[20.0, 0.0]])])  # it reads 20, 0
_, weights = attention(at_mill, twins, held, closeness)
assert weights[0, 1] == weights[0, 7]
averaged = held.clone()
averaged[[1, 7]] = held[[1, 7]].mean(dim=0)
assert torch.allclose(weights @ averaged, weights @ held)

copies = torch.cat([places, at_mill, at_mill])  # three times the Mill
values = torch.cat([readings, readings[1:2], readings[1:2]])
pooled, triple = attention(query, copies, values, closeness)
_, single = attention(query, places, readings, closeness)
others = [0, 2, 3, 4, 5, 6]
shrink = triple[0, others] / single[0, others]
print(f"all other weights are multiplied by {shrink[0]:.3f}")
assert torch.allclose(shrink, shrink[0].expand(6))

bias = torch.zeros(7)
bias[1] = torch.tensor(3.0).log()
same, _ = attention(
    query, places, readings, lambda q, k: closeness(q, k) + bias
)
assert torch.allclose(same, pooled, atol=1e-5)

# %% [markdown]
# ## Exercise 7: Straight through
#
# *Write a look-up that is hard forward and soft backward, and compare the gradients of a loss at three temperatures.*
# [Exercise](../queries-keys-values.md#exercise-7)
#
# `soft + (hard - soft).detach()` has the value of `hard`, and since what is detached counts as a constant, the derivative of `soft`. The gradient of the loss
# $L = \lVert \mathbf{o} - \mathbf{y} \rVert^2$ is $2\,(\partial\mathbf{o}/\partial\mathbf{q})^\top (\mathbf{o} - \mathbf{y})$. The first factor is the same for both look-ups, the
# soft Jacobian. The second is the residual, which each look-up takes from its own output.


# %%
def straight_through(query, key, value, score):
    """Return the nearest value; differentiate like soft attention."""
    soft, _ = attention(query, key, value, score)
    return soft + (nearest(query, key, value) - soft).detach()


def loss_gradient(look_up, temperature, target):
    """Differentiate the squared error with respect to the query."""
    asked = query.clone().requires_grad_()
    output = look_up(
        asked, places, readings, at_temperature(closeness, temperature)
    )
    loss = ((output - target) ** 2).sum()
    return torch.autograd.grad(loss, asked)[0][0]


def soft_look_up(*arguments):
    """Return the output of attention alone."""
    return attention(*arguments)[0]


# %%
target = torch.tensor([[10.0, 9.0]])
rows, cosines, lengths = [], [], []
for heat in (10.0, 1.0, 0.1):
    through = loss_gradient(straight_through, heat, target)
    soft = loss_gradient(soft_look_up, heat, target)
    cosines.append(float(torch.cosine_similarity(through, soft, dim=0)))
    lengths.append(float(through.norm()))
    rows.append(
        [
            f"{heat:g}",
            f"{through.norm():.1e}",
            f"{soft.norm():.1e}",
            f"{cosines[-1]:.3f}",
        ]
    )
table(
    ["temperature", "length, straight through", "length, soft", "cosine"],
    rows,
)

# %% [markdown]
# At a high temperature the two gradients point in opposite directions. The soft output is nearly an average, too dry, and asks the query to move towards the rainy Ridge; the hard
# output is the reading of the Ridge itself, too cold, and asks it to move away. As the temperature falls, the soft output approaches the hard one, the residuals agree, and so do the
# gradients. But in the end both all but vanish, as the Jacobian of a decided softmax is nearly zero: where the estimate is faithful, there is hardly anything left of it. That
# is the dilemma of a straight-through look-up.

# %%
assert torch.equal(
    straight_through(query, places, readings, closeness).round(decimals=4),
    nearest(query, places, readings),
)
average = soft_look_up(
    query, places, readings, at_temperature(closeness, 10.0)
)
assert average[0, 1] < 6 < 9 < average[0, 0]
to_ridge = places[5] - query[0]  # a step goes against the gradient
assert loss_gradient(soft_look_up, 10.0, target) @ to_ridge < 0
assert loss_gradient(straight_through, 10.0, target) @ to_ridge > 0
assert cosines[0] < 0 < cosines[1] and cosines[2] > 0.999
assert lengths[2] < lengths[1] / 100

# %% [markdown]
# ## Exercise 8: Sparsemax
#
# *Derive sparsemax* [@martins2016] *for two scores.*
# [Exercise](../queries-keys-values.md#exercise-8)
#
# Sparsemax is the projection of the scores on the simplex, $\operatorname{argmin}_{\boldsymbol{\alpha}} \lVert \boldsymbol{\alpha} - \mathbf{s} \rVert^2$ over all
# $\boldsymbol{\alpha}$ with $\alpha_i \ge 0$ and $\sum_i \alpha_i = 1$. For two scores put $\alpha_1 = p$, $\alpha_2 = 1 - p$. Setting the derivative of
# $(p - s_1)^2 + (1 - p - s_2)^2$ to zero gives $2(p - s_1) - 2(1 - p - s_2) = 0$, that is, $p = (1 + s_1 - s_2)/2$. The function is a parabola in $p$, so if this point lies
# outside of $[0, 1]$ the nearer end is the minimum:
#
# $$
# \alpha_1 = \min\Bigl(1, \max\Bigl(0, \frac{1 + s_1 - s_2}{2}\Bigr)\Bigr) .
# $$ {#eq-sparsemax}
#
# The smaller weight is exactly zero as soon as the scores differ by 1 or more. There, as with the softmax in floating-point numbers, the gradient is exactly zero; but here this is
# intended, and true of real numbers too.


# %%
def sparsemax_of_two(scores):
    """Project scores (..., 2) on the simplex: weights (..., 2)."""
    first = ((1 + scores[..., 0] - scores[..., 1]) / 2).clamp(0, 1)
    return torch.stack([first, 1 - first], dim=-1)


def sparsemax(scores):
    """Project scores (S,) on the simplex, for any number of them.

    The k largest scores keep a weight; all lose one common threshold.
    """
    ordered = scores.sort(descending=True).values
    counts = torch.arange(1, len(scores) + 1)
    thresholds = (ordered.cumsum(dim=0) - 1) / counts
    kept = int((ordered > thresholds).sum())
    return (scores - thresholds[kept - 1]).clamp(min=0)


# %%
gaps = torch.tensor([0.0, 0.5, 1.0, 2.0])
pairs_of_scores = torch.stack([gaps, torch.zeros(4)], dim=1)
sparse = sparsemax_of_two(pairs_of_scores)
dense = softmax(pairs_of_scores)
table(
    ["gap", "sparsemax", "softmax"],
    [
        [
            f"{gap:g}",
            ", ".join(f"{x:.2f}" for x in one.tolist()),
            ", ".join(f"{x:.2f}" for x in two.tolist()),
        ]
        for gap, one, two in zip(gaps, sparse, dense, strict=True)
    ],
)

# %%
assert torch.equal(sparse[:, 0], torch.tensor([0.5, 0.75, 1.0, 1.0]))
for scores in torch.linspace(-2, 2, 41)[:, None] * torch.tensor([1.0, -0.5]):
    assert torch.allclose(
        sparsemax_of_two(scores), sparsemax(scores), atol=1e-6
    )
many = sparsemax(closeness(query, places)[0] / 4)
print(
    "stations with any weight at a temperature of 4:",
    [name for name, weight in zip(names, many, strict=True) if weight > 0],
)
assert torch.isclose(many.sum(), torch.tensor(1.0)) and (many == 0).any()
