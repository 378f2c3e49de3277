# %% [markdown]
# # Solutions: Multi-head attention
#
# [Back to the section](../multihead-attention.md#exercises)
#
# The solutions use the layers and the look-up of the section. Everything is trained for at most 300 steps, on three seeds.

# %%
import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

from snippets.attention_scoring_functions import (
    scaled_dot_product_attention,
)
from snippets.multihead_attention import (
    LookUp,
    MultiHeadAttention,
    draw_boards,
    look_up_loss,
    merge_heads,
    right_answers,
    split_heads,
)
from snippets.plotting import table
from snippets.training import evaluating, train

SEEDS = range(3)

# %% [markdown]
# ## Exercise 1: Predict the failure rate
#
# *Predict how often one head is right when the query holds $k$ names, and check it for $k = 3$.*
# [Exercise](../multihead-attention.md#exercise-1)
#
# As in the section, suppose that the read-out favours no symbol. All $k$ places then see the same weights and give the same answer: the head holds a *vote* in which each name
# votes for its symbol, with its weight. All answers are right only if all $k$ symbols are equal, with probability $1/n^{k-1}$.
#
# How many answers are right otherwise depends on the weights. If one of them is larger than all others together, its symbol wins always. It is right in its own place, and in each other place by
# chance:
#
# $$
# p_{\text{low}} = \frac1k \left( 1 + \frac{k - 1}{n} \right) .
# $$
#
# For $k = 2$ one of the two always outweighs the other, and this is @eq-failure-rate. For $k = 3$ and nearly equal weights, two equal symbols outvote the third. All three are equal with probability $1/n^2$, exactly two
# with $3(n-1)/n^2$, and then two of three answers are right, whichever names they belong to:
#
# $$
# p_{\text{high}} = \frac{1}{n^2} \left( 1 + \tfrac23 \cdot 3(n - 1) + \tfrac13 (n - 1)(n - 2) \right) .
# $$
#
# For $n = 8$ the rate must lie between $26.7/64 = 41.7\,\%$ and $29/64 = 45.3\,\%$, and all three are right on $1/64 = 1.6\,\%$ of the boards. The model adds three vectors to one query and gives three answers:


# %%
def draw_questions(count, num_asked):
    """Draw boards as in the section, but ask for `num_asked` names."""
    names, symbols, _, _ = draw_boards(count)
    places = torch.rand(names.shape).argsort(-1)[:, :num_asked]
    return names, symbols, names.gather(1, places), symbols.gather(1, places)


def endless_questions(num_asked):
    """Yield batches of 128 questions."""
    while True:
        yield draw_questions(128, num_asked)


# %%
class LookUpMany(nn.Module):
    """Look up k names with one query, the sum of k learned vectors."""

    def __init__(self, num_asked, num_heads, width=36):
        """Give each of the k places its own vectors for the 25 names."""
        super().__init__()
        self.asked = nn.Embedding(num_asked * 25, width)
        self.name, self.symbol = (
            nn.Embedding(25, width),
            nn.Embedding(8, width),
        )
        self.attend = MultiHeadAttention(width, num_heads)
        self.read = nn.Linear(width, num_asked * 8)
        self.shift = 25 * torch.arange(num_asked)

    def forward(self, names, symbols, asked, need_weights=False):
        """Give logits (B, k, 8) and weights (B, H, 1, S), or None."""
        query = self.asked(asked + self.shift).sum(1, keepdim=True)
        board = self.name(names), self.symbol(symbols)
        output, weights = self.attend(query, *board, None, need_weights)
        return self.read(output[:, 0]).unflatten(-1, (-1, 8)), weights


# %%
def score(model, boards):
    """Give the share of right symbols, and of boards with all right."""
    with evaluating(model):
        right = right_answers(model, boards).double()
    return right.mean().item(), right.prod(-1).mean().item()


def vote(model, boards):
    """Let the names vote with the weights of the only head; → as `score`."""
    names, symbols, asked, answer = boards
    with evaluating(model):
        _, weights = model(names, symbols, asked, need_weights=True)
    there = names[:, None] == asked[:, :, None]  # (B, k, S)
    votes = (there * weights[:, 0]).sum(-1)  # (B, k)
    counts = torch.zeros(len(names), 8).scatter_add(1, answer, votes)
    right = (counts.argmax(-1, keepdim=True) == answer).double()
    return right.mean().item(), right.prod(-1).mean().item()


# %%
torch.manual_seed(1000)
fresh_questions = draw_questions(4000, 3)
rates = {}
for num_heads, steps in ((1, 200), (3, 300)):
    for seed in SEEDS:
        torch.manual_seed(seed)
        model, batches = LookUpMany(3, num_heads), endless_questions(3)
        train(model, look_up_loss, batches, steps=steps, rate=0.01, seed=seed)
        rates[str(num_heads), seed] = score(model, fresh_questions)
        if num_heads == 1:
            rates["1, a vote", seed] = vote(model, fresh_questions)

# %%
table(
    ["heads", "seed", "a symbol", "all three"],
    [
        (*key, *(f"{x:.1%}" for x in found))
        for key, found in sorted(rates.items())
    ],
    align="lrrr",
)

# %%
low, high, every = (1 + 2 / 8) / 3, 29 / 64, 1 / 64
for seed in SEEDS:
    one_symbol, all_three = rates["1", seed]
    assert low - 0.02 < one_symbol < high + 0.02
    assert abs(one_symbol - rates["1, a vote", seed][0]) < 0.03
    assert abs(all_three - every) < 0.02
    assert rates["3", seed][1] > 0.9

# %% [markdown]
# The rate lies between the two bounds, and the vote with the model's own weights foretells it almost exactly: the head does hold a vote. With three heads all three answers are right.

# %% [markdown]
# ## Exercise 2: Head algebra
#
# *Write a layer as a sum over heads, with two matrices a head, and bound their rank.*
# [Exercise](../multihead-attention.md#exercise-2)
#
# Cut $\mathbf{W}^o = [\mathbf{W}^o_1, \dots, \mathbf{W}^o_H]$ into blocks of $d = D / H$ columns. A product with a joined vector is the sum of the products with its parts:
#
# $$
# \begin{gathered}
# \mathbf{W}^o \begin{bmatrix} \mathbf{h}_1 \\ \vdots \\ \mathbf{h}_H \end{bmatrix} = \sum_{i} \mathbf{W}^o_i \mathbf{h}_i
# = \sum_i \sum_s \alpha_{i,s}\, \underbrace{\mathbf{W}^o_i \mathbf{W}^v_i}_{\mathbf{N}_i} \mathbf{v}_s , \\
# (\mathbf{W}^q_i\mathbf{q})^\top \mathbf{W}^k_i\mathbf{k} = \mathbf{q}^\top \underbrace{(\mathbf{W}^q_i)^\top \mathbf{W}^k_i}_{\mathbf{M}_i} \mathbf{k} .
# \end{gathered}
# $$
#
# $\mathbf{M}_i$ decides where a head looks and $\mathbf{N}_i$ what it brings from there [@elhage2021]. Both are $D \times D$, and both are products of a thin matrix of $d$ columns with
# one of $d$ rows, so their rank is at most $d$.

# %%
torch.manual_seed(0)
width, num_heads = 32, 4
size = width // num_heads
layer = MultiHeadAttention(width, num_heads)
query, board = torch.randn(3, 5, width), torch.randn(3, 7, width)


def blocks(linear):
    """Cut the rows of a weight into heads, (H, d, D)."""
    return linear.weight.detach().unflatten(0, (num_heads, size))


look = blocks(layer.query_layer).mT @ blocks(layer.key_layer)  # M, (H, D, D)
after = layer.output_layer.weight.detach().unflatten(1, (num_heads, size))
bring = after.transpose(0, 1) @ blocks(layer.value_layer)  # N, (H, D, D)
ranks = [torch.linalg.matrix_rank(x).tolist() for x in (look, bring)]
print("ranks of M:", ranks[0], " of N:", ranks[1])

# %%
scores = query[:, None] @ look @ board[:, None].mT / math.sqrt(size)
weights = scores.softmax(-1)  # (B, H, T, S)
total = sum(
    weights[:, h] @ board @ bring[h].mT  # one head, projected
    for h in range(num_heads)
)
output, found = layer(query, board, board, need_weights=True)
assert ranks == [[size] * num_heads] * 2
assert torch.allclose(weights, found, atol=1e-5)
assert torch.allclose(total, output, atol=1e-5)

# %% [markdown]
# Joining is bookkeeping: the heads are *added*, each after its own projection. A thin $\mathbf{M}_i$ can compare only $d$ combinations of coordinates, however wide the
# inputs are; exercise 6 makes that hurt.

# %% [markdown]
# ## Exercise 3: What can be moved without a trace
#
# *Permute heads, find all other changes of the weights that leave the layer as it is, and count them.*
# [Exercise](../multihead-attention.md#exercise-3)
#
# **Heads.** The sum of exercise 2 has no order. Moving the blocks of rows of $\mathbf{W}^q, \mathbf{W}^k, \mathbf{W}^v$ together with the blocks of columns of $\mathbf{W}^o$ changes nothing.
#
# **Coordinates inside a head.** The layer depends on $\mathbf{M}_i$ and $\mathbf{N}_i$ alone. For any invertible $\mathbf{A}$ and $\mathbf{C}$ of size $d \times d$,
#
# $$
# \left( \mathbf{A}\mathbf{W}^q_i \right)^\top \mathbf{A}^{-\top} \mathbf{W}^k_i = \mathbf{M}_i, \qquad
# \mathbf{W}^o_i\mathbf{C}^{-1} \, \mathbf{C}\mathbf{W}^v_i = \mathbf{N}_i .
# $$

# %%
other = copy.deepcopy(layer)
order = [2, 0, 3, 1]
turn = torch.randn(2, num_heads, size, size)
turn = turn + 4 * torch.eye(size)  # far from singular
with torch.no_grad():
    rows = [
        turn[0] @ blocks(layer.query_layer),
        torch.linalg.inv(turn[0]).mT @ blocks(layer.key_layer),
        turn[1] @ blocks(layer.value_layer),
    ]
    back = after.transpose(0, 1) @ torch.linalg.inv(turn[1])  # (H, D, d)
    other.query_layer.weight.copy_(rows[0][order].flatten(0, 1))
    other.key_layer.weight.copy_(rows[1][order].flatten(0, 1))
    other.value_layer.weight.copy_(rows[2][order].flatten(0, 1))
    other.output_layer.weight.copy_(back[order].transpose(0, 1).flatten(1))

new_output, new_weights = other(query, board, board, need_weights=True)
assert torch.allclose(new_output, output, atol=1e-4)
assert torch.allclose(new_weights, weights[:, order], atol=1e-4)
print(f"largest difference: {(new_output - output).abs().max():.0e}")

# %% [markdown]
# **Are these all?** Almost all weights have blocks of full rank $d$. Two factorisations of the same matrix of rank $d$ into $d$ columns and $d$ rows differ by an invertible $d \times d$
# matrix, so nothing else leaves $\mathbf{M}_i$ and $\mathbf{N}_i$ alone. That makes $2 d^2$ free directions a head, $2 H d^2 = 2D^2 / H$ in a layer of $4D^2$ numbers. Two layers with different
# matrices could still agree on every input. If that happened along a direction, the output would not change to first order there, and the rank of its derivative with respect to the weights
# would be below $4D^2 - 2D^2/H$. The rank can be computed:


# %%
def free_directions(num_heads, bias, width=4):
    """Give the number of weights, and the rank of the output's slope."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(width, num_heads, bias=bias).double()
    names, values = zip(*layer.named_parameters(), strict=True)
    query, board = torch.randn(2, 20, 3, width, dtype=torch.float64)

    def output(*values):
        weights = dict(zip(names, values, strict=True))
        arguments = query, board, board, None, True
        return torch.func.functional_call(layer, weights, arguments)[0]

    every = tuple(range(len(values)))
    slopes = torch.func.jacrev(output, every)(*values)
    slopes = [slope.detach().reshape(query.numel(), -1) for slope in slopes]
    slope = torch.cat(slopes, dim=1)
    return slope.shape[1], torch.linalg.matrix_rank(slope, rtol=1e-10).item()


counts = {
    (heads, bias): free_directions(heads, bias)
    for bias in (False, True)
    for heads in (1, 2, 4)
}

# %%
table(
    ["heads", "biases", "weights", "rank", "free"],
    [
        (heads, "yes" if bias else "no", total, rank, total - rank)
        for (heads, bias), (total, rank) in counts.items()
    ],
)

# %%
for (heads, bias), (total, rank) in counts.items():
    assert total == 64 + 16 * bias
    assert total - rank == 2 * 4**2 // heads + 8 * bias

# %% [markdown]
# The prediction is exact. With biases, $2D$ more directions are free. The bias of the keys adds the same number to all scores of a query, which the softmax does not see. The bias of the values passes
# through every average unchanged, since weights sum to one, and could as well be part of the last bias.

# %% [markdown]
# ## Exercise 4: Which heads matter
#
# *Compare three cheap measures of a head's importance with knocking it out.*
# [Exercise](../multihead-attention.md#exercise-4)
#
# Three models with eight heads, where two would do. For each head $i$ with the output $\mathbf{h}_i$, let $g_i = 1$ be a gate in front of $\mathbf{W}^o_i\mathbf{h}_i$.


# %%
def eight_heads(seed):
    """Train the look-up of the section with eight heads."""
    torch.manual_seed(seed)
    model = LookUp(MultiHeadAttention(32, 8), nn.Linear(32, 16))
    train(model, look_up_loss, endless(), steps=300, rate=0.01, seed=seed)
    return model


def endless(**sizes):
    """Yield batches of 128 boards."""
    while True:
        yield draw_boards(128, **sizes)


models = [eight_heads(seed) for seed in SEEDS]
torch.manual_seed(1000)
test_boards = draw_boards(2000)


# %%
def without_head(model, head):
    """Give a copy whose output projection does not hear one head."""
    model = copy.deepcopy(model)
    columns = model.attend.output_layer.weight.unflatten(1, (8, -1))
    with torch.no_grad():
        columns[:, head] = 0
    return model


def knock_out(model):
    """Give the rise of the loss without each head, (H,)."""
    with torch.no_grad():
        whole = look_up_loss(model, test_boards)
        parts = [
            look_up_loss(without_head(model, h), test_boards) for h in range(8)
        ]
    return torch.stack(parts) - whole


# %%
def measures(model):
    """Give slope at the gate, size and minus the entropy of each head."""
    *question, answer = test_boards
    kept = []
    hook = model.attend.output_layer.register_forward_pre_hook(
        lambda _, inputs: kept.append(inputs[0])
    )
    logits, weights = model(*question, need_weights=True)  # weights (B, H, S)
    hook.remove()
    (joined,) = kept  # (B, 1, D)
    loss = F.cross_entropy(
        logits.flatten(0, 1), answer.flatten(), reduction="sum"
    )
    (slope,) = torch.autograd.grad(loss, joined)
    gates = (slope * joined).unflatten(-1, (8, -1)).sum(-1)  # (B, 1, H)
    heads = joined.detach().unflatten(-1, (8, -1))[:, 0].transpose(0, 1)
    columns = model.attend.output_layer.weight.unflatten(1, (8, -1))
    parts = heads @ columns.detach().permute(1, 2, 0)  # (H, B, D)
    entropy = torch.special.entr(weights.detach()).sum(-1).mean(0)
    return gates.abs().mean((0, 1)), parts.norm(dim=-1).mean(1), -entropy


# %% [markdown]
# The slope of the loss in the gate is $\partial L / \partial g_i = (\partial L / \partial \mathbf{h}_i)^\top \mathbf{h}_i$ by the chain rule; its absolute value is averaged over boards
# [@michel2019]. The size is the mean length of $\mathbf{W}^o_i\mathbf{h}_i$. Agreement is measured by the correlation of the *ranks* (Spearman's), since only the order of the heads matters
# for pruning.


# %%
def rank_correlation(first, second):
    """Correlate the ranks of two lists of numbers."""
    ranks = torch.stack([first, second]).argsort(-1).argsort(-1).double()
    return torch.corrcoef(ranks)[0, 1].item()


agreement = []  # (seed, measure)
for model in models:
    rise = knock_out(model)
    agreement.append([rank_correlation(rise, x) for x in measures(model)])
table(
    ["seed", "gate", "size", "low entropy"],
    [
        (seed, *(f"{x:.2f}" for x in row))
        for seed, row in zip(SEEDS, agreement, strict=True)
    ],
)

# %%
gate, size_of, focus = torch.tensor(agreement).mean(0).tolist()
assert size_of > 0.6
assert min(gate, size_of, focus) > 0.3
median = max(knock_out(model).median().item() for model in models)
assert median < 0.05

# %% [markdown]
# All three agree with knocking out, none of them fully: the mean correlation is `{python} f"{size_of:.2f}"` for the size, `{python} f"{gate:.2f}"` for the gate and
# `{python} f"{focus:.2f}"` for the entropy. The slope at the gate sees an infinitely small change, and where the loss is near zero that change is nearly free for every head. The entropy
# is blind to what the read-out makes of a head: a sharp head can be ignored. The size sees the whole head, but in a deep model a later layer may erase what it wrote. Eight
# heads of three runs do not settle which measure is best.
#
# In each model half of the heads can go, one at a time, at a cost of less than 0.05 nats: two heads would do for this task.

# %% [markdown]
# ## Exercise 5: Grouped queries from a trained model
#
# *Average the key and value heads of a trained model within groups, and repair the damage by a little training.*
# [Exercise](../multihead-attention.md#exercise-5)
#
# The rows of $\mathbf{W}^k$ and $\mathbf{W}^v$ come in eight blocks. Neighbouring blocks that will share a head are replaced by their mean, as Ainslie et al. [@ainslie2023] do.


# %%
def grouped(model, num_kv_heads):
    """Give a copy with fewer heads of keys and values, the means of old."""
    attend = MultiHeadAttention(32, 8, num_kv_heads=num_kv_heads)
    state = model.state_dict()
    for name in ("attend.key_layer.weight", "attend.value_layer.weight"):
        blocks = state[name].unflatten(0, (num_kv_heads, -1, 4))
        state[name] = blocks.mean(1).flatten(0, 1)
    copied = LookUp(attend, nn.Linear(32, 16))
    copied.load_state_dict(state)
    return copied


def test_loss(model):
    """Give the loss on the test boards."""
    with evaluating(model):
        return look_up_loss(model, test_boards).item()


# %%
healed = {}
for groups in (8, 4, 2, 1):
    for seed, model in zip(SEEDS, models, strict=True):
        few = grouped(model, groups)
        before = test_loss(few)
        train(few, look_up_loss, endless(), steps=50, rate=0.003, seed=seed)
        healed[groups, seed] = before, test_loss(few)
table(
    ["key-value heads", *(f"seed {seed}: before, after" for seed in SEEDS)],
    [
        (
            groups,
            *("{:.2f}, {:.2f}".format(*healed[groups, s]) for s in SEEDS),
        )
        for groups in (8, 4, 2, 1)
    ],
    align="rrrr",
)

# %%
for seed in SEEDS:
    assert abs(healed[8, seed][0] - test_loss(models[seed])) < 1e-4
    for groups in (4, 2, 1):
        before, afterwards = healed[groups, seed]
        assert before > 0.5
        assert afterwards < before - 0.1
    assert healed[4, seed][1] < healed[2, seed][1] < healed[1, seed][1]
    assert healed[4, seed][1] < healed[4, seed][0] / 2

# %% [markdown]
# With eight groups nothing changes. Any averaging of trained heads does great damage, because heads that have specialised on different names are mixed, and a mean of two maps is
# neither. 50 steps repair most of it for four heads, part of it for two and little for one: a single key of width 4 has to serve all eight queries. The large models of
# Ainslie et al. have wide heads, and their repair takes a twentieth of the pretraining.

# %% [markdown]
# ## Exercise 6: Too thin
#
# *Raise the number of heads at a fixed width until the model fails; say why, and mend it.*
# [Exercise](../multihead-attention.md#exercise-6)
#
# At width 32, 32 heads are one number wide. Then the keys of a head are points on a line, and the score of a record is $q\,k_s$. For $q > 0$ the largest key wins, for $q < 0$ the smallest.
# **No query can give the largest weight to a key in between.** In $d$ dimensions a key can win exactly if it is a corner of the convex hull of all keys. On a line there are two corners, in
# the plane all ten keys can be corners. With two records on the board, two corners are enough.

# %%
wide = "8 heads of width 4, 10 records"  # the models of exercise 4
settings = {
    "32 heads of width 1, 10 records": (32, 1, 10),
    "32 heads of width 1, 2 records": (32, 1, 2),
    "32 heads of width 4, 10 records": (32, 4, 10),
}


class WideHeads(MultiHeadAttention):
    """Choose the width of a head freely: heads of any size, joined."""

    def __init__(self, width, num_heads, size):
        """Replace the four maps of a layer with `num_heads` heads."""
        super().__init__(width, num_heads)
        joined = num_heads * size
        self.query_layer = nn.Linear(width, joined, bias=False)
        self.key_layer = nn.Linear(width, joined, bias=False)
        self.value_layer = nn.Linear(width, joined, bias=False)
        self.output_layer = nn.Linear(joined, width, bias=False)


# %%
torch.manual_seed(1000)
known = draw_boards(2000)
thin = {
    (wide, seed): score(model, known)[1]
    for seed, model in zip(SEEDS, models, strict=True)
}
for name, (num_heads, size, num_records) in settings.items():
    for seed in SEEDS:
        torch.manual_seed(seed)
        layer = WideHeads(32, num_heads, size)
        model = LookUp(layer, nn.Linear(32, 16))
        boards = endless(num_records=num_records)
        train(model, look_up_loss, boards, steps=150, rate=0.01, seed=seed)
        torch.manual_seed(1000)
        test = draw_boards(2000, num_records=num_records)
        thin[name, seed] = score(model, test)[1]

# %%
table(
    ["both symbols right", *(f"seed {seed}" for seed in SEEDS)],
    [
        (name, *(f"{thin[name, seed]:.2f}" for seed in SEEDS))
        for name in (wide, *settings)
    ],
)

# %%
thinnest, two, mended = settings
for seed in SEEDS:
    assert thin[wide, seed] > 0.95
    assert thin[thinnest, seed] < 0.75
    assert thin[two, seed] > 0.95
    assert thin[mended, seed] > 0.95

# %% [markdown]
# The fall is no matter of parameters: both layers with 10 records in the first two rows have $4 \cdot 32^2$. The last row keeps 32 heads and gives each a width of 4. The layer then is wider than its
# input, which is what Bhojanapalli et al. [@bhojanapalli2020] propose: the width of a head should follow from the length of the sequence, not from $D / H$.
# Nor are 32 thin heads helpless together: a name can be at an end of the line in some of them. (The first row shows the models of exercise 4, trained twice as long; the other rows have 150 steps each.)
#
# How many of ten random keys can win some query, by the width of a head? A query was drawn 20,000 times:

# %%
torch.manual_seed(0)
winners = {}
for size in (1, 2, 3, 4, 8):
    scores = torch.randn(20_000, size) @ torch.randn(size, 10)
    winners[size] = len(scores.argmax(-1).unique())
print(winners)
assert winners[1] == 2 < winners[2] < winners[8] == 10

# %% [markdown]
# ## Exercise 7: Find the bug
#
# *Of six ways to cut and join heads five are wrong. One test finds them all and spares the sixth.*
# [Exercise](../multihead-attention.md#exercise-7)


# %%
def view(x, h):  # (B, T, D) → (B, H, T, d)
    return x.reshape(len(x), h, x.shape[1], -1)


def view_back(x, h):
    return x.reshape(len(x), x.shape[2], -1)


def cut(x, h):
    return x.unflatten(-1, (h, -1)).transpose(1, 2)


def join(x, h):
    return x.transpose(1, 2).flatten(2)


# %%
def fold(x, h):  # (B, T, D) → (B · H, T, d)
    return cut(x, h).flatten(0, 1)


def unfold(x, h):
    return x.unflatten(0, (h, -1)).permute(1, 2, 0, 3).flatten(2)


def turn(x, h):
    x = x.unflatten(-1, (h, -1))
    return x.permute(0, 2, 3, 1).reshape(len(x), h, x.shape[1], -1)


def comb(x, h):
    return x.unflatten(-1, (-1, h)).permute(0, 3, 1, 2)


def comb_back(x, h):
    return x.permute(0, 2, 3, 1).flatten(2)


# %%
ways = {
    "view, view back": (view, view_back),
    "cut, view back": (cut, view_back),
    "view, join": (view, join),
    "fold, unfold": (fold, unfold),
    "turn, join": (turn, join),
    "comb, comb back": (comb, comb_back),
    "the section's": (split_heads, lambda x, h: merge_heads(x)),
}


def attend(way, x, mask=None):
    """Attend with three heads and no projections, (B, T, D) → the same."""
    cut, join = way
    heads = cut(x, 3)
    return join(scaled_dot_product_attention(heads, heads, heads, mask)[0], 3)


# %% [markdown]
# Attention without positions must commute with any order of the tokens: if $\pi$ moves the tokens, $f(\pi x) = \pi f(x)$. A wrong reshape makes a head read pieces of several tokens, or of several samples, as one
# token. Which pieces depends on where the tokens stand, and so a shuffle shows it. **Each sample must be shuffled in its own way.** The pair *fold, unfold* hands heads to the wrong samples, whole
# sequences at a time; if all samples are shuffled alike, it commutes as well. The table compares this test with three weaker ones.


# %%
torch.manual_seed(0)
x = torch.randn(2, 5, 12)  # (B, T, D); B, T and H differ
rows = torch.arange(2)[:, None]
alike = torch.tensor([[2, 0, 4, 1, 3]] * 2)
apart = torch.tensor([[2, 0, 4, 1, 3], [1, 4, 3, 0, 2]])


def keeps_the_shape(way):
    return attend(way, x).shape == x.shape


def is_causal(way):
    mask, later = torch.ones(5, 5).tril() > 0, x.clone()
    later[:, -1] += 1
    pair = attend(way, x, mask), attend(way, later, mask)
    return torch.allclose(pair[0][:, :-1], pair[1][:, :-1], atol=1e-5)


def commutes(way, order):
    moved = attend(way, x[rows, order])
    return torch.allclose(moved, attend(way, x)[rows, order], atol=1e-5)


# %%
tests = {
    "shape": keeps_the_shape,
    "causality": is_causal,
    "one shuffle for all": lambda way: commutes(way, alike),
    "a shuffle each": lambda way: commutes(way, apart),
}
marks = {
    name: [test(way) for test in tests.values()] for name, way in ways.items()
}
table(
    ["", *tests],
    [
        (name, *("passes" if mark else "caught" for mark in row))
        for name, row in marks.items()
    ],
)

# %%
right = {"comb, comb back", "the section's"}
assert all(row[0] for row in marks.values())
assert {name for name, row in marks.items() if row[3]} == right
assert {name for name, row in marks.items() if row[2]} == {
    *right,
    "fold, unfold",
}
assert marks["view, view back"][1]

# %% [markdown]
# *Comb* is the innocent one. It gives every third coordinate to a head instead of a block of neighbours, and joins them in the same order. After a learned projection this is only another numbering of its rows. It does matter when weights are
# copied from another library. *View, view back* passes the test of causality: its pieces stay in the order of the tokens, and the faults of cutting and joining hide each other.
