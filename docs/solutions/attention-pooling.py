# %% [markdown]
# # Solutions: Attention pooling by similarity
#
# [Back to the section](../attention-pooling.md#exercises)

# %%
import torch
from torch.nn.functional import one_hot

from snippets.attention_pooling import (
    LearnedBandwidth,
    boxcar,
    constant,
    distances,
    epanechnikov,
    gaussian,
    nadaraya_watson,
    normalise,
    others_mask,
    triangular,
)
from snippets.datasets import (
    handwritten_digits,
    road_readings,
    road_temperature,
)

# %%
from snippets.plotting import (
    RULE,
    dots,
    label_line,
    line,
    new_figure,
    table,
)

# %% [markdown]
# ## Exercise 1: Two densities
#
# Show that the sign of the estimate is the sign of the difference of two
# weighted densities. [Exercise](../attention-pooling.md#exercise-1)
#
# Let $S_+$ of the $S$ keys have the value $+1$ and $S_-$ the value $-1$, and let
# the kernel $K_w(\mathbf{q}, \mathbf{k})$ have the integral one over $\mathbf{q}$. The kernel density
# estimate of a class is the mean of the kernels at its keys, and its
# frequency is its share of the keys:
#
# $$
# p_\pm(\mathbf{q}) = \frac{1}{S_\pm} \sum_{i \in \pm} K_w(\mathbf{q}, \mathbf{k}_i), \qquad \pi_\pm = \frac{S_\pm}{S}.
# $$
#
# In $\pi_\pm \, p_\pm(\mathbf{q})$ the number $S_\pm$ cancels, and both have the denominator $S$. So
#
# $$
# \begin{gathered}
# f(\mathbf{q}) = \frac{\sum_{i \in +} K_w(\mathbf{q}, \mathbf{k}_i) - \sum_{i \in -} K_w(\mathbf{q}, \mathbf{k}_i)}{\sum_{i} K_w(\mathbf{q}, \mathbf{k}_i)} \\
# = \frac{\pi_+ p_+(\mathbf{q}) - \pi_- p_-(\mathbf{q})}{\pi_+ p_+(\mathbf{q}) + \pi_- p_-(\mathbf{q})}.
# \end{gathered}
# $$ {#eq-two-densities}
#
# The denominator is positive wherever a key is in reach, so the sign is that of the numerator. The
# kernel's area cancels too: here it made the $p_\pm$ densities, the classifier
# does not need it. By Bayes' rule $f$ is the difference of the two
# estimated probabilities of the classes, a number between $-1$ and $1$.

# %%
generator = torch.Generator().manual_seed(1)
plus = torch.randn(23, generator=generator, dtype=torch.float64) + 1
minus = 2 * torch.randn(31, generator=generator, dtype=torch.float64) - 1
keys = torch.cat([plus, minus])
values = torch.cat([torch.ones(23), -torch.ones(31)]).double()
queries, width = torch.linspace(-5, 5, 101, dtype=torch.float64), 0.5


def density(points, queries, width):
    """Estimate the density of the points at the queries; area one."""
    kernels = epanechnikov(distances(queries, points) / width) / width
    return kernels.mean(dim=1)


estimates, weights = nadaraya_watson(
    queries, keys, values, epanechnikov, width
)
weighted_plus = 23 / 54 * density(plus, queries, width)
weighted_minus = 31 / 54 * density(minus, queries, width)
reached = weights.sum(dim=1) > 0
expected = (weighted_plus - weighted_minus) / (weighted_plus + weighted_minus)
print(f"{reached.sum()} of {len(queries)} queries have a key in reach")

# %%
#| check: true
torch.testing.assert_close(estimates[reached], expected[reached])
signs = (weighted_plus - weighted_minus)[reached].sign()
assert (estimates[reached].sign() == signs).all()
# The mean of the kernels is a density: its area is one.
fine = torch.linspace(-12, 12, 24_001, dtype=torch.float64)
area = torch.trapezoid(density(plus, fine, width), fine)
torch.testing.assert_close(area, torch.ones_like(area), atol=1e-5, rtol=0)

# %% [markdown]
# ## Exercise 2: Learn the width twice
#
# Learn the width with and without the diagonal on new noise, and predict the
# limit of the training error first. [Exercise](../attention-pooling.md#exercise-2)
#
# **Prediction.** As $w \to 0$ the weights of the query $\mathbf{k}_i$ go to the keys at
# the least distance, and that distance is zero: the key itself. If it is the
# only one there, the estimate becomes the reading and the training error
# goes to 0. If several stations stand at one place, they share the weight;
# each is estimated by their mean, and what remains is the scatter of
# readings around the mean of their place. No width can remove that.


# %%
def learn_width(keys, values, leave_one_out, start=0.3, steps=250):
    """Return the learned width and the training error at that width."""
    model = LearnedBandwidth(start)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        estimates, _ = model(keys, keys, values, leave_one_out=leave_one_out)
        loss = ((estimates - values) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.log_bandwidth.exp().item(), loss.item()


# %%
seeds = (21, 22, 23)
apart = [road_readings(seed, num_readings=20) for seed in seeds]
rows, pairs = [], {}
for seed, (keys, values) in zip(seeds, apart, strict=True):
    honest, error = learn_width(keys, values, leave_one_out=True)
    narrow, training = learn_width(keys, values, leave_one_out=False)
    twice = keys.repeat_interleave(2)  # two thermometers at each place
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(40, generator=generator)
    pairs[seed] = road_temperature(twice) + noise
    _, shared = learn_width(twice, pairs[seed], leave_one_out=False)
    within = pairs[seed].view(20, 2).var(dim=1, correction=0)
    scatter = within.mean().item()
    rows.append((seed, honest, narrow, training, shared, scatter))

# %%
#| echo: false
#| label: tbl-learned-twice
#| caption: Three draws of 20 stations. Without leaving one out the training error goes to 0; with two thermometers at each place it stops near the scatter within the places, as predicted.
table(
    [
        "seed",
        "width, one left out",
        "width, all",
        "training error",
        "same, two at each place",
        "scatter",
    ],
    [
        [row[0], f"{row[1]:.2f}", f"{row[2]:.4f}"]
        + [f"{number:.3f}" for number in row[3:]]
        for row in rows
    ],
)

# %%
#| check: true
for (keys, values), row in zip(apart, rows, strict=True):
    seed, honest, narrow, training, shared, scatter = row
    assert narrow < honest / 10 and training < 0.1
    assert scatter - 1e-3 < shared < scatter + 0.06
    limit = LearnedBandwidth(1e-8)  # as good as zero
    assert (limit(keys, keys, values)[0] - values).abs().max() < 1e-6
    twice, paired = keys.repeat_interleave(2), pairs[seed]
    misses = limit(twice, twice, paired)[0] - paired
    assert abs((misses**2).mean().item() - scatter) < 1e-6

# %% [markdown]
# ## Exercise 3: On the unit sphere
#
# Rewrite the Gaussian score for queries and keys of length one, and find the
# temperature. [Exercise](../attention-pooling.md#exercise-3)
#
# With $\lVert \mathbf{q} \rVert = \lVert \mathbf{k} \rVert = 1$ the expanded square of @eq-expanded-square is
#
# $$
# -\frac{\lVert \mathbf{q} - \mathbf{k} \rVert^2}{2 w^2} = \frac{\mathbf{q}^\top \mathbf{k} - 1}{w^2}.
# $$
#
# The $-1/w^2$ is the same for every key and cancels in the softmax. The
# similarity is $\exp(\mathbf{q}^\top \mathbf{k} / w^2)$ and the temperature is $w^2$: half the
# width is a quarter of the temperature. If only the keys have length one,
# the term $-\lVert \mathbf{q} \rVert^2 / 2 w^2$ is another constant of the row, and the
# weights are still those of the dot product. The length of the *query* then
# acts like a temperature of its own. If the keys differ in length, the
# equality is lost: distance prefers the nearer key, the dot product the
# longer one.

# %%
generator = torch.Generator().manual_seed(3)
queries = torch.randn(5, 7, generator=generator, dtype=torch.float64)
keys = torch.randn(11, 7, generator=generator, dtype=torch.float64)
unit_keys = torch.nn.functional.normalize(keys)
values = torch.zeros(11, dtype=torch.float64)


def gap(queries, keys, width):
    """Largest difference of distance weights and dot-product weights."""
    _, weights = nadaraya_watson(queries, keys, values, gaussian, width)
    by_dot = torch.softmax(queries @ keys.T / width**2, dim=1)
    return (weights - by_dot).abs().max().item()


unit_queries = torch.nn.functional.normalize(queries)
for width in (0.5, 1.0, 2.0):
    both = gap(unit_queries, unit_keys, width)
    only_keys = gap(queries, unit_keys, width)
    neither = gap(queries, keys, width)
    print(f"width {width}: neither of length one {neither:.2f}")
    assert both < 1e-12 and only_keys < 1e-12 and neither > 0.01

# %% [markdown]
# ## Exercise 4: The rate
#
# Balance bias against variance and measure the rate.
# [Exercise](../attention-pooling.md#exercise-4)
#
# Let $E(w) = a w^4 + b / (S w^D)$. Its derivative vanishes where
#
# $$
# 4 a w^3 = \frac{D\, b}{S\, w^{D+1}}
# \quad\Longleftrightarrow\quad
# w^{D+4} = \frac{D\, b}{4 a S},
# $$
#
# so $w \propto S^{-1/(D+4)}$, and both terms of $E$ are then proportional to $S^{-4/(D+4)}$.
#
# For the simulation no noise need be drawn. Given the keys, the estimate at
# $\mathbf{q}$ is $\sum_i \alpha_i v_i$ with $v_i = g(\mathbf{k}_i) + \text{noise}$, so its expected squared error is
# the squared bias $(\sum_i \alpha_i\, g(\mathbf{k}_i) - g(\mathbf{q}))^2$ plus the noise variance times
# $\sum_i \alpha_i^2$. The theory is about the inside of the region and even
# coverage, so we ask in the middle and place the keys on a jittered grid.


# %%
def keys_on_grid(num_keys, dims, generator):
    """Place one key at random in each cell of a grid on [0, 1]^D."""
    per_axis = round(num_keys ** (1 / dims))
    axis = torch.arange(per_axis, dtype=torch.float64)
    corners = torch.cartesian_prod(*[axis] * dims).view(-1, dims)
    jitter = torch.rand(
        corners.shape, generator=generator, dtype=torch.float64
    )
    return (corners + jitter) / per_axis


def wave(places):
    """Be a smooth truth: the product of a sine in each coordinate."""
    return torch.sin(4 * places + 1).prod(dim=1)


def expected_error(queries, keys, width, noise=0.5):
    """Squared bias plus variance, mean over the queries."""
    estimates, weights = nadaraya_watson(
        queries, keys, wave(keys), gaussian, width
    )
    bias = estimates - wave(queries)
    return (bias**2 + noise**2 * (weights**2).sum(dim=1)).mean().item()


# %%
def best_widths(dims, sizes, generator):
    """Find the width of least expected error for each number of keys."""
    middle = torch.linspace(0.35, 0.65, 9, dtype=torch.float64)
    queries = torch.cartesian_prod(*[middle] * dims).view(-1, dims)
    found = []
    for size in sizes:
        keys = keys_on_grid(size, dims, generator)
        grid = torch.logspace(-2, -0.7, 40).tolist()
        errors = [expected_error(queries, keys, w) for w in grid]
        found.append(grid[errors.index(min(errors))])
    return found


# %%
generator = torch.Generator().manual_seed(4)
sizes = {
    1: [100, 200, 400, 800, 1600, 3200, 6400],
    2: [400, 784, 1600, 3136, 6400],
}
found = {dims: best_widths(dims, sizes[dims], generator) for dims in sizes}
slopes = {}
for dims, widths in found.items():
    x = torch.tensor(sizes[dims]).double().log()
    y = torch.tensor(widths).double().log()
    slopes[dims] = ((x - x.mean()) * y).sum() / ((x - x.mean()) ** 2).sum()
    print(
        f"D = {dims}: slope {slopes[dims]:.3f}, theory {-1 / (dims + 4):.3f}"
    )


# %%
#| echo: false
def plot_rates(sizes, found, slopes):
    """Draw the best widths over the number of keys with fitted lines."""
    figure, axes = new_figure(height=2.6)
    for index, (dims, widths) in enumerate(found.items()):
        x = torch.tensor(sizes[dims]).double()
        y = torch.tensor(widths).double().log()
        fit = (y.mean() + slopes[dims] * (x.log() - x.log().mean())).exp()
        dots(axes, x, widths, index)
        line(axes, x, fit, index, linewidth=1, label=f"D = {dims}")
    axes.set(xscale="log", yscale="log", yticks=[0.04, 0.08, 0.16])
    axes.set_yticks([], minor=True)
    axes.set_yticklabels(["0.04", "0.08", "0.16"])
    axes.set(xlabel="keys, logarithmic", ylabel="best width, logarithmic")
    return figure


# %%
#| echo: false
#| label: fig-width-rate
#| caption: The best width against the number of keys, both logarithmic, with straight lines fitted to the dots. In two dimensions the width shrinks more slowly.
#| alt: >-
#|   Two falling straight lines of dots; the one for two dimensions lies
#|   higher and falls a little less steeply than the one for one dimension.
plot_rates(sizes, found, slopes)

# %%
#| check: true
assert abs(slopes[1] + 1 / 5) < 0.05 and abs(slopes[2] + 1 / 6) < 0.05

# %% [markdown]
# ## Exercise 5: A width per key
#
# Give each key a width that follows the distance to its $k$-th neighbour, and
# compare with one width. [Exercise](../attention-pooling.md#exercise-5)
#
# We draw 150 stations on the first half of the road and 10 on the second,
# twelve times. The width of key $i$ is $c\, d_i^{\,p}$, with $d_i$ the distance to its
# fifth neighbour and $c$ chosen by leaving one out. The exercise asks for
# $p = 1$; $p = 0$ is one width for all, and $p = 1/2$ stands between them.


# %%
def uneven_readings(seed, dense=150, sparse=10):
    """Draw a road with many stations on the left half and few on the right."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(dense + sparse, generator=generator)
    shift = torch.cat([torch.zeros(dense), torch.ones(sparse)])
    places = (2.5 * (uniform + shift)).sort().values.double()
    noise = torch.randn(len(places), generator=generator, dtype=torch.float64)
    return places, road_temperature(places) + 0.5 * noise


def left_out_error(keys, values, widths):
    """Leave-one-out error of a Gaussian with a width (S,) per key."""
    similarity = gaussian(distances(keys, keys) / widths)
    weights = normalise(similarity.masked_fill(~others_mask(keys), 0))
    return ((weights @ values - values) ** 2).mean().item()


# %%
queries = torch.linspace(0, 5, 251, dtype=torch.float64)
truth = road_temperature(queries)
powers, factors = (0.0, 0.5, 1.0), torch.logspace(-1.7, 1.2, 50)
left_out, true = torch.zeros(12, 3), torch.zeros(12, 3)
for seed in range(12):
    keys, values = uneven_readings(seed)
    fifth = distances(keys, keys).sort(dim=1).values[:, 5]
    for column, power in enumerate(powers):
        shape = fifth**power
        errors = [left_out_error(keys, values, c * shape) for c in factors]
        widths = factors[errors.index(min(errors))] * shape
        weights = normalise(gaussian(distances(queries, keys) / widths))
        left_out[seed, column] = min(errors)
        true[seed, column] = ((weights @ values - truth) ** 2).mean()
for column, power in enumerate(powers):
    print(
        f"power {power}: leave-one-out {left_out[:, column].mean():.3f}, "
        f"true {true[:, column].mean():.3f} (means of 12 draws)"
    )


# %%
#| echo: false
def plot_powers(left_out):
    """Draw the leave-one-out error of each draw relative to one width."""
    figure, axes = new_figure(height=2.3)
    for index, name in ((1, "p = 1/2"), (2, "p = 1")):
        relative = left_out[:, index] / left_out[:, 0]
        dots(axes, range(12), relative, index - 1)
        label_line(axes, 11.2, relative[-1], name, index - 1)
    axes.axhline(1, color=RULE, linewidth=0.8)
    axes.set(xlabel="draw", xticks=range(0, 12, 2))
    axes.set_ylabel("leave-one-out error,\none width = 1")
    return figure


# %%
#| echo: false
#| label: fig-key-widths
#| caption: Leave-one-out error with a width per key, relative to the best single width (line), on twelve draws. Widths proportional to the neighbour's distance mostly do worse; proportional to its square root, mostly better.
#| alt: >-
#|   Round dots for the square root lie close to the line at one, mostly
#|   below it; squares for the distance itself lie mostly above the line.
plot_powers(left_out)

# %%
#| check: true
assert (left_out[:, 2] > left_out[:, 0]).sum() >= 10
assert (left_out[:, 1] < left_out[:, 0]).sum() >= 8
assert true.mean(dim=0).argmin() == 1

# %% [markdown]
# The plain proposal is *not* better than one width: it overdoes it. Exercise 4 says why.
# Where the density of stations is $\rho$, the best width falls like $\rho^{-1/5}$, but the
# distance to a neighbour falls like $\rho^{-1}$. On the dense half the widths become
# far too small. The square root is a compromise, and the mean true error is
# then the smallest of the three.
#
# ## Exercise 6: A weighted line
#
# Fit a weighted line around each query and show that it is exact on linear
# data. [Exercise](../attention-pooling.md#exercise-6)
#
# With keys centred at the query, $z_i = k_i - q$, we minimise
# $\sum_i \alpha_i (v_i - a - b z_i)^2$; the estimate is the intercept $a$. With
# $m_1 = \sum_i \alpha_i z_i$, $m_2 = \sum_i \alpha_i z_i^2$, $s_0 = \sum_i \alpha_i v_i$ and $s_1 = \sum_i \alpha_i z_i v_i$,
#
# $$
# a = \frac{m_2 s_0 - m_1 s_1}{m_2 - m_1^2}.
# $$ {#eq-local-line}
#
# For $v_i = c + d\, k_i = (c + d q) + d z_i$ we get $s_0 = (c + d q) + d m_1$ and $s_1 = (c + d q) m_1 + d m_2$;
# put in, the numerator is $(c + d q)(m_2 - m_1^2)$ and $a = c + d q$ exactly. The average $s_0$ is off by $d m_1$: slope times how far the
# neighbours' centre of gravity lies from the query. At the end of a road that is far.
# (If all the weight lies on one place, the denominator is 0: one point makes no line.)


# %%
def local_line(queries, keys, values, kernel, bandwidth):
    """Fit a line around each query by weighted least squares.

    queries (T,), keys (S,), values (S,) -> estimates (T,).
    """
    _, weights = nadaraya_watson(queries, keys, values, kernel, bandwidth)
    offsets = keys - queries[:, None]  # (T, S)
    first = (weights * offsets).sum(dim=1)
    second = (weights * offsets**2).sum(dim=1)
    average = weights @ values
    slope_sum = (weights * offsets) @ values
    return (second * average - first * slope_sum) / (second - first**2)


keys, readings = (x.double() for x in road_readings(1))
straight = 3 - 2 * keys
ends = torch.tensor([0.0, 2.5, 5.0], dtype=torch.float64)
line_fit = local_line(ends, keys, straight, gaussian, 0.5)
average, _ = nadaraya_watson(ends, keys, straight, gaussian, 0.5)
print("truth  ", (3 - 2 * ends).tolist())
print("line   ", [round(number, 3) for number in line_fit.tolist()])
print("average", [round(number, 3) for number in average.tolist()])

# %%
#| check: true
torch.testing.assert_close(line_fit, 3 - 2 * ends)
assert (average - (3 - 2 * ends))[[0, 2]].abs().min() > 0.3

# %% [markdown]
# On the noisy readings the line removes bias at the ends and pays with variance:
# near the border few readings must fix two numbers. Whether it wins depends on the draw.

# %%
wins = 0
for seed in range(12):
    keys, readings = (x.double() for x in road_readings(seed))
    average, _ = nadaraya_watson(queries, keys, readings, gaussian, 0.5)
    fitted = local_line(queries, keys, readings, gaussian, 0.5)
    wins += ((fitted - truth) ** 2).mean() < ((average - truth) ** 2).mean()
print(f"at width 0.5 the line has the smaller error on {wins} of 12 draws")

# %% [markdown]
# ## Exercise 7: At the edge
#
# One key with the value 5, and a query at a distance of $1$, $1 + 10^{-6}$ and $10^6$
# widths: what comes out? [Exercise](../attention-pooling.md#exercise-7)
#
# A single key has the weight 1 if its similarity is positive and 0 if it is
# not, so the answer is 5 or 0. The boxcar is positive *at* the edge, by our
# choice of ≤; the triangle and the parabola have just reached zero there.
# The Gaussian is positive at all distances on paper, but $e^{-10^{12}/2}$ is zero in
# any floating point. As a softmax of scores it would still give 5.

# %%
#| label: tbl-edge
#| caption: The estimate for one key with the value 5. A 0 means that the key is out of reach.
kernels = [
    gaussian,
    boxcar,
    triangular,
    epanechnikov,
    constant,
]
places = torch.tensor([1, 1 + 1e-6, 1e6], dtype=torch.float64)
key, value = torch.zeros(1).double(), torch.full((1,), 5.0).double()
found = {
    kernel.__name__: nadaraya_watson(places, key, value, kernel)[0].tolist()
    for kernel in kernels
}
table(
    ["kernel", "u = 1", "u = 1.000001", "u = 1,000,000"],
    [[name, *(f"{x:.0f}" for x in row)] for name, row in found.items()],
)

# %%
#| check: true
assert found == {
    "gaussian": [5, 5, 0],
    "boxcar": [5, 0, 0],
    "triangular": [0, 0, 0],
    "epanechnikov": [0, 0, 0],
    "constant": [5, 5, 5],
}
with torch.no_grad():
    by_scores, _ = LearnedBandwidth(1.0)(places, key, value)
assert by_scores.tolist() == [5, 5, 5]

# %% [markdown]
# The query at $1 + 10^{-6}$ is in float64 on purpose: in float32 the next number
# after 1 is $1 + 1.2 \cdot 10^{-7}$, so it would still work, but $1 + 10^{-8}$ would be 1 itself.
#
# ## Exercise 8: A rare digit
#
# Remove nine tenths of one class and watch its recall as the width grows.
# [Exercise](../attention-pooling.md#exercise-8)

# %%
(images, labels), (test_images, test_labels) = handwritten_digits()
widths = [0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0]


def recall(rare, thin_out):
    """Recall of one digit at each width, with or without most of its keys."""
    keep = torch.ones(len(labels), dtype=torch.bool)
    if thin_out:
        own = (labels == rare).nonzero().squeeze(1)
        keep[own[len(own) // 10 :]] = False
    votes = one_hot(labels[keep], 10).float()
    asked = test_images[test_labels == rare]
    half_squares = distances(asked, images[keep]) ** 2 / 2
    return [
        ((-half_squares / w**2).softmax(dim=1) @ votes)
        .argmax(dim=1)
        .eq(rare)
        .double()
        .mean()
        .item()
        for w in widths
    ]


# %%
full = torch.tensor([recall(digit, False) for digit in range(10)])
thinned = torch.tensor([recall(digit, True) for digit in range(10)])


# %%
#| echo: false
def plot_recall(full, thinned):
    """Draw the recall of each digit as a dot and the means as lines."""
    figure, axes = new_figure(height=2.6)
    for index, recalls in enumerate((full, thinned)):
        for row in recalls:
            dots(axes, widths, row, index, alpha=0.35, markersize=3)
        line(axes, widths, recalls.mean(dim=0), index)
    label_line(axes, 0.62, 1.04, "all keys", 0)
    label_line(axes, 0.1, 0.15, "one tenth of the class", 1)
    axes.set(xscale="log", xlabel="width, logarithmic", ylim=(-0.03, 1.08))
    axes.set_ylabel("recall of the class")
    return figure


# %%
#| echo: false
#| label: fig-rare-digit
#| caption: Recall of each of the ten digits, once with all keys and once with a tenth of that digit's keys; lines are means. The wider the kernel, the more the number of keys counts.
#| alt: >-
#|   With all keys recall stays near one up to width 0.6 and then falls
#|   slowly. With a tenth of the keys it starts a little lower and falls
#|   steeply, to almost zero at width one.
plot_recall(full, thinned)

# %%
#| check: true
lost = full - thinned  # (10, 9)
assert (lost[:, widths.index(0.8)] > lost[:, 0]).all()
assert thinned[:, -1].max() < 0.05 and thinned[:, 0].mean() > 0.75

# %% [markdown]
# By @eq-two-densities the vote is a density times a *frequency*. With a narrow
# kernel only the nearest keys speak, and a rare class may well own the
# nearest one. With a wide kernel all keys speak with almost the same weight:
# the vote tends to the frequencies, and the rare class never has the majority. How many
# similar keys there are counts; a softmax over keys cannot tell one relevant
# key from a hundred half-relevant ones. Attention in the later sections inherits this.
