# %% [markdown]
# # Solutions: The Transformer architecture
#
# [Back to the section](../transformer.md#exercises)
#
# Whatever is trained here is small: one or three blocks, lists of one and two numbers, 120 steps. Exact match is measured on *validation* numbers, and differs by
# several points from seed to seed, so look at large differences only.

# %%
import itertools
import math
import random
import time
from copy import deepcopy
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F

# %%
from snippets.attention_scoring_functions import (
    AdditiveScore,
    causal_mask,
    length_mask,
    masked_softmax,
)
from snippets.bahdanau_attention import (
    exact_match,
    greedy_decode,
    translation_loss,
)
from snippets.datasets import (
    number_batches,
    number_pairs,
    number_parts,
    number_vocabularies,
)
from snippets.multihead_attention import MultiHeadAttention, mix_heads

# %%
from snippets.plotting import SERIES, dots, line, new_figure, table
from snippets.training import evaluating, train
from snippets.transformer import (
    BlockCache,
    PositionWiseFFN,
    Transformer,
    TransformerDecoderBlock,
    TransformerEncoder,
    TransformerEncoderBlock,
    Translator,
    attend,
    padding_mask,
    project,
)


# %%
def median_seconds(calls, repeats=5):
    """Time calls in turn; → the median CPU seconds of each."""
    runs = {name: [] for name in calls}
    for _, (name, call) in itertools.product(range(repeats), calls.items()):
        start = time.process_time()
        call()
        runs[name].append(time.process_time() - start)
    return {name: median(each) for name, each in runs.items()}


# %% [markdown]
# ## Exercise 1: Count them all
#
# *Give the number of parameters of a `Transformer` by a formula; where do they sit as the width grows?*
# [Exercise](../transformer.md#exercise-1)
#
# With the width $D$, a hidden layer of $F$, $L$ blocks a stack and vocabularies of $n_s$ and $n_t$ tokens, biases included:
#
# - an attention has four square matrices, $4(D^2 + D)$; the number of heads does not matter, since they share the width;
# - a feed-forward network has $2DF + F + D$, a norm $2D$;
# - an encoder block has one attention, one network and two norms; a decoder block two attentions, one network and three norms;
# - the embeddings have $(n_s + n_t)D$, the output layer $n_t(D + 1)$, and the sinusoids have none;
# - pre-norm adds a norm at the end of each stack.


# %%
def count_parts(vocab_sizes, width, ffn_width, num_layers, norm_first):
    """Count parameters by formula, → {part: number}."""
    source_size, target_size = vocab_sizes
    last = 2 * 2 * width if norm_first else 0
    return {
        "embeddings": (source_size + target_size) * width,
        "output layer": target_size * (width + 1),
        "attention": num_layers * 3 * 4 * (width**2 + width),
        "feed-forward": num_layers
        * 2
        * (2 * width * ffn_width + ffn_width + width),
        "norms": num_layers * 5 * 2 * width + last,
    }


# %%
torch.manual_seed(0)
for vocab_sizes, width, ffn_width, heads, layers, norm_first in (
    ((11, 13), 32, 64, 4, 2, False),
    ((11, 13), 32, 64, 8, 2, False),  # more heads, the same number
    ((40, 37), 48, 96, 4, 2, True),
    ((5, 500), 64, 256, 2, 1, True),
    ((300, 7), 24, 30, 3, 5, False),
):
    sizes = width, ffn_width, heads, layers
    model = Transformer(*vocab_sizes, *sizes, norm_first=norm_first)
    counted = sum(x.numel() for x in model.parameters())
    parts = count_parts(vocab_sizes, width, ffn_width, layers, norm_first)
    print(f"{counted:,} counted, {sum(parts.values()):,} by formula")
    assert counted == sum(parts.values())

# %% [markdown]
# For large $D$ and $F = 4D$ an encoder block has $12D^2$ and a decoder block $16D^2$, together $28LD^2$; what surrounds the blocks has $3nD$ for two vocabularies of $n$ tokens. So the blocks win at
# $D = 3n/(28L)$.

# %%
vocab_size, num_layers = 37_000, 6
rows = []
for width in (64, 256, 512, 1024, 4096):
    parts = count_parts(
        [vocab_size] * 2, width, 4 * width, num_layers, norm_first=False
    )
    total = sum(parts.values())
    shares = [f"{100 * each / total:.1f}" for each in parts.values()]
    rows.append((width, f"{total / 1e6:,.0f}", *shares))
table(["D", "millions", *(f"{name}, %" for name in parts)], rows)

# %%
crossing = 3 * vocab_size / (28 * num_layers)
print(f"the blocks hold more than half from D = {crossing:.0f} on")
for width, more in ((620, False), (700, True)):
    parts = count_parts(
        [vocab_size] * 2, width, 4 * width, num_layers, norm_first=False
    )
    outside = parts["embeddings"] + parts["output layer"]
    assert (outside < sum(parts.values()) / 2) == more
    assert parts["norms"] < 0.001 * sum(parts.values())

# %% [markdown]
# A narrow model is a dictionary with a little network in it; a wide one is two thirds feed-forward (here $16/28$, since the decoder has two attentions). The paper's base model has $D = 512$ and *one* matrix for
# both embeddings and the output layer [@vaswani2017; @press2017]: then $nD$ is left outside, and the formula gives nearly the 65 million that the paper names.

# %%
parts = count_parts([vocab_size] * 2, 512, 2048, 6, norm_first=False)
tied = sum(parts.values()) - 2 * vocab_size * 512 - vocab_size
print(f"{tied / 1e6:.0f} million")
assert abs(tied / 65e6 - 1) < 0.04

# %% [markdown]
# ## Exercise 2: Additive heads
#
# *Put the additive score of @sec-additive into a block; measure time and memory, and say why nobody does it.*
# [Exercise](../transformer.md#exercise-2)
#
# The heads stay: queries and keys are cut as before, and a network with one hidden layer, as wide as a head, scores each pair. All heads share it; their projections
# differ.


# %%
class AdditiveHeads(MultiHeadAttention):
    """Attend in several heads by an additive score."""

    def __init__(self, width, num_heads, **options):
        super().__init__(width, num_heads, **options)
        self.score = AdditiveScore(*[width // num_heads] * 3)

    def forward(self, query, key, value, mask=None, need_weights=False):
        """Score every pair by a network; there is no fused kernel."""
        query, key, value = self.split(query, key, value)
        scores = self.score(query, key)  # (B, H, T, S)
        if mask is not None:
            mask = mask[:, None] if mask.ndim == 3 else mask
            mask = mask.expand(scores.shape)
        weights = masked_softmax(scores, mask)
        output = mix_heads(self.output_layer, weights @ value, None)
        return output, weights if need_weights else None


# %%
def make_block(kind, width=64, num_heads=4):
    """Make an encoder block with an attention of this kind."""
    torch.manual_seed(0)
    block = TransformerEncoderBlock(width, 4 * width, num_heads)
    block.attention = kind(width, num_heads, bias=True)
    return block


# %%
block = make_block(AdditiveHeads)
x, mask = torch.randn(2, 7, 64), length_mask(torch.tensor([7, 4]), 7)
weights = block(x, mask, need_weights=True)[1]
assert weights.shape == (2, 4, 7, 7) and not weights[1, :, :, 4:].any()
assert torch.allclose(weights.sum(-1), torch.ones(2, 4, 7))
changed = x.clone()
changed[:, -1] += 1
a, b = (block(each, causal_mask(7, 7))[0] for each in (x, changed))
assert torch.equal(a[:, :-1], b[:, :-1])

# %% [markdown]
# The memory that matters in training is what a forward pass *keeps* for the backward pass. It can be counted to the byte: torch tells a hook which tensors it saves. The prediction for
# the additive score: the tanh of every pair, $H \cdot T \cdot S \cdot d = T^2 D$ numbers of four bytes.


# %%
def kept_bytes(call):
    """Count the bytes that a forward pass saves for the backward pass."""
    sizes = {}

    def note(x):
        storage = x.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        output = call()
    assert output.requires_grad
    return sum(sizes.values())


# %%
kinds = {"dot product": MultiHeadAttention, "additive": AdditiveHeads}
kept = {}
for (name, kind), length in itertools.product(kinds.items(), (64, 256)):
    block, x = make_block(kind), torch.randn(1, length, 64)
    kept[name, length] = kept_bytes(lambda block=block, x=x: block(x)[0])
for length in (64, 256):
    extra = kept["additive", length] - kept["dot product", length]
    predicted = 4 * length**2 * 64
    print(
        f"T = {length}: {extra / 2**20:.1f} MiB more,",
        f"predicted at least {predicted / 2**20:.1f}",
    )
    assert predicted < extra < 1.4 * predicted

# %%
#| timing: true
rows = []
for length in (64, 256):
    calls = {}
    for name, kind in kinds.items():
        block, x = make_block(kind), torch.randn(1, length, 64)
        calls[name] = lambda b=block, x=x: b(x)[0].sum().backward()
    found = median_seconds(calls)
    for name in kinds:
        mebibytes = f"{kept[name, length] / 2**20:.1f}"
        rows.append((length, name, f"{1000 * found[name]:.2g}", mebibytes))
assert found["additive"] > 2 * found["dot product"]
table(["T", "score", "forward and backward, ms", "kept, MiB"], rows)

# %% [markdown]
# Why does nobody do it? The dot product of all pairs is *one* matrix product, what processors do best, and the fused kernel never writes the $T^2$ scores down at all. The additive score has a
# tanh for each pair *and each coordinate of a head*: $d$ times as many slow operations as the softmax has, and no product to merge them into. In @sec-bahdanau-attention that was harmless, with one query a
# step and a recurrent network that cost more. In a stack where every position asks every other it is the whole cost. And what it buys is little: @eq-variance took away the dot product's only weakness, and learned projections stand before it in any case.

# %% [markdown]
# ## Exercise 3: All weights zero
#
# *What does a block compute whose sublayers have only zeros, in pre-norm and in post-norm, and can it learn?*
# [Exercise](../transformer.md#exercise-3)
#
# The sublayers find 0. Pre-norm adds it: $\mathbf{x} + 0$, the identity, to the bit. Post-norm applies its norms to $\mathbf{x}$, one for each sublayer.


# %%
def zero_block(kind, norm_first):
    """Make a block whose sublayers have only zeros; the norms stay."""
    block = kind(16, 32, 2, norm_first=norm_first)
    with torch.no_grad():
        for part in block.modules():
            if isinstance(part, MultiHeadAttention | PositionWiseFFN):
                for each in part.parameters():
                    each.zero_()
    return block


# %%
torch.manual_seed(0)
x, memory = 3 * torch.randn(2, 5, 16) + 1, torch.randn(2, 4, 16)
norm = nn.LayerNorm(16)
for norm_first in (True, False):
    encoder = zero_block(TransformerEncoderBlock, norm_first)(x)[0]
    decoder = zero_block(TransformerDecoderBlock, norm_first)(x, memory)[0]
    if norm_first:
        assert torch.equal(encoder, x) and torch.equal(decoder, x)
    else:
        assert torch.equal(encoder, norm(norm(x)))
        assert torch.equal(decoder, norm(norm(norm(x))))
        assert torch.allclose(encoder, norm(x), atol=1e-5)

# %% [markdown]
# Is a norm of a norm the norm? Nearly. The first leaves a variance of $\sigma^2 / (\sigma^2 + \varepsilon)$, a little below 1, which the second pushes up. That is invisible unless $\sigma^2$ is as small as $\varepsilon$:

# %%
tiny = 0.001 * torch.randn(1000, 16)
once, twice = norm(tiny), norm(norm(tiny))
sizes = [each.square().mean().sqrt().item() for each in (once, twice)]
print(f"size after one norm {sizes[0]:.2f}, after two {sizes[1]:.2f}")
assert sizes[0] < 0.4 and sizes[1] > 0.95

# %% [markdown]
# Can it learn? A gradient passes a product only if the *other* factor is not zero. With zeros everywhere, each weight is multiplied with a zero before it or after it; only the biases of the last layers are not. Zeros in the
# *last* layer of each sublayer alone are another matter: the block is still the identity, but those layers get a gradient, and after one step everything does. Deep networks are often started so.


# %%
def with_gradient(block):
    """Name the parameters of the sublayers whose gradient is not zero."""
    (block(x)[0] * torch.randn(x.shape)).sum().backward()
    return {
        name
        for name, each in block.named_parameters()
        if each.grad.any() and "residual" not in name
    }


# %%
zeros = with_gradient(zero_block(TransformerEncoderBlock, norm_first=True))
print("zeros everywhere:", *sorted(zeros))
assert zeros == {"attention.output_layer.bias", "ffn.output_layer.bias"}
block = TransformerEncoderBlock(16, 32, 2, norm_first=True)
last = block.attention.output_layer, block.ffn.output_layer
with torch.no_grad():
    for each in (*last[0].parameters(), *last[1].parameters()):
        each.zero_()
assert torch.equal(block(x)[0], x)
more = with_gradient(block)
print("zeros in the last layers:", *sorted(more - zeros), "as well")
assert len(more) == 4
with torch.no_grad():
    for each in block.parameters():
        each.sub_(0.1 * each.grad)
    block.zero_grad()
assert len(with_gradient(block)) > 10

# %% [markdown]
# ## Exercise 4: Hunt the leak
#
# *Six decoders are broken. Find probes that look only at inputs and outputs and tell all six, and the right one, apart.*
# [Exercise](../transformer.md#exercise-4)
#
# First the suspects. Two need a block whose mask can be broken. It is the section's post-norm block, its mask a method.


# %%
class OpenBlock(TransformerDecoderBlock):
    """Compute the mask of the first attention in a method."""

    def mask_for(self, num_new, num_keys):
        return causal_mask(num_new, num_keys)

    def forward(
        self, x, memory, memory_mask=None, cache=None, need_weights=False
    ):
        key, value = project(self.attention, x)
        memory_pair = project(self.cross_attention, memory)
        if cache is not None:
            key = torch.cat([cache.key, key], dim=2)
            value = torch.cat([cache.value, value], dim=2)
        mask = self.mask_for(x.shape[1], key.shape[2])
        y, _ = attend(self.attention, x, key, value, mask)
        x = self.attention_residual(x, y)
        y, _ = attend(self.cross_attention, x, *memory_pair, memory_mask)
        x = self.cross_residual(x, y)
        x = self.ffn_residual(x, self.ffn(x))
        return x, BlockCache(key, value, *memory_pair), None


# %%
class OnlyInTraining(OpenBlock):
    """Mask in training only."""

    def mask_for(self, num_new, num_keys):
        mask = causal_mask(num_new, num_keys)
        return mask if self.training else torch.ones_like(mask)


class TopLeft(OpenBlock):
    """Count the triangle from the first key, also after a cache."""

    def mask_for(self, num_new, num_keys):
        return torch.ones(num_new, num_keys, dtype=torch.bool).tril()


# %%
class NormOverTime(nn.Module):
    """Normalise over positions, too."""

    def forward(self, x):
        return F.layer_norm(x, x.shape[1:])


class NormOverBatch(nn.BatchNorm1d):
    """Normalise each coordinate over the batch and the positions."""

    def forward(self, x):
        return super().forward(x.mT).mT


# %% [markdown]
# Two more are mistakes around the blocks. `predict` gives the logits that the loss compares with `target[:, 1:]`.


# %%
class Suspect(Transformer):
    """Predict every token of a target but the first."""

    def predict(self, source, target, source_lens):
        return self(source, target[:, :-1], source_lens)


class NotShifted(Suspect):
    """Read the very token that is to be predicted."""

    def predict(self, source, target, source_lens):
        return self(source, target[:, 1:], source_lens)


class SeesPadding(Suspect):
    """Take no padding mask along to the cross-attention."""

    def decode(self, tgt, memory, src_lens, cache=None, need_weights=False):
        everything = torch.full_like(src_lens, memory.shape[1])
        return super().decode(tgt, memory, everything, cache, need_weights)


# %%
def make_suspect(fault):
    """Make an untrained model with one fault, or "none"."""
    kinds = {"no shift": NotShifted, "cross mask": SeesPadding}
    torch.manual_seed(0)
    model = kinds.get(fault, Suspect)(11, 13, 32, 64, 4, 2)
    block = model.decoder.blocks[0]
    if fault == "mask in training only":
        block.__class__ = OnlyInTraining
    if fault == "top-left triangle":
        block.__class__ = TopLeft
    if fault == "norm over time":
        block.ffn_residual.norm = NormOverTime()
    if fault == "batch norm":
        block.ffn_residual.norm = NormOverBatch(32)
    return model


FAULTS = [
    "mask in training only",
    "norm over time",
    "no shift",
    "batch norm",
    "cross mask",
    "top-left triangle",
]


# %% [markdown]
# Now the probes. Each changes something that must not matter and says whether a prediction changed.


# %%
class Probes:
    """Ask a model six questions; every answer should be False."""

    def __init__(self, model):
        torch.manual_seed(1)
        self.model, self.lens = model, torch.tensor([7, 4, 2])
        self.source = torch.randint(11, (3, 7))
        self.target = torch.randint(13, (3, 9))

    def changes(self, place, rows, columns, *, training=False):
        """Change one entry; → whether these predictions change."""
        inputs = {"source": self.source, "target": self.target}
        before = self.run(**inputs, training=training)
        name, *index = place
        inputs[name] = inputs[name].clone()
        inputs[name][tuple(index)] = (inputs[name][tuple(index)] + 1) % 11
        after = self.run(**inputs, training=training)
        difference = (before - after)[rows, columns].abs().max()
        return difference.item() > 1e-4

    def run(self, source, target, training):
        """Predict in a copy, so that no statistics are left behind."""
        model = deepcopy(self.model).train(training)
        with torch.no_grad():
            return model.predict(source, target, self.lens)


# %%
def chunks_differ(model, source, target, lens):
    """Decode in two chunks and at once; → whether the logits differ."""
    with evaluating(model):
        memory = model.encode(source, lens)
        whole, _ = model.decode(target, memory, lens)
        _, cache = model.decode(target[:, :4], memory, lens)
        rest, _ = model.decode(target[:, 4:], memory, lens, cache)
    return (rest - whole[:, 4:]).abs().max().item() > 1e-4


def answers(model):
    """Give a letter for each probe that finds something."""
    ask, every, before = Probes(model), slice(None), slice(0, -1)
    found = {
        "A": ask.changes(("target", every, -1), every, every),
        "B": ask.changes(("target", every, -2), every, before, training=True),
        "C": ask.changes(("target", every, -2), every, before),
        "D": ask.changes(("target", 0, 1), slice(1, 3), every, training=True),
        "E": ask.changes(("source", 2, 5), every, every),
        "F": chunks_differ(model, ask.source, ask.target, ask.lens),
    }
    return "".join(letter for letter, guilty in found.items() if guilty)


# %%
signs = {fault: answers(make_suspect(fault)) for fault in FAULTS}
questions = {
    "A": "the last target token, which is an answer only",
    "B": "the last input token, in training mode",
    "C": "the last input token, in evaluation mode",
    "D": "another sentence of the batch, in training mode",
    "E": "the source behind its end",
    "F": "two chunks with a cache instead of one pass",
}
table(
    ["", "what is changed", *FAULTS],
    [
        (letter, text, *("×" if letter in signs[f] else "" for f in FAULTS))
        for letter, text in questions.items()
    ],
)

# %% [markdown]
# All six patterns differ, and the right model has none. So a function can name the fault of a model it is given; it is graded on models in random order.

# %%
names = {pattern: fault for fault, pattern in signs.items()} | {"": "none"}
assert len(names) == 7
exam = [*FAULTS, "none"]
random.Random(0).shuffle(exam)
graded = [names[answers(make_suspect(fault))] == fault for fault in exam]
print(f"{sum(graded)} of {len(exam)} named")
assert all(graded)
caught = [
    probes
    for size in (1, 2, 3)
    for probes in itertools.combinations("ABCDEF", size)
    if all(set(probes) & set(each) for each in signs.values())
]
print("sets of at most three probes that catch all:", caught)
assert {"".join(each) for each in caught} == {"BEF"}

# %% [markdown]
# To *catch* all six (without naming them) three probes are enough, and two of the three are the tests of @sec-two-tests: causality in training mode, and chunks against one pass. Causality in evaluation mode is then
# not needed, because a mask that is missing there makes chunks and the single pass differ. But it is the test that says *what* is wrong.

# %% [markdown]
# ## Exercise 5: Everything at position 0
#
# *Let every token of a chunk stand at position 0, in a model whose positions can be heard and in one where they drown; explain the accuracies.*
# [Exercise](../transformer.md#exercise-5)
#
# The task: six different symbols out of twenty come in any order, and are to be written sorted. The two models differ in one number, the standard deviation with which the embeddings are drawn, $1/\sqrt{D}$ as in the section or 1.


# %%
def sort_batches(batch_size=64, num_symbols=20, count=6):
    """Draw rows of different symbols, and the same rows sorted."""
    while True:
        rows = torch.rand(batch_size, num_symbols).argsort(-1)[:, :count] + 3
        begin = torch.full((batch_size, 1), 1)  # <bos>; <eos> is 2
        target = [begin, rows.sort(dim=1).values, begin + 1]
        yield rows, begin[:, 0] * count, torch.cat(target, dim=1)


def make_sorter(spread, steps=150):
    """Train on sorting, embeddings drawn with this standard deviation."""
    torch.manual_seed(0)
    model = Translator(23, 23, 32, 64, 4, 1, norm_first=True)
    for part in (model.source_embedding, model.target_embedding):
        nn.init.normal_(part.embedding.weight, std=spread)
    train(model, translation_loss, sort_batches(), steps=steps, rate=0.01)
    return model


# %%
#| timeout: 300
sorters = {"heard": make_sorter(32**-0.5), "drowned": make_sorter(1.0)}


# %%
class Forgetful(nn.Module):
    """Embed each chunk as if it were the first."""

    def __init__(self, embed):
        super().__init__()
        self.embed = embed

    def forward(self, tokens, offset=0):
        return self.embed(tokens)


def forget(model):
    """Copy a model; in the copy every new token stands at position 0."""
    model = deepcopy(model)
    model.target_embedding = Forgetful(model.target_embedding)
    return model


# %%
def judge(model):
    """Decode fresh rows greedily; → (found, wanted), ids (500, 7)."""
    torch.manual_seed(1)
    source, lens, target = next(sort_batches(500))
    with evaluating(model):
        first = model.start(source, lens)
        found = greedy_decode(model.step, first, bos_id=1, eos_id=2, max_len=7)
    return F.pad(found, (0, 7 - found.shape[1]), value=2), target[:, 1:]


def rows_right(model):
    """Give the share of rows that are right."""
    found, wanted = judge(model)
    return (found == wanted).all(dim=1).float().mean().item()


def loudness(model):
    """Compare the size of the positions with that of the embeddings."""
    part = model.target_embedding
    size = math.sqrt(32) * part.embedding.weight.square().mean().sqrt()
    return (part.positions.table[:7].square().mean().sqrt() / size).item()


# %%
sorted_right = {
    name: (loudness(model), rows_right(model), rows_right(forget(model)))
    for name, model in sorters.items()
}
table(
    ["positions", "position / embedding", "rows right", "all at position 0"],
    [
        (name, *(f"{each:.2f}" for each in row))
        for name, row in sorted_right.items()
    ],
)

# %%
for name, (_, right, at_zero) in sorted_right.items():
    assert right > 0.85
    assert (at_zero > right - 0.05) == (name == "drowned")
assert sorted_right["heard"][2] < sorted_right["heard"][1] - 0.15

# %% [markdown]
# Sorting needs no positions. The next symbol is the smallest of the source that is larger than the last one written, so the last token and the *set* of the source are enough; when there is none, the row ends. The model with drowned positions can only
# learn it that way, and the bug takes nothing from it that it had. What has the other one learned from positions? Look where its first mistakes are.

# %%
found, wanted = judge(forget(sorters["heard"]))
slips = (found != wanted)[(found != wanted).any(dim=1)]
first = slips.float().argmax(dim=1)
at_end = (first == 6).float().mean().item()
print(f"first mistake where the row should end: {at_end:.0%} of wrong rows")
assert at_end > 0.5

# %% [markdown]
# It has learned to *count*: a row has six symbols, then it ends. That is the easier way while positions can be heard. Now every token claims to be the first, the end never comes near, and it goes on writing. So a test on accuracy sees the bug in the *sound* model only, and whoever mends the
# initialisation alone will think it a step back. The gap to the teacher-forced pass (@sec-two-tests) finds the bug in both:


# %%
def forced_gap(model):
    """Decode tokens one by one and at once; → the largest difference."""
    torch.manual_seed(1)
    source, lens, target = next(sort_batches(50))
    with evaluating(model):
        expected = model(source, target, lens).log_softmax(dim=-1)
        state, pieces = model.start(source, lens), []
        for tokens in target.T:
            log_probs, state = model.step(tokens, state)
            pieces.append(log_probs)
    return (torch.stack(pieces, dim=1) - expected).abs().max().item()


# %%
for name, model in sorters.items():
    gaps = forced_gap(model), forced_gap(forget(model))
    print(f"{name}: gap {gaps[0]:.2f}, all at position 0 {gaps[1]:.2f}")
    assert gaps[0] < 1e-3 and gaps[1] > 0.1

# %% [markdown]
# ## Exercise 6: Which half for which task?
#
# *Encoder, decoder or both, for tagging, translation, continuation and ranking?*
# [Exercise](../transformer.md#exercise-6)
#
# Two questions decide. *May an output depend on what comes later in its own sequence?* If the whole sequence is there before the first output is needed, it may, and it should. *How many outputs are there, and when are they known?*
#
# | task | half | reason |
# |---|---|---|
# | tagging: a label for each word | encoder | one output a word, all words are there; in "they *can* fish" the label of the second word depends on the third |
# | translation | both | the source is there as a whole, the target comes token by token and has another length; the memory is projected once |
# | continuation of a text | decoder, without cross-attention | there is no second sequence; old outputs do not change when a token comes, so a step costs one token |
# | ranking texts for a query | encoder | no text is written; texts encoded on their own can be stored, and a query then costs one pass and dot products |
#
# (For ranking there is a second way, an encoder over query and text *together*: better, since words of both can meet, but one pass a pair. It is used for the best few of the first. And a decoder over "source, then
# target" can translate as well; the source is then read from left to right, unless the mask lets it see both sides.) The reasons can be checked on untrained layers. A decoder without cross-attention is an encoder with a causal mask.

# %%
torch.manual_seed(0)
encoder = TransformerEncoder(32, 64, 4, 2).eval()
x, other = torch.randn(2, 1, 6, 32)


def read(x, causal=False):
    """Run the encoder, or with a causal mask a decoder alone."""
    mask = causal_mask(*[x.shape[1]] * 2) if causal else None
    with torch.no_grad():
        return encoder(x, mask)[0]


# %% [markdown]
# Tagging: does the output at the second word know the third? Continuation: do the old outputs stay when a token is appended?

# %%
changed = x.clone()
changed[:, 2] = other[:, 2]
for causal in (False, True):
    knows = not torch.equal(read(x, causal)[:, 1], read(changed, causal)[:, 1])
    longer = read(torch.cat([x, other[:, :1]], dim=1), causal)[:, :6]
    stays = torch.allclose(longer, read(x, causal), atol=1e-5)
    name = "causal: " if causal else "encoder:"
    print(f"{name} knows the next word {knows}, old outputs stay {stays}")
    assert knows == (not causal) and stays == causal

# %% [markdown]
# Ranking: texts that are read on their own give vectors that no query can change, and a matrix product compares all of them with a query. Read together, each pair is another pass.

# %%
texts, queries = torch.randn(20, 6, 32), torch.randn(3, 4, 32)
stored = read(texts).mean(dim=1)  # (20, D), once and for all
scores = read(queries).mean(dim=1) @ stored.T  # (3, 20)
apart, together = len(texts) + len(queries), len(texts) * len(queries)
print(f"passes apart {apart}, together {together}")
pairs = [torch.cat([query.expand(20, -1, -1), texts], 1) for query in queries]
found = torch.stack([read(each)[:, 4:].mean(dim=1) for each in pairs])
assert scores.shape == (3, 20) and apart < together == found[..., 0].numel()
assert not torch.allclose(found[0], found[1], atol=1e-2)  # texts know queries

# %% [markdown]
# ## Exercise 7: What padding does to a gradient
#
# *Show by numbers how the batch changes the gradient when padding is averaged in.*
# [Exercise](../transformer.md#exercise-7)
#
# Let a batch have $R$ real tokens in $B \cdot T$ places, and $\ell$ the sum of the losses of the real ones. The right mean is $\ell / R$. The mean over all places, with zeros at the padding, is $\ell / (BT)$: the right
# loss, and so the right gradient, times the share $R / (BT)$ of real tokens. With uniform logits over ten words, two real steps of four:


# %%
def averaged_in(model, batch):
    """Average the losses over all places, zeros at padding: wrong."""
    source, source_lens, target = batch
    logits = model(source, target[:, :-1], source_lens)
    losses = F.cross_entropy(logits.mT, target[:, 1:], reduction="none")
    return (losses * (target[:, 1:] != 0)).mean()


class Uniform(nn.Module):
    """Give equal logits over ten words."""

    def forward(self, source, target, source_lens):
        return torch.zeros(*target.shape, 10)


# %%
batch = None, None, torch.tensor([[1, 7, 5, 0, 0]])
wrong = averaged_in(Uniform(), batch).item()
right = translation_loss(Uniform(), batch).item()
print(f"right {right:.4f}, padding averaged in {wrong:.4f}")
assert math.isclose(right, math.log(10), rel_tol=1e-6)
assert math.isclose(wrong, math.log(10) / 2, rel_tol=1e-6)

# %% [markdown]
# Now the gradient. The same short sentence, alone or beside a longer one: how much does *one of its tokens* count, and how large is the gradient of the batch?


# %%
def gradient(loss, model, batch):
    """Give the gradient of a loss as one long vector."""
    model.zero_grad()
    loss(model, batch).backward()
    return torch.cat([x.grad.flatten() for x in model.parameters()])


def batch_beside(num_words):
    """Put a target of three tokens beside one of `num_words`."""
    target = torch.zeros(2, max(4, num_words + 1), dtype=torch.long)
    target[0, :4] = torch.tensor([1, 7, 5, 2])
    target[1, 0], target[1, num_words] = 1, 2
    target[1, 1:num_words] = torch.arange(num_words - 1) % 9 + 3
    return torch.full((2, 3), 5), torch.tensor([3, 2]), target


# %%
torch.manual_seed(0)
model, rows = Transformer(12, 12, 32, 64, 4, 1), []
for num_words in (3, 10, 50):
    batch = batch_beside(num_words)
    real = (batch[2][:, 1:] != 0).sum().item()
    places = batch[2][:, 1:].numel()
    wrong, right = (
        gradient(loss, model, batch)
        for loss in (averaged_in, translation_loss)
    )
    share = real / places
    assert torch.allclose(wrong, share * right, atol=1e-6)
    norms = (f"{each.norm():.2f}" for each in (right, wrong))
    weights = f"1/{real}", f"1/{places}"
    rows.append((num_words, f"{share:.2f}", *norms, *weights))
# %%
table(
    [
        "tokens of the neighbour",
        "share real",
        "gradient, right",
        "averaged in",
        "weight of a token, right",
        "averaged in",
    ],
    rows,
)

# %% [markdown]
# (A token weighs less beside a long neighbour in the right mean too, because there are more tokens; but over *real* ones.) The factor would be harmless if it were the same for all batches: Adam divides it out. It is not. A batch of equally long
# sentences has the share 1, one with a single long sentence perhaps 0.3, and so the same sentence teaches three times as much in one as in the other, by the luck of the draw. What padding there is depends also on things that have no meaning, such as how far the batch is filled up:

# %%
source, lens, target = batch_beside(10)
norms = {}
for more in (0, 10, 30):
    batch = source, lens, F.pad(target, (0, more))
    norms[more] = [
        gradient(loss, model, batch).norm().item()
        for loss in (translation_loss, averaged_in)
    ]
    print(f"{more:2} more pads: right {norms[more][0]:.3f},", end=" ")
    print(f"averaged in {norms[more][1]:.3f}")
assert math.isclose(norms[0][0], norms[30][0], rel_tol=1e-4)
assert math.isclose(norms[0][1], 4 * norms[30][1], rel_tol=1e-4)

# %% [markdown]
# And if the zeros are forgotten as well, the padding is *taught*: its loss is small soon, which looks like success, and the gradient points elsewhere.


# %%
def padding_taught(model, batch):
    """Average over all places, padding as a word like others: wrong."""
    source, source_lens, target = batch
    logits = model(source, target[:, :-1], source_lens)
    return F.cross_entropy(logits.mT, target[:, 1:])


batch = batch_beside(50)
angles = [
    torch.cosine_similarity(
        gradient(loss, model, batch),
        gradient(translation_loss, model, batch),
        dim=0,
    ).item()
    for loss in (averaged_in, padding_taught)
]
print("cosine to the right gradient:", *(f"{each:.2f}" for each in angles))
assert angles[0] > 0.9999 and angles[1] < 0.95

# %% [markdown]
# ## Exercise 8: Deep or wide
#
# *Spend the same number of parameters on depth or on width, three seeds each.*
# [Exercise](../transformer.md#exercise-8)
#
# A block's parameters grow with $D^2$, so three blocks must be narrower than one by about $\sqrt{3}$.

# %%
numbers, validation, _ = number_parts()
vocabularies = english, german = number_vocabularies(numbers)
held_out = {n: number_pairs(validation, n, 100) for n in (1, 2)}


def make_translator(width, num_layers, seed):
    """Make a pre-norm Transformer for number lists."""
    torch.manual_seed(seed)
    sizes = width, 2 * width, 4, num_layers
    return Translator(len(english), len(german), *sizes, norm_first=True)


def teach(model, seed=0):
    """Train on lists of one and two numbers, 120 steps."""
    batches = number_batches(numbers, vocabularies, batch_size=32, max_count=2)
    train(model, translation_loss, batches, steps=120, rate=0.01, seed=seed)
    return model


def matches(model):
    """Give the exact match on held-out lists of one and of two."""
    return [
        exact_match(model, held_out[n], vocabularies, max_len=24)
        for n in held_out
    ]


# %%
#| timeout: 300
SHAPES = {"1 block of width 48": (48, 1), "3 blocks of width 28": (28, 3)}
taught = {
    name: [teach(make_translator(*shape, seed), seed) for seed in range(3)]
    for name, shape in SHAPES.items()
}

# %%
scores = {
    name: torch.tensor([matches(model) for model in models])
    for name, models in taught.items()
}
sizes = {
    name: sum(x.numel() for x in models[0].parameters())
    for name, models in taught.items()
}
wide, deep = scores.values()
assert max(sizes.values()) < 1.01 * min(sizes.values())
assert wide[:, 1].min() > 0.5
assert wide[:, 1].mean() > deep[:, 1].mean() + 0.1
assert min(wide[:, 0].min(), deep[:, 0].min()) > 0.75
table(
    ["", "parameters", "one number", "two numbers"],
    [
        (
            name,
            f"{sizes[name]:,}",
            *(", ".join(f"{x:.2f}" for x in column) for column in found.T),
        )
        for name, found in scores.items()
    ],
)

# %%
#| timing: true
batch = next(number_batches(numbers, vocabularies, batch_size=32))
found = median_seconds(
    {
        name: lambda m=models[0]: translation_loss(m, batch).backward()
        for name, models in taught.items()
    }
)
for name, each in found.items():
    print(f"{name}: {1000 * each:.2g} ms a step")
assert found["3 blocks of width 28"] > 1.2 * found["1 block of width 48"]

# %% [markdown]
# Here width wins, twice. A step through three narrow blocks takes longer, since three small products in a row are slower than a larger one, and after 120 steps their seeds differ widely: some have learned pairs, some have not *yet*. (With 300 steps they do; try it.)
# The task asks for little composition, to look up a word and write its translation, so depth has little to offer that would make up for the slower start.
#
# What one may not conclude is that width is better, in general or even here after more steps. One learning rate for both is not quite fair either: a comparison that should settle something gives each shape its own, found on other seeds than those it is judged by.

# %% [markdown]
# ## Exercise 9: A window over long inputs
#
# *Let each source word see only its neighbours up to $w$ places away: cost and exact match by window.*
# [Exercise](../transformer.md#exercise-9)
#
# The window is a mask. It leaves $S(2w + 1)$ pairs of $S^2$, less what is missing at both ends, $w(w + 1)$.


# %%
def window_mask(num_tokens, reach):
    """Let each token see those at most `reach` away, → bool (S, S)."""
    places = torch.arange(num_tokens)
    return (places[:, None] - places).abs() <= reach


for num_tokens, reach in ((10, 0), (10, 3), (100, 7)):
    pairs = num_tokens * (2 * reach + 1) - reach * (reach + 1)
    assert window_mask(num_tokens, reach).sum() == pairs

# %% [markdown]
# With depth the view widens: after $L$ blocks a word knows those up to $L \cdot w$ away. The gradient shows it.

# %%
torch.manual_seed(0)
stack = TransformerEncoder(16, 32, 2, 3).eval()
x = torch.randn(1, 17, 16, requires_grad=True)
for reach in (1, 2):
    output = stack(x, window_mask(17, reach))[0]
    (felt,) = torch.autograd.grad(output[0, 8].square().sum(), x)
    places = felt[0].abs().sum(dim=1).nonzero().flatten().tolist()
    print(f"reach {reach}: place 8 knows {places[0]} to {places[-1]}")
    assert places == list(range(8 - 3 * reach, 9 + 3 * reach))


# %% [markdown]
# A mask alone saves nothing: all pairs are computed, most of them thrown away. To save, cut the sequence into blocks of $w$ words; each block needs only itself and its two neighbours as keys.


# %%
def banded_attention(query, key, value, reach):
    """Attend within a window, block by block.

    query, key, value (B, H, S, d), S a multiple of reach → (B, H, S, d).
    """
    heads, num_tokens = query.shape[:2], query.shape[2]
    query, key, value = (
        x.flatten(0, 1).unflatten(1, (-1, reach)) for x in (query, key, value)
    )  # (B · H, blocks, reach, d)
    count = query.shape[1]
    key, value = (
        torch.cat(
            [F.pad(x, (0, 0, 0, 0, 1, 1))[:, i : i + count] for i in range(3)],
            dim=2,
        )
        for x in (key, value)
    )  # (B · H, blocks, 3 · reach, d)
    own = torch.arange(num_tokens).view(count, reach, 1)
    seen = own[:, :1] - reach + torch.arange(3 * reach)  # (blocks, 1, 3 · …)
    mask = (own - seen).abs() <= reach
    mask = mask & (seen >= 0) & (seen < num_tokens)
    output = F.scaled_dot_product_attention(query, key, value, mask[None])
    return output.flatten(1, 2).unflatten(0, heads)


# %%
torch.manual_seed(0)
for num_tokens, reach in ((12, 3), (8, 8), (64, 16)):
    inputs = torch.randn(3, 2, 4, num_tokens, 5)
    expected = F.scaled_dot_product_attention(
        *inputs, window_mask(num_tokens, reach)
    )
    found = banded_attention(*inputs, reach)
    assert torch.allclose(found, expected, atol=1e-5)

# %%
#| timing: true
rows = []
for num_tokens in (256, 1024, 2048):
    inputs = torch.randn(3, 1, 4, num_tokens, 16)
    mask = window_mask(num_tokens, 32)
    found = median_seconds(
        {
            "all": lambda x=inputs: F.scaled_dot_product_attention(*x),
            "mask": lambda x=inputs, m=mask: F.scaled_dot_product_attention(
                *x, m
            ),
            "blocks": lambda x=inputs: banded_attention(*x, 32),
        }
    )
    rows.append((num_tokens, *(f"{1000 * s:.2g}" for s in found.values())))
assert found["mask"] > 2 * found["blocks"]
table(["S", "all pairs, ms", "window as a mask", "window in blocks"], rows)

# %% [markdown]
# Twice the length costs four times as much with a mask, and twice with blocks.
#
# Now exact match. We put the window over the *encoder* of the wide model from exercise 8, which was trained without one; and train one more that never sees a neighbour.


# %%
class Windowed(Translator):
    """Read the source through a window."""

    reach = None

    def encode(self, src, src_lens, need_weights=False):
        mask = length_mask(src_lens, src.shape[1])
        if self.reach is not None:
            mask = mask & window_mask(src.shape[1], self.reach)
        x = self.source_embedding(src)
        memory, maps = self.encoder(x, mask, need_weights)
        return (memory, maps) if need_weights else memory


# %%
#| timeout: 300
blind = make_translator(48, 1, seed=0)
blind.__class__, blind.reach = Windowed, 0
blind = teach(blind)

# %% [markdown]
# The decoder can have a window too: a *rolling* cache that keeps the keys and values of the last tokens only. It then no longer knows how many tokens there were, and the position has to be carried along, or exercise 5 comes back.


# %%
class Rolling(Translator):
    """Keep the last `reach` tokens in the cache, not all."""

    reach = 0

    def start(self, source, source_lens):
        lens, cache = super().start(source, source_lens)
        return lens, cache, torch.zeros_like(lens)

    def step(self, tokens, state):
        lens, cache, count = state
        keep = slice(max(cache[0].key.shape[2] - self.reach, 0), None)
        cache = tuple(
            each._replace(
                key=each.key[:, :, keep], value=each.value[:, :, keep]
            )
            for each in cache
        )
        mask = padding_mask(lens, len(lens), cache[0].memory_key.shape[2])
        x = self.target_embedding(tokens[:, None], int(count[0]))
        x, cache, _ = self.decoder(x, None, mask, cache)
        log_probs = self.output(x)[:, -1].log_softmax(dim=-1)
        return log_probs, (lens, cache, count + 1)


# %%
def through_window(kind, reach):
    """Give exact match on one and two numbers through a window."""
    model = deepcopy(taught["1 block of width 48"][0])
    model.__class__, model.reach = kind, reach
    return matches(model)


reaches = (0, 1, 2, 4, 100)
by_window = {
    name: [through_window(kind, reach) for reach in reaches]
    for name, kind in (("encoder", Windowed), ("decoder", Rolling))
}
without_any = matches(blind)

# %%
#| label: fig-by-window
#| caption: Exact match on lists of two numbers, by the window of the encoder or of the decoder's cache; the other half sees everything. The single dot was *trained* with a window of 0.
#| alt: >-
#|   Two rising lines over the window 0, 1, 2, 4 and all. That of the encoder begins in the middle and is at its full height from 2 on, that of the decoder begins at zero and is there from 4 on. A single dot at window 0 lies nearly as high as the ends.
figure, axes = new_figure(width=3.4, height=2.4)
for index, found in enumerate(by_window.values()):
    heights = [pairs for _, pairs in found]
    line(axes, range(5), heights, index)
    dots(axes, range(5), heights, index)
axes.text(2.1, 0.88, "encoder", color=SERIES[0])
axes.text(1.6, 0.5, "decoder", color=SERIES[1])
dots(axes, [0], [without_any[1]], 2)
axes.text(0.12, without_any[1] + 0.03, "trained so", color=SERIES[2])
axes.set(ylim=(-0.12, 1), xlabel="window w", ylabel="exact match")
axes.set_xticks(range(5), [*map(str, reaches[:-1]), "all"])
figure

# %%
whole = by_window["encoder"][-1]
assert torch.allclose(torch.tensor(whole), scores["1 block of width 48"][0])
for name in ("encoder", "decoder"):
    found = torch.tensor(by_window[name])  # (windows, 2)
    assert found[0, 1] < found[-1, 1] - 0.1  # 0 hurts pairs
    assert (found[3] - found[-1]).abs().max() < 0.1  # 4 is enough
assert without_any[1] > 0.5

# %% [markdown]
# Number words are local, as @fig-by-window shows. A window of four neighbours in the encoder is as good as all, although the model was never trained with one, and so is a cache of the last four tokens. (That the whole window changes nothing is a check
# of the code.) Without any neighbours the trained model loses much. But one that was *trained* so has learned to do without: its decoder looks for each word in the source where it is needed. So a window that is put on afterwards measures
# what a model has got used to, not what the task needs. In long texts what is needed may stand far away, and
# $L \cdot w$ is a long way only if every layer passes the message on. Longformer therefore lets a few chosen tokens see everything and be seen by all [@beltagy2020].
