# %% [markdown]
# # Solutions: Self-attention and positional encoding
#
# [Back to the section](../self-attention-and-positional-encoding.md#exercises)
#
# All solutions use the layers of the section. Where something is trained, it is small: a few seconds, three seeds.

# %%
import itertools
import math
import time
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F

from snippets.attention_scoring_functions import causal_mask, length_mask
from snippets.datasets import characters_to_ids, documentation, draw_windows
from snippets.multihead_attention import MultiHeadAttention
from snippets.plotting import RULE, line, new_figure, table
from snippets.self_attention_and_positional_encoding import (
    AlibiAttention,
    CharacterModel,
    LearnedPositions,
    PositionalEncoding,
    RotaryAttention,
    alibi_bias,
    rotate,
    sinusoid,
)
from snippets.training import sequence_loss, train

# %% [markdown]
# ## Exercise 1: Order does not matter
#
# *Prove that attention and position-wise layers commute with every order of the tokens; find the line that a causal mask breaks.*
# [Exercise](../self-attention-and-positional-encoding.md#exercise-1)
#
# The tokens are the rows of $\mathbf{X}$, and $\mathbf{P}\mathbf{X}$ has them in another order. A permutation matrix has
# $\mathbf{P}^\top\mathbf{P} = \mathbf{I}$. Line by line:
#
# 1. A linear map works on each row, so $(\mathbf{P}\mathbf{X})\mathbf{W}_q = \mathbf{P}\mathbf{Q}$, and so for keys and values.
# 2. The scores become $\mathbf{P}\mathbf{Q}(\mathbf{P}\mathbf{K})^\top = \mathbf{P}\mathbf{S}\mathbf{P}^\top$: rows and columns in the new order.
# 3. The softmax treats all rows alike, and within a row it does not care which entry stands where: the weights are $\mathbf{P}\mathbf{A}\mathbf{P}^\top$.
# 4. The output is $\mathbf{P}\mathbf{A}\mathbf{P}^\top\mathbf{P}\mathbf{V} = \mathbf{P}\mathbf{A}\mathbf{V}$.
# 5. Heads are joined row by row. A position-wise layer has $g(\mathbf{P}\mathbf{Y}) = \mathbf{P}g(\mathbf{Y})$, and adding the input keeps that. Layers can be stacked.
#
# A mask $\mathbf{M}$ of $0$ and $-\infty$ is added in line 2: $\mathbf{P}\mathbf{S}\mathbf{P}^\top + \mathbf{M}$. The proof goes on only if this is
# $\mathbf{P}(\mathbf{S} + \mathbf{M})\mathbf{P}^\top$, which needs $\mathbf{P}\mathbf{M}\mathbf{P}^\top = \mathbf{M}$. A padding mask that moves along with its tokens is
# no trouble, since it is data. The causal mask belongs to the places: **line 2 breaks**.

# %%
torch.manual_seed(0)
attention = MultiHeadAttention(16, 4).double()
network = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
network = network.double()


def stack(x, mask=None):
    """Attend, then work on each position; two rounds of it, x (B, T, D)."""
    for _ in range(2):
        x = x + attention(x, x, x, mask)[0]
        x = x + network(x)
    return x


# %%
x = torch.randn(3, 7, 16, dtype=torch.float64)
padding = length_mask(torch.tensor([7, 4, 2]), 7)  # (B, 1, S)
causal = causal_mask(7, 7)
largest = {"no mask": 0.0, "padding, moved along": 0.0, "causal": math.inf}
for _ in range(100):
    order = torch.randperm(7)
    while torch.equal(order, torch.arange(7)):
        order = torch.randperm(7)
    moved = x[:, order]
    gap = (stack(moved) - stack(x)[:, order]).abs().max().item()
    largest["no mask"] = max(largest["no mask"], gap)
    gap = stack(moved, padding[:, :, order]) - stack(x, padding)[:, order]
    gap = max(largest["padding, moved along"], gap.abs().max().item())
    largest["padding, moved along"] = gap
    gap = (stack(moved, causal) - stack(x, causal)[:, order]).abs().max()
    largest["causal"] = min(largest["causal"], gap.item())
print(f"no mask: at most {largest['no mask']:.0e}")
print(f"padding: at most {largest['padding, moved along']:.0e}")
print(f"causal: at least {largest['causal']:.2f}")
assert max(largest["no mask"], largest["padding, moved along"]) < 1e-12
assert largest["causal"] > 1e-3

# %% [markdown]
# How many orders leave the causal mask as it is? Only the identity: the first query sees one key, the second two, and so on, so every row of the mask has another number of keys.

# %%
mask = causal_mask(5, 5)
orders = [torch.tensor(order) for order in itertools.permutations(range(5))]
kept = [order for order in orders if torch.equal(mask[order][:, order], mask)]
print(f"{len(kept)} of {len(orders)}")
assert [order.tolist() for order in kept] == [[0, 1, 2, 3, 4]]

# %% [markdown]
# ## Exercise 2: A clock without positions
#
# *Set the weights of one causal head, without any training, so that its output tells the position.*
# [Exercise](../self-attention-and-positional-encoding.md#exercise-2)
#
# Let the query map be zero. All scores are then 0, and the query at position $t$ spreads its weight evenly over the $t + 1$ keys that it may see. Let
# the value be the first coordinate, which is 1 at the start token and 0 elsewhere. The weighted sum is
#
# $$
# o_t = \sum_{s \le t} \frac{1}{t + 1} \, [s = 0] = \frac{1}{t + 1},
# $$
#
# and a network on each position can find $t = 1/o_t - 1$. No other token matters, as long as the start token does not come again.

# %%
clock = MultiHeadAttention(8, 1).double()
with torch.no_grad():
    for parameter in clock.parameters():
        parameter.zero_()
    clock.value_layer.weight[0, 0] = 1.0  # read the mark of the start
    clock.output_layer.weight[0, 0] = 1.0

torch.manual_seed(0)
x = torch.randn(5, 200, 8, dtype=torch.float64)  # (B, T, D)
x[..., 0] = 0.0
x[:, 0, 0] = 1.0  # the start token
output, _ = clock(x, x, x, causal_mask(200, 200))
position = 1 / output[..., 0] - 1
right = torch.arange(200, dtype=torch.float64).expand(5, 200)
print(position[0, [0, 1, 2, 50, 199]].tolist())
assert torch.allclose(position, right, rtol=0, atol=1e-9)

# %% [markdown]
# How far does this clock go? In float16 a number between $2^{-11}$ and $2^{-10}$ has neighbours at a distance of $2^{-21}$. Two readings, $1/t$ and $1/(t + 1)$, are about
# $1/t^2$ apart. They begin to coincide where $1/t^2 < 2^{-21}$, that is from $t = 2^{10.5}$ on.

# %%
readings = (1 / torch.arange(1, 5000, dtype=torch.float64)).half()
same = (readings[1:] == readings[:-1]).nonzero()[0].item()
print(f"predicted {2**10.5:.0f}, found {same}")
assert abs(same / 2**10.5 - 1) < 0.05

# %% [markdown]
# Trained models without positions have more than one head for it, but this is the principle: the mask lets a layer *count*, and what the first layer has counted, the second can
# use. Haviv et al. found that such models do learn the position [@haviv2022].

# %% [markdown]
# ## Exercise 3: The matrix of a shift
#
# *Build the matrix that moves every sinusoidal position on by the same distance; find its eigenvalues.*
# [Exercise](../self-attention-and-positional-encoding.md#exercise-3)
#
# For the pair $j$ with the frequency $\omega_j$ the addition theorems say
#
# $$
# \begin{bmatrix} \sin \omega_j (i + \delta) \\ \cos \omega_j (i + \delta) \end{bmatrix} =
# \begin{bmatrix} \cos \omega_j \delta & \sin \omega_j \delta \\ -\sin \omega_j \delta & \cos \omega_j \delta \end{bmatrix}
# \begin{bmatrix} \sin \omega_j i \\ \cos \omega_j i \end{bmatrix}.
# $$ {#eq-shift-block}
#
# $\mathbf{R}(\delta)$ has these blocks on its diagonal. It does not contain $i$.


# %%
def shift_matrix(shift, width):
    """Give R(δ), width × width, for an even width."""
    matrix = torch.zeros(width, width, dtype=torch.float64)
    for j in range(0, width, 2):
        angle = shift * 10_000 ** (-j / width)
        cos, sin = math.cos(angle), math.sin(angle)
        block = torch.tensor([[cos, sin], [-sin, cos]], dtype=torch.float64)
        matrix[j : j + 2, j : j + 2] = block
    return matrix


code = sinusoid(300, 16, dtype=torch.float64)  # (T, D)
for shift in (1, 7, 100):
    moved = code[:-shift] @ shift_matrix(shift, 16).T
    assert torch.allclose(moved, code[shift:], rtol=0, atol=1e-12)
    turned = rotate(code[:-shift], torch.tensor([-shift]))
    assert torch.allclose(turned, code[shift:], rtol=0, atol=1e-12)

# %% [markdown]
# The last two lines say that `rotate` of the section is the same matrix turned the other way: sine and cosine stand in the pair as $y$ and $x$ do, so that a step forward turns clockwise.
#
# A block has the eigenvectors $(1, \pm i)$ and the eigenvalues $\cos\omega_j\delta \pm i \sin\omega_j\delta = e^{\pm i \omega_j \delta}$. All have the absolute value 1:
# nothing grows or shrinks, however often one shifts. Shifts add up, $\mathbf{R}(a)\,\mathbf{R}(b) = \mathbf{R}(a + b)$, and $\mathbf{R}(\delta)^\top = \mathbf{R}(-\delta)$.

# %%
found = torch.linalg.eigvals(shift_matrix(7, 16))
angles = 7 * 10_000 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
expected = torch.polar(torch.ones(16).double(), torch.cat([angles, -angles]))
distance = (found[:, None] - expected).abs()  # one row an eigenvalue found
matched = distance.argmin(dim=1)
print(f"largest distance {distance.amin(dim=1).max():.0e}")
assert distance.amin(dim=1).max() < 1e-12
assert sorted(matched.tolist()) == list(range(16))

five, seven = shift_matrix(5, 16), shift_matrix(7, 16)
assert torch.allclose(five @ seven, shift_matrix(12, 16), atol=1e-12)
assert torch.allclose(five.T, shift_matrix(-5, 16), atol=1e-12)

# %% [markdown]
# ## Exercise 4: Odd widths and other bases
#
# *For which widths and bases are the positions 0 … 999 at least $10^{-3}$ apart?*
# [Exercise](../self-attention-and-positional-encoding.md#exercise-4)
#
# With width 2 there is one pair, which turns by one radian a step, whatever the base. Since $\pi \approx 355/113$, a distance of 710 steps is nearly 113 whole turns: the angle
# is off by $6 \cdot 10^{-5}$. So width 2 fails for every base.
#
# A second pair must tell positions 710 apart. At width 4 it turns by $\beta^{-1/2}$ a step for the base $\beta$, so it fails where $710\,\beta^{-1/2}$ is within about $10^{-3}$ of
# a whole number of turns, $2\pi k$:
#
# * $k = 0$: the pair is too slow. It fails from $\beta = (710 / 10^{-3})^2 \approx 5 \cdot 10^{11}$ on.
# * $k = 1, 2, \dots, 113$: it fails in a narrow window around $\beta = (710 / 2\pi k)^2 \approx (113/k)^2$. The first is near 12,769, not far from the usual 10,000.


# %%
def codes(width, base, count=1000):
    """Give sinusoids (count, width) with another base, in float64."""
    rates = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(count, dtype=torch.float64)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]


def smallest_gap(width, base):
    """Find the smallest distance of two codes, and the two positions."""
    code = codes(width, base)
    first = code[:1] if width % 2 == 0 else code  # a shift changes nothing
    exact = "donot_use_mm_for_euclid_dist"  # a product would lose digits
    gaps = torch.cdist(first, code, compute_mode=exact)
    gaps.diagonal().fill_(math.inf)
    place = divmod(gaps.argmin().item(), len(code))
    return gaps.min().item(), place


# %%
assert torch.equal(codes(7, 10_000.0), sinusoid(1000, 7, dtype=torch.float64))
bases = (1.0, 2.0, 100.0, 1e4, 1e8, 1e12)
names = ("1", "2", "100", "10⁴", "10⁸", "10¹²")
rows = []
for width in (1, 2, 3, 4, 5, 8):
    gaps = [smallest_gap(width, base)[0] for base in bases]
    rows.append([width, *(f"{gap:.0e}" for gap in gaps)])
    if width <= 2:
        assert max(gaps) < 1e-3
    if width >= 5:
        assert min(gaps[1:]) > 1e-3
table(["width", *(f"base {name}" for name in names)], rows)

# %%
turns = 710 / (2 * math.pi)
for base, apart in (
    (4.9e11, True),
    (5.2e11, False),
    (10_000.0, True),
    (turns**2, False),
    ((turns / 2) ** 2, False),
    (1.0, False),
):
    gap, (first, second) = smallest_gap(4, base)
    print(f"base {base:.6g}: positions {first} and {second}, {gap:.2e} apart")
    assert (gap > 1e-3) == apart
    assert apart or (first, second) == (0, 710)

# %% [markdown]
# An odd width drops the last cosine, and a sine alone takes each value twice in a turn: at the angles $a$ and $\pi - a$. So at width 3 two positions that are 710 apart coincide
# also where $\beta^{-2/3}(i + j)$ is near an odd multiple of $\pi$, which depends on where they stand. The base 100 in the table is such a case.

# %%
gap, (first, second) = smallest_gap(3, 100.0)
halves = 100.0 ** (-2 / 3) * (first + second) / math.pi
print(f"{first} and {second}: {gap:.0e} apart, sum of angles {halves:.3f} π")
assert gap < 1e-3
assert abs(first - second) == 710
assert abs(halves - round(halves)) < 0.01
assert round(halves) % 2 == 1

# %% [markdown]
# From width 5 on every base in the table but 1 is good. What matters in practice is not that codes differ at all, but that near positions have near codes, and far ones do not.

# %% [markdown]
# ## Exercise 5: A number for each distance
#
# *Learn the bias of every distance, and compare with ALiBi.*
# [Exercise](../self-attention-and-positional-encoding.md#exercise-5)
#
# A head has $2k + 1$ numbers for the distances $-k, \dots, k$; what is farther away shares the last one. Only differences between them matter, since the softmax of a row does not change
# when all its scores grow by the same amount. We multiply the parameters by 8 so that a short training can move them far enough, since the optimiser's steps all have about the same size.


# %%
class RelativeAttention(MultiHeadAttention):
    """Attention with a learned bias for each clipped distance."""

    def __init__(self, width, num_heads, reach=16):
        """Begin with no preference: a table (H, 2 · reach + 1) of zeros."""
        super().__init__(width, num_heads)
        self.reach = reach
        self.table = nn.Parameter(torch.zeros(num_heads, 2 * reach + 1))

    def bias(self, num_queries, num_keys):
        """Look up the bias of each pair, (H, T, S)."""
        queries = torch.arange(num_keys - num_queries, num_keys)
        distances = torch.arange(num_keys) - queries[:, None]
        places = distances.clamp(-self.reach, self.reach) + self.reach
        return 8 * self.table[:, places]

    def forward(self, query, key, value, mask=None, need_weights=False):
        """Attend with the bias added to the scores."""
        bias = self.bias(query.shape[1], key.shape[1])
        inputs = query, key, value, mask, need_weights
        return super().forward(*inputs, score_bias=bias)


# %% [markdown]
# First the check that the table can be ALiBi: filled with its straight lines, it gives ALiBi's bias up to the distance $k$.

# %%
layer = RelativeAttention(64, 4, reach=16)
with torch.no_grad():
    layer.table.copy_(alibi_bias(4, 33, 33)[:, 16] / 8)
near = layer.bias(17, 17).detach()
assert layer.table.shape == (4, 2 * 16 + 1)
assert torch.allclose(near, alibi_bias(4, 17, 17))
assert torch.equal(layer.bias(3, 17), layer.bias(17, 17)[:, -3:])

# %%
texts = {part: characters_to_ids(x) for part, x in documentation().items()}
torch.manual_seed(0)
held_out = next(draw_windows(texts["test"], 128, 96))


def make(scheme):
    """Build the model of the section, with either kind of attention."""
    kind = AlibiAttention if scheme == "ALiBi" else RelativeAttention
    model = CharacterModel("none")
    for block in model.blocks:
        block.attention = kind(64, 4)
    return model


def text_loss(model, batch):
    return sequence_loss(model(batch[0]), batch[1], pad_id=-1)


# %%
def losses_by_position(model):
    """Give the loss at positions 16–31 and at 64–95, unseen in training."""
    inputs, targets = held_out
    with torch.no_grad():
        logits = model(inputs)
    losses = F.cross_entropy(logits.mT, targets, reduction="none").mean(0)
    return losses[16:32].mean().item(), losses[64:].mean().item()


def trained(scheme, seed):
    """Train on windows of 32 characters for 100 steps."""
    torch.manual_seed(seed)
    model = make(scheme)
    batches = draw_windows(texts["train"], 16, 32)
    train(model, text_loss, batches, steps=100, rate=1e-2, seed=seed)
    return model


# %%
#| label: tbl-relative-bias
#| caption: Loss on held-out text in nats a character, trained at a length of 32.
rows = []
for seed in range(3):
    alibi = losses_by_position(trained("ALiBi", seed))
    learned_model = trained("relative", seed)
    learned = losses_by_position(learned_model)
    rows.append([seed, *(f"{x:.2f}" for x in (*alibi, *learned))])
    assert learned[0] < alibi[0] - 0.05
    assert learned[1] < alibi[1] - 0.05
    assert learned[1] < learned[0] + 0.25
places = ("at 16–31", "at 64–95")
table(
    ["seed", *(f"{x} {y}" for x in ("ALiBi", "learned") for y in places)],
    rows,
)

# %% [markdown]
# On all three seeds the learned table is ahead, after this very short training, and it holds at three times the length: whatever is more than 16 characters away has the same number, near or far. (With longer training, or
# without the factor of 8, the order may be another one; try it.) @fig-relative-bias shows what it found.


# %%
#| label: fig-relative-bias
#| caption: >-
#|   The bias of the four heads of the first layer by distance into the past, learned (left) and ALiBi's (right), 0 at the token itself.
#| alt: >-
#|   Two panels of four lines over the distance from 0 to 16. On the left all lines rise from 0 to a peak at a distance of one or two characters, then fall
#|   and stay low and wavy. On the right four straight lines fall from 0 with different slopes.
def plot_bias(panels):
    """Draw a line a head, (H, distances), in one panel each."""
    figure, axes = new_figure(columns=2, width=4.6, height=2.4, sharey=True)
    for panel, bias in zip(axes, panels, strict=True):
        for head, row in enumerate(bias.tolist()):
            line(panel, range(len(row)), row, head)
        panel.axhline(0, color=RULE, linewidth=0.6)
        panel.set_xlabel("distance")
    axes[0].set_ylabel("bias")
    return figure


past = learned_model.blocks[0].attention.bias(1, 17)[:, 0].flip(-1).detach()
past = past - past[:, :1]  # (H, 17): relative to the token itself
plot_bias([past, alibi_bias(4, 1, 17)[:, 0].flip(-1)])

# %% [markdown]
# The learned lines are not straight. They are highest at the last few characters, not at the token itself: the model looks for what came just before. ALiBi is always highest at the token
# itself; its queries and keys must do the rest. Shaw et al. and T5 learn such tables [@shaw2018; @raffel2020].

# %%
near = past[:, 1:4].amax(dim=1)
print("highest among distances 1 to 3:", [f"{x:.1f}" for x in near.tolist()])
assert (near > past[:, 8:].mean(dim=1) + 1).all()
assert (near > 0).all()

# %% [markdown]
# ## Exercise 6: Rotated values
#
# *Show that the rotary score depends on the difference of the positions alone; rotate the values, too, and see what breaks.*
# [Exercise](../self-attention-and-positional-encoding.md#exercise-6)
#
# Read a pair of coordinates as a complex number. Rotating by the position $m$ multiplies it by $e^{i \omega m}$, and the dot product of two pairs is the real part of
# $q \bar{k}$. So
#
# $$
# \operatorname{Re}\bigl(q e^{i\omega m} \, \overline{k e^{i\omega n}}\bigr) = \operatorname{Re}\bigl(q \bar{k}\, e^{i\omega (m - n)}\bigr),
# $$
#
# in which $m$ and $n$ occur only as $m - n$. The score is the sum of this over the pairs.

# %%
torch.manual_seed(0)
query, key = torch.randn(2, 1, 16, dtype=torch.float64)  # (1, D) each


def score(m, n):
    """Give the score of a query at m and a key at n."""
    turned = rotate(query, torch.tensor([m])), rotate(key, torch.tensor([n]))
    return (turned[0] @ turned[1].mT).item()


assert abs(score(5, 3) - score(105, 103)) < 1e-12
assert abs(score(5, 3) - score(2, 0)) < 1e-12
assert abs(score(5, 3) - score(3, 5)) > 1e-3
print(f"{score(5, 3):.4f} {score(105, 103):.4f}, but {score(3, 5):.4f}")

# %% [markdown]
# With rotated values the output at $m$ is $\sum_n \alpha_{mn} \mathbf{R}_n \mathbf{v}_n$. The weights still depend on differences, but the output does not: if everything moves on by
# $\delta$, it is turned by $\mathbf{R}_\delta$. The same words would get another vector at another place of the text, which the output projection then mixes.


# %%
def attend(query, key, value, positions, turn_values=False, turn_back=False):
    """Attend with rotary positions, and perhaps with rotated values."""
    turned = rotate(query, positions), rotate(key, positions)
    value = rotate(value, positions) if turn_values else value
    output = F.scaled_dot_product_attention(*turned, value)
    return rotate(output, -positions) if turn_back else output


inputs = torch.randn(3, 1, 9, 16, dtype=torch.float64)  # query, key, value
here, there = torch.arange(9), torch.arange(9) + 50
plain = attend(*inputs, here)
assert torch.allclose(plain, attend(*inputs, there))

turned = [attend(*inputs, places, True) for places in (here, there)]
print(f"moved by {(turned[0] - turned[1]).abs().max():.2f}")
assert (turned[0] - turned[1]).abs().max() > 0.1
assert torch.allclose(turned[1], rotate(turned[0], torch.tensor(50)))

# %% [markdown]
# It can be mended: turn the output back by its own position. Then $\mathbf{R}_{-m} \sum_n \alpha_{mn} \mathbf{R}_n \mathbf{v}_n = \sum_n \alpha_{mn} \mathbf{R}_{n - m} \mathbf{v}_n$ is
# relative again, and even richer than before: what arrives tells how far it has come.

# %%
back = [attend(*inputs, places, True, True) for places in (here, there)]
assert torch.allclose(*back)
assert not torch.allclose(back[0], plain, atol=1e-2)

# %% [markdown]
# ## Exercise 7: Where the lines cross
#
# *Predict from operation counts the length at which attention costs as much as a GRU; measure; explain.*
# [Exercise](../self-attention-and-positional-encoding.md#exercise-7)
#
# A gated recurrent unit multiplies the input and the state by three $D \times D$ matrices each [@cho2014learning]: $2 \cdot 6 D^2 = 12 D^2$ operations a step, $12 T D^2$ for the sequence. Attention has
# four projections, $8 T D^2$, then scores and weighted sums, $4 T^2 D$. They are equal where
#
# $$
# 12 T D^2 = 8 T D^2 + 4 T^2 D \quad\Longleftrightarrow\quad T = D .
# $$
#
# For the measurement we time both at two lengths, and fit $c_1 T$ to the GRU and $a_1 T + a_2 T^2$ to attention. The lines cross at $T = (c_1 - a_1)/a_2$.


# %%
def crossing(width, lengths=(1024, 4096), rounds=5):
    """Time a GRU and attention; → where they cross, operations a second."""
    gru = nn.GRU(width, width, batch_first=True).eval()
    attention = MultiHeadAttention(width, 1).eval()
    layers = gru, lambda x: attention(x, x, x)
    times = []
    for length in lengths:
        x, runs = torch.randn(1, length, width), [[], []]
        for _ in range(rounds + 1):  # the first round only warms up
            for layer, run in zip(layers, runs, strict=True):
                start = time.process_time()
                layer(x)
                run.append(time.process_time() - start)
        times.append([median(run[1:]) for run in runs])
    a, b = lengths
    ratio = [row[1] / length for row, length in zip(times, lengths)]
    square = (ratio[1] - ratio[0]) / (b - a)
    meet = (times[1][0] / b - ratio[0] + square * a) / square
    done = 12 * b * width**2, 8 * b * width**2 + 4 * b**2 * width
    return meet, [x / y for x, y in zip(done, times[1])]


# %%
#| timing: true
#| label: tbl-crossing
#| caption: >-
#|   Length at which attention (one head, one sample) takes as long as a GRU, and billions of operations a second at a length of 4,096.
rows, meets, speeds = [], [], []
torch.manual_seed(0)
with torch.no_grad():
    for width in (32, 64, 128):
        meet, speed = crossing(width)
        meets.append(meet)
        speeds.append(speed)
        meet = round(meet, 1 - math.floor(math.log10(meet)))  # two digits
        rates = [f"{x / 1e9:.2g}" for x in speed]
        rows.append((width, width, f"{meet:,.0f}", *rates))
table(["D", "predicted T", "found T", "GRU", "attention"], rows)

# %%
assert all(meet > 4 * D for meet, D in zip(meets, (32, 64, 128)))
assert meets[0] > meets[2]
assert all(fast > 4 * slow for slow, fast in speeds)

# %% [markdown]
# The prediction is far too low, and where it rises with $D$, the measured length falls. Counts would decide if an operation took the same time everywhere. But the GRU runs
# its steps one after the other, each on one vector, with a fixed cost to start each small product. Attention runs a few large products that keep the processor busy, so it does many more operations a second, as
# the last two columns show. The fixed cost matters most for small $D$, which is why the lines cross later there. A prediction must count what is *sequential*, not only what is done.

# %% [markdown]
# ## Exercise 8: The neighbours on both sides
#
# *Which scheme lets one layer find the previous and the next symbol? What does a layer without positions reach?*
# [Exercise](../self-attention-and-positional-encoding.md#exercise-8)
#
# Without positions a layer knows which symbols there are, but not where. The best guess for either neighbour is the symbol that is most frequent among the *other* nine
# places. If it occurs $k$ times there, each neighbour is right with the probability $k/9$, both with $k(k - 1)/72$. First the average of this over random sequences:

# %%
COUNT, LENGTH = 8, 10  # symbols, places
torch.manual_seed(0)
tokens = torch.randint(COUNT, (20_000, LENGTH))
own = F.one_hot(tokens, COUNT)  # (B, T, symbols)
others = own.sum(1, keepdim=True) - own
most = others.amax(dim=-1)[:, 1:-1].double()  # k, at the inner places
predicted_one = (most / 9).mean().item()
predicted_both = (most * (most - 1) / 72).mean().item()
print(f"one {predicted_one:.3f}, both {predicted_both:.3f}", end=", ")
print(f"blind guess {1 / COUNT:.3f} and {1 / COUNT**2:.3f}")

# %% [markdown]
# This is above 1/8 and 1/64, because in ten places some symbol is bound to occur more often than others. Now the runs. The bias in the projections gives rotary attention queries and keys that do not depend on
# the symbol.


# %%
class Neighbours(nn.Module):
    """Find the symbols before and after each inner place, in one layer."""

    def __init__(self, scheme, width=32):
        """Choose what adds positions, and the attention of two heads."""
        super().__init__()
        added = {"sinusoidal": PositionalEncoding, "learned": LearnedPositions}
        inside = {"rotary": RotaryAttention, "ALiBi": AlibiAttention}
        self.embedding = nn.Embedding(COUNT, width)
        self.positions = added.get(scheme, nn.Identity)(width, LENGTH)
        kind = inside.get(scheme, MultiHeadAttention)
        self.attention = kind(width, 2, bias=True)
        self.read_out = nn.Linear(width, 2 * COUNT)

    def forward(self, tokens):
        """Give logits (B, T − 2, 2, symbols)."""
        x = self.positions(self.embedding(tokens))
        found, _ = self.attention(x, x, x)
        return self.read_out(found[:, 1:-1]).unflatten(-1, (2, COUNT))


# %%
def neighbours(tokens):
    """Give the symbols before and after, (B, T − 2, 2)."""
    return torch.stack([tokens[:, :-2], tokens[:, 2:]], dim=-1)


def draw():
    """Yield batches of random sequences for ever."""
    while True:
        yield torch.randint(COUNT, (64, LENGTH))


def guess_loss(model, tokens):
    logits, targets = model(tokens), neighbours(tokens)
    return F.cross_entropy(logits.flatten(0, 2), targets.flatten())


# %%
def accuracy(scheme, seed):
    """Train, then give the share right: a symbol, and both."""
    torch.manual_seed(seed)
    model = Neighbours(scheme)
    train(model, guess_loss, draw(), steps=200, rate=1e-2, seed=seed)
    with torch.no_grad():
        guesses = model(tokens[:2000]).argmax(-1)
    right = (guesses == neighbours(tokens[:2000])).double()
    return right.mean().item(), right.prod(-1).mean().item()


# %%
#| label: tbl-neighbours
#| caption: Share of symbols, and of pairs, that one layer of two heads gets right, on three seeds.
schemes = ("none", "ALiBi", "learned", "sinusoidal", "rotary")
scores = {x: [accuracy(x, seed) for seed in range(3)] for x in schemes}
rows = []
for scheme, runs in scores.items():
    seeds = [" · ".join(f"{x:.2f}" for x in row) for row in zip(*runs)]
    rows.append((scheme, *seeds))
table(["scheme", "a symbol", "both"], rows)

# %%
for one, both in scores["none"]:
    assert abs(one - predicted_one) < 0.03
    assert abs(both - predicted_both) < 0.02
for scheme in ("learned", "sinusoidal", "rotary"):
    assert min(both for _, both in scores[scheme]) > 0.9
assert all(0.33 < one < 0.5 for one, _ in scores["ALiBi"])
assert max(both for _, both in scores["ALiBi"]) < 0.2

# %% [markdown]
# *None* reaches what was predicted. *Learned*, *sinusoidal* and *rotary* positions solve the task: one head turns to the left, the other to the right. ALiBi without a causal mask knows
# near from far, but its bias is the same on both sides, and its slopes are fixed: it gets a little more than *none*, and never both sides. In a causal model the mask takes one side away, and the question does not come
# up.
