# %% [markdown]
# # Solutions: The Bahdanau attention mechanism
#
# [Back to the section](../bahdanau-attention.md#exercises)
#
# The models of this page are half as wide as those of the section and see a fraction of its steps, so that all of them together train in half a minute.
# What is measured is measured on lists of *validation* numbers, with one seed unless it says otherwise: look at large differences only.

# %%
import itertools
import math
from statistics import median
from time import process_time

import torch
from torch import nn

from snippets.attention_scoring_functions import masked_softmax
from snippets.bahdanau_attention import (
    BahdanauDecoder,
    RecurrentEncoder,
    Seq2Seq,
    beam_search,
    exact_match,
    greedy_decode,
    gru_steps,
    look_up,
    translation_loss,
)

# %%
from snippets.datasets import (
    encode_pairs,
    number_batches,
    number_pairs,
    number_parts,
    number_vocabularies,
)
from snippets.plotting import SERIES, dots, line, new_figure, table
from snippets.training import evaluating, sequence_loss, train

# %%
numbers, validation, _ = number_parts()
vocabularies = english, german = number_vocabularies(numbers)
held_out = {n: number_pairs(validation, n, 100) for n in (1, 2, 3, 4)}
batch_of = {n: encode_pairs(held_out[n], vocabularies) for n in held_out}


# %%
def make_model(decoder, width=32):
    """Make a small model with a decoder of the given class."""
    torch.manual_seed(0)
    return Seq2Seq(
        RecurrentEncoder(len(english), width, width, 1),
        decoder(len(german), width, width, 1, 2 * width),
    )


def teach(decoder, *, steps=60, max_count=2, loss=translation_loss):
    """Train it on lists of at most `max_count` numbers."""
    model = make_model(decoder)
    batches = number_batches(numbers, vocabularies, max_count=max_count)
    train(model, loss, batches, steps=steps, rate=2e-2)
    return model


def matches(model, counts=(1, 2)):
    """Give the exact match on held-out lists of each length, as text."""
    return [
        f"{exact_match(model, held_out[n], vocabularies):.2f}" for n in counts
    ]


# %% [markdown]
# ## Exercise 1: Two states, one query
#
# *Build the decoder with an LSTM: which vector is the query, what else changes, how many parameters come on top?*
# [Exercise](../bahdanau-attention.md#exercise-1)
#
# The query is $\mathbf{h}$. An LSTM shows its surroundings only $\mathbf{h} = \mathbf{o} \odot \tanh(\mathbf{c})$; the cell $\mathbf{c}$ is its private
# memory, not bounded, and its output layer reads $\mathbf{h}$ too. Three things change. The state that is passed on is a pair. The first cell needs a rule: zeros here (a second bridge would do as well).
# And the recurrent layer has four gates of matrices where the GRU has three. With $h$ units that read $m$ inputs, one gate has $h(m + h + 2)$ parameters,
# since PyTorch keeps two biases. That is the prediction.


# %%
class LSTMDecoder(BahdanauDecoder):
    """Decode with attention and an LSTM; the query is h, not c."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        sizes = self.rnn.input_size, self.rnn.hidden_size
        self.rnn = nn.LSTM(*sizes, batch_first=True)

    def start(self, outputs, state, lengths):
        """Begin with a cell of zeros."""
        hidden, *memory = super().start(outputs, state, lengths)
        return hidden, torch.zeros_like(hidden), *memory

    def forward(self, tokens, state, need_weights=False):
        """Map tokens (B, T), state → logits, state, None."""
        (hidden, cell, *memory), pieces = state, []
        for token in self.embedding(tokens).unbind(1):
            context, _ = look_up(self.attention, hidden[:, -1], *memory)
            x = torch.cat([token, context], dim=-1)[:, None]
            pair = hidden.transpose(0, 1), cell.transpose(0, 1)
            top, pair = self.rnn(x, pair)
            hidden, cell = (each.transpose(0, 1) for each in pair)
            pieces.append(torch.cat([top[:, 0], context], dim=-1))
        state = hidden, cell, *memory
        return self.output(torch.stack(pieces, dim=1)), state, None


# %%
#| cache: true
#| timeout: 300
additive, lstm = teach(BahdanauDecoder), teach(LSTMDecoder)

# %%
size = {
    name: sum(p.numel() for p in model.parameters())
    for name, model in (("GRU", additive), ("LSTM", lstm))
}
units, inputs = 32, 32 + 64  # the GRU reads a token and a context
more = units * (inputs + units + 2)
print(f"predicted {more:,} more, counted {size['LSTM'] - size['GRU']:,}")
assert size["LSTM"] - size["GRU"] == more
table(
    ["", "parameters", "1 number", "2 numbers"],
    [
        ("GRU", f"{size['GRU']:,}", *matches(additive)),
        ("LSTM", f"{size['LSTM']:,}", *matches(lstm)),
    ],
)

# %% [markdown]
# After so few steps, and with one seed, a difference of this size means nothing. One step at a time must still be the teacher-forced
# pass; this is the test that finds a forgotten $\mathbf{c}$:

# %%
source, source_lens, target = batch_of[2]
with evaluating(lstm):
    logits = lstm(source, target[:, :-1], source_lens)
    state = lstm.start(source, source_lens)
    for t, tokens in enumerate(target[:, :-1].T):
        log_probs, state = lstm.step(tokens, state)
        assert torch.allclose(
            log_probs, logits[:, t].log_softmax(-1), atol=1e-4
        )

# %% [markdown]
# ## Exercise 2: Another score
#
# *Dot products, with and without the scale, in place of the additive score: time, exact match, and where the scale matters.*
# [Exercise](../bahdanau-attention.md#exercise-2)
#
# The projection of the keys, of the width of the query, is still there: without it states of width 32 and outputs of width 64 could not be multiplied. The query's projection and the score layer
# go.


# %%
class DotDecoder(BahdanauDecoder):
    """Decode with a dot product of the state and the projected keys."""

    scale = 1.0

    def forward(self, tokens, state, need_weights=False):
        """Map tokens (B, T), state → logits, state, None."""
        hidden, keys, values, mask = state
        pieces = []
        for token in self.embedding(tokens).unbind(1):
            scores = self.scale * hidden[:, -1:] @ keys.mT  # (B, 1, S)
            context = (masked_softmax(scores, mask) @ values)[:, 0]
            x = torch.cat([token, context], dim=-1)[:, None]
            top, hidden = gru_steps(self.rnn, x, hidden)
            pieces.append(torch.cat([top[:, 0], context], dim=-1))
        logits = self.output(torch.stack(pieces, dim=1))
        return logits, (hidden, keys, values, mask), None


class ScaledDecoder(DotDecoder):
    """Divide the dot product by the root of its width."""

    scale = 32**-0.5


# %%
#| cache: true
#| timeout: 300
dot, scaled = teach(DotDecoder), teach(ScaledDecoder)


# %%
def describe(model):
    """Give the size of queries and keys, and the spread of the scores."""
    source, source_lens, target = batch_of[2]
    queries, scores = [], []
    with evaluating(model):
        state = model.start(source, source_lens)
        keys, mask = state[1], state[3]
        for tokens in target[:, :-1].T:
            query = state[0][:, -1:]
            queries.append(query.square().mean().sqrt().item())
            scores.append((model.decoder.scale * query @ keys.mT)[mask])
            _, state = model.step(tokens, state)
    real = keys[mask[:, 0]]
    size = sum(queries) / len(queries), real.square().mean().sqrt().item()
    return *size, torch.cat(scores).std().item()


# %%
found = {
    "dot, untrained": describe(make_model(DotDecoder)),
    "dot, trained": describe(dot),
    "scaled, untrained": describe(make_model(ScaledDecoder)),
    "scaled, trained": describe(scaled),
}
assert all(found[f"{name}, untrained"][2] < 1 for name in ("dot", "scaled"))
assert found["dot, trained"][2] > 2 * found["scaled, trained"][2] > 2
table(
    ["", "size of a query", "size of a key", "spread of the scores"],
    [(name, *(f"{x:.2f}" for x in row)) for name, row in found.items()],
)

# %% [markdown]
# The argument for $1/\sqrt{D}$ assumed coordinates of variance 1. A fresh GRU's state has coordinates of about `{python} f"{found['dot, untrained'][0]:.1f}"` and its projected keys smaller ones, so the scores spread by
# far less than 1 without any scale, and nothing saturates. Then training goes to work: queries and keys grow, the spread with them, and the
# score without a scale ends deep in saturation. So the scale does nothing useful at the start. It begins to pay when the norms have grown:


# %%
scores = {"additive": additive, "dot": dot, "scaled dot": scaled}
two = {
    name: exact_match(each, held_out[2], vocabularies)
    for name, each in scores.items()
}
assert two["scaled dot"] > two["dot"]
table(
    ["score", "1 number", "2 numbers"],
    [(name, *matches(each)) for name, each in scores.items()],
)


# %%
def one_step(model):
    """Time a forward and a backward pass in CPU-milliseconds."""
    start = process_time()
    translation_loss(model, batch_of[2]).backward()
    return 1000 * (process_time() - start)


# %%
#| timing: true
times = {name: [] for name in scores}
for _, (name, each) in itertools.product(range(7), scores.items()):
    times[name].append(one_step(each))
cost = {name: median(each) for name, each in times.items()}
print(*(f"{name} {each:.2g} ms" for name, each in cost.items()), sep=", ")
assert cost["dot"] < 2 * cost["additive"]

# %% [markdown]
# The times are for 100 lists of two numbers at width 32. The recurrent steps are most of it, so the score hardly shows. With long sources the additive score
# pays for its hidden layer: $S \cdot h$ numbers a step.

# %% [markdown]
# ## Exercise 3: Look near where you looked
#
# *Let each step see only the keys within w places of the last largest weight. How large must w be, and for the list in reverse order?*
# [Exercise](../bahdanau-attention.md#exercise-3)
#
# The window is a second mask, and it belongs to the state: each step computes it for the next one. At the first step everything is open. From here on the model is one that
# was taught lists of up to three numbers for twice the steps.

# %%
#| cache: true
#| timeout: 300
model = teach(BahdanauDecoder, steps=120, max_count=3)


# %%
def windowed(reach):
    """Make a step that sees only near the last largest weight."""

    def step(tokens, state):
        (hidden, keys, values, mask), padding = state
        logits, (hidden, *_), weights = model.decoder(
            tokens[:, None], (hidden, keys, values, mask), need_weights=True
        )
        peak = weights.argmax(dim=-1)  # (N, 1)
        near = (torch.arange(padding.shape[-1]) - peak).abs() <= reach
        mask = padding & near[:, None]
        return logits[:, -1], ((hidden, keys, values, mask), padding)

    return step


# %%
def greedy_match(step, count, prepare=lambda state: state):
    """Give the exact match of greedy decoding with any step."""
    source, source_lens, _ = batch_of[count]
    with evaluating(model):
        state = prepare(model.start(source, source_lens))
        ids = greedy_decode(step, state, bos_id=1, eos_id=2, max_len=40)
    pairs = zip(ids, held_out[count], strict=True)
    return sum(german.decode(row) == list(y) for row, (_, y) in pairs) / 100


reaches = range(1, 15)
windows = [
    greedy_match(windowed(reach), 3, lambda state: (state, state[3]))
    for reach in reaches
]
everything = exact_match(model, held_out[3], vocabularies)
assert windows[0] < 0.1
assert windows[4] > everything - 0.15
assert windows[-1] > everything - 0.05
enough = next(w for w, x in zip(reaches, windows) if x > everything - 0.05)

# %% [markdown]
# For the reversal no model is needed, only the path of the largest weights under the true translation. Cut at the commas, the pieces of the path belong to one number each, and the
# reversed list needs the same pieces in the other order.


# %%
def paths(count):
    """Give the path of each sentence, one list of places a number."""
    source, source_lens, target = batch_of[count]
    with evaluating(model):
        state = model.start(source, source_lens)
        weights = model.decoder(target[:, :-1], state, need_weights=True)[2]
    found = []
    for row, ids in zip(weights.argmax(-1), target[:, 1:], strict=True):
        pieces = [[]]
        for place, word in zip(row.tolist(), german.decode(ids)):
            if word == ",":
                pieces.append([])
            else:
                pieces[-1].append(place)
        found.append(pieces)
    return found


def longest_jump(pieces):
    """Give the longest jump of a path that is joined from pieces."""
    path = list(itertools.chain(*pieces))
    return max(abs(b - a) for a, b in itertools.pairwise(path))


# %%
#| label: fig-windows
#| caption: Lists of three numbers. A window that carries the list in order is too narrow for nearly all lists in reverse.
#| alt: >-
#|   Three rising curves over the reach of the window, from 1 to 14. Exact match with the window and the share of paths in order that fit rise together
#|   between 2 and 5. The share of reversed paths that fit stays low until it jumps up at 9.
jumps = [longest_jump(pieces) for pieces in paths(3)]
back = [longest_jump(pieces[::-1]) for pieces in paths(3)]
fits = [
    [sum(jump <= reach for jump in each) / 100 for reach in reaches]
    for each in (jumps, back)
]
figure, axes = new_figure(width=3.4, height=2.5)
line(axes, reaches, windows, 0)
line(axes, reaches, fits[0], 1)
line(axes, reaches, fits[1], 2)
axes.text(1.2, 0.62, "exact\nmatch", color=SERIES[0])
axes.text(5.6, 0.6, "paths\nin order", color=SERIES[1])
axes.text(9.4, 0.35, "paths in reverse", color=SERIES[2])
axes.set(xlabel="reach w of the window", ylabel="share", ylim=(0, 1.05))
axes.set_xticks(range(2, 15, 2))
figure

# %%
assert all(a >= b for a, b in zip(*fits, strict=True))
assert fits[1][4] < 0.3 < fits[0][4]
print(
    f"within 5 places: {fits[0][4]:.0%} of the paths in order,"
    f" {fits[1][4]:.0%} of those in reverse"
)

# %% [markdown]
# A reach of `{python} enough` is enough for the list in order: within a number the path steps back by one or two words and forwards by a few. The reversed list must go from the end of a number back over that number
# and over the one before it, which is longer than any window that seems ample in order. And its first step starts at the far end. A window is a bet on a nearly
# monotone alignment.

# %% [markdown]
# ## Exercise 4: Read once
#
# *Sum the weights over all steps: how often was each token read? Then sort the errors on lists that are too long.*
# [Exercise](../bahdanau-attention.md#exercise-4)


# %%
def coverage(count, targets):
    """Sum weights (B, T, S) over the real target tokens, → (B, S)."""
    source, source_lens, _ = batch_of[count]
    with evaluating(model):
        state = model.start(source, source_lens)
        weights = model.decoder(targets[:, :-1], state, need_weights=True)[2]
    real = (targets[:, 1:] != german.pad_id)[..., None]
    return (weights * real).sum(dim=1)


# %%
digits = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
kinds = {
    "units": [*digits, "nine"],
    "teens": [word for word in english.words if word.endswith("teen")],
    "tens": [word for word in english.words if word.endswith("ty")],
    "hundred": ["hundred"],
    "and": ["and"],
    "comma": [","],
}
sums, source = coverage(3, batch_of[3][2]), batch_of[3][0]
read = {
    kind: sums[torch.isin(source, torch.tensor(english.encode(words)))]
    for kind, words in kinds.items()
}
steps = (batch_of[3][2][:, 1:] != german.pad_id).sum(dim=1)
assert torch.allclose(sums.sum(dim=1), steps.float(), atol=1e-4)
assert read["and"].mean() < 0.5 < read["units"].mean()
table(
    ["source token", "how often read", "± between tokens"],
    [(kind, f"{x.mean():.2f}", f"{x.std():.2f}") for kind, x in read.items()],
)

# %% [markdown]
# Units, teens and tens are read about once or more, "and" almost never: the English "and" stands before the tens, the German one between units and tens, and the decoder
# knows when it is due. While it says *und* or a comma it looks at a neighbour, whose sum grows. The sums are a property of training, not a rule of the
# formula: rows sum to one, columns to nothing in particular.
#
# Now lists of four numbers, where three was the longest in training.


# %%
def split(words):
    """Cut a list of words at its commas into numbers."""
    groups = itertools.groupby(words, key=lambda word: word == ",")
    return [tuple(group) for comma, group in groups if not comma]


# %%
source, source_lens, _ = batch_of[4]
with evaluating(model):
    state = model.start(source, source_lens)
    ids = greedy_decode(model.step, state, bos_id=1, eos_id=2, max_len=40)
found = [split(german.decode(row)) for row in ids]
truth = [split(right) for _, right in held_out[4]]

# %%
sorts = {"too few numbers": 0, "too many": 0, "one is wrong": 0, "right": 0}
for mine, right in zip(found, truth, strict=True):
    if mine == right:
        sorts["right"] += 1
    elif len(mine) == len(right):
        sorts["one is wrong"] += 1
    else:
        few = len(mine) < len(right)
        sorts["too few numbers" if few else "too many"] += 1
print(sorts)
assert sorts["too few numbers"] > 50

# %%
over = (ids == german.eos_id).cumsum(dim=1) > 1  # filled up after the end
begin = torch.full_like(ids[:, :1], german.bos_id)
said = torch.cat([begin, ids.masked_fill(over, german.pad_id)], dim=1)
sums = coverage(4, said)
places = torch.arange(source.shape[1])
sent, skipped = [], []
for row, words, mine, right in zip(sums, source, found, truth, strict=True):
    number = (words == english.ids[","]).cumsum(0)
    real = (words != english.ids[","]) & (words > english.eos_id)
    for n, each in enumerate(right):
        total = row[real & (number == n)].sum().item() / len(each)
        (sent if each in mine else skipped).append(total)
per_word = [sum(x) / len(x) for x in (sent, skipped)]
print(
    f"read, per word due: {per_word[0]:.2f} in the {len(sent)} numbers"
    f" that were translated, {per_word[1]:.2f} in the {len(skipped)} others"
)
assert per_word[1] > 0.4 * per_word[0]

# %% [markdown]
# The common error is a number too few. The model leaps over one, or begins one number and ends in the next, and stops after about as many as training had. The sums are a poor
# witness: what is missing in the output was read hardly less than what is there. These weights are spread over several places, so that a glance at the neighbours counts as
# reading, and to read is not to say. Coverage models [@tu2016] give the sums to the score as one more input and leave it to training what to make of them.

# %% [markdown]
# ## Exercise 5: Beams that lose
#
# *A model on which a beam of two ends below greedy search, and one on which a length penalty changes the winner.*
# [Exercise](../bahdanau-attention.md#exercise-5)
#
# A model is a table from a prefix to the probabilities of *a*, *b*, *c* and `<eos>`; a prefix that is not in the table is followed by all four alike.
#
# **The first.** Greedy search goes through *a*, which is right. A beam of two also keeps *b*; two words can follow *b* with equal probability, and both
# products, 0.45 · 0.5, are larger than 0.46 · 0.4. They fill the beam, and lead nowhere.

# %%
A, B, C, EOS, BOS = range(5)
losing = {
    (): [0.46, 0.45, 0.05, 0.04],
    (A,): [0.40, 0.20, 0.20, 0.20],
    (B,): [0.50, 0.50, 0.00, 0.00],
    (A, A): [0.00, 0.00, 0.00, 1.00],
}


def table_step(model):
    """Make a step whose state is the prefix itself, filled up with −1."""

    def step(tokens, state):
        rows, new = [], state.clone()
        for row, token in zip(new, tokens.tolist(), strict=True):
            if token != BOS:
                row[(row >= 0).sum()] = token
            prefix = tuple(each for each in row.tolist() if each >= 0)
            rows.append(model.get(prefix, [0.25] * 4))
        return torch.tensor(rows).log(), new

    return step


# %%
def brute_force(model, max_len, penalty=0.0):
    """Score every sentence, one by one; → (ids, score), best first."""
    scored = []
    for row in itertools.product(range(4), repeat=max_len):
        ids = row[: row.index(EOS) + 1] if EOS in row else row
        probs = [
            model.get(ids[:t], [0.25] * 4)[each] for t, each in enumerate(ids)
        ]
        if min(probs) > 0:
            total = sum(map(math.log, probs))
            scored.append((list(ids), total / len(ids) ** penalty))
    unique = {tuple(ids): (ids, score) for ids, score in scored}
    return sorted(unique.values(), key=lambda pair: -pair[1])


# %%
def search(model, beam_size, max_len=4, penalty=0.0):
    """Search the table by a beam."""
    return beam_search(
        table_step(model),
        torch.full((1, max_len), -1),
        bos_id=BOS,
        eos_id=EOS,
        beam_size=beam_size,
        max_len=max_len,
        length_penalty=penalty,
    )


# %%
greedy = greedy_decode(
    table_step(losing),
    torch.full((1, 3), -1),
    bos_id=BOS,
    eos_id=EOS,
    max_len=3,
)
rows = [("greedy", greedy[0].tolist(), 0.46 * 0.4)]
for beam_size in (1, 2, 3, 4**3):
    ids, score = search(losing, beam_size, max_len=3)[0]
    rows.append((f"beam of {beam_size}", ids, math.exp(score)))
best, score = brute_force(losing, 3)[0]
rows.append(("all, one by one", best, math.exp(score)))
assert rows[0][1] == rows[1][1] == rows[4][1] == best == [A, A, EOS]
assert rows[2][2] < rows[0][2] / 3
table(
    ["search", "found", "probability"],
    [(x, " ".join("abc."[i] for i in y), f"{z:.3f}") for x, y, z in rows],
)

# %% [markdown]
# (The dot stands for `<eos>`.) A beam of one can do no worse than greedy search: it keeps the best continuation of its one prefix, which is the token that greedy search takes.
#
# **The second.** *a* `<eos>` has the probability $0.5 \cdot 0.6 = 0.3$, *b c a* `<eos>` has $0.5 \cdot 0.8^3 = 0.256$. With the power $\lambda$ of @eq-length-penalty the long one wins once
#
# $$
# \frac{\ln 0.256}{4^\lambda} > \frac{\ln 0.3}{2^\lambda}, \qquad \text{that is} \qquad \lambda > \log_2 \frac{\ln 0.256}{\ln 0.3} .
# $$

# %%
lengths = {
    (): [0.50, 0.50, 0.00, 0.00],
    (A,): [0.20, 0.20, 0.00, 0.60],
    (B,): [0.00, 0.20, 0.80, 0.00],
    (B, C): [0.80, 0.20, 0.00, 0.00],
    (B, C, A): [0.00, 0.20, 0.00, 0.80],
}
turn = math.log2(math.log(0.256) / math.log(0.3))
for penalty in (0.0, turn - 0.01, turn + 0.01, 1.0):
    found = search(lengths, 4**4, 4, penalty)
    exact = brute_force(lengths, 4, penalty)
    assert found[0][0] == exact[0][0]
    assert math.isclose(found[0][1], exact[0][1], rel_tol=1e-5)
    assert found[0][0] == ([B, C, A, EOS] if penalty > turn else [A, EOS])
print(f"the winner changes at a penalty of {turn:.3f}")

# %% [markdown]
# ## Exercise 6: Its own mistakes
#
# *In training, replace input tokens by the model's own guesses with probability p. What sees the gap between teacher forcing and decoding?*
# [Exercise](../bahdanau-attention.md#exercise-6)
#
# **Exact match does not see it.** Suppose that every token of a sentence is right under teacher forcing. Greedy decoding starts from the same `<bos>`, so its first token is right; then its second input is the true
# one, so its second token is right, and so on. Conversely, if greedy decoding makes no mistake, its inputs were the true ones, and teacher forcing
# has seen the same. The two count the same sentences, whatever the model. A difference can only show *after* a first mistake.


# %%
def mixed_loss(share):
    """Teach with true tokens, a share of them replaced by guesses."""

    def loss(model, batch):
        source, source_lens, target = batch
        given = target[:, :-1]
        with torch.no_grad():
            guesses = model(source, given, source_lens).argmax(dim=-1)
        own = torch.cat([given[:, :1], guesses[:, :-1]], dim=1)
        mixed = torch.where(torch.rand(given.shape) < share, own, given)
        logits = model(source, mixed, source_lens)
        return sequence_loss(logits, target[:, 1:], german.pad_id)

    return loss


# %%
#| cache: true
#| timeout: 300
mixed = {0.0: additive}  # the model of exercise 1: true tokens only
for share in (0.25, 0.5, 1.0):
    mixed[share] = teach(BahdanauDecoder, loss=mixed_loss(share))


# %%
lists = number_pairs(validation, 2, 400)
source, source_lens, target = encode_pairs(lists, vocabularies)
wanted = target[:, 1:]
real = wanted != german.pad_id


# %%
def two_ways(model):
    """Give the tokens (B, T) under teacher forcing and in a free run."""
    with evaluating(model):
        forced = model(source, target[:, :-1], source_lens).argmax(dim=-1)
        state = model.start(source, source_lens)
        free = greedy_decode(
            model.step, state, bos_id=1, eos_id=2, max_len=wanted.shape[1]
        )
    return forced, free


def whole(forced, free):
    """Tell which sentences are right in every token, both ways."""
    words = [german.decode(row) for row in free]
    exact = [x == right for x, (_, right) in zip(words, lists, strict=True)]
    return ((forced == wanted) | ~real).all(dim=1), torch.tensor(exact)


# %%
runs = {share: two_ways(each) for share, each in mixed.items()}
for both in runs.values():
    assert torch.equal(*whole(*both))  # the argument above

# %%
#| label: fig-own-mistakes
#| caption: Lists of two numbers after 60 steps. The model that reads nothing but its own guesses in training is the worst.
#| alt: >-
#|   Two curves over the share of own tokens in training, 0, 0.25, 0.5 and 1. The share of right tokens under teacher forcing is near one for the first three and falls at
#|   the last. Exact match lies below it and falls far at the last.
tokens = [
    (forced == wanted)[real].float().mean().item()
    for forced, _ in runs.values()
]
sentences = [whole(*both)[1].float().mean().item() for both in runs.values()]
figure, axes = new_figure(width=3.4, height=2.5)
for index, row in enumerate((sentences, tokens)):
    line(axes, list(mixed), row, index)
    dots(axes, list(mixed), row, index)
axes.text(0.3, 0.5, "exact match", color=SERIES[0])
axes.text(0.3, 1.03, "tokens, teacher forcing", color=SERIES[1])
axes.set(xlabel="share p of own tokens in training", ylabel="share right")
axes.set(ylim=(0, 1.15), xticks=list(mixed))
figure

# %% [markdown]
# So neither curve is about the gap: both say how well a model reads *right* prefixes. To see the gap, ask for the second number where the first one is wrong. Under teacher forcing the true
# first number stands before it, in a free run the wrong one.


# %%
def second_after_mistake(forced, free):
    """Count: first number wrong; then second right, forced and free."""
    comma = german.ids[","]
    later = (wanted == comma).cumsum(dim=1) > 0  # the comma and after
    right = (forced == wanted) | ~real
    slips = ~(right | later).all(dim=1)
    forced_right = (right | ~later).all(dim=1)[slips].sum().item()
    free_right = 0
    for i in slips.nonzero().flatten().tolist():
        found, words = german.decode(free[i]), lists[i][1]
        end = words[words.index(",") :]
        free_right += found[-len(end) :] == end
    return slips.sum().item(), forced_right, free_right


# %%
gaps = {share: second_after_mistake(*both) for share, both in runs.items()}
count, forced_right, free_right = gaps[0.0]
assert abs(forced_right - free_right) <= 0.25 * count
assert sentences[-1] < sentences[0] - 0.1
table(
    ["p", "first one wrong", "second right, forced", "second right, free"],
    [(share, *numbers) for share, numbers in gaps.items()],
)

# %% [markdown]
# There is hardly a gap in this task. After a wrong first number the decoder comes to the comma, looks up where the next number begins, and is back on the true path, whatever it said before. The
# remedy is then without a disease, and an overdose hurts: with $p = 1$ the decoder reads nothing but guesses, which are noise at first, and learns much less in the same steps. Bengio et al. [@bengio2015] therefore begin with true tokens and raise the share slowly. The gap is to be expected where an output must agree
# with what was said far before: in free text, without a source to go back to.

# %% [markdown]
# ## Exercise 7: How big must the vector be?
#
# *How many numbers fit into a state by counting? Put five into one float64 number and read them back.*
# [Exercise](../bahdanau-attention.md#exercise-7)
#
# A list of $n$ numbers below 1,000 is one of $1000^n$, so it needs $n \log_2 1000 \approx 9.97\,n$ bits, and $64 \cdot 32$ bits hold

# %%
bits_a_number = math.log2(1000)
room = math.floor(64 * 32 / bits_a_number)
print(f"{room} numbers")
assert 1000**room < 2 ** (64 * 32) < 1000 ** (room + 1)

# %% [markdown]
# A float64 number is exact for whole numbers up to $2^{53}$, and $1000^5 < 2^{53} < 1000^6$: five numbers fit.


# %%
def pack(members):
    """Write a list in base 1,000, as one number between 0 and 1."""
    return sum(x * 1000.0**i for i, x in enumerate(members)) / 1000.0**5


def unpack(vector):
    """Read five numbers back."""
    whole = round(vector * 1000.0**5)
    return [whole // 1000**i % 1000 for i in range(5)]


# %%
torch.manual_seed(0)
for members in torch.randint(1000, (1000, 5)).tolist():
    assert unpack(pack(members)) == members
members = [706, 42, 9, 374, 811]
for change in (0.0, 1e-15, 1e-12, 1e-9, 1e-6, 1e-3):
    print(f"{change:5.0e}", unpack(pack(members) * (1 + change)))
touched = unpack(pack(members) * (1 + 1e-9))
assert [x == y for x, y in zip(touched, members)] == [False] * 2 + [True] * 3
half = torch.tensor(pack(members), dtype=torch.float64).half().item()
print("float16", unpack(half))
assert sum(x == y for x, y in zip(unpack(half), members)) == 1

# %% [markdown]
# The bound is right and says nothing. It counts the states that differ, not those that a network can tell apart. This code lives from its last bits: a change by a billionth costs two of these five numbers, and rounding to
# float16, as at the end of our training, all but one. Its decoder is a staircase of $10^{15}$ steps: flat where it has a derivative, and a jump everywhere
# else, so no gradient can find it or mend it. What a decoder of matrices and tanh reads stably has a few bits a coordinate, and training must *find* a code
# that spreads a list over the coordinates and reads each number out at its time. The cliff of the baseline is one of learning; more units or steps move it, as the section
# measured. Attention needs no such code.

# %% [markdown]
# ## Exercise 8: Fool the map
#
# *Replace the trained weights while the model decodes; which changes cost exact match, and what may one conclude?*
# [Exercise](../bahdanau-attention.md#exercise-8)
#
# One step of the decoder, with a place where its weights can be changed:


# %%
def changed(change):
    """Make a step of `model` whose weights go through a function."""
    decoder = model.decoder

    def step(tokens, state):
        hidden, *memory = state
        _, values, mask = memory
        _, weights = look_up(decoder.attention, hidden[:, -1], *memory)
        context = (change(weights, mask) @ values)[:, 0]
        x = torch.cat([decoder.embedding(tokens), context], dim=-1)
        top, hidden = gru_steps(decoder.rnn, x[:, None], hidden)
        logits = decoder.output(torch.cat([top[:, 0], context], dim=-1))
        return logits.log_softmax(dim=-1), (hidden, *memory)

    return step


# %%
def shuffled(weights, mask):
    """Deal the same weights out to the real places at random."""
    keys = torch.rand(weights.shape).masked_fill(~mask, 2.0)
    return weights.gather(-1, keys.argsort(dim=-1)) * mask


def one_hot(weights, mask):
    """Give everything to the largest weight."""
    top = weights.argmax(dim=-1, keepdim=True)
    return torch.zeros_like(weights).scatter(-1, top, 1.0)


changes = {
    "none": lambda weights, mask: weights,
    "all at the largest": one_hot,
    "equal weights": lambda weights, mask: mask / mask.sum(-1, keepdim=True),
    "one place to the right": lambda weights, mask: weights.roll(1, -1),
    "shuffled": shuffled,
}

# %%
torch.manual_seed(0)
kept = {
    name: [greedy_match(changed(change), n) for n in (1, 2, 3)]
    for name, change in changes.items()
}
for n in (1, 2, 3):
    assert kept["none"][n - 1] == exact_match(model, held_out[n], vocabularies)
table(
    ["change", "1 number", "2 numbers", "3 numbers"],
    [(name, *(f"{x:.2f}" for x in row)) for name, row in kept.items()],
)

# %%
whole_map, largest, *others = kept.values()
assert all(max(row[1:]) < 0.15 for row in others)
assert 0.3 < largest[2] < whole_map[2]

# %% [markdown]
# Equal, shifted and shuffled weights bring the lists down to nothing: this decoder depends on *where* it looks, and here the map shows something that matters. (A few single numbers may survive
# equal weights: over so few outputs the mean, and the encoder's state, still tell enough.) With all the weight at the largest the model loses some lists, so the paler squares matter as well,
# and a picture of the maxima would be too simple.
#
# What one may not conclude: that these weights are the only ones for this answer; that a large weight means "this *word* was used", since an output of the encoder holds its
# surroundings too; or that a map that looks right means a right answer. The test changes what the model was trained with, and a model may fail for being surprised. Jain and Wallace [@jain2019] search for *other* weights with the
# same answer, and find them for many classifiers; Wiegreffe and Pinter [@wiegreffe2019] ask when such weights are more than an accident. Neither paper is about a
# decoder whose weights choose one of twenty words at every step.
