"""Prove that the Transformer is torch's own, sees no future, and decodes as it was trained."""

import copy
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

from snippets import transformer as section
from snippets.attention_scoring_functions import causal_mask, length_mask
from snippets.bahdanau_attention import beam_search, greedy_decode
from snippets.self_attention_and_positional_encoding import sinusoid
from snippets.training import evaluating, sequence_loss
from snippets.transformer import (
    AddNorm,
    PositionWiseFFN,
    TokenEmbedding,
    Transformer,
    TransformerDecoder,
    TransformerDecoderBlock,
    TransformerEncoder,
    TransformerEncoderBlock,
    Translator,
    copy_stack,
)

# Axes: a number each that no other has, so that no swapped axis can pass.
B, H, T, S, D, HIDDEN = 2, 3, 5, 7, 33, 19  # a head is 11 wide
SOURCE, TARGET = 17, 13  # sizes of the vocabularies
LAYERS, MAX_LEN = 2, 23

# The largest error allowed, absolute and relative, by dtype.
TOLERANCE = {
    torch.float16: 3e-2,
    torch.bfloat16: 2e-1,
    torch.float32: 1e-5,
    torch.float64: 1e-12,
}
NAN = math.nan
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
norms = pytest.mark.parametrize("norm_first", (False, True), ids=("post-norm", "pre-norm"))
modes = pytest.mark.parametrize("training", (True, False), ids=("train", "eval"))
with_and_without_weights = pytest.mark.parametrize("need_weights", (False, True))
LENS = torch.tensor([S, 4])


def close(found, expected, dtype=torch.float32):
    """Assert equality within the tolerance of a dtype."""
    limit = TOLERANCE[dtype]
    assert_close(found.to(expected.dtype), expected, atol=limit, rtol=limit)


def shake(module, seed=5):
    """Give every parameter a value of its own; biases and norms start with zeros and ones."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def draw(*shape, seed=3, dtype=torch.float32):
    """Draw numbers that do not depend on what was drawn before."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_encoder(*, seed=1, **options):
    torch.manual_seed(seed)
    return shake(TransformerEncoder(D, HIDDEN, H, LAYERS, **options))


def make_decoder(*, seed=1, **options):
    torch.manual_seed(seed)
    return shake(TransformerDecoder(D, HIDDEN, H, LAYERS, **options))


def make_model(kind=Transformer, *, seed=1, max_len=MAX_LEN, **options):
    torch.manual_seed(seed)
    return shake(kind(SOURCE, TARGET, D, HIDDEN, H, LAYERS, max_len=max_len, **options))


def sentences(batch=B, num_source=S, num_target=T, seed=9):
    """Draw a batch of sources and targets."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(SOURCE, (batch, num_source), generator=generator)
    return source, torch.randint(TARGET, (batch, num_target), generator=generator)


# ------------------------------------------------------------------------------------------------
# Agreement with torch. The pairing of the weights is written here a second time, on purpose.


def pair_attention(ours, theirs):
    """Pair our four maps with torch's, as (ours, theirs, rows of theirs)."""
    width, pairs = ours.query_layer.in_features, []
    for i, layer in enumerate((ours.query_layer, ours.key_layer, ours.value_layer)):
        rows = slice(i * width, (i + 1) * width)
        pairs.append((layer.weight, theirs.in_proj_weight, rows))
        if theirs.in_proj_bias is not None:
            pairs.append((layer.bias, theirs.in_proj_bias, rows))
    return pairs + pair_all(ours.output_layer, theirs.out_proj)


def pair_all(ours, theirs):
    """Pair the parameters of two modules of one kind."""
    mine, other = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert mine.keys() == other.keys()
    return [(mine[name], other[name], slice(None)) for name in mine]


def pair_block(ours, theirs):
    """Pair every parameter of a block."""
    pairs = pair_attention(ours.attention, theirs.self_attn)
    pairs += pair_all(ours.attention_residual.norm, theirs.norm1)
    last = theirs.norm2
    if isinstance(theirs, nn.TransformerDecoderLayer):
        pairs += pair_attention(ours.cross_attention, theirs.multihead_attn)
        pairs += pair_all(ours.cross_residual.norm, theirs.norm2)
        last = theirs.norm3
    pairs += pair_all(ours.ffn_residual.norm, last)
    pairs += pair_all(ours.ffn.hidden_layer, theirs.linear1)
    return pairs + pair_all(ours.ffn.output_layer, theirs.linear2)


def pair_stack(ours, theirs):
    """Pair every parameter of an encoder or decoder."""
    pairs = []
    for block, layer in zip(ours.blocks, theirs.layers, strict=True):
        pairs += pair_block(block, layer)
    if theirs.norm is not None:
        pairs += pair_all(ours.norm, theirs.norm)
    mine = [id(parameter) for parameter in ours.parameters()]
    assert sorted(id(pair[0]) for pair in pairs) == sorted(mine), "a parameter without a partner"
    return pairs


@torch.no_grad()
def copy_weights(pairs):
    """Copy torch's weights into ours."""
    for ours, theirs, rows in pairs:
        ours.copy_(theirs[rows])


def same_gradients(pairs):
    """Assert that every gradient of ours is torch's."""
    for ours, theirs, rows in pairs:
        close(ours.grad, theirs.grad[rows])


OPTIONS = (
    {},
    {"norm_first": True},
    {"bias": False},
    {"activation": "gelu", "norm_first": True},
    {"eps": 0.3},
    {"eps": 0.3, "norm_first": True, "bias": False, "activation": "gelu"},
)
options_of_both = pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda x: ", ".join(f"{k}={v}" for k, v in x.items()) or "defaults"
)


def theirs_of(kind, options, **rest):
    """Make a layer of torch with our options in its words."""
    options = {"layer_norm_eps" if k == "eps" else k: v for k, v in options.items()}
    return shake(kind(D, H, HIDDEN, 0.0, batch_first=True, **options, **rest), seed=8)


def encoder_masks():
    """Give (our mask, torch's mask, torch's padding mask) by name."""
    padding, causal = length_mask(LENS, S), causal_mask(S, S)
    each = torch.rand(B, H, S, S, generator=torch.Generator().manual_seed(2)) < 0.6
    each[..., 0] = True
    return {
        "none": (None, None, None),
        "padding": (padding, None, ~padding[:, 0]),
        "causal": (causal, ~causal, None),
        "both": (padding & causal, ~causal, ~padding[:, 0]),
        "each sample": (each[:, 0], ~each[:, 0].repeat_interleave(H, 0), None),
        "each head": (each, ~each.flatten(0, 1), None),
    }


@options_of_both
@modes
@pytest.mark.parametrize("kind", encoder_masks())
def test_encoder_block_is_torchs_with_copied_weights(options, training, kind):
    mask, their_mask, their_padding = encoder_masks()[kind]
    torch.manual_seed(0)
    ours = TransformerEncoderBlock(D, HIDDEN, H, **options).train(training)
    theirs = theirs_of(nn.TransformerEncoderLayer, options).train(training)
    pairs = pair_block(ours, theirs)
    copy_weights(pairs)
    x, y = (draw(B, S, D).requires_grad_() for _ in range(2))
    found, weights = ours(x, mask)
    wanted = theirs(y, src_mask=their_mask, src_key_padding_mask=their_padding)
    assert weights is None
    close(found, wanted)
    close(ours(x, mask, need_weights=True)[0], wanted)
    for output in (found, wanted):
        (output * draw(B, S, D, seed=4)).sum().backward()
    close(x.grad, y.grad)
    same_gradients(pairs)


@options_of_both
@modes
@pytest.mark.parametrize("padded", (False, True), ids=("whole", "padded"))
def test_decoder_block_is_torchs_with_copied_weights(options, training, padded):
    torch.manual_seed(0)
    ours = TransformerDecoderBlock(D, HIDDEN, H, **options).train(training)
    theirs = theirs_of(nn.TransformerDecoderLayer, options).train(training)
    pairs = pair_block(ours, theirs)
    copy_weights(pairs)
    mask = length_mask(LENS, S) if padded else None
    inputs = [[draw(B, T, D).requires_grad_(), draw(B, S, D, seed=6)] for _ in range(2)]
    for _, memory in inputs:
        memory.requires_grad_()
    found, _, weights = ours(*inputs[0], mask)
    wanted = theirs(
        *inputs[1],
        tgt_mask=~causal_mask(T, T),
        memory_key_padding_mask=~mask[:, 0] if padded else None,
    )
    assert weights is None
    close(found, wanted)
    close(ours(*inputs[0], mask, need_weights=True)[0], wanted)
    for output in (found, wanted):
        (output * draw(B, T, D, seed=4)).sum().backward()
    for mine, other in zip(*inputs):
        close(mine.grad, other.grad)
    same_gradients(pairs)


@norms
@pytest.mark.parametrize("final_norm", (False, True))
@pytest.mark.parametrize("eps", (1e-5, 0.2))
def test_stacks_are_torchs_with_the_final_norm_accounted_for(norm_first, final_norm, eps):
    options = {"norm_first": norm_first, "eps": eps}
    norm = shake(nn.LayerNorm(D, eps), seed=9) if final_norm else None
    layer = theirs_of(nn.TransformerEncoderLayer, options)
    their_encoder = nn.TransformerEncoder(layer, LAYERS, norm, enable_nested_tensor=False)
    layer = theirs_of(nn.TransformerDecoderLayer, options)
    their_decoder = nn.TransformerDecoder(layer, LAYERS, copy.deepcopy(norm))
    encoder = make_encoder(final_norm=final_norm, **options)
    decoder = make_decoder(final_norm=final_norm, **options)
    pairs = []
    for ours, theirs in ((encoder, their_encoder), (decoder, their_decoder)):
        shake(theirs, seed=10)  # torch starts with copies of one layer
        pairs += pair_stack(ours, theirs)
    copy_weights(pairs)
    mask, padding = length_mask(LENS, S), ~length_mask(LENS, S)[:, 0]
    x, y = draw(B, S, D), draw(B, T, D, seed=5)
    memory = encoder(x, mask)[0]
    wanted = their_encoder(x, src_key_padding_mask=padding)
    close(memory, wanted)
    found = decoder(y, memory, mask)[0]
    wanted = their_decoder(y, wanted, tgt_mask=~causal_mask(T, T), memory_key_padding_mask=padding)
    close(found, wanted)
    for output in (found, wanted):
        (output * draw(B, T, D, seed=4)).sum().backward()
    same_gradients(pairs)


@norms
@modes
def test_whole_model_is_nn_transformer_between_our_embeddings_and_output(norm_first, training):
    ours = make_model(norm_first=norm_first).train(training)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its nested tensors
        theirs = nn.Transformer(
            D, H, LAYERS, LAYERS, HIDDEN, 0.0, batch_first=True, norm_first=norm_first
        ).train(training)
    if not norm_first:  # nn.Transformer has a second norm there
        assert sum(p.numel() for p in theirs.parameters()) == 4 * D + sum(
            p.numel() for part in (ours.encoder, ours.decoder) for p in part.parameters()
        )
        theirs.encoder.norm = theirs.decoder.norm = None
    shake(theirs, seed=12)
    pairs = pair_stack(ours.encoder, theirs.encoder) + pair_stack(ours.decoder, theirs.decoder)
    copy_weights(pairs)
    source, target = sentences()
    rows = []
    for tokens, part in ((source, ours.source_embedding), (target, ours.target_embedding)):
        scaled = math.sqrt(D) * part.embedding.weight.detach()[tokens]
        rows.append(scaled + sinusoid(tokens.shape[1], D))
    padding = ~length_mask(LENS, S)[:, 0]
    wanted = theirs(
        *rows,
        tgt_mask=~causal_mask(T, T),
        src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
    )
    wanted = F.linear(wanted, ours.output.weight.detach(), ours.output.bias.detach())
    found = ours(source, target, LENS)
    close(found, wanted)
    for output in (found, wanted):
        (output * draw(B, T, TARGET, seed=4)).sum().backward()
    same_gradients(pairs)


@pytest.mark.parametrize("bias", (True, False))
def test_copy_stack_copies_every_weight(bias):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = shake(nn.Transformer(D, H, LAYERS, 3, HIDDEN, 0.0, batch_first=True, bias=bias))
    options = {"final_norm": True, "bias": bias}
    encoder = make_encoder(**options)
    decoder = TransformerDecoder(D, HIDDEN, H, 3, **options)
    for ours, other in ((encoder, theirs.encoder), (decoder, theirs.decoder)):
        copy_stack(ours, other)
        for mine, their, rows in pair_stack(ours, other):
            assert torch.equal(mine, their[rows])
    with pytest.raises(ValueError, match="zip"):
        copy_stack(make_decoder(final_norm=True, bias=bias), theirs.decoder)


def test_options_of_the_stack_reach_every_block_and_the_model():
    options = {"bias": False, "activation": "gelu", "eps": 0.25}
    model = make_model(norm_first=True, **options)
    layers = [part for part in model.modules() if isinstance(part, nn.LayerNorm)]
    assert len(layers) == 5 * LAYERS + 2
    assert {(part.eps, part.bias) for part in layers} == {(0.25, None)}
    left = {name for name, _ in model.named_parameters() if name.endswith("bias")}
    assert left == {"output.bias"}
    source, target = sentences()
    other = make_model(norm_first=True, **{**options, "activation": "relu"})
    other.load_state_dict(model.state_dict())
    difference = model(source, target, LENS) - other(source, target, LENS)
    assert difference.abs().max() > 1e-3


# ------------------------------------------------------------------------------------------------
# Causality, in both modes, to the bit


def run_decoder_block(training, need_weights, **options):
    torch.manual_seed(2)
    block = shake(TransformerDecoderBlock(D, HIDDEN, H, 0.1, **options)).train(training)
    memory, mask = draw(B, S, D, seed=6), length_mask(LENS, S)
    return lambda x: block(x, memory, mask, None, need_weights)[0]


def run_decoder_stack(training, need_weights, **options):
    decoder = make_decoder(dropout=0.1, **options).train(training)
    memory, mask = draw(B, S, D, seed=6), length_mask(LENS, S)
    return lambda x: decoder(x, memory, mask, None, need_weights)[0]


def run_causal_encoder(training, need_weights, **options):
    encoder = make_encoder(dropout=0.1, **options).train(training)
    return lambda x: encoder(x, causal_mask(T, T), need_weights)[0]


def run_model(training, need_weights, **options):
    model = make_model(dropout=0.1, **options).train(training)
    source, _ = sentences()
    memory = model.encode(source, LENS)

    def decode(tokens):
        if not need_weights:
            return model(source, tokens, LENS)
        return model.decode(tokens, memory, LENS, need_weights=True)[0]

    return decode


@norms
@modes
@with_and_without_weights
@pytest.mark.parametrize(
    "make", (run_decoder_block, run_decoder_stack, run_causal_encoder, run_model)
)
def test_no_output_knows_a_later_target_by_one_bit(make, norm_first, training, need_weights):
    run = make(training, need_weights, norm_first=norm_first)
    x = sentences()[1] if make is run_model else draw(B, T, D)
    torch.manual_seed(3)  # the same dropout each time
    before = run(x)
    for t in range(T):
        changed = x.clone()
        changed[:, t:] = (x[:, t:] + 3) % TARGET if make is run_model else x[:, t:] + 3
        torch.manual_seed(3)
        after = run(changed)
        assert torch.equal(after[:, :t], before[:, :t])
        assert (after[:, t] != before[:, t]).any(-1).all()


@norms
@modes
@pytest.mark.parametrize("sizes", ((1,) * T, (2, 3), (4, 1), (1, 3, 1), (3, 2)), ids=str)
def test_no_output_of_a_chunk_knows_a_later_target(norm_first, training, sizes):
    model = make_model(norm_first=norm_first).train(training)
    source, target = sentences()
    memory = model.encode(source, LENS)
    outputs = []
    for tokens in (target, torch.cat([target[:, :-1], (target[:, -1:] + 3) % TARGET], dim=1)):
        cache, chunks = None, []
        for chunk in tokens.split(sizes, dim=1):
            logits, cache = model.decode(chunk, memory, LENS, cache)
            chunks.append(logits)
        outputs.append(torch.cat(chunks, dim=1))
    assert torch.equal(outputs[0][:, :-1], outputs[1][:, :-1])
    assert not torch.equal(outputs[0][:, -1], outputs[1][:, -1])


@norms
def test_gradient_of_an_output_reaches_no_later_input(norm_first):
    decoder = make_decoder(norm_first=norm_first).eval()
    x, memory = draw(1, T, D).requires_grad_(), draw(1, S, D, seed=6)
    output = decoder(x, memory)[0]
    for t in range(T):
        (gradient,) = torch.autograd.grad(output[0, t].square().sum(), x, retain_graph=True)
        seen = gradient[0].abs().sum(-1)
        assert (seen[: t + 1] > 0).all() and (seen[t + 1 :] == 0).all()


def test_an_encoder_without_a_mask_sees_the_future():
    encoder, x = make_encoder().eval(), draw(B, S, D)
    changed = x.clone()
    changed[:, -1] += 3
    assert (encoder(x)[0] != encoder(changed)[0]).any(-1).all()


def test_train_and_eval_give_the_same_loss_without_dropout():
    model = make_model()
    source, target = sentences()
    losses = []
    for training in (True, False):
        model.train(training)
        losses.append(sequence_loss(model(source, target, LENS), target, 0))
    assert losses[0] == losses[1]


# ------------------------------------------------------------------------------------------------
# The cache


def decode_in_chunks(model, target, memory, lens, sizes):
    """Decode chunk by chunk; the memory is handed over once."""
    cache, outputs = None, []
    for chunk in target.split(sizes, dim=1):
        logits, cache = model.decode(chunk, memory, lens, cache)
        outputs.append(logits)
        memory = None
    return torch.cat(outputs, dim=1)


@norms
@modes
@pytest.mark.parametrize("length", (1, 2, 3, 8, MAX_LEN))
def test_one_token_at_a_time_gives_the_logits_of_all_at_once(norm_first, training, length):
    model = make_model(norm_first=norm_first).train(training)
    lens = torch.tensor([S, 1, 4])
    source, target = sentences(batch=3, num_target=length)
    memory = model.encode(source, lens)
    found = decode_in_chunks(model, target, memory, lens, (1,) * length)
    close(found, model(source, target, lens))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(sum),
    lens=st.lists(st.integers(0, S), min_size=1, max_size=4),
    norm_first=st.booleans(),
)
def test_chunks_of_any_length_give_the_logits_of_all_at_once(sizes, lens, norm_first):
    sizes = [size for i, size in enumerate(sizes) if sum(sizes[: i + 1]) <= MAX_LEN] or [1]
    model = make_model(norm_first=norm_first).eval()
    lens = torch.tensor(lens)
    source, target = sentences(batch=len(lens), num_target=sum(sizes))
    with torch.no_grad():
        found = decode_in_chunks(model, target, model.encode(source, lens), lens, sizes)
        close(found, model(source, target, lens))


@norms
@dtypes
def test_chunks_agree_in_every_dtype(norm_first, dtype):
    model = make_model(norm_first=norm_first).to(dtype).eval()
    source, target = sentences()
    found = decode_in_chunks(model, target, model.encode(source, LENS), LENS, (2, 1, 2))
    assert found.dtype == dtype
    close(found, model(source, target, LENS), dtype)


@norms
@with_and_without_weights
@pytest.mark.parametrize(
    "kind", ("(T, S)", "(B, T, S)", "(B, 1, S)", "(B, H, T, S)", "(B, 1, T, S)")
)
def test_chunks_of_the_decoder_agree_under_a_mask_for_each_query(norm_first, need_weights, kind):
    decoder = make_decoder(norm_first=norm_first).eval()
    x, memory = draw(B, T, D), draw(B, S, D, seed=6)
    mask = torch.rand(B, H, T, S, generator=torch.Generator().manual_seed(2)) < 0.6
    mask[:, :, :2, 3:] = False  # what the first chunk may not read, the second may
    mask[:, :, 2:, 3] = True
    mask = {
        "(T, S)": mask[0, 0],
        "(B, T, S)": mask[:, 0],
        "(B, 1, S)": mask[:, 0, -1:],
        "(B, H, T, S)": mask,
        "(B, 1, T, S)": mask[:, :1],
    }[kind]
    wanted, _, maps = decoder(x, memory, mask, need_weights=True)
    for _, cross in maps:
        full = mask[:, None] if mask.ndim == 3 else mask
        assert torch.equal(cross > 0, full.expand(B, H, T, S))
    cache, outputs = None, []
    for rows in (slice(0, 2), slice(2, 3), slice(3, T)):
        part = mask if kind == "(B, 1, S)" else mask[..., rows, :]
        output, cache, _ = decoder(x[:, rows], memory, part, cache, need_weights)
        outputs.append(output)
    close(torch.cat(outputs, dim=1), wanted)


@norms
def test_weights_of_chunks_are_rows_of_the_whole(norm_first):
    model = make_model(norm_first=norm_first).eval()
    source, target = sentences()
    memory = model.encode(source, LENS)
    _, _, whole = model.decode(target, memory, LENS, need_weights=True)
    _, cache, first = model.decode(target[:, :2], memory, LENS, need_weights=True)
    _, _, second = model.decode(target[:, 2:], memory, LENS, cache, need_weights=True)
    for (own, cross), a, b in zip(whole, first, second, strict=True):
        close(a[0], own[:, :, :2, :2])
        close(b[0], own[:, :, 2:])
        close(torch.cat([a[1], b[1]], dim=2), cross)


def tensors_of(cache):
    """List the tensors of a cache."""
    return [tensor for block in cache for tensor in block]


@pytest.fixture(params=(True, False), ids=("with gradients", "no gradients"))
def gradients(request):
    """Run a test with gradients and without."""
    with torch.set_grad_enabled(request.param):
        yield request.param


@pytest.mark.usefixtures("gradients")
def test_a_cache_that_is_given_in_is_not_changed_and_can_be_used_again():
    model = make_model().eval()
    source, target = sentences(num_target=9)
    memory = model.encode(source, LENS)
    kept = memory.clone()
    _, cache = model.decode(target[:, :4], memory, LENS)
    before = [(tensor, tensor.clone(), tensor._version) for tensor in tensors_of(cache)]
    one, longer = model.decode(target[:, 4:6], memory, LENS, cache)
    model.decode(target[:, 6:], memory, LENS, longer)
    other = (target + 1) % TARGET
    two, _ = model.decode(other[:, 4:7], memory, LENS, cache)
    again, _ = model.decode(target[:, 4:6], memory, LENS, cache)
    assert torch.equal(one, again)
    assert len(before) == 4 * LAYERS
    for (old, copied, version), new in zip(before, tensors_of(cache), strict=True):
        assert new is old and torch.equal(old, copied) and old._version == version
    close(two, model(source, torch.cat([target[:, :4], other[:, 4:7]], 1), LENS)[:, 4:])
    assert torch.equal(memory, kept)


def test_writing_into_a_new_cache_leaves_the_old_one_alone():
    model = make_model().eval()
    source, target = sentences()
    memory = model.encode(source, LENS)
    _, old = model.decode(target[:, :2], memory, LENS)
    before = [block.key.clone() for block in old]
    _, new = model.decode(target[:, 2:], memory, LENS, old)
    with torch.no_grad():
        for block in new:
            block.key.zero_()
    for block, key in zip(old, before, strict=True):
        assert torch.equal(block.key, key)


def test_gradients_flow_through_the_cache():
    model = make_model()
    source, target = sentences()
    gradients = []
    for sizes in ((T,), (2, 1, 2)):
        model.zero_grad()
        logits = decode_in_chunks(model, target, model.encode(source, LENS), LENS, sizes)
        (logits * draw(B, T, TARGET)).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, two in zip(*gradients, strict=True):
        close(one, two)


def test_memory_and_past_are_projected_once():
    model, rows = make_model().eval(), {}
    for name, part in model.decoder.named_modules():
        if name.endswith(("key_layer", "value_layer")):
            rows[name] = []
            part.register_forward_hook(
                lambda _, inputs, __, name=name: rows[name].append(inputs[0].shape[1])
            )
    source, target = sentences()
    decode_in_chunks(model, target, model.encode(source, LENS), LENS, (1,) * T)
    assert len(rows) == 4 * LAYERS
    for name, seen in rows.items():
        assert sum(seen) == (S if "cross" in name else T), name


def test_memory_is_not_read_again_once_it_is_cached():
    model = make_model().eval()
    source, target = sentences()
    memory = model.encode(source, LENS)
    _, cache = model.decode(target[:, :2], memory, LENS)
    wanted, _ = model.decode(target[:, 2:], memory, LENS, cache)
    for other in (None, torch.full_like(memory, NAN)):
        assert torch.equal(model.decode(target[:, 2:], other, LENS, cache)[0], wanted)


# ------------------------------------------------------------------------------------------------
# Padding, batches, empty sources


@norms
@modes
def test_ids_at_padding_places_of_the_source_do_not_matter(norm_first, training):
    model = make_model(norm_first=norm_first).train(training)
    source, target = sentences()
    other = source.clone()
    other[1, 4:] = (other[1, 4:] + torch.tensor([1, 5, 9])) % SOURCE
    assert torch.equal(model(other, target, LENS), model(source, target, LENS))
    real = other.clone()
    real[1, 3] = (real[1, 3] + 1) % SOURCE
    assert not torch.equal(model(real, target, LENS)[1], model(source, target, LENS)[1])
    memories = model.encode(source, LENS), model.encode(other, LENS)
    assert torch.equal(memories[0][1, :4], memories[1][1, :4])


@norms
def test_a_sentence_does_not_depend_on_its_batch_or_on_the_padded_width(norm_first):
    model = make_model(norm_first=norm_first).eval()
    lens = torch.tensor([3, S, 1, 5])
    source, target = sentences(batch=4)
    together = model(source, target, lens)
    wider = F.pad(source, (0, 6), value=2)
    close(model(wider, target, lens), together)
    for i, size in enumerate(lens.tolist()):
        alone = model(source[i : i + 1, :size], target[i : i + 1], lens[i : i + 1])
        close(alone[0], together[i])
    order = torch.tensor([2, 0, 3, 1])
    close(model(source[order], target[order], lens[order]), together[order])
    close(model(source, F.pad(target, (0, 4)), lens)[:, :T], together)


@norms
@dtypes
def test_an_empty_source_gives_finite_logits_and_gradients(norm_first, dtype):
    model = make_model(norm_first=norm_first).to(dtype)
    source, target = sentences()
    lens = torch.tensor([0, 3])
    logits = model(source, target, lens)
    logits.float().square().sum().backward()
    assert logits.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    other = (source + 4) % SOURCE
    other[1, :3] = source[1, :3]
    assert torch.equal(model(other, target, lens), logits)
    nothing = model(source[:, :0], target, torch.tensor([0, 0]))
    close(nothing[0], logits[0], dtype)


@norms
@with_and_without_weights
@pytest.mark.parametrize("value", (NAN, math.inf, 1e30, 3e38))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16), ids=str)
def test_what_stands_in_padding_never_matters(norm_first, need_weights, value, dtype):
    mask = length_mask(LENS, S)
    encoder = make_encoder(norm_first=norm_first).to(dtype)
    decoder = make_decoder(norm_first=norm_first).to(dtype)
    x, y = draw(B, S, D, dtype=dtype), draw(B, T, D, seed=5, dtype=dtype)
    bad = x.masked_fill(~mask.mT, value)
    found, maps = encoder(bad, mask, need_weights)
    wanted, _ = encoder(x, mask)
    close(found[1, :4], wanted[1, :4], dtype)
    output = decoder(y, bad, mask, None, need_weights)[0]
    close(output, decoder(y, x, mask)[0], dtype)
    if not 1e30 <= value < math.inf:  # a finite row stays, and takes part in its own output
        (found[:, :4].float().square().sum() + output.float().square().sum()).backward()
        for part in (encoder, decoder):
            for parameter in part.parameters():
                assert parameter.grad.isfinite().all()
    if need_weights:
        for weights in maps:
            assert (weights[1, :, :, 4:] == 0).all()


@with_and_without_weights
def test_a_nan_reaches_the_output_if_one_head_may_read_it_and_only_then(need_weights):
    mask = torch.ones(B, H, S, S, dtype=torch.bool)
    mask[..., 5] = False
    encoder, decoder = make_encoder().eval(), make_decoder().eval()
    x, y = draw(B, S, D), draw(B, S, D, seed=5)
    bad = x.clone()
    bad[:, 5] = NAN
    others = torch.arange(S) != 5
    for run in (
        lambda mask: encoder(bad, mask, need_weights)[0][:, others],
        lambda mask: decoder(y, bad, mask, None, need_weights)[0][:, others],
    ):
        assert run(mask).isfinite().all()
        for head in range(H):
            read = mask.clone()
            read[:, head, 2, 5] = True  # one query of one head
            assert run(read)[:, 2].isnan().all()


@pytest.mark.parametrize("need_weights", (False, True))
def test_numbers_in_padding_that_overflow_float16_do_not_matter(need_weights):
    mask = length_mask(LENS, S)
    decoder = make_decoder().half()
    x, y = draw(B, S, D).half(), draw(B, T, D, seed=5).half()
    bad = x.masked_fill(~mask.mT, 6e4) * torch.where(draw(D) > 0, 1, -1)
    good = bad.masked_fill(~mask.mT, 1)
    found = decoder(y, bad, mask, None, need_weights)[0]
    assert found.isfinite().all()
    assert torch.equal(found, decoder(y, good, mask, None, need_weights)[0])


def test_a_query_that_may_read_no_memory_gets_nothing_from_it():
    decoder = make_decoder().eval()
    y, memory = draw(B, T, D), draw(B, S, D, seed=6)
    mask = torch.ones(B, T, S, dtype=torch.bool)
    mask[0, 1] = mask[1] = False
    output, _, maps = decoder(y, memory, mask, need_weights=True)
    for _, cross in maps:
        assert (cross[0, :, 1] == 0).all() and (cross[1] == 0).all()
    close(decoder(y, memory, mask)[0], output)
    empty = decoder(y[1:], memory[1:, :0])[0]
    close(output[1:], empty)
    block, seen = decoder.blocks[0], []
    block.cross_residual.register_forward_hook(lambda _, inputs, __: seen.append(inputs[1]))
    decoder(y, memory, mask)
    assert (seen[0][1] == 0).all() and (seen[0][0, 1] == 0).all() and (seen[0][0, 0] != 0).any()


def test_the_given_inputs_stay_as_they_are():
    encoder, decoder = make_encoder(), make_decoder()
    mask = length_mask(LENS, S)
    x, y = draw(B, S, D).masked_fill(~mask.mT, NAN), draw(B, T, D)
    before = x.clone(), y.clone(), mask.clone()
    decoder(y, encoder(x, mask)[0], mask)
    decoder(y, x, mask)
    for now, then in zip((x, y, mask), before, strict=True):
        assert_close(now, then, rtol=0, atol=0, equal_nan=True)


# ------------------------------------------------------------------------------------------------
# The parts: FFN, AddNorm, embedding


def test_ffn_is_equation_2_by_hand():
    ffn = PositionWiseFFN(2, 3)
    with torch.no_grad():
        ffn.hidden_layer.weight.copy_(torch.tensor([[1.0, 0], [0, 1], [-1, -1]]))
        ffn.hidden_layer.bias.copy_(torch.tensor([0.0, -1, 0]))
        ffn.output_layer.weight.copy_(torch.tensor([[1.0, 2, 0], [0, 1, 1]]))
        ffn.output_layer.bias.copy_(torch.tensor([10.0, 20]))
    x = torch.tensor([[3.0, 4], [-1, -2]])  # hidden (3, 3, 0) and (0, 0, 3)
    assert torch.equal(ffn(x), torch.tensor([[19.0, 23], [10, 23]]))


@pytest.mark.parametrize("shape", ((D,), (T, D), (B, T, D), (B, H, T, D)), ids=str)
def test_ffn_works_on_each_position_alone(shape):
    torch.manual_seed(0)
    ffn, x = PositionWiseFFN(D, HIDDEN), draw(*shape)
    rows = torch.stack([ffn(row) for row in x.reshape(-1, D)])
    close(ffn(x), rows.reshape(shape))


def test_activation_is_a_name_or_a_function():
    torch.manual_seed(0)
    x = draw(T, D)
    plain = PositionWiseFFN(D, HIDDEN)
    for activation, function in (("relu", F.relu), ("gelu", F.gelu), (torch.tanh, torch.tanh)):
        ffn = PositionWiseFFN(D, HIDDEN, activation=activation)
        ffn.load_state_dict(plain.state_dict())
        close(ffn(x), ffn.output_layer(function(ffn.hidden_layer(x))))
    with pytest.raises(ValueError, match="'swish'.*relu.*gelu"):
        PositionWiseFFN(D, HIDDEN, activation="swish")


NORMED = (
    ([1.0, 0, 0, 0], [1.7320, -0.5773, -0.5773, -0.5773]),
    ([1.0, 2, 3, 4], [-1.3416, -0.4472, 0.4472, 1.3416]),
    ([5.0, 5, 5, 5], [0.0, 0, 0, 0]),
)


@pytest.mark.parametrize(("row", "wanted"), NORMED)
def test_add_norm_divides_by_n_and_has_eps_under_the_root(row, wanted):
    row, add = torch.tensor(row), AddNorm(4)
    zeros = torch.zeros(4)
    for x, found in ((row, zeros), (zeros, row), (0.25 * row, 0.75 * row)):
        assert_close(add(x, found), torch.tensor(wanted), atol=1e-4, rtol=0)
    large = AddNorm(4, eps=0.8125)(torch.tensor([1.0, 0, 0, 0]), zeros)  # 3/16 + 13/16 = 1
    close(large, torch.tensor([0.75, -0.25, -0.25, -0.25]))


def test_add_norm_normalises_each_vector_alone_in_every_dtype():
    for dtype, limit in ((torch.float32, 1e-5), (torch.float64, 1e-5), (torch.bfloat16, 2e-2)):
        x, found = draw(B, T, D, dtype=dtype), draw(B, T, D, seed=4, dtype=dtype)
        out = AddNorm(D).to(dtype)(7 * x, found + 3)
        assert out.dtype == dtype
        assert out.double().mean(-1).abs().max() < limit
        assert (out.double().var(-1, unbiased=False) - 1).abs().max() < 10 * limit


def test_add_norm_of_pre_norm_normalises_before_and_leaves_the_sum_alone():
    x, found = draw(B, T, D), draw(B, T, D, seed=4)
    pre, post = AddNorm(D, norm_first=True), AddNorm(D)
    assert torch.equal(pre(x, found), x + found)
    close(pre.before(x), F.layer_norm(x, (D,)))
    assert torch.equal(post.before(x), x)
    close(post(x, found), F.layer_norm(x + found, (D,)))


@norms
def test_add_norm_refuses_to_broadcast(norm_first):
    for shape in ((1, T, D), (B, 1, D), (T, D)):
        with pytest.raises(ValueError, match=rf"{shape[-2]}.*{B}, {T}, {D}"):
            AddNorm(D, norm_first=norm_first)(draw(B, T, D), draw(*shape))


def test_dropout_falls_on_what_the_sublayer_found_and_not_on_the_sum():
    x, found = draw(B, T, D), draw(B, T, D, seed=4)
    close(AddNorm(D, 1.0)(x, found), F.layer_norm(x, (D,)))
    assert torch.equal(AddNorm(D, 1.0, norm_first=True)(x, found), x)
    close(AddNorm(D, 1.0).eval()(x, found), F.layer_norm(x + found, (D,)))


@pytest.mark.parametrize("width", (32, 256))
def test_embeddings_and_positions_are_of_one_size(width):
    torch.manual_seed(0)
    model = Transformer(400, 300, width, 8, 4, 1)
    positions = sinusoid(50, width)
    assert positions.square().mean().sqrt().item() == pytest.approx(0.5**0.5, abs=1e-6)
    for part, size in ((model.source_embedding, 400), (model.target_embedding, 300)):
        tokens = torch.arange(size).reshape(-1, 50)
        found = part(tokens) - positions
        close(found, math.sqrt(width) * part.embedding.weight[tokens])
        assert found.square().mean().sqrt().item() == pytest.approx(1, abs=0.05)


def test_embedding_knows_the_offset_and_drops_the_sum():
    torch.manual_seed(0)
    part = TokenEmbedding(SOURCE, D, MAX_LEN, dropout=1.0)
    tokens = sentences()[0]
    assert (part(tokens) == 0).all()
    part.eval()
    for cut in range(S + 1):
        both = torch.cat([part(tokens[:, :cut]), part(tokens[:, cut:], cut)], dim=1)
        assert torch.equal(both, part(tokens))


def test_the_untrained_loss_is_near_that_of_a_blind_guess():
    torch.manual_seed(0)
    for norm_first in (False, True):
        model = Transformer(100, 100, 64, 128, 4, 2, norm_first=norm_first)
        source, target = torch.randint(100, (2, 8, 30))
        loss = sequence_loss(model(source, target[:, :-1], torch.full((8,), 30)), target[:, 1:], -1)
        assert loss.item() == pytest.approx(math.log(100), abs=0.35)


@norms
def test_blocks_with_zero_weights_and_pre_norm_are_the_identity(norm_first):
    x, memory = draw(B, T, D), draw(B, S, D, seed=6)
    for kind in (TransformerEncoderBlock, TransformerDecoderBlock):
        block = kind(D, HIDDEN, H, norm_first=norm_first)
        for name, parameter in block.named_parameters():
            if "norm" not in name:
                nn.init.zeros_(parameter)
        found = block(x)[0] if kind is TransformerEncoderBlock else block(x, memory)[0]
        if norm_first:
            assert torch.equal(found, x)
        else:
            close(found, F.layer_norm(x, (D,)))


def test_only_pre_norm_ends_with_a_final_norm_unless_asked():
    x = 9 * draw(B, S, D)
    for norm_first in (False, True):
        torch.manual_seed(0)
        encoder = TransformerEncoder(D, HIDDEN, H, LAYERS, norm_first=norm_first)
        out = encoder(x)[0]
        assert out.mean(-1).abs().max() < 1e-5
        assert_close(out.var(-1, unbiased=False), torch.ones(B, S), atol=1e-3, rtol=0)
        bare = TransformerEncoder(
            D, HIDDEN, H, LAYERS, norm_first=norm_first, final_norm=not norm_first
        )
        size = sum(p.numel() for p in bare.parameters())
        size -= sum(p.numel() for p in encoder.parameters())
        assert size == (-2 * D if norm_first else 2 * D)
    assert bare(x)[0].var(-1).max() > 20


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("width", (12, 64))
def test_a_block_has_12_width_squared_parameters(width):
    sizes = width, 4 * width, 4
    bare = TransformerEncoderBlock(*sizes, bias=False)
    assert count(bare) == 12 * width**2 + 2 * width  # and the scales of two norms
    full = TransformerEncoderBlock(*sizes)
    assert count(full) == 12 * width**2 + 13 * width
    assert count(full) == count(nn.TransformerEncoderLayer(width, 4, 4 * width))
    bare, full = (TransformerDecoderBlock(*sizes, bias=bias) for bias in (False, True))
    assert count(bare) == 16 * width**2 + 3 * width
    assert count(full) == count(nn.TransformerDecoderLayer(width, 4, 4 * width))
    for norm_first in (False, True):
        model = Transformer(SOURCE, TARGET, *sizes, 3, norm_first=norm_first)
        blocks = 3 * (28 * width**2 + 32 * width) + norm_first * 4 * width
        assert count(model) == blocks + (SOURCE + 2 * TARGET) * width + TARGET


# ------------------------------------------------------------------------------------------------
# Weights, dropout, dtypes, kernels, state


@norms
@modes
def test_weights_are_rows_that_sum_to_one_before_dropout(norm_first, training):
    model = make_model(dropout=0.5, norm_first=norm_first).train(training)
    source, target = sentences()
    memory, maps = model.encode(source, LENS, need_weights=True)
    _, _, pairs = model.decode(target, memory, LENS, need_weights=True)
    assert len(maps) == len(pairs) == LAYERS
    padding = length_mask(LENS, S)[:, None]
    for weights in (*maps, *(cross for _, cross in pairs)):
        assert weights.shape[:2] == (B, H) and weights.shape[-1] == S
        close(weights.sum(-1), torch.ones(weights.shape[:3]))
        assert torch.equal(weights > 0, padding.expand_as(weights))
    for own, cross in pairs:
        assert cross.shape == (B, H, T, S)
        close(own.sum(-1), torch.ones(B, H, T))
        assert torch.equal(own > 0, causal_mask(T, T).expand(B, H, T, T))


def test_weights_of_an_encoder_block_are_those_of_its_attention():
    block = make_encoder(norm_first=True).blocks[0]
    x = draw(B, S, D)
    _, weights = block(x, need_weights=True)
    y = block.attention_residual.before(x)
    heads = (layer(y).unflatten(-1, (H, -1)).transpose(1, 2)
             for layer in (block.attention.query_layer, block.attention.key_layer))  # fmt: skip
    query, key = heads
    close(weights, (query @ key.mT / math.sqrt(D // H)).softmax(-1))


@norms
def test_outputs_do_not_depend_on_whether_weights_are_asked_for(norm_first):
    model = make_model(norm_first=norm_first, dropout=0.3).eval()
    source, target = sentences()
    memory = model.encode(source, LENS)
    close(model.encode(source, LENS, need_weights=True)[0], memory)
    logits, _ = model.decode(target, memory, LENS)
    close(model.decode(target, memory, LENS, need_weights=True)[0], logits)
    assert make_encoder()(draw(B, S, D))[1] is None
    assert make_decoder()(draw(B, T, D), draw(B, S, D))[2] is None


@norms
@with_and_without_weights
def test_dropout_is_on_in_train_and_off_in_eval(norm_first, need_weights):
    model = make_model(dropout=0.5, norm_first=norm_first).eval()
    plain = make_model(norm_first=norm_first).eval()
    plain.load_state_dict(model.state_dict())
    source, target = sentences()

    def run(each):
        memory = each.encode(source, LENS, need_weights)
        memory = memory[0] if need_weights else memory
        return each.decode(target, memory, LENS, need_weights=need_weights)[0]

    quiet = run(model)
    assert torch.equal(run(model), quiet) and torch.equal(run(plain), quiet)
    model.train()
    assert not torch.equal(run(model), run(model))


def test_dropout_of_the_model_reaches_both_embeddings_and_every_block():
    model = make_model(dropout=0.5)
    layers = [part for part in model.modules() if isinstance(part, nn.Dropout)]
    assert len(layers) == 2 + (4 + 6) * LAYERS and {part.p for part in layers} == {0.5}
    for part in (model.source_embedding, model.target_embedding):
        dropped = (part(torch.zeros(1, 20, dtype=torch.long)) == 0).double().mean()
        assert 0.4 < dropped < 0.6


@norms
@pytest.mark.parametrize("kind", (TransformerEncoderBlock, TransformerDecoderBlock))
def test_each_dropout_of_a_block_acts_where_the_paper_and_torch_have_it(norm_first, kind):
    torch.manual_seed(0)
    block = shake(kind(D, HIDDEN, H, 0.5, norm_first=norm_first))
    x, rest = draw(B, T, D), ()
    if kind is TransformerDecoderBlock:
        rest = (draw(B, S, D, seed=6),)
    layers = {name: m for name, m in block.named_modules() if isinstance(m, nn.Dropout)}
    assert len(layers) == (6 if rest else 4) and {m.p for m in layers.values()} == {0.5}
    quiet = block.eval()(x, *rest)[0]
    for name, layer in layers.items():
        layer.train()
        changed = [block(x, *rest)[0] for _ in range(2)]
        assert not torch.equal(*changed) and not torch.equal(changed[0], quiet), name
        layer.eval()
    block.train()
    for layer in layers.values():
        layer.p = 1.0  # nothing that was found is left
    found = block(x, *rest)[0]
    if norm_first:
        assert torch.equal(found, x)
    else:
        for part in ("attention_residual", "cross_residual", "ffn_residual"):
            if hasattr(block, part):
                x = getattr(block, part).norm(x)
        close(found, x)


@dtypes
@norms
def test_every_dtype_gives_what_float64_gives(dtype, norm_first):
    exact = make_model(norm_first=norm_first).double()
    model = copy.deepcopy(exact).to(dtype)
    source, target = sentences()
    wanted, found = (each(source, target, LENS) for each in (exact, model))
    assert found.dtype == dtype
    close(found, wanted, max(dtype, torch.float32, key=TOLERANCE.get)
          if dtype == torch.float64 else dtype)  # fmt: skip
    memory, maps = model.encode(source, LENS, need_weights=True)
    _, cache, pairs = model.decode(target, memory, LENS, need_weights=True)
    for tensor in (memory, *maps, *(x for pair in pairs for x in pair), *tensors_of(cache)):
        assert tensor.dtype == dtype and tensor.isfinite().all()


def test_model_runs_under_autocast():
    model = make_model()
    source, target = sentences()
    wanted = model(source, target, LENS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(source, target, LENS)
        chunks = decode_in_chunks(model, target, model.encode(source, LENS), LENS, (2, 3))
    close(found.float(), wanted, torch.bfloat16)
    close(chunks.float(), wanted, torch.bfloat16)


@pytest.fixture
def calls(monkeypatch):
    """Record what torch's fused kernel is asked."""
    calls, fused = [], F.scaled_dot_product_attention

    def spy(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **rest):
        shape = tuple(query.shape[:3]) + (key.shape[2],)
        calls.append((shape, attn_mask is not None, is_causal, dropout_p))
        return fused(query, key, value, attn_mask, dropout_p, is_causal, **rest)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return calls


def test_the_fused_kernel_makes_the_causal_mask_itself(calls):
    model = make_model(dropout=0.25)
    source, target = sentences()
    model(source, target, torch.tensor([S, S]))
    own, cross = ((B, H, T, T), False, True, 0.25), ((B, H, T, S), False, False, 0.25)
    assert calls == LAYERS * [((B, H, S, S), False, False, 0.25)] + LAYERS * [own, cross]
    calls.clear()
    model.eval()(source, target, LENS)
    own, cross = ((B, H, T, T), False, True, 0.0), ((B, H, T, S), True, False, 0.0)
    assert calls == LAYERS * [((B, H, S, S), True, False, 0.0)] + LAYERS * [own, cross]
    calls.clear()
    make_encoder()(draw(B, S, D), causal_mask(S, S))
    assert calls == LAYERS * [((B, H, S, S), False, True, 0.0)]


def test_with_a_cache_the_fused_kernel_is_never_told_that_all_is_causal(calls):
    model = make_model().eval()
    source, target = sentences()
    full = torch.tensor([S, S])
    memory = model.encode(source, full)
    _, cache = model.decode(target[:, :2], memory, full)
    calls.clear()
    model.decode(target[:, 2:3], memory, full, cache)
    assert calls == LAYERS * [
        ((B, H, 1, 3), False, False, 0.0),  # the newest token may see all
        ((B, H, 1, S), False, False, 0.0),
    ]
    calls.clear()
    model.decode(target[:, 2:4], memory, full, cache)
    assert [call[:3] for call in calls[::2]] == LAYERS * [((B, H, 2, 4), True, False)]


def test_the_fused_kernel_is_not_used_when_weights_are_asked_for(calls):
    model = make_model().eval()
    source, target = sentences()
    memory, _ = model.encode(source, LENS, need_weights=True)
    model.decode(target, memory, LENS, need_weights=True)
    assert calls == []


def test_a_model_can_be_copied_and_saved_after_a_forward_pass():
    model = make_model(dropout=0.1)
    source, target = sentences()
    logits = model(source, target, LENS)
    logits.sum().backward()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert file.tell() < size + 60_000
    twin = copy.deepcopy(model).eval()
    fresh = make_model(seed=2).eval()
    fresh.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    wanted = model.eval()(source, target, LENS)
    assert torch.equal(twin(source, target, LENS), wanted)
    assert torch.equal(fresh(source, target, LENS), wanted)
    names = {name for name, _ in model.named_parameters()}
    assert set(model.state_dict()) == names  # the table of positions is made again


def test_no_module_keeps_a_tensor_from_the_forward_pass():
    model = make_model()
    source, target = sentences()
    memory, _ = model.encode(source, LENS, need_weights=True)
    model.decode(target, memory, LENS, need_weights=True)
    for part in model.modules():
        for name, value in vars(part).items():
            assert not torch.is_tensor(value), name
            kept = value if isinstance(value, (list, tuple)) else ()
            assert not any(torch.is_tensor(each) for each in kept), name


def test_model_runs_where_tensors_have_no_values():
    model = make_model().to("meta")
    source, target, lens = (x.to("meta") for x in (*sentences(), LENS))
    memory = model.encode(source, lens)
    logits, cache = model.decode(target, memory, lens)
    more, _ = model.decode(target, memory, lens, cache)
    assert logits.shape == more.shape == (B, T, TARGET) and more.is_meta


def test_initial_norms_of_a_decoder_block_are_three_and_apart():
    block = TransformerDecoderBlock(D, HIDDEN, H)
    norms = [part for part in block.modules() if isinstance(part, nn.LayerNorm)]
    assert len({id(part.weight) for part in norms}) == 3
    layers = [part for part in make_decoder().modules() if isinstance(part, nn.Linear)]
    assert len({part.weight.data_ptr() for part in layers}) == len(layers) == 10 * LAYERS


# ------------------------------------------------------------------------------------------------
# What is refused


def test_positions_past_max_len_are_refused_and_the_last_is_not():
    model = make_model(max_len=6).eval()
    source, target = sentences(num_source=6, num_target=6)
    lens = torch.tensor([6, 2])
    assert model(source, target, lens).shape == (B, 6, TARGET)
    memory = model.encode(source, lens)
    _, cache = model.decode(target, memory, lens)
    for run in (
        lambda: model(F.pad(source, (0, 1)), target, lens),
        lambda: model(source, F.pad(target, (0, 1)), lens),
        lambda: model.encode(F.pad(source, (0, 1)), lens),
        lambda: model.decode(target[:, :1], memory, lens, cache),
    ):
        with pytest.raises(ValueError, match="table of 6 positions"):
            run()


def test_default_max_len_is_512():
    model = Transformer(5, 5, 4, 4, 1, 1)
    tokens = torch.zeros(1, 513, dtype=torch.long)
    assert model.encode(tokens[:, 1:], torch.tensor([512])).shape == (1, 512, 4)
    with pytest.raises(ValueError, match="512 positions"):
        model.encode(tokens, torch.tensor([513]))


@pytest.mark.parametrize(
    ("lens", "error", "match"),
    (
        (torch.tensor([S + 1, 2]), ValueError, f"0 to {S}, not .{S + 1}"),
        (torch.tensor([-1, 2]), ValueError, "-1"),
        (torch.tensor([1, 2, 3]), ValueError, rf"{B} lengths, not the shape \(3,\)"),
        (torch.tensor([[1, 2]]), ValueError, r"\(1, 2\)"),
        (torch.tensor(3), ValueError, r"\(\)"),
        (torch.tensor([1.0, 2.0]), TypeError, "integers"),
    ),
)
def test_lengths_that_do_not_fit_are_refused(lens, error, match):
    model = make_model()
    source, target = sentences()
    memory = model.encode(source, LENS)
    for run in (lambda: model.encode(source, lens), lambda: model.decode(target, memory, lens)):
        with pytest.raises(error, match=match):
            run()


def test_sizes_that_do_not_fit_are_refused_when_a_model_is_made():
    for arguments, match in (
        ((S, T, 8, 8, 3, 1), "8 .* 3 heads"),
        ((S, T, 8, 8, 2, 0), "at least 1"),
        ((S, T, 8, 0, 2, 1), "at least 1"),
        ((S, T, 0, 8, 2, 1), "at least 1"),
        ((0, T, 8, 8, 2, 1), "at least 1"),
        ((S, 0, 8, 8, 2, 1), "at least 1"),
    ):
        with pytest.raises(ValueError, match=match):
            Transformer(*arguments)
    with pytest.raises(ValueError, match="at least 1"):
        Transformer(S, T, 8, 8, 2, 1, max_len=0)
    for kind in (TransformerEncoder, TransformerDecoder):
        with pytest.raises(ValueError, match="at least 1"):
            kind(8, 8, 2, 0)
        with pytest.raises(TypeError):
            kind(8, 8, 2, 1, norm_frist=True)


@norms
def test_inputs_that_do_not_fit_are_refused(norm_first):
    encoder, decoder = (make(norm_first=norm_first) for make in (make_encoder, make_decoder))
    x, memory = draw(B, T, D), draw(B, S, D)
    _, cache, _ = decoder(x, memory)
    for run, match in (
        (lambda: encoder(draw(B, T, 32)), "32"),
        (lambda: encoder(draw(T, D)), rf"\({T}, {D}\)"),
        (lambda: decoder(draw(B, T, 32), memory), "32"),
        (lambda: decoder(x, draw(B, S, 32)), "32"),
        (lambda: decoder(x[0], memory), rf"\({T}, {D}\)"),
        (lambda: decoder(x, memory[0]), rf"\({S}, {D}\)"),
        (lambda: decoder(x, memory[:1]), "1 samples"),
        (lambda: decoder(x[:1], memory), "2 samples"),
        (lambda: decoder(x[:1], memory[:1], cache=cache), "2 samples"),
        (lambda: decoder(x, memory, cache=cache[:1]), "1 caches for 2 blocks"),
        (lambda: decoder(x, memory, cache=2 * cache), "4 caches for 2 blocks"),
    ):
        with pytest.raises(ValueError, match=match):
            run()
    with pytest.raises(ValueError, match="inputs must be 33 wide, not 32"):
        PositionWiseFFN(D, HIDDEN)(draw(B, T, 32))


@norms
@with_and_without_weights
def test_masks_that_do_not_fit_are_refused(norm_first, need_weights):
    encoder, decoder = (make(norm_first=norm_first) for make in (make_encoder, make_decoder))
    x, memory = draw(B, T, D), draw(B, S, D)
    yes = torch.ones(B, H, S, S, dtype=torch.bool)
    for mask in (yes[0, 0, 0], yes[0, 0, :, :T], yes[:1, 0], yes[:, :2], yes[0, :, :, :]):
        with pytest.raises(ValueError, match="mask"):
            encoder(memory, mask, need_weights)
    for mask in (yes[0, 0], yes[0, 0, :T, :T], yes[:1, 0, :1], yes[:, :2, :T], yes[0, :, :T]):
        with pytest.raises(ValueError, match="mask"):
            decoder(x, memory, mask, None, need_weights)
    with pytest.raises(TypeError, match="boolean"):
        encoder(memory, yes[0, 0].float(), need_weights)
    for mask in (yes[:, 0, :1].float(), yes[:, 0, :1].tolist()):
        with pytest.raises(TypeError, match="boolean"):
            decoder(x, memory, mask, None, need_weights)


# ------------------------------------------------------------------------------------------------
# Decoding, and a task


def decode_without_cache(model, source, lens, max_len):
    """Decode greedily, running the whole model for every token."""
    tokens = torch.ones(len(source), 1, dtype=torch.long)
    for _ in range(max_len):
        following = model(source, tokens, lens)[:, -1].argmax(-1)
        tokens = torch.cat([tokens, following[:, None]], dim=1)
    return tokens[:, 1:]


@norms
def test_greedy_decoding_by_steps_is_greedy_decoding_without_a_cache(norm_first):
    model = make_model(Translator, norm_first=norm_first, dropout=0.2).eval()
    lens = torch.tensor([S, 2, 5])
    source, _ = sentences(batch=3)
    start = model.start(source, lens)
    found = greedy_decode(model.step, start, bos_id=1, eos_id=-1, max_len=11)
    assert torch.equal(found, decode_without_cache(model, source, lens, 11))
    again = greedy_decode(model.step, start, bos_id=1, eos_id=-1, max_len=11)
    assert torch.equal(found, again)


def test_steps_give_log_probabilities_of_the_teacher_forced_pass():
    model = make_model(Translator).eval()
    source, target = sentences()
    state, rows = model.start(source, LENS), []
    for tokens in target.unbind(1):
        log_probs, state = model.step(tokens, state)
        rows.append(log_probs)
    close(torch.stack(rows, 1), model(source, target, LENS).log_softmax(-1))


def test_beams_have_the_score_that_the_whole_model_gives_them():
    model = make_model(Translator).eval()
    source, _ = sentences(batch=1)
    lens = torch.tensor([S - 1])
    options = {"bos_id": 1, "eos_id": 2, "beam_size": 4, "max_len": 6}
    with torch.no_grad():
        found = beam_search(model.step, model.start(source, lens), **options)
        assert len(found) == 4
        for ids, score in found:
            tokens = torch.tensor([[1, *ids]])
            rows = model(source, tokens[:, :-1], lens).log_softmax(-1)[0]
            wanted = rows.gather(1, tokens[0, 1:, None]).sum()
            assert score == pytest.approx(wanted.item(), abs=1e-4)


def test_a_rise_of_padding_logits_or_targets_leaves_the_loss_alone():
    logits = torch.zeros(1, 4, 10)
    targets = torch.tensor([[3, 4, 0, 0]])
    assert sequence_loss(logits, targets, 0).item() == pytest.approx(math.log(10), abs=1e-6)
    model = make_model()
    source, target = sentences()
    target[1, 3:] = 0
    target[target == 0] = 1
    labels = target.clone()
    labels[1, 3:] = 0
    loss = sequence_loss(model(source, target, LENS), labels, 0)
    other = target.clone()
    other[1, 3:] = 5  # inputs after the end of a target
    assert sequence_loss(model(source, other, LENS), labels, 0).item() == loss.item()


@norms
def test_a_small_model_learns_to_write_backwards_and_decodes_what_it_learned(norm_first):
    torch.manual_seed(0)
    model = Translator(10, 10, 32, 64, 4, 1, max_len=8, norm_first=norm_first)
    adam = torch.optim.Adam(model.parameters(), lr=4e-3)

    def batch(size):
        lens = torch.randint(2, 6, (size,))
        source = torch.randint(2, 10, (size, 5))
        places = (lens[:, None] - 1 - torch.arange(5)) % 5
        real = torch.arange(5) < lens[:, None]
        target = source.gather(1, places).masked_fill(~real, 0)
        return source, lens, target

    for _ in range(250):
        source, lens, target = batch(48)
        inputs = F.pad(target, (1, 0), value=1)[:, :-1]
        loss = sequence_loss(model(source, inputs, lens), target, 0)
        adam.zero_grad()
        loss.backward()
        adam.step()
    with evaluating(model):
        source, lens, target = batch(200)
        inputs = F.pad(target, (1, 0), value=1)[:, :-1]
        held_out = sequence_loss(model(source, inputs, lens), target, 0)
        start = model.start(source, lens)
        ids = greedy_decode(model.step, start, bos_id=1, eos_id=-1, max_len=5)
    right = ((ids == target) | (target == 0)).all(1).double().mean()
    assert held_out < 0.2 and right > 0.9, (held_out, right)


def test_everything_public_has_a_docstring():
    for name, item in vars(section).items():
        if getattr(item, "__module__", None) == section.__name__ and not name.startswith("_"):
            assert item.__doc__, name
