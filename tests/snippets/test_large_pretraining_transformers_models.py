"""Prove that BERT, T5 and GPT are those of transformers, in all they compute and in size."""

import copy
import inspect
import io
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from snippets.bahdanau_attention import (
    beam_search,
    exact_match,
    greedy_decode,
    translation_loss,
)
from snippets.datasets import Vocabulary, encode_pairs
from snippets.large_pretraining_transformers import (
    BERT,
    GPT,
    T5,
    RelativeBias,
    count_parameters,
    relative_buckets,
)
from snippets.self_attention_and_positional_encoding import RotaryAttention
from snippets.training import evaluating, train
from snippets.transformer import padding_mask

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", minversion="5")
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        BertModel,
        GPT2Config,
        GPT2LMHeadModel,
        T5Config,
        T5ForConditionalGeneration,
    )
    from transformers.models.t5.modeling_t5 import T5Attention

# Axes: a number each that no other has, so that no swapped axis can pass.
B, H, T, S, D = 2, 3, 5, 7, 33  # a head is 11 wide
WORDS, CONTEXT, LAYERS, HIDDEN = 37, 13, 2, 29
LENS = torch.tensor([S, 4])
TOLERANCE = {
    torch.float16: 3e-2,
    torch.bfloat16: 2e-1,
    torch.float32: 1e-5,
    torch.float64: 1e-11,
}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
modes = pytest.mark.parametrize("training", (True, False), ids=("train", "eval"))
with_and_without_weights = pytest.mark.parametrize("need_weights", (False, True))
both_positions = pytest.mark.parametrize("rotary", (False, True), ids=("learned", "rotary"))


def close(found, expected, dtype=torch.float32):
    """Assert equality within the tolerance of a dtype."""
    limit = TOLERANCE[dtype]
    assert_close(found.to(expected.dtype), expected, atol=limit, rtol=limit)


@torch.no_grad()
def stir(model, seed=5, size=0.3):
    """Give every parameter a value of its own, large enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return model


def draw_tokens(*shape, seed=9, words=WORDS):
    """Draw tokens that do not depend on what was drawn before."""
    return torch.randint(words, shape, generator=torch.Generator().manual_seed(seed))


def make_bert(*, stirred=True, seed=1, words=WORDS, **options):
    torch.manual_seed(seed)
    model = BERT(words, CONTEXT, D - 1 if options.get("rotary") else D, *heads(options), **options)
    return stir(model) if stirred else model


def heads(options):
    """Give heads and layers; what is rotated must be even: two heads of 16."""
    return (2 if options.get("rotary") else H), LAYERS


def make_t5(*, stirred=True, seed=1, words=WORDS, **options):
    torch.manual_seed(seed)
    model = T5(words, D, H, LAYERS, **({"ffn_width": HIDDEN} | options))
    return stir(model, size=0.1) if stirred else model


def make_gpt(*, stirred=True, seed=1, words=WORDS, context=CONTEXT, **options):
    torch.manual_seed(seed)
    model = GPT(words, context, D, H, LAYERS, **options)
    return stir(model) if stirred else model


# ------------------------------------------------------------------------------------------------
# Agreement with transformers. A pair: (our parameter, theirs, what of theirs it is).


def whole(x):
    return x


def turned(x):
    return x.mT


def pair(ours, theirs, view=whole):
    """Pair the parameters of two modules of one kind."""
    mine, other = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert mine.keys() == other.keys(), (mine.keys(), other.keys())
    return [(mine[name], other[name], view if mine[name].ndim > 1 else whole) for name in mine]


def adopt(ours, theirs, pairs):
    """Copy their weights into ours; nothing may be left out, on either side."""
    mine = [id(x) for x in ours.parameters()]
    assert sorted(id(x) for x, *_ in pairs) == sorted(mine), "a parameter without a partner"
    other = {id(x) for x in theirs.parameters()}
    assert {id(x) for _, x, _ in pairs} == other, "one of theirs without a partner"
    with torch.no_grad():
        for x, y, view in pairs:
            x.copy_(view(y))


def same_gradients(pairs, limit=1e-5):
    """Assert that every gradient of ours is theirs."""
    for x, y, view in pairs:
        assert x.grad is not None and x.grad.abs().max() > 0
        assert_close(x.grad, view(y.grad), atol=limit, rtol=limit)


def stirred_of(kind, config, size=0.3):
    """Make one of their models, with weights of every parameter's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(5)  # they draw their weights from the global state
        return stir(kind(config).eval(), size=size)


def pair_bert(ours, masked, model):
    """Pair our BERT with their masked language model, and a model for the pooler."""
    a, b = ours.embedding, masked.bert.embeddings
    pairs = pair(a.tokens, b.word_embeddings) + pair(a.segments, b.token_type_embeddings)
    pairs += [(a.positions.table, b.position_embeddings.weight, whole)]
    pairs += pair(a.norm, b.LayerNorm)
    for a, b in zip(ours.encoder.blocks, masked.bert.encoder.layer, strict=True):
        own = b.attention.self
        pairs += pair(a.attention.query_layer, own.query) + pair(a.attention.key_layer, own.key)
        pairs += pair(a.attention.value_layer, own.value)
        pairs += pair(a.attention.output_layer, b.attention.output.dense)
        pairs += pair(a.attention_residual.norm, b.attention.output.LayerNorm)
        pairs += pair(a.ffn.hidden_layer, b.intermediate.dense)
        pairs += pair(a.ffn.output_layer, b.output.dense)
        pairs += pair(a.ffn_residual.norm, b.output.LayerNorm)
    head = masked.cls.predictions
    pairs += pair(ours.head.dense, head.transform.dense)
    pairs += pair(ours.head.norm, head.transform.LayerNorm)
    pairs += [(ours.head.bias, head.decoder.bias, whole)]
    return pairs, pair(ours.pooler, model.pooler.dense)


def both_berts(words, context, width, num_heads, layers, segments):
    """Make our BERT and theirs, a masked model that shares all with one with a pooler."""
    config = BertConfig(
        vocab_size=words, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=num_heads, intermediate_size=4 * width, pad_token_id=None,
        max_position_embeddings=context, type_vocab_size=segments, layer_norm_eps=1e-12,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    masked, model = stirred_of(BertForMaskedLM, config), stirred_of(BertModel, config)
    masked.bert.pooler = None
    pooler = model.pooler
    model.load_state_dict(masked.bert.state_dict(), strict=False)
    ours = BERT(words, context, width, num_heads, layers, num_segments=segments).eval()
    pairs, pooled = pair_bert(ours, masked, model)
    with torch.no_grad():
        for x, y, _ in pooled:
            x.copy_(y)
    rest = nn.ModuleList([ours.embedding, ours.encoder, ours.head])
    adopt(rest, masked, pairs)
    assert pooler is model.pooler
    return ours, masked, model, pairs


BERTS = [(WORDS, CONTEXT, D, H, LAYERS, 2), (11, 7, 10, 5, 1, 3), (53, 23, 14, 1, 3, 1)]


@pytest.mark.parametrize("config", BERTS, ids=str)
@pytest.mark.parametrize("padded", (False, True), ids=("whole", "padded"))
def test_bert_is_that_of_transformers(config, padded):
    ours, masked, model, pairs = both_berts(*config)
    tokens = draw_tokens(3, 7, words=config[0])
    segments = draw_tokens(3, 7, seed=2, words=config[-1])
    lengths = torch.tensor([7, 1, 4]) if padded else None
    mask = (torch.arange(7) < lengths[:, None]).long() if padded else torch.ones(3, 7).long()
    rest = {"attention_mask": mask, "token_type_ids": segments}
    wanted = masked(tokens, output_attentions=True, **rest)
    states, maps = ours.encode(tokens, lengths, segments, need_weights=True)
    for found, theirs in zip(maps, wanted.attentions, strict=True):
        close(found, theirs)
    wanted_model = model(tokens, **rest)
    close(states, wanted_model.last_hidden_state)
    close(ours.pool(states), wanted_model.pooler_output)
    found = ours(tokens, lengths, segments)
    close(found, wanted.logits)
    labels = draw_tokens(3, 7, seed=4, words=config[0])
    for logits in (found, wanted.logits):
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    for x, y, view in pairs:  # a table of one segment, like a bias before a norm, may have none
        assert_close(x.grad, view(y.grad), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_bert_has_their_epsilon_too():
    ours, masked, _, pairs = both_berts(*BERTS[0])
    for x, y, view in pairs:
        y.mul_(0.01)  # norms of what is as small as √ε
        x.copy_(view(y))
    found, wanted = ours(draw_tokens(B, S)), masked(draw_tokens(B, S)).logits
    scale = wanted.abs().max()
    close(found / scale, wanted / scale)


def test_bert_reads_segment_0_unless_told():
    ours, masked, *_ = both_berts(*BERTS[0])
    tokens = draw_tokens(B, S)
    close(ours(tokens), masked(tokens).logits)
    close(ours(tokens), ours(tokens, None, torch.zeros(B, S, dtype=torch.long)))
    ones = torch.ones(B, S, dtype=torch.long)
    assert (ours(tokens) - ours(tokens, segments=ones)).abs().max() > 1e-2


def cut(i):
    """Give what of their joined queries, keys and values is the i-th."""
    return lambda x: x.chunk(3, dim=-1)[i].mT if x.ndim > 1 else x.chunk(3, dim=-1)[i]


def pair_gpt(ours, theirs):
    """Pair our GPT with theirs, whose linear layers keep their matrices the other way round."""
    a, b = ours, theirs.transformer
    pairs = pair(a.embedding, b.wte) + [(a.positions.table, b.wpe.weight, whole)]
    pairs += pair(a.norm, b.ln_f)
    for a, b in zip(ours.blocks, theirs.transformer.h, strict=True):
        pairs += pair(a.attention_residual.norm, b.ln_1) + pair(a.ffn_residual.norm, b.ln_2)
        layers = a.attention.query_layer, a.attention.key_layer, a.attention.value_layer
        for i, layer in enumerate(layers):
            pairs += [(layer.weight, b.attn.c_attn.weight, cut(i))]
            pairs += [(layer.bias, b.attn.c_attn.bias, cut(i))]
        pairs += pair(a.attention.output_layer, b.attn.c_proj, turned)
        pairs += pair(a.ffn.hidden_layer, b.mlp.c_fc, turned)
        pairs += pair(a.ffn.output_layer, b.mlp.c_proj, turned)
    return pairs


def both_gpts(words, context, width, num_heads, layers):
    config = GPT2Config(
        vocab_size=words, n_positions=context, n_embd=width, n_layer=layers, n_head=num_heads,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    theirs = stirred_of(GPT2LMHeadModel, config)
    ours = GPT(words, context, width, num_heads, layers).eval()
    pairs = pair_gpt(ours, theirs)
    adopt(ours, theirs, pairs)
    return ours, theirs, pairs


GPTS = [(WORDS, CONTEXT, D, H, LAYERS), (11, 11, 10, 5, 1), (53, 23, 14, 1, 3)]


@pytest.mark.parametrize("config", GPTS, ids=str)
def test_gpt_is_that_of_transformers(config):
    ours, theirs, pairs = both_gpts(*config)
    tokens = draw_tokens(3, 11, words=config[0])
    wanted = theirs(tokens, output_attentions=True)
    found, maps = ours(tokens, need_weights=True)
    close(found, wanted.logits)
    close(ours(tokens), wanted.logits)
    for mine, other in zip(maps, wanted.attentions, strict=True):
        close(mine, other)
    labels = draw_tokens(3, 11, seed=4, words=config[0])
    for logits in (ours(tokens), wanted.logits):
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    for x, y, view in pairs:
        assert_close(x.grad, view(y.grad), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_gpt_has_their_epsilon_too():
    ours, theirs, pairs = both_gpts(*GPTS[0])
    for x, y, view in pairs:
        y.mul_(0.01)
        x.copy_(view(y))
    found, wanted = ours(draw_tokens(B, S)), theirs(draw_tokens(B, S)).logits
    scale = wanted.abs().max()
    close(found / scale, wanted / scale)


@pytest.mark.parametrize("sizes", ((11,), (1,) * 11, (4, 7), (7, 1, 3)), ids=str)
@torch.no_grad()
def test_cache_of_gpt_is_that_of_transformers(sizes):
    ours, theirs, _ = both_gpts(*GPTS[0])
    tokens = draw_tokens(3, 11)
    name = "cache" if "cache" in inspect.signature(theirs.forward).parameters else "past_key_values"
    cache, past = None, None
    for chunk in tokens.split(sizes, dim=1):
        logits, cache = ours.decode(chunk, cache)
        answer = theirs(chunk, use_cache=True, **{name: past})
        past = answer[name]
        close(logits, answer.logits)
        for mine, layer in zip(cache, past.layers, strict=True):
            close(mine.key, layer.keys)
            close(mine.value, layer.values)


def pair_t5(ours, theirs):
    """Pair our T5 with theirs."""
    pairs = pair(ours.embedding, theirs.shared)
    for a, b in ((ours.encoder, theirs.encoder), (ours.decoder, theirs.decoder)):
        pairs += pair(a.norm[0], b.final_layer_norm)
        table = b.block[0].layer[0].SelfAttention.relative_attention_bias
        pairs += pair(a.relative_bias.table, table)
        for mine, other in zip(a.blocks, b.block, strict=True):
            layers = list(other.layer)
            pairs += pair_t5_attention(mine.attention, layers[0].SelfAttention)
            pairs += pair(mine.attention_residual.norm, layers[0].layer_norm)
            if len(layers) == 3:
                pairs += pair_t5_attention(mine.cross_attention, layers[1].EncDecAttention)
                pairs += pair(mine.cross_residual.norm, layers[1].layer_norm)
            pairs += pair(mine.ffn.hidden_layer, layers[-1].DenseReluDense.wi)
            pairs += pair(mine.ffn.output_layer, layers[-1].DenseReluDense.wo)
            pairs += pair(mine.ffn_residual.norm, layers[-1].layer_norm)
    return pairs


def pair_t5_attention(ours, theirs):
    pairs = pair(ours.query_layer, theirs.q) + pair(ours.key_layer, theirs.k)
    return pairs + pair(ours.value_layer, theirs.v) + pair(ours.output_layer, theirs.o)


def both_t5s(words, width, num_heads, layers, hidden, buckets, distance):
    config = T5Config(
        vocab_size=words, d_model=width, d_kv=width // num_heads, d_ff=hidden, num_layers=layers,
        num_heads=num_heads, relative_attention_num_buckets=buckets, dropout_rate=0.0,
        relative_attention_max_distance=distance, tie_word_embeddings=True, pad_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    theirs = stirred_of(T5ForConditionalGeneration, config, size=0.1)
    options = {"ffn_width": hidden, "num_buckets": buckets, "max_distance": distance}
    ours = T5(words, width, num_heads, layers, **options).eval()
    pairs = pair_t5(ours, theirs)
    adopt(ours, theirs, pairs)
    return ours, theirs, pairs


T5S = [
    (WORDS, D, H, LAYERS, HIDDEN, 32, 128),
    (11, 10, 5, 1, 41, 7, 5),
    (53, 14, 1, 3, 17, 12, 19),
]


@pytest.mark.parametrize("config", T5S, ids=str)
@pytest.mark.parametrize("lens", (None, (23, 1, 11)), ids=("whole", "padded"))
def test_t5_is_that_of_transformers(config, lens):
    ours, theirs, pairs = both_t5s(*config)
    source, target = draw_tokens(3, 23, words=config[0]), draw_tokens(3, 19, words=config[0])
    lengths = torch.tensor(lens or (23, 23, 23))
    mask = (torch.arange(23) < lengths[:, None]).long()
    wanted = theirs(source, mask, decoder_input_ids=target, output_attentions=True)
    found = ours(source, target, lengths)
    close(found, wanted.logits)
    memory, maps = ours.encode(source, lengths, need_weights=True)
    close(memory, wanted.encoder_last_hidden_state)
    for mine, other in zip(maps, wanted.encoder_attentions, strict=True):
        close(mine, other)
    logits, _, maps = ours.decode(target, memory, lengths, need_weights=True)
    close(logits, wanted.logits)
    theirs_of_decoder = zip(wanted.decoder_attentions, wanted.cross_attentions, strict=True)
    for mine, other in zip(maps, theirs_of_decoder, strict=True):
        close(mine[0], other[0])
        close(mine[1], other[1])
    labels = draw_tokens(3, 19, seed=4, words=config[0])
    for each in (found, wanted.logits):
        F.cross_entropy(each.flatten(0, 1), labels.flatten()).backward()
    for x, y, view in pairs:
        assert_close(x.grad, view(y.grad), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_t5_is_that_of_transformers_beyond_its_largest_distance():
    ours, theirs, _ = both_t5s(*T5S[0])
    source, target = draw_tokens(1, 293), draw_tokens(1, 271)
    wanted = theirs(source, decoder_input_ids=target)
    found = ours(source, target, torch.tensor([293]))
    close(found, wanted.logits)
    cache, logits = None, []
    for chunk in target.split((199, 1, 71), dim=1):
        memory = ours.encode(source, torch.tensor([293]))
        new, cache = ours.decode(chunk, memory, torch.tensor([293]), cache)
        logits.append(new)
    close(torch.cat(logits, 1), wanted.logits)


@pytest.mark.parametrize("bidirectional", (True, False))
@pytest.mark.parametrize(
    "sizes", ((32, 128), (4, 3), (5, 4), (7, 19), (16, 17), (64, 1000), (33, 128)), ids=str
)
def test_buckets_are_those_of_transformers(bidirectional, sizes):
    distances = torch.arange(-1500, 1501)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # log(0)
        wanted = T5Attention._relative_position_bucket(distances, bidirectional, *sizes)
    found = relative_buckets(distances, *sizes, bidirectional)
    assert torch.equal(found, wanted)
    assert found.min() == 0 and found.max() < sizes[0]


def test_buckets_by_hand():
    near = torch.tensor([-3, -2, -1, 0, 1, 2, 3])
    both_ways = relative_buckets(near, 32, 128, True).tolist()
    assert both_ways == [3, 2, 1, 0, 17, 18, 19]
    assert relative_buckets(near, 32, 128, False).tolist() == [3, 2, 1, 0, 0, 0, 0]
    far = torch.tensor([-7, -8, -127, -128, -(10**6)])
    assert relative_buckets(far, 32, 128, True).tolist() == [7, 8, 15, 15, 15]
    assert relative_buckets(far, 32, 128, False).tolist() == [7, 8, 31, 31, 31]
    # 8 buckets to distance 16, one way: 0 1 2 3 alone, then 4 to 16 by factors of √2
    row = relative_buckets(-torch.arange(18), 8, 16, False).tolist()
    assert row == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7]


def test_the_last_query_of_a_bias_stands_at_the_last_key():
    for bidirectional in (True, False):
        bias = stir(RelativeBias(H, 7, 19, bidirectional))
        square = bias(11, 11)
        assert square.shape == (H, 11, 11)
        assert torch.equal(bias(3, 11), square[:, -3:])
        assert torch.equal(square[:, 1:, 1:], square[:, :-1, :-1])  # only distances count
        ahead = square[:, 0, 1:]
        assert (ahead != square[:, :1, 0]).any() == bidirectional


@torch.no_grad()
def test_t5_has_their_epsilon_too():
    ours, theirs, pairs = both_t5s(*T5S[0])
    for x, y, view in pairs:
        y.mul_(0.003)
        x.copy_(view(y))
    source, target = draw_tokens(B, S), draw_tokens(B, T)
    found = ours(source, target, torch.tensor([S, S]))
    wanted = theirs(source, decoder_input_ids=target).logits
    scale = wanted.abs().max()
    close(found / scale, wanted / scale)


# ------------------------------------------------------------------------------------------------
# Published sizes, on the meta device: nothing is allocated

GPT2_SIZES = {
    (12, 768, 12): 124_439_808,
    (24, 1024, 16): 354_823_168,
    (36, 1280, 20): 774_030_080,
    (48, 1600, 25): 1_557_611_200,
}


def test_bert_has_the_published_sizes():
    for layers, width, num_heads, body, pooled in (
        (12, 768, 12, 108_891_648, 109_482_240),
        (24, 1024, 16, 334_092_288, 335_141_888),
    ):
        with torch.device("meta"):
            ours = BERT(30522, 512, width, num_heads, layers)
            config = BertConfig(
                hidden_size=width, num_hidden_layers=layers, num_attention_heads=num_heads,
                intermediate_size=4 * width,
            )  # fmt: skip
            theirs = BertModel(config).num_parameters()
        parts = ours.embedding, ours.encoder
        assert count_parameters(*parts) == body
        assert count_parameters(*parts, ours.pooler) == pooled == theirs
        head = width * width + width + 2 * width + 30522
        assert count_parameters(ours) == pooled + head


@pytest.mark.parametrize("size", GPT2_SIZES, ids=str)
def test_gpt_2_has_the_published_sizes(size):
    layers, width, num_heads = size
    with torch.device("meta"):
        ours = GPT(50257, 1024, width, num_heads, layers)
        config = GPT2Config(n_embd=width, n_layer=layers, n_head=num_heads)
        theirs = GPT2LMHeadModel(config)
    assert count_parameters(ours) == GPT2_SIZES[size] == theirs.num_parameters()
    untied = count_parameters(ours) + 50257 * width
    assert untied == 163_037_184 or width != 768


def test_gpt_3_has_the_published_size():
    with torch.device("meta"):
        ours = GPT(50257, 2048, 12288, 96, 96)
        config = GPT2Config(n_embd=12288, n_layer=96, n_head=96, n_positions=2048)
        theirs = GPT2LMHeadModel(config)
    assert count_parameters(ours) == theirs.num_parameters() == 174_604_259_328


def test_t5_has_the_published_sizes():
    for width, num_heads, layers, count in (
        (512, 8, 6, 60_506_624), (768, 12, 12, 222_903_552), (1024, 16, 24, 737_668_096)
    ):  # fmt: skip
        with torch.device("meta"):
            ours = T5(32128, width, num_heads, layers)
            config = T5Config(
                d_model=width, d_ff=4 * width, num_heads=num_heads, num_layers=layers,
                tie_word_embeddings=True, d_kv=64,
            )  # fmt: skip
            theirs = T5ForConditionalGeneration(config)
        assert count_parameters(ours) == count == theirs.num_parameters()


def test_parameters_are_counted_once():
    layer = nn.Linear(3, 5)
    assert count_parameters(layer) == 20
    assert count_parameters(layer, layer, nn.ModuleList([layer, nn.Linear(2, 1)])) == 23
    assert count_parameters() == 0
    gpt = make_gpt()
    block = 12 * D * D + 13 * D
    assert count_parameters(*gpt.blocks) == LAYERS * block
    assert count_parameters(gpt) == LAYERS * block + 2 * D + (WORDS + CONTEXT) * D


def test_sizes_can_be_read_from_the_models():
    bert, t5, gpt = make_bert(), make_t5(), make_gpt()
    for model in (bert, t5, gpt):
        sizes = model.vocab_size, model.width, model.num_heads, model.num_layers
        assert sizes == (WORDS, D, H, LAYERS)
    assert bert.context == gpt.context == CONTEXT
    assert t5.ffn_width == HIDDEN and T5(5, 6, 1, 1).ffn_width == 24
    assert t5.encoder.blocks[0].ffn.hidden_layer.out_features == HIDDEN


# ------------------------------------------------------------------------------------------------
# Before training

WIDE = 64, 4, 3  # width, heads, layers


def untrained():
    """Give models with first weights, as functions of tokens (B, T)."""
    torch.manual_seed(0)
    lengths = torch.tensor([23, 23, 23])
    t5 = T5(101, *WIDE)
    return {
        "BERT": BERT(101, 23, *WIDE),
        "rotary BERT": BERT(101, 23, *WIDE, rotary=True),
        "T5": lambda tokens: t5(tokens, tokens, lengths),
        "GPT": GPT(101, 23, *WIDE),
    }


@pytest.mark.parametrize("kind", ("BERT", "rotary BERT", "T5", "GPT"))
@torch.no_grad()
def test_an_untrained_model_knows_nothing(kind):
    model = untrained()[kind]
    tokens = draw_tokens(3, 23, words=101)
    for labels in (draw_tokens(3, 23, seed=1, words=101), tokens.roll(-1, 1)):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        assert abs(loss - math.log(101)) < (0.4 if kind == "T5" else 0.1)


def test_first_weights_of_bert_and_gpt_have_the_published_sizes():
    torch.manual_seed(0)
    bert, gpt = BERT(499, 97, 96, 4, 3), GPT(499, 97, 96, 4, 3)
    for model in (bert, gpt):
        for name, x in model.named_parameters():
            if x.ndim == 2:
                into_stream = model is gpt and "output_layer" in name
                wanted = 0.02 / 6**0.5 if into_stream else 0.02
                few = 0.3 if "segments" in name else 0.06
                assert x.std().item() == pytest.approx(wanted, rel=few), name
                assert abs(x.mean()) < 3 * wanted / x.numel() ** 0.5
            else:
                assert (x == (1 if "norm.weight" in name else 0)).all(), name


def test_first_weights_of_t5_keep_its_ratios():
    torch.manual_seed(0)
    t5 = T5(499, 96, 4, 2, ffn_width=192)
    stds = {
        "query_layer": (96 * 24) ** -0.5, "key_layer": 96**-0.5, "value_layer": 96**-0.5,
        "hidden_layer": 96**-0.5, "relative_bias": 96**-0.5, "embedding": 0.5,
        "attention.output_layer": 0.5 * 96**-0.5, "ffn.output_layer": 0.5 * 192**-0.5,
    }  # fmt: skip
    for name, x in t5.named_parameters():
        if x.ndim == 2:
            (wanted,) = (std for key, std in stds.items() if key in name)
            few = 0.25 if "bias" in name else 0.06
            assert x.std().item() == pytest.approx(wanted, rel=few), name
        else:
            assert (x == 1).all(), name


@torch.no_grad()
def test_states_of_an_untrained_t5_are_as_large_as_its_own_init_makes_them():
    torch.manual_seed(0)
    t5 = T5(499, 96, 4, 3)
    theirs = copy.deepcopy(t5)
    for name, x in theirs.named_parameters():
        if "embedding" in name or "output_layer" in name:
            x.mul_(2)  # what T5 itself starts with
    tokens, lengths = draw_tokens(3, 23, words=499), torch.tensor([23, 11, 5])
    for a, b in ((t5.encode(tokens, lengths), theirs.encode(tokens, lengths)),):
        assert_close(a, b, atol=1e-3, rtol=1e-3)  # all but the ε of the norms
    found, wanted = t5(tokens, tokens, lengths), theirs(tokens, tokens, lengths)
    assert_close(found * 2, wanted, atol=5e-3, rtol=5e-3)


# ------------------------------------------------------------------------------------------------
# What may be seen


def run_gpt(training, need_weights):
    model = make_gpt(dropout=0.1).train(training)
    return lambda tokens: model.decode(tokens, None, need_weights)[0]


def run_t5(training, need_weights):
    model = make_t5(dropout=0.1).train(training)
    memory = model.encode(draw_tokens(B, S), LENS)
    return lambda tokens: model.decode(tokens, memory, LENS, None, need_weights)[0]


@modes
@with_and_without_weights
@pytest.mark.parametrize("make", (run_gpt, run_t5))
@torch.no_grad()
def test_no_logit_knows_a_later_token_by_one_bit(make, training, need_weights):
    run, tokens = make(training, need_weights), draw_tokens(B, 11)
    torch.manual_seed(3)  # the same dropout each time
    before = run(tokens)
    for t in range(11):
        changed = tokens.clone()
        changed[:, t:] = (tokens[:, t:] + 3) % WORDS
        torch.manual_seed(3)
        after = run(changed)
        assert torch.equal(after[:, :t], before[:, :t])
        assert (after[:, t] != before[:, t]).any(-1).all()


@modes
@pytest.mark.parametrize("sizes", ((1,) * 7, (3, 4), (6, 1)), ids=str)
@pytest.mark.parametrize("kind", ("GPT", "T5"))
@torch.no_grad()
def test_no_logit_of_a_chunk_knows_a_later_token(kind, training, sizes):
    if kind == "GPT":
        model = make_gpt().train(training)
        decode = model.decode
    else:
        model = make_t5().train(training)
        memory = model.encode(draw_tokens(B, S), LENS)

        def decode(chunk, cache):
            return model.decode(chunk, memory, LENS, cache)

    tokens, outputs = draw_tokens(B, 7), []
    for each in (tokens, torch.cat([tokens[:, :-1], (tokens[:, -1:] + 3) % WORDS], dim=1)):
        outputs.append(in_chunks(decode, each, sizes))
    assert torch.equal(outputs[0][:, :-1], outputs[1][:, :-1])
    assert not torch.equal(outputs[0][:, -1], outputs[1][:, -1])


def in_chunks(decode, tokens, sizes):
    """Decode chunk by chunk."""
    cache, outputs = None, []
    for chunk in tokens.split(sizes, dim=1):
        logits, cache = decode(chunk, cache)
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


@both_positions
@with_and_without_weights
def test_bert_sees_every_token_from_every_position(rotary, need_weights):
    model = make_bert(rotary=rotary).eval()
    tokens = draw_tokens(1, S)
    gradients = []
    model.embedding.tokens.register_forward_hook(
        lambda _, inputs, output: gradients.append(output.retain_grad() or output)
    )
    for t in range(S):
        states = model.encode(tokens, need_weights=need_weights)
        (states[0] if need_weights else states)[0, t].square().sum().backward()
        assert (gradients[-1].grad[0].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("kind", ("BERT", "rotary BERT", "T5", "GPT"))
@torch.no_grad()
def test_order_counts(kind):
    models = {
        "BERT": make_bert(), "rotary BERT": make_bert(rotary=True), "GPT": make_gpt(),
        "T5": make_t5(),
    }  # fmt: skip
    model = models[kind].eval()
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])
    turned = torch.tensor([[5, 3, 1, 4, 2, 6, 7]])
    if kind == "T5":
        memory = [model.encode(x, torch.tensor([7])) for x in (tokens, turned)]
        assert (memory[0][0, -1] - memory[1][0, -1]).abs().max() > 1e-3  # the encoder's bias
        found = [model.decode(x, memory[0], torch.tensor([7]))[0] for x in (tokens, turned)]
    else:
        found = [model(x) for x in (tokens, turned)]
    assert (found[0][0, -1] - found[1][0, -1]).abs().max() > 1e-3


@torch.no_grad()
def test_positions_of_bert_are_in_a_table_or_in_the_attention():
    learned, rotary = make_bert().eval(), make_bert(rotary=True).eval()
    assert count_parameters(learned.embedding.positions) == CONTEXT * D
    assert count_parameters(rotary.embedding.positions) == 0
    sizes = WORDS, CONTEXT, 16, 2, LAYERS  # all else is as large
    learned_size, rotary_size = (count_parameters(BERT(*sizes, rotary=r)) for r in (False, True))
    assert learned_size - rotary_size == CONTEXT * 16
    kinds = {type(block.attention) for block in rotary.encoder.blocks}
    assert kinds == {RotaryAttention}
    assert rotary.encoder.blocks[0].attention is not rotary.encoder.blocks[1].attention
    same = torch.full((1, S), 8)
    assert (learned(same)[0, 0] - learned(same)[0, 1]).abs().max() > 1e-2
    close(rotary(same)[0, :1].expand(S, -1), rotary(same)[0])  # what is alike stays alike


@both_positions
@with_and_without_weights
@torch.no_grad()
def test_padding_of_bert_does_not_count(rotary, need_weights):
    model = make_bert(rotary=rotary).eval()
    tokens = draw_tokens(3, S)
    lengths = torch.tensor([S, 4, 1])

    def run(tokens, lengths):
        states = model.encode(tokens, lengths, need_weights=need_weights)
        return states[0] if need_weights else states

    states = run(tokens, lengths)
    for row, length in enumerate(lengths):
        alone = run(tokens[row : row + 1, :length], None)
        close(states[row, :length], alone[0])
        for other in (0, WORDS - 1):
            changed = tokens.clone()
            changed[row, length:] = other
            assert torch.equal(run(changed, lengths)[row, :length], states[row, :length])
    longer = torch.cat([tokens, draw_tokens(3, 5, seed=1)], 1)
    close(run(longer, lengths)[0], torch.cat([states, run(longer, lengths)[:, S:]], 1)[0])


@with_and_without_weights
@torch.no_grad()
def test_padding_of_t5_does_not_count(need_weights):
    model = make_t5().eval()
    source, target = draw_tokens(3, S), draw_tokens(3, T, seed=2)
    lens = torch.tensor([S, 4, 1])

    def run(source, target, lens):
        if not need_weights:
            return model(source, target, lens)
        memory, _ = model.encode(source, lens, need_weights=True)
        return model.decode(target, memory, lens, need_weights=True)[0]

    logits = run(source, target, lens)
    for row, length in enumerate(lens):
        short = source[row : row + 1, :length], target[row : row + 1], lens[row : row + 1]
        close(logits[row], run(*short)[0])
        changed = source.clone()
        changed[row, length:] = 1
        close(run(changed, target, lens)[row], logits[row])


@torch.no_grad()
def test_no_lengths_and_full_lengths_are_the_same():
    model, tokens = make_bert().eval(), draw_tokens(B, S)
    assert torch.equal(model(tokens), model(tokens, torch.tensor([S, S])))


def test_samples_of_a_gpt_do_not_know_each_other():
    model, tokens = make_gpt().eval(), draw_tokens(3, T)
    close(model(tokens)[1:2], model(tokens[1:2]))


@both_positions
@with_and_without_weights
def test_what_stands_at_padding_may_be_nan_in_bert(rotary, need_weights):
    model = make_bert(rotary=rotary).eval()
    tokens = draw_tokens(3, S, words=WORDS - 1)
    lengths = torch.tensor([S, 4, 0])
    tokens[torch.arange(S) >= lengths[:, None]] = WORDS - 1

    def run():
        model.zero_grad()
        states = model.encode(tokens, lengths, need_weights=need_weights)
        states = states[0] if need_weights else states
        real = states[torch.arange(S) < lengths[:, None]]
        real.square().sum().backward()
        rest = [x.grad for name, x in model.named_parameters() if x.grad is not None]
        return real.detach(), rest

    clean, gradients = run()
    for poison in (math.nan, math.inf, 3e38):
        with torch.no_grad():
            model.embedding.tokens.weight[-1] = poison
        found, dirty = run()
        close(found, clean)
        for x, y in zip(dirty, gradients, strict=True):
            close(x[: WORDS - 1], y[: WORDS - 1])


@with_and_without_weights
def test_what_stands_at_padding_may_be_nan_in_t5(need_weights):
    model = make_t5().eval()
    source = draw_tokens(3, S, words=WORDS - 1)
    lens, target = torch.tensor([S, 4, 0]), draw_tokens(3, T, words=WORDS - 1)
    source[torch.arange(S) >= lens[:, None]] = WORDS - 1

    def run():
        model.zero_grad()
        memory = model.encode(source, lens, need_weights=need_weights)
        memory = memory[0] if need_weights else memory
        x, mask = model.target_embedding(target), padding_mask(lens, *source.shape)
        states = model.decoder(x, memory, mask, need_weights=need_weights)[0]
        states.square().sum().backward()
        logits = model.output(states)[..., : WORDS - 1].detach()
        assert model.embedding.weight.grad[: WORDS - 1].isfinite().all()
        named = model.named_parameters()
        return logits, [x.grad for name, x in named if name != "embedding.weight"]

    clean, gradients = run()
    for poison in (math.nan, math.inf, 3e38):
        with torch.no_grad():
            model.embedding.weight[-1] = poison
        found, dirty = run()
        close(found, clean)
        for x, y in zip(dirty, gradients, strict=True):
            assert_close(x, y, atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------------------
# Caches


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(1, 3), st.booleans())
def test_gpt_in_chunks_of_any_length_is_gpt_at_once(sizes, batch, training):
    sizes = [n for i, n in enumerate(sizes) if sum(sizes[: i + 1]) <= CONTEXT] or [CONTEXT]
    model, tokens = make_gpt().train(training), draw_tokens(batch, sum(sizes))
    with torch.no_grad():
        close(in_chunks(model.decode, tokens, sizes), model(tokens))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(sum),
    st.lists(st.integers(0, S), min_size=1, max_size=3),
    st.booleans(),
)
def test_t5_in_chunks_of_any_length_is_t5_at_once(sizes, lens, training):
    model, lens = make_t5(num_buckets=6, max_distance=5).train(training), torch.tensor(lens)
    source, target = draw_tokens(len(lens), S), draw_tokens(len(lens), sum(sizes), seed=2)
    with torch.no_grad():
        memory = model.encode(source, lens)

        def decode(chunk, cache):
            return model.decode(chunk, memory if cache is None else None, lens, cache)

        close(in_chunks(decode, target, sizes), model(source, target, lens))


@with_and_without_weights
@torch.no_grad()
def test_weights_of_a_chunk_are_rows_of_those_of_the_whole(need_weights):
    gpt, t5 = make_gpt().eval(), make_t5().eval()
    tokens, memory = draw_tokens(B, 11), t5.encode(draw_tokens(B, S), LENS)
    _, maps = gpt(tokens, need_weights=True)
    _, cache, *_ = gpt.decode(tokens[:, :4], None, need_weights)
    _, _, late = gpt.decode(tokens[:, 4:], cache, need_weights=True)
    assert len(maps) == len(late) == LAYERS
    for x, y in zip(maps, late, strict=True):
        assert y.shape == (B, H, 7, 11)
        close(y, x[:, :, 4:])
        close(y.sum(-1), torch.ones(B, H, 7))
    _, _, maps = t5.decode(tokens, memory, LENS, need_weights=True)
    _, cache, *_ = t5.decode(tokens[:, :4], memory, LENS, None, need_weights)
    _, _, late = t5.decode(tokens[:, 4:], None, LENS, cache, need_weights=True)
    for x, y in zip(maps, late, strict=True):
        close(y[0], x[0][:, :, 4:])
        close(y[1], x[1][:, :, 4:])
        assert (y[1][1, ..., 4:] == 0).all()  # padding of the source


@torch.no_grad()
def test_a_cache_is_not_changed_and_can_be_used_twice():
    gpt, t5 = make_gpt().eval(), make_t5().eval()
    memory, start, more = t5.encode(draw_tokens(B, S), LENS), draw_tokens(B, 3), draw_tokens(B, 2)
    for decode in (gpt.decode, lambda x, cache: t5.decode(x, memory, LENS, cache)):
        _, cache = decode(start, None)
        before = copy.deepcopy(cache)
        first, longer = decode(more, cache)
        decode(draw_tokens(B, 4, seed=5), cache)
        for old, kept in zip(before, cache, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(old, kept, strict=True))
        assert longer[0].key.shape[2] == 5 and cache[0].key.shape[2] == 3
        assert torch.equal(decode(more, cache)[0], first)


def test_the_first_chunk_of_gpt_may_be_the_whole_context_and_no_more():
    model = make_gpt().eval()
    tokens = draw_tokens(B, CONTEXT)
    assert model(tokens).shape == (B, CONTEXT, WORDS)
    _, cache = model.decode(tokens)
    with pytest.raises(ValueError, match=r"at most 0.*\(2, 1\)"):
        model.decode(tokens[:, :1], cache)
    with pytest.raises(ValueError, match=r"at most 13.*\(2, 14\)"):
        model(draw_tokens(B, CONTEXT + 1))
    _, cache = model.decode(tokens[:, :7])
    assert model.decode(tokens[:, 7:], cache)[0].shape == (B, 6, WORDS)
    with pytest.raises(ValueError, match=r"at most 6.*\(2, 7\)"):
        model.decode(tokens[:, :7], cache)


def test_a_cache_that_does_not_fit_is_refused():
    gpt, tokens = make_gpt(), draw_tokens(B, 3)
    _, cache = gpt.decode(tokens)
    with pytest.raises(ValueError, match="1 caches for 2 blocks"):
        gpt.decode(tokens, cache[:1])
    with pytest.raises(ValueError, match="batch of 3"):
        gpt.decode(draw_tokens(3, 3), cache)
    _, other = GPT(WORDS, CONTEXT, D, 1, LAYERS).decode(tokens)
    with pytest.raises(ValueError, match="3 heads of width 11"):
        gpt.decode(tokens, other)
    _, other = GPT(WORDS, CONTEXT, D - 3, H, LAYERS).decode(tokens)
    with pytest.raises(ValueError, match="width 11"):
        gpt.decode(tokens, other)
    t5 = make_t5()
    memory = t5.encode(draw_tokens(B, S), LENS)
    _, cache = t5.decode(tokens, memory, LENS)
    with pytest.raises(ValueError, match="1 caches for 2 blocks"):
        t5.decode(tokens, None, LENS, cache[:1])
    with pytest.raises(ValueError, match="batch of 3"):
        t5.decode(draw_tokens(3, 3), None, torch.tensor([S, S, S]), cache)
    with pytest.raises(ValueError, match="batch of 3"):
        t5.decode(draw_tokens(3, 3), memory, torch.tensor([S, S, S]))


# ------------------------------------------------------------------------------------------------
# Modes, dtypes, devices, errors


def every_model(**options):
    """Give (name, model, a run of it) of each kind."""
    bert, rotary = make_bert(**options), make_bert(rotary=True, **options)
    t5, gpt = make_t5(**options), make_gpt(**options)
    x, y = draw_tokens(B, S), draw_tokens(B, T)
    return [
        ("BERT", bert, lambda m: m(x, LENS.to(m.head.bias.device))),
        ("rotary BERT", rotary, lambda m: m(x, LENS)),
        ("T5", t5, lambda m: m(x, y, LENS)),
        ("GPT", gpt, lambda m: m(x)),
    ]


def test_without_dropout_training_and_evaluation_are_the_same():
    for name, model, run in every_model():
        assert torch.equal(run(model.train()), run(model.eval())), name


def test_dropout_is_for_training_only_and_random():
    for (name, model, run), (_, plain, _) in zip(
        every_model(dropout=0.3), every_model(), strict=True
    ):
        assert torch.equal(run(model.eval()), run(plain.eval())), name
        torch.manual_seed(0)
        first, second = run(model.train()), run(model)
        assert not torch.equal(first, second), name
        torch.manual_seed(0)
        assert torch.equal(run(model), first), name


def test_dropout_stands_where_the_papers_have_it():
    """Count the layers that drop, beside those of the attention weights."""
    counts = {"BERT": 1 + 3 * LAYERS, "rotary BERT": 1 + 3 * LAYERS, "GPT": 1 + 3 * LAYERS}
    counts["T5"] = 3 + (4 + 6) * LAYERS  # embeddings, two ends; hidden layers as well
    for name, model, _ in every_model(dropout=0.25):
        layers = [part for part in model.modules() if isinstance(part, nn.Dropout)]
        rates = [part.p for part in layers if part.p > 0]
        assert set(rates) == {0.25} and len(rates) == counts[name], name


def test_every_layer_that_drops_is_used():
    x, y = draw_tokens(B, S), draw_tokens(B, T)
    for name, model, _ in every_model(dropout=0.25):
        used = set()
        layers = [part for part in model.modules() if isinstance(part, nn.Dropout) and part.p > 0]
        for layer in layers:
            layer.register_forward_hook(lambda part, *_, used=used: used.add(id(part)))
        model.train()  # and with weights, since the fused kernel drops by itself
        if isinstance(model, T5):
            memory, _ = model.encode(x, LENS, need_weights=True)
            model.decode(y, memory, LENS, need_weights=True)
        elif isinstance(model, GPT):
            model(x, need_weights=True)
        else:
            model.encode(x, LENS, need_weights=True)
        assert len(used) == len(layers), name


@pytest.mark.parametrize("kind", range(4), ids=("BERT", "rotary BERT", "T5", "GPT"))
def test_all_dropped_leaves_only_what_is_not_dropped(kind):
    name, model, run = every_model(dropout=0.999)[kind]
    logits = run(model.train())
    assert logits.isfinite().all()


@dtypes
@torch.no_grad()
def test_models_work_in_every_dtype(dtype):
    for name, model, run in every_model():
        wanted = run(model.double().eval())
        found = run(model.to(dtype))
        assert found.dtype == dtype, name
        error = (found - wanted).abs().max() / wanted.abs().max()
        assert error < TOLERANCE[dtype] * 2, name


@dtypes
@torch.no_grad()
def test_chunks_agree_in_every_dtype(dtype):
    gpt, t5 = make_gpt().to(dtype).eval(), make_t5().to(dtype).eval()
    tokens, memory = draw_tokens(B, 7), t5.encode(draw_tokens(B, S), LENS)
    for decode in (gpt.decode, lambda x, cache: t5.decode(x, memory, LENS, cache)):
        found, wanted = in_chunks(decode, tokens, (3, 1, 3)), decode(tokens, None)[0]
        assert found.dtype == dtype
        scale = wanted.abs().max()
        close(found / scale, wanted / scale, dtype)


def test_models_go_to_another_device_whole():
    x, lens = draw_tokens(B, S).to("meta"), LENS.to("meta")
    for _, model, _ in every_model():
        model.to("meta")
        for part in model.modules():
            for name, value in vars(part).items():
                assert not torch.is_tensor(value), (part, name)
        if isinstance(model, T5):
            assert model(x, x, lens).shape == (B, S, WORDS)
            logits, cache = model.decode(x[:, :3], model.encode(x, lens), lens)
            assert model.decode(x[:, 3:], None, lens, cache)[0].shape == (B, 4, WORDS)
        elif isinstance(model, GPT):
            logits, cache = model.decode(x[:, :3])
            assert logits.device.type == "meta"
            assert model.decode(x[:, 3:], cache)[0].shape == (B, 4, WORDS)
        else:
            assert model(x, lens).shape == (B, S, WORDS)


def test_no_model_keeps_weights_or_graphs():
    for name, model, run in every_model():
        run(model).sum().backward()
        copied = copy.deepcopy(model)
        assert torch.equal(run(copied.eval()), run(model.eval())), name
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        assert torch.equal(run(loaded), run(model)), name
        fresh = {"BERT": make_bert, "T5": make_t5, "GPT": make_gpt}.get(name)
        if fresh:
            fresh = fresh(seed=3, stirred=False).eval()
            assert not torch.equal(run(fresh), run(model))
            fresh.load_state_dict(model.state_dict())
            assert torch.equal(run(fresh), run(model)), name


def test_embeddings_are_tied_to_the_output():
    for name, model, run in every_model():
        table = {"T5": "embedding.weight", "GPT": "embedding.weight"}.get(
            name, "embedding.tokens.weight"
        )
        shapes = [key for key, x in model.named_parameters() if x.shape[0] == WORDS]
        assert shapes in ([table], [table, "head.bias"]), name
        run(model).square().sum().backward()
        gradient = model.get_parameter(table).grad
        unused = sorted(set(range(WORDS)) - set(draw_tokens(B, S).flatten().tolist()))
        assert (gradient[unused].abs().sum(-1) > 0).all(), name  # by the output


def test_seeds_give_the_same_model_twice():
    for make in (make_bert, make_t5, make_gpt):
        models = [make(stirred=False, seed=seed) for seed in (1, 1, 2)]
        first, again, other = (nn.utils.parameters_to_vector(m.parameters()) for m in models)
        assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize(
    ("make", "message"),
    (
        (lambda: BERT(0, 5, 6, 2, 1), "at least 1"),
        (lambda: BERT(7, 0, 6, 2, 1), "at least 1"),
        (lambda: BERT(7, 5, 6, 2, 0), "at least 1"),
        (lambda: BERT(7, 5, 6, 2, 1, num_segments=0), "at least 1"),
        (lambda: BERT(7, 5, 7, 2, 1), "width 7 does not split into 2 heads"),
        (lambda: BERT(7, 5, 6, 2, 1, rotary=True), "even, not 3"),
        (lambda: GPT(0, 5, 6, 2, 1), "at least 1"),
        (lambda: GPT(7, 0, 6, 2, 1), "at least 1"),
        (lambda: GPT(7, 5, 0, 2, 1), "at least 1"),
        (lambda: GPT(7, 5, 6, 2, 0), "at least 1"),
        (lambda: GPT(7, 5, 6, 4, 1), "width 6 does not split into 4 heads"),
        (lambda: T5(0, 6, 2, 1), "at least 1"),
        (lambda: T5(7, 6, 2, 0), "at least 1"),
        (lambda: T5(7, 6, 0, 1), "at least 1"),
        (lambda: T5(7, 6, 2, 1, ffn_width=0), "at least 1"),
        (lambda: T5(7, 6, 5, 1), "width 6 does not split into 5 heads"),
        (lambda: T5(7, 6, 2, 1, num_buckets=3), "3 buckets cannot cover 128"),
        (lambda: T5(7, 6, 2, 1, num_buckets=32, max_distance=16), "32 buckets cannot cover 16"),
    ),
)
def test_sizes_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_fewest_buckets_work():
    model = make_t5(num_buckets=4, max_distance=3).eval()
    assert model(draw_tokens(B, S), draw_tokens(B, T), LENS).isfinite().all()


def test_tokens_lengths_and_segments_that_do_not_fit_are_refused():
    bert, t5, gpt = make_bert(), make_t5(), make_gpt()
    x = draw_tokens(B, S)
    for model in (bert, make_bert(rotary=True), gpt):
        with pytest.raises(ValueError, match=r"at most 13.*\(2, 14\)"):
            model(draw_tokens(B, 14))
        with pytest.raises(ValueError, match=r"\(7,\)"):
            model(x[0])
    for lengths in (torch.tensor([S]), torch.tensor([[S], [S]]), torch.tensor([S, S, S])):
        with pytest.raises(ValueError, match="lengths"):
            bert(x, lengths)
        with pytest.raises(ValueError, match="lengths"):
            t5(x, x, lengths)
    for lengths in (torch.tensor([S + 1, 2]), torch.tensor([-1, 2])):
        with pytest.raises(ValueError, match="valid_lens must be 0 to 7"):
            bert(x, lengths)
        with pytest.raises(ValueError, match="valid_lens must be 0 to 7"):
            t5(x, x, lengths)
    with pytest.raises(TypeError, match="integers"):
        bert(x, torch.tensor([1.0, 2.0]))
    for segments in (x[:1] * 0, x[:, :1] * 0, x[0] * 0):
        with pytest.raises(ValueError, match="segments"):
            bert(x, segments=segments)


def test_weights_are_returned_when_asked_for_and_sum_to_one():
    bert, t5, gpt = make_bert(dropout=0.5), make_t5(dropout=0.5), make_gpt(dropout=0.5)
    x, y = draw_tokens(B, S), draw_tokens(B, T)
    assert torch.is_tensor(bert.encode(x, LENS)) and torch.is_tensor(t5.encode(x, LENS))
    assert torch.is_tensor(gpt(x)) and len(gpt.decode(x)) == 2
    _, maps = bert.encode(x, LENS, need_weights=True)
    memory, source_maps = t5.encode(x, LENS, need_weights=True)
    for weights in maps + source_maps:
        assert weights.shape == (B, H, S, S)
        close(weights.sum(-1), torch.ones(B, H, S))  # before dropout
        assert (weights[1, ..., 4:] == 0).all()
    _, _, pairs = t5.decode(y, memory, LENS, need_weights=True)
    for own, cross in pairs:
        assert own.shape == (B, H, T, T) and cross.shape == (B, H, T, S)
        close(own.sum(-1), torch.ones(B, H, T))
        assert (own.triu(1) == 0).all()


# ------------------------------------------------------------------------------------------------
# T5 goes where a translator of section 7 goes


def test_t5_is_decoded_greedily_as_it_is_trained():
    model = make_t5(seed=2).eval()
    source, lens = draw_tokens(3, S), torch.tensor([S, 4, 0])
    ids = greedy_decode(model.step, model.start(source, lens), bos_id=1, eos_id=2, max_len=6)
    target = torch.cat([torch.ones(3, 1, dtype=torch.long), ids[:, :-1]], 1)
    best = model(source, target, lens).argmax(-1)
    running = (ids == 2).cumsum(1) - (ids == 2).long() == 0
    assert torch.equal(best[running], ids[running])
    beams = beam_search(
        model.step, model.start(source[:1], lens[:1]), bos_id=1, eos_id=2, beam_size=1, max_len=6
    )
    assert beams[0][0] == ids[0, : len(beams[0][0])].tolist()


def test_t5_learns_to_copy_by_the_loop_of_section_4():
    pairs = [(list(word), list(word)) for word in ("ab", "ba", "aab", "bba", "abb", "b")]
    vocabulary = Vocabulary([words for words, _ in pairs])
    vocabularies = vocabulary, vocabulary
    torch.manual_seed(0)
    model = T5(len(vocabulary), 32, 4, 1)
    batch = encode_pairs(pairs, vocabularies)
    losses, _ = train(model, translation_loss, (batch for _ in range(120)), steps=120, rate=5e-3)
    assert losses[-1] < 0.3 < 1.5 < losses[0]
    assert exact_match(model, pairs, vocabularies) > 0.6


def test_gpt_and_bert_learn():
    tokens = torch.arange(11).repeat(2)[None]
    torch.manual_seed(0)
    gpt = GPT(11, 22, 32, 4, 1)

    def loss(model, batch):
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    losses, _ = train(gpt, loss, (tokens for _ in range(80)), steps=80, rate=1e-2)
    assert losses[-1] < 0.1
    bert = BERT(12, 22, 32, 4, 1, rotary=True)
    hidden = tokens.clone()
    hidden[:, ::5] = 11

    def masked_loss(model, batch):
        return F.cross_entropy(model(hidden)[:, ::5].flatten(0, 1), batch[:, ::5].flatten())

    losses, _ = train(bert, masked_loss, (tokens for _ in range(80)), steps=80, rate=1e-2)
    assert losses[-1] < 0.1
    with evaluating(bert):
        assert torch.equal(bert(hidden)[:, ::5].argmax(-1), tokens[:, ::5])
