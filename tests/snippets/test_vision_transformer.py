"""Proof of `snippets.vision_transformer`: order, positions, and two references.

Every axis has another size, mostly prime. Weights are drawn anew before a
comparison: those of a fresh model are so small that mistakes hide.
"""

import copy
import io
import math
import re
import warnings

import hypothesis.strategies as some
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.nn import functional as F

from snippets import multihead_attention
from snippets.transformer import TransformerEncoderBlock, copy_block
from snippets.vision_transformer import (
    PatchEmbedding,
    ViT,
    ViTBlock,
    ViTEmbedding,
    ViTEncoder,
    check_images,
    cut_patches,
    grid_for,
    height_and_width,
    join_patches,
    occlude,
    rank_correlation,
    resize_positions,
    roll_out,
)

HALF = [torch.float16, torch.bfloat16]
DTYPES = [*HALF, torch.float32, torch.float64]
FEW = settings(max_examples=40, deadline=None)
small = some.integers(1, 4)


@torch.no_grad()
def stir(module, seed=0):
    """Draw all parameters anew, large enough to matter; → the module."""
    generator = torch.Generator().manual_seed(seed)
    for each in module.modules():
        for x in each.parameters(recurse=False):
            noise = torch.randn(x.shape, generator=generator, dtype=torch.double)
            x.copy_(0.5 * noise if x.ndim == 1 else noise / math.sqrt(x[0].numel()))
        if isinstance(each, nn.LayerNorm):
            each.weight.add_(1)
        if isinstance(each, ViTEmbedding):
            each.positions.mul_(math.sqrt(each.positions.shape[1]) / 2)
    return module


def draw(*shape, seed=1, dtype=torch.double):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype)


def tall_model(**options):
    """Images (·, 3, 15, 14) in patches of 5 × 2: a grid of 3 × 7."""
    model = ViT((15, 14), (5, 2), 3, 11, width=26, num_heads=2, num_layers=3, **options)
    return stir(model).double().eval()


def count(module):
    return sum(x.numel() for x in module.parameters())


# Patches


def test_patches_are_read_like_words_on_a_page():
    image = torch.arange(16).view(1, 1, 4, 4)
    order = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert cut_patches(image, 2).tolist() == [order]
    assert cut_patches(image, (2, 2)).tolist() == [order]


def test_the_first_number_of_a_size_is_the_height():
    image = torch.arange(12).view(1, 1, 2, 6)
    flat = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert cut_patches(image, (1, 3))[0].tolist() == flat
    upright = [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]
    assert cut_patches(image, (2, 1))[0].tolist() == upright


def test_in_a_patch_the_channels_follow_each_other():
    image = torch.arange(8).view(1, 2, 2, 2)
    assert cut_patches(image, 2)[0].tolist() == [[*range(8)]]
    assert cut_patches(image, (1, 2))[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


@FEW
@given(small, small, small, small, small, small)
def test_patches_are_those_of_a_loop_and_of_unfold(batch, channels, down, across, tall, wide):
    images = draw(batch, channels, down * tall, across * wide)
    found = cut_patches(images, (tall, wide))
    looped = [
        images[:, :, r * tall : (r + 1) * tall, c * wide : (c + 1) * wide].flatten(1)
        for r in range(down)
        for c in range(across)
    ]
    assert torch.equal(found, torch.stack(looped, 1))
    assert torch.equal(found, F.unfold(images, (tall, wide), stride=(tall, wide)).mT)
    assert torch.equal(join_patches(found, (down, across), (tall, wide)), images)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, *DTYPES])
def test_cutting_and_joining_keep_the_kind_of_the_pixels(dtype):
    images = (10 * draw(2, 3, 6, 20)).abs().to(dtype)
    patches = cut_patches(images, (3, 5))
    assert patches.dtype == dtype
    assert torch.equal(join_patches(patches, (2, 4), (3, 5)), images)


def test_images_may_lie_in_memory_in_any_way():
    images = draw(2, 20, 3, 6).transpose(1, 2).transpose(2, 3)  # (2, 3, 6, 20)
    assert not images.is_contiguous()
    assert torch.equal(cut_patches(images, (3, 5)), cut_patches(images.contiguous(), (3, 5)))
    patches = draw(13, 8, 15).transpose(0, 1).transpose(0, 1)[::2]
    again = join_patches(patches, (2, 4), (3, 5))
    assert torch.equal(cut_patches(again, (3, 5)), patches)


def test_patches_of_one_pixel_and_of_the_whole_image():
    images = draw(2, 3, 5, 7)
    assert torch.equal(cut_patches(images, 1), images.flatten(2).mT)
    assert torch.equal(cut_patches(images, (5, 7)), images.flatten(1)[:, None])


@pytest.mark.parametrize("shape", [(4, 6), (3, 4, 6), (1, 1, 3, 4, 6)])
def test_only_batches_of_images_are_cut(shape):
    with pytest.raises(ValueError, match=rf"4 axes, not {re.escape(str(shape))}"):
        cut_patches(torch.zeros(shape), 2)


def test_cutting_leaves_the_images_alone_and_lets_gradients_through():
    images = draw(2, 3, 6, 20).requires_grad_()
    before = images.detach().clone()
    weights = draw(2, 8, 45, seed=2)
    (cut_patches(images, (3, 5)) * weights).sum().backward()
    assert torch.equal(images, before)
    assert torch.equal(images.grad, join_patches(weights, (2, 4), (3, 5)))


@pytest.mark.parametrize(
    ("size", "pair"),
    [(7, (7, 7)), ((5, 3), (5, 3)), ([5, 3], (5, 3)), (torch.Size([5, 3]), (5, 3))],
)
def test_a_size_is_a_square_or_height_and_width(size, pair):
    assert height_and_width(size) == pair


@pytest.mark.parametrize(
    ("size", "number"),
    [(0, "(0, 0)"), (-3, "-3"), ((0, 4), "(0, 4)"), ((4, -1), "(4, -1)"), ((4,), "(4,)"),
     ([4, 5, 6], "(4, 5, 6)"), ((), "()")],
)  # fmt: skip
def test_other_sizes_are_refused_with_their_numbers(size, number):
    with pytest.raises(ValueError, match=re.escape(number)):
        height_and_width(size)


def test_the_grid_counts_patches_down_and_across():
    assert grid_for((15, 14), (5, 2)) == (3, 7)
    assert grid_for((14, 15), (2, 5)) == (7, 3)


@pytest.mark.parametrize(
    ("image", "patch"),
    [((15, 14), (2, 5)), ((15, 14), (5, 3)), ((15, 14), (4, 2)), ((4, 4), (8, 8)), ((0, 4), (2, 2)),
     ((4, 0), (2, 2))],
)  # fmt: skip
def test_patches_that_do_not_tile_are_named(image, patch):
    message = rf"{image[0]} × {image[1]} .*{patch[0]} × {patch[1]}"
    with pytest.raises(ValueError, match=message):
        grid_for(image, patch)
    with pytest.raises(ValueError, match=message):
        cut_patches(torch.zeros(1, 1, *image), patch)


# Patch embedding


def test_a_patch_embedding_is_a_strided_convolution_and_a_matrix_product():
    embed = stir(PatchEmbedding((15, 14), (5, 2), 3, 13)).double()
    images = draw(2, 3, 15, 14)
    weight, bias = embed.projection.weight, embed.projection.bias
    assert isinstance(embed.projection, nn.Conv2d)
    assert weight.shape == (13, 3, 5, 2)
    found = embed(images)
    assert found.shape == (2, 21, 13)
    unfolded = F.unfold(images, (5, 2), stride=(5, 2)).mT @ weight.flatten(1).T + bias
    torch.testing.assert_close(found, unfolded, rtol=0, atol=1e-12)
    torch.testing.assert_close(found, cut_patches(images, (5, 2)) @ weight.flatten(1).T + bias)
    convolved = F.conv2d(images, weight, bias, stride=(5, 2))
    for place in range(21):  # row by row
        pixel = convolved[:, :, place // 7, place % 7]
        torch.testing.assert_close(found[:, place], pixel, rtol=0, atol=1e-12)


def test_a_convolution_that_copies_gives_the_patches_themselves():
    embed = PatchEmbedding(4, 2, 1, 4)
    with torch.no_grad():
        embed.projection.weight.copy_(torch.eye(4).view(4, 1, 2, 2))
        embed.projection.bias.zero_()
    found = embed(torch.arange(16.0).view(1, 1, 4, 4))
    order = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert found[0].int().tolist() == order


def test_a_patch_embedding_says_its_sizes():
    embed = PatchEmbedding((15, 14), (5, 2), 3, 13)
    assert embed.image_size == (15, 14)
    assert embed.patch_size == (5, 2)
    assert embed.grid == (3, 7)
    assert embed.num_patches == 21
    assert count(embed) == 5 * 2 * 3 * 13 + 13
    square = PatchEmbedding(28, 7, 1, 5)
    assert (square.grid, square.num_patches) == ((4, 4), 16)


def test_a_patch_sees_its_own_pixels_only():
    embed = stir(PatchEmbedding((15, 14), (5, 2), 3, 13)).double()
    images = draw(2, 3, 15, 14).requires_grad_()
    embed(images)[1, 9].sum().backward()
    own = cut_patches(images.grad, (5, 2)) != 0
    assert own[1, 9].all()
    own[1, 9] = False
    assert not own.any()


def test_another_image_of_patches_is_embedded_too():
    embed = stir(PatchEmbedding((15, 14), (5, 2), 3, 13)).double()
    images = draw(2, 3, 15, 14)
    torch.testing.assert_close(embed(images)[:, :7], embed(images[:, :, :5]))
    assert embed(draw(2, 3, 20, 6)).shape == (2, 12, 13)


@pytest.mark.parametrize("build", [lambda: PatchEmbedding((15, 14), (5, 2), 3, 13), tall_model])
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 3, 14, 14), "14 × 14 .*5 × 2"),
        ((2, 3, 15, 15), "15 × 15 .*5 × 2"),
        ((2, 3, 14, 15), "14 × 15 .*5 × 2"),  # height and width changed places
        ((2, 3, 0, 14), "0 × 14 .*5 × 2"),
        ((2, 1, 15, 14), r"\(B, 3, height, width\).*\(2, 1, 15, 14\)"),
        ((2, 4, 15, 14), r"\(B, 3, height, width\).*\(2, 4, 15, 14\)"),
        ((2, 15, 14, 3), r"\(B, 3, height, width\).*\(2, 15, 14, 3\)"),
        ((3, 15, 14), r"\(B, 3, height, width\).*\(3, 15, 14\)"),
        ((2, 3, 14), r"\(B, 3, height, width\).*\(2, 3, 14\)"),
        ((1, 3, 2, 15, 14), r"\(1, 3, 2, 15, 14\)"),
    ],
)
def test_images_that_do_not_fit_are_refused(build, shape, message):
    with pytest.raises(ValueError, match=message):
        build().float()(torch.zeros(shape))


def test_images_are_checked_by_axes_and_channels():
    check_images(torch.zeros(0, 3, 1, 1), 3)
    with pytest.raises(ValueError, match=r"\(B, 2, height, width\), not \(1, 3, 1, 1\)"):
        check_images(torch.zeros(1, 3, 1, 1), 2)


SIZES = {"image_size": 12, "patch_size": 4, "num_channels": 3, "num_classes": 5, "width": 6,
         "num_heads": 2, "num_layers": 1}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "numbers"),
    [
        ({"patch_size": 5}, ["12 × 12", "5 × 5"]),
        ({"patch_size": (4, 5)}, ["12 × 12", "4 × 5"]),
        ({"image_size": (12, 10)}, ["12 × 10", "4 × 4"]),
        ({"image_size": 3}, ["3 × 3", "4 × 4"]),
        ({"patch_size": 0}, ["0"]),
        ({"patch_size": -4}, ["-4"]),
        ({"image_size": (12, 12, 12)}, ["(12, 12, 12)"]),
        ({"num_channels": 0}, ["0"]),
        ({"num_classes": 0}, ["0"]),
        ({"num_layers": 0}, ["0"]),
        ({"num_layers": -2}, ["-2"]),
        ({"width": 0}, ["0"]),
        ({"width": 7}, ["7", "2"]),
        ({"num_heads": 0}, ["0"]),
        ({"num_heads": 4}, ["6", "4"]),
        ({"ffn_width": 0}, ["0"]),
        ({"dropout": 1.5}, ["1.5"]),
    ],
)
def test_a_model_of_wrong_sizes_is_refused_with_the_numbers(changed, numbers):
    ViT(**SIZES)
    with pytest.raises(ValueError) as caught:
        ViT(**SIZES | changed)
    assert all(number in str(caught.value) for number in numbers)


# Class token and positions


def test_the_class_token_stands_first_and_gets_a_position():
    embed = stir(ViTEmbedding((15, 14), (5, 2), 3, 13, 0.0)).double()
    images = draw(2, 3, 15, 14)
    tokens = embed(images)
    assert tokens.shape == (2, 22, 13)
    assert embed.positions.shape == (22, 13)
    first = embed.class_token + embed.positions[0]
    assert torch.equal(tokens[:, 0], first.expand(2, 13))
    patches = embed.patches(images)
    for place in range(21):
        assert torch.equal(tokens[:, 1 + place], patches[:, place] + embed.positions[1 + place])


def test_a_fresh_embedding_has_small_positions_and_no_class():
    torch.manual_seed(0)
    embed = ViTEmbedding(32, 1, 3, 17, 0.0)
    assert embed.positions.std().item() == pytest.approx(0.02, rel=0.03)
    assert embed.positions.mean().item() == pytest.approx(0, abs=1e-3)
    assert not embed.class_token.any()


def test_dropout_acts_on_whole_tokens_in_training_only():
    embed = stir(ViTEmbedding((15, 14), (5, 2), 3, 13, 0.5)).double()
    images = draw(53, 3, 15, 14)
    expected = embed.eval()(images)
    embed.train()
    torch.manual_seed(0)
    found = embed(images)
    kept = found != 0
    assert kept.double().mean().item() == pytest.approx(0.5, abs=0.02)
    torch.testing.assert_close(found[kept], 2 * expected[kept])
    assert 0 < kept[:, 0].sum() < kept[:, 0].numel()


def cubic(distance, a=-0.75):
    """Give the weight of a sample at this distance: cubic convolution."""
    x = abs(distance)
    if x < 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * (x**3 - 5 * x**2 + 8 * x - 4) if x < 2 else 0.0


def stretching(old, new):
    """Give the matrix (new, old) of cubic interpolation along one axis."""
    matrix = torch.zeros(new, old, dtype=torch.double)
    for place in range(new):
        centre = (place + 0.5) * old / new - 0.5
        for tap in range(math.floor(centre) - 1, math.floor(centre) + 3):
            matrix[place, min(max(tap, 0), old - 1)] += cubic(centre - tap)
    return matrix


@pytest.mark.parametrize(
    ("old", "new"),
    [((3, 7), (5, 11)), ((7, 3), (3, 7)), ((3, 3), (3, 5)), ((3, 3), (5, 3)), ((5, 2), (2, 3)),
     ((1, 1), (2, 3)), ((4, 3), (6, 2))],
)  # fmt: skip
def test_positions_are_stretched_like_a_picture_by_cubic_interpolation(old, new):
    table = draw(1 + old[0] * old[1], 13)
    found = resize_positions(table, old, new)
    assert found.shape == (1 + new[0] * new[1], 13)
    assert torch.equal(found[0], table[0])
    picture = table[1:].view(*old, 13)
    down, across = stretching(old[0], new[0]), stretching(old[1], new[1])
    expected = torch.einsum("ir,jc,rcd->ijd", down, across, picture)
    torch.testing.assert_close(found[1:], expected.flatten(0, 1), rtol=0, atol=1e-12)


def test_the_same_grid_keeps_the_very_table():
    table = draw(22, 13)
    assert torch.equal(resize_positions(table, (3, 7), (3, 7)), table)
    assert torch.equal(resize_positions(table, (3, 7), [3, 7]), table)


def test_a_grid_of_as_many_patches_but_another_form_is_another_grid():
    table = draw(22, 13)
    assert not torch.allclose(resize_positions(table, (3, 7), (7, 3)), table, atol=0.1)


def test_equal_rows_stay_equal_and_the_class_token_does_not_leak():
    table = torch.ones(22, 13, dtype=torch.double)
    table[0] = math.nan
    found = resize_positions(table, (3, 7), (5, 11))
    torch.testing.assert_close(found[1:], torch.ones(55, 13, dtype=torch.double))
    assert found[0].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_stretched_positions_keep_their_kind(dtype):
    table = draw(22, 13).to(dtype)
    found = resize_positions(table, (3, 7), (5, 11))
    assert found.dtype == dtype
    wide = resize_positions(table.double(), (3, 7), (5, 11))
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 3e-6}
    torch.testing.assert_close(found.double(), wide, **tolerance)


def test_gradients_pass_through_stretching():
    table = draw(7, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: resize_positions(x, (2, 3), (3, 5)), table)


# The block


@pytest.mark.parametrize("seed", range(3))
def test_a_block_is_torchs_encoder_layer_with_the_norm_first_and_gelu(seed):
    theirs = nn.TransformerEncoderLayer(
        14, 2, 31, 0.0, "gelu", 1e-3, batch_first=True, norm_first=True
    )
    theirs = stir(theirs, seed).double()
    ours = ViTBlock(14, 2, ffn_width=31, eps=1e-3).double()
    copy_block(ours, theirs)
    x = draw(3, 5, 14).requires_grad_()
    y = x.detach().clone().requires_grad_()
    found, weights = ours(x)
    expected = theirs(y)
    assert weights is None
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    found.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-9)


def test_a_block_is_one_of_section_7_with_biases_and_a_wide_network():
    block = ViTBlock(6, 2)
    assert isinstance(block, TransformerEncoderBlock)
    assert count(block) == 12 * 6**2 + 13 * 6
    assert block.ffn.hidden_layer.out_features == 24
    assert ViTBlock(6, 2, ffn_width=7).ffn.hidden_layer.out_features == 7
    norms = [x for x in block.modules() if isinstance(x, nn.LayerNorm)]
    assert [x.eps for x in norms] == [1e-6, 1e-6]


def test_a_block_of_zeros_passes_everything_on():
    block = ViTBlock(6, 2).double()
    for x in block.parameters():
        nn.init.zeros_(x)
    x = draw(3, 5, 6)
    assert torch.equal(block(x)[0], x)


def test_a_block_has_the_exact_gelu():
    block = ViTBlock(1, 1, ffn_width=1).double()
    for x in block.parameters():
        nn.init.zeros_(x)
    nn.init.constant_(block.ffn.hidden_layer.bias, -1.5)
    nn.init.ones_(block.ffn.output_layer.weight)
    found = block(torch.zeros(1, 1, 1, dtype=torch.double))[0].item()
    gelu = -1.5 * (1 + math.erf(-1.5 / math.sqrt(2))) / 2
    assert found == pytest.approx(gelu, abs=1e-12)


def test_a_block_commutes_with_the_order_of_the_tokens():
    block = stir(ViTBlock(6, 2)).double()
    x, order = draw(3, 7, 6), torch.randperm(7)
    found, weights = block(x, need_weights=True)
    mixed, mixed_weights = block(x[:, order], need_weights=True)
    torch.testing.assert_close(mixed, found[:, order])
    torch.testing.assert_close(mixed_weights, weights[:, :, order][..., order])


# The model, by hand


def by_hand(model, images, num_heads, eps):
    """Compute logits and weights of a ViT from its parameters alone."""
    state = {name.removeprefix("encoder."): x for name, x in model.state_dict().items()}
    tall, wide = state["embedding.patches.projection.weight"].shape[-2:]

    def linear(name, x):
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(name, x):
        centred = x - x.mean(-1, keepdim=True)
        x = centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        return x * state[f"{name}.weight"] + state[f"{name}.bias"]

    def attention(name, x):
        names = (f"{name}.{each}_layer" for each in ("query", "key", "value"))
        outputs, weights = [], []
        for q, k, v in zip(*(linear(each, x).chunk(num_heads, -1) for each in names)):
            weights.append((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1))
            outputs.append(weights[-1] @ v)
        return linear(f"{name}.output_layer", torch.cat(outputs, -1)), torch.stack(weights, 1)

    logits, maps = [], []
    for image in images:
        tokens = [state["embedding.class_token"]]
        for top in range(0, image.shape[1], tall):
            for left in range(0, image.shape[2], wide):
                patch = image[:, top : top + tall, left : left + wide]
                filters = state["embedding.patches.projection.weight"]
                tokens.append(
                    (filters * patch).sum((1, 2, 3)) + state["embedding.patches.projection.bias"]
                )
        x = (torch.stack(tokens) + state["embedding.positions"])[None]
        found = []
        for number in range(len(model.encoder.blocks)):
            block = f"blocks.{number}"
            y, weights = attention(
                f"{block}.attention", norm(f"{block}.attention_residual.norm", x)
            )
            x = x + y
            y = linear(f"{block}.ffn.hidden_layer", norm(f"{block}.ffn_residual.norm", x))
            x = x + linear(f"{block}.ffn.output_layer", y * (1 + torch.erf(y / 2**0.5)) / 2)
            found.append(weights[0])
        logits.append(linear("head", norm("norm", x)[0, 0]))
        maps.append(torch.stack(found))
    return torch.stack(logits), torch.stack(maps)


@pytest.mark.parametrize("eps", [None, 1e-12, 0.1])
@pytest.mark.parametrize("heads", [1, 2, 13])
def test_a_model_is_what_its_equations_say(heads, eps):
    options = {} if eps is None else {"eps": eps}
    model = ViT((15, 14), (5, 2), 3, 11, 26, heads, 2, ffn_width=17, **options)
    stir(model, heads).double().eval()
    images = draw(2, 3, 15, 14)
    logits, weights = model(images, need_weights=True)
    expected, maps = by_hand(model, images, heads, 1e-6 if eps is None else eps)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-11)
    torch.testing.assert_close(weights, maps, rtol=0, atol=1e-12)
    torch.testing.assert_close(model(images), expected, rtol=0, atol=1e-11)


# The model of Hugging Face's transformers


@torch.no_grad()
def copy_to_theirs(ours, theirs):
    """Copy the weights of our ViT into theirs."""
    embedding, parts = ours.encoder.embedding, theirs.vit.embeddings
    parts.cls_token.copy_(embedding.class_token)
    parts.position_embeddings.copy_(embedding.positions)
    pairs = [
        (embedding.patches.projection, parts.patch_embeddings.projection),
        (ours.encoder.norm, theirs.vit.layernorm),
        (ours.head, theirs.classifier),
    ]
    for a, b in zip(ours.encoder.blocks, theirs.vit.layers, strict=True):
        pairs += [
            (a.attention.query_layer, b.attention.q_proj),
            (a.attention.key_layer, b.attention.k_proj),
            (a.attention.value_layer, b.attention.v_proj),
            (a.attention.output_layer, b.attention.o_proj),
            (a.attention_residual.norm, b.layernorm_before),
            (a.ffn_residual.norm, b.layernorm_after),
            (a.ffn.hidden_layer, b.mlp.fc1),
            (a.ffn.output_layer, b.mlp.fc2),
        ]
    for a, b in pairs:
        b.load_state_dict(a.state_dict())
    assert count(ours) == count(theirs)


def build_both(image_size, patch_size, channels, classes, width, heads, layers, hidden, eps):
    """Give our model and theirs, of one size and with the same weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers", minversion="5")
        config = transformers.ViTConfig(
            image_size=image_size, patch_size=patch_size, num_channels=channels,
            num_labels=classes, hidden_size=width, num_attention_heads=heads,
            num_hidden_layers=layers, intermediate_size=hidden, layer_norm_eps=eps,
            attn_implementation="eager",
        )  # fmt: skip
        theirs = transformers.ViTForImageClassification(config).eval()
    sizes = image_size, patch_size, channels, classes, width, heads, layers
    ours = stir(ViT(*sizes, ffn_width=hidden, eps=eps), seed=width).eval()
    copy_to_theirs(ours, theirs)
    return ours, theirs


CONFIGS = [
    (12, 4, 3, 5, 8, 2, 1, 32, 1e-12),
    ((15, 14), (5, 2), 1, 11, 26, 13, 2, 17, 1e-6),
    ((6, 35), (3, 5), 2, 2, 21, 3, 3, 84, 1e-5),
    ((35, 6), (7, 6), 5, 3, 15, 1, 2, 7, 1e-2),
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_is_that_of_transformers(config, dtype):
    ours, theirs = (x.to(dtype) for x in build_both(*config))
    images = draw(3, config[2], *height_and_width(config[0]), dtype=dtype)
    answer = theirs(images, output_attentions=True)
    logits, weights = ours(images, need_weights=True)
    atol = 1e-5 if dtype == torch.float32 else 1e-6  # their softmax is in float32
    torch.testing.assert_close(logits, answer.logits, rtol=0, atol=atol)
    torch.testing.assert_close(ours(images), answer.logits, rtol=0, atol=atol)
    torch.testing.assert_close(weights, torch.stack(answer.attentions, 1), rtol=0, atol=atol)
    tokens = theirs.vit(images).last_hidden_state
    torch.testing.assert_close(ours.encoder(images)[0], tokens, rtol=0, atol=atol)


@pytest.mark.parametrize("size", [(12, 12), (20, 12), (12, 20), (24, 28), (4, 8), (8, 18)])
def test_positions_are_stretched_as_in_transformers(size):
    ours, theirs = build_both(12, (4, 4) if size[1] != 18 else 2, 3, 5, 8, 2, 2, 32, 1e-12)
    if isinstance(theirs.vit.embeddings.patch_size, tuple):  # divides by it
        theirs.vit.embeddings.patch_size = theirs.vit.embeddings.patch_size[0]
    images = draw(3, 3, *size, dtype=torch.float32)
    answer = theirs(images, interpolate_pos_encoding=True)
    torch.testing.assert_close(ours(images), answer.logits, rtol=0, atol=1e-5)


def test_gradients_are_those_of_transformers():
    ours, theirs = (x.double() for x in build_both(*CONFIGS[1]))
    images, labels = draw(3, 1, 15, 14), torch.tensor([7, 0, 10])
    F.cross_entropy(ours(images), labels).backward()
    F.cross_entropy(theirs(images).logits, labels).backward()
    for x in ours.parameters():
        x.data = x.grad
    gradients = {name: x.grad.clone() for name, x in theirs.named_parameters()}
    copy_to_theirs(ours, theirs)
    for name, x in theirs.named_parameters():
        torch.testing.assert_close(x.data, gradients[name], rtol=0, atol=1e-6)


# Properties of the model


def test_weights_do_not_change_the_logits_and_their_rows_sum_to_one():
    model, images = tall_model(), draw(5, 3, 15, 14)
    logits, weights = model(images, need_weights=True)
    assert logits.shape == (5, 11)
    assert weights.shape == (5, 3, 2, 22, 22)
    torch.testing.assert_close(weights.sum(-1), torch.ones(5, 3, 2, 22, dtype=torch.double))
    assert not torch.allclose(weights.sum(-2), torch.ones(()).double(), atol=0.1)
    plain = model(images)
    assert torch.is_tensor(plain)
    torch.testing.assert_close(plain, logits, rtol=0, atol=1e-12)


def test_layers_and_heads_are_in_order():
    model, images = tall_model(), draw(5, 3, 15, 14)
    weights = model(images, need_weights=True)[1]
    x = model.encoder.embedding(images)
    for layer, block in enumerate(model.encoder.blocks):
        x, found = block(x, need_weights=True)
        torch.testing.assert_close(weights[:, layer], found)
    assert len(weights.flatten(1, 2).unique(dim=1)[0]) == 6


def test_the_head_reads_the_class_token_after_the_last_norm():
    model, images = tall_model(), draw(5, 3, 15, 14)
    tokens, weights = model.encoder(images)
    assert weights is None
    assert tokens.shape == (5, 22, 26)
    torch.testing.assert_close(model(images), model.head(tokens[:, 0]))
    norm = model.encoder.norm
    model.encoder.norm = nn.Identity()
    torch.testing.assert_close(norm(model.encoder(images)[0]), tokens)


def test_an_encoder_takes_its_tokens_from_any_embedding():
    encoder = stir(ViTEncoder(nn.Linear(5, 6), 6, 3, 2, ffn_width=7, eps=0.25)).double()
    x = draw(2, 7, 5)
    tokens, weights = encoder(x, need_weights=True)
    assert tokens.shape == (2, 7, 6)
    assert weights.shape == (2, 2, 3, 7, 7)
    norms = [x for x in encoder.modules() if isinstance(x, nn.LayerNorm)]
    assert {x.eps for x in norms} == {0.25}
    assert len(norms) == 5
    assert encoder.blocks[1].ffn.hidden_layer.out_features == 7


def test_the_fused_kernel_runs_unless_weights_are_asked_for(monkeypatch):
    calls, kernel = [], F.scaled_dot_product_attention

    def counted(*args, **options):
        calls.append(options)
        return kernel(*args, **options)

    monkeypatch.setattr(multihead_attention.F, "scaled_dot_product_attention", counted)
    model, images = tall_model(), draw(2, 3, 15, 14)
    model(images)
    assert len(calls) == 3
    model(images, need_weights=True)
    assert len(calls) == 3


def test_an_answer_does_not_depend_on_the_other_images():
    model, images = tall_model(), draw(5, 3, 15, 14)
    logits, weights = model(images, need_weights=True)
    for each in range(5):
        alone, map_alone = model(images[each : each + 1], need_weights=True)
        torch.testing.assert_close(alone[0], logits[each], rtol=0, atol=1e-12)
        torch.testing.assert_close(map_alone[0], weights[each], rtol=0, atol=1e-12)
    images[1:] = math.nan
    torch.testing.assert_close(model(images)[0], logits[0], rtol=0, atol=1e-12)
    model.train()  # no norm over the batch either
    torch.testing.assert_close(model(images)[0], logits[0], rtol=0, atol=1e-12)


def test_no_images_give_no_logits():
    logits, weights = tall_model()(torch.zeros(0, 3, 15, 14).double(), need_weights=True)
    assert logits.shape == (0, 11)
    assert weights.shape == (0, 3, 2, 22, 22)


def test_without_positions_the_patches_are_a_set():
    model, images = tall_model(), draw(2, 3, 15, 14)
    order = torch.randperm(21, generator=torch.Generator().manual_seed(0))
    mixed = join_patches(cut_patches(images, (5, 2))[:, order], (3, 7), (5, 2))
    assert not torch.allclose(model(mixed), model(images), atol=0.01)
    nn.init.zeros_(model.encoder.embedding.positions)
    torch.testing.assert_close(model(mixed), model(images), rtol=0, atol=1e-11)


def test_a_shuffle_of_whole_patches_only_renames_the_positions():
    model, images = tall_model(), draw(2, 3, 15, 14)
    logits = model(images)
    order = torch.randperm(21, generator=torch.Generator().manual_seed(0))
    mixed = join_patches(cut_patches(images, (5, 2))[:, order], (3, 7), (5, 2))
    positions = model.encoder.embedding.positions
    with torch.no_grad():
        positions[1:] = positions[1:][order].clone()
    torch.testing.assert_close(model(mixed), logits, rtol=0, atol=1e-11)


@pytest.mark.parametrize("size", [(15, 14), (5, 2), (20, 6), (5, 42), (105, 2)])
def test_an_image_of_any_size_in_whole_patches_is_read(size):
    model, images = tall_model(), draw(2, 3, *size)
    table = resize_positions(
        model.encoder.embedding.positions, (3, 7), (size[0] // 5, size[1] // 2)
    )
    logits, weights = model(images, need_weights=True)
    tokens = 1 + size[0] // 5 * (size[1] // 2)
    assert logits.shape == (2, 11)
    assert weights.shape == (2, 3, 2, tokens, tokens)
    fitted = ViT(size, (5, 2), 3, 11, width=26, num_heads=2, num_layers=3).double().eval()
    state = model.state_dict() | {"encoder.embedding.positions": table}
    fitted.load_state_dict(state)
    torch.testing.assert_close(logits, fitted(images), rtol=0, atol=1e-12)


def test_a_square_model_reads_wide_and_tall_images_differently():
    model = stir(ViT(12, 4, 1, 5, width=6, num_heads=2, num_layers=2)).double()
    wide = draw(2, 1, 12, 20)
    assert not torch.allclose(model(wide), model(wide.mT), atol=1e-3)


def test_an_int_is_a_square():
    sizes = {"num_channels": 2, "num_classes": 5, "width": 6, "num_heads": 3, "num_layers": 1}
    torch.manual_seed(0)
    one = ViT(12, 4, **sizes)
    torch.manual_seed(0)
    other = ViT((12, 12), [4, 4], **sizes)
    images = draw(3, 2, 12, 12, dtype=torch.float32)
    assert torch.equal(one(images), other(images))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(15, 14), (20, 6)])
def test_all_kinds_of_floats(dtype, size):
    model, images = tall_model(), draw(2, 3, *size)
    expected, maps = model(images, need_weights=True)
    model.to(dtype)
    logits, weights = model(images.to(dtype), need_weights=True)
    assert logits.dtype == weights.dtype == dtype
    tolerance = {torch.float16: 0.03, torch.bfloat16: 0.25}.get(dtype, 1e-5)
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(weights.double(), maps, rtol=0, atol=tolerance)
    torch.testing.assert_close(model(images.to(dtype)).double(), expected, rtol=0, atol=tolerance)
    model(images.to(dtype)).sum().backward()
    assert all(x.grad.dtype == dtype and x.grad.isfinite().all() for x in model.parameters())


def test_mixed_precision_runs():
    model, images = tall_model().float(), draw(2, 3, 20, 6, dtype=torch.float32)
    expected = model(images)
    with torch.autocast("cpu", torch.bfloat16):
        logits, weights = model(images, need_weights=True)
        logits.float().sum().backward()
    torch.testing.assert_close(logits.float(), expected, rtol=0, atol=0.25)
    assert weights.shape == (2, 3, 2, 13, 13)
    assert all(x.grad.isfinite().all() for x in model.parameters())


def test_images_of_any_memory_layout_give_the_same_logits():
    model, images = tall_model(), draw(2, 3, 15, 14)
    expected = model(images)
    other = images.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(other), expected, rtol=0, atol=1e-12)
    other = images.mT.contiguous().mT
    torch.testing.assert_close(model(other), expected, rtol=0, atol=1e-12)


# Dropout, gradients, copies


def test_dropout_is_off_in_eval():
    model = tall_model(dropout=0.5)
    images = draw(2, 3, 15, 14)
    logits, weights = model(images, need_weights=True)
    assert torch.equal(model(images), model(images))
    torch.testing.assert_close(logits, tall_model()(images), rtol=0, atol=1e-12)
    torch.testing.assert_close(weights, tall_model()(images, need_weights=True)[1])


def test_dropout_is_on_in_training_wherever_it_should():
    model = tall_model(dropout=0.37).train()
    images = draw(2, 3, 15, 14)
    assert not torch.allclose(model(images), model(images), atol=1e-3)
    places = {
        name.split(".", 3)[-1]: x.p for name, x in model.named_modules()
        if isinstance(x, nn.Dropout)
    }  # fmt: skip
    assert places == dict.fromkeys(
        ("dropout", "attention.dropout", "attention_residual.dropout", "ffn.dropout",
         "ffn_residual.dropout"), 0.37)  # fmt: skip
    assert sum(isinstance(x, nn.Dropout) for x in model.modules()) == 1 + 4 * 3


def test_weights_are_those_before_dropout():
    model = tall_model(dropout=0.5).train()
    weights = model(draw(2, 3, 15, 14), need_weights=True)[1]
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 2, 22, dtype=torch.double))
    assert (weights > 0).all()


def test_without_dropout_training_and_eval_agree():
    model, images = tall_model(), draw(2, 3, 15, 14)
    assert torch.equal(model(images), model.train()(images))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("size", [(15, 14), (20, 6)])
def test_gradients_reach_every_parameter_and_every_pixel(need_weights, size):
    model, images = tall_model().train(), draw(2, 3, *size).requires_grad_()
    found = model(images, need_weights=need_weights)
    logits = found[0] if need_weights else found
    F.cross_entropy(logits, torch.tensor([3, 10])).backward()
    assert (images.grad != 0).all()
    for name, x in model.named_parameters():
        if "key_layer.bias" not in name:  # adds the same to all scores of a row
            assert (x.grad != 0).any(), name
    assert (model.encoder.embedding.positions.grad != 0).all()
    assert (model.encoder.embedding.class_token.grad != 0).all()


def test_gradients_pass_a_numerical_check():
    model = stir(ViT((3, 4), (3, 2), 1, 2, width=4, num_heads=2, num_layers=2, ffn_width=3))
    model.double()
    images = draw(2, 1, 3, 4).requires_grad_()
    assert torch.autograd.gradcheck(model, images)
    assert torch.autograd.gradcheck(lambda x: model(x, need_weights=True)[1], images)


def test_a_model_keeps_nothing_of_what_it_read():
    model = tall_model().train()
    _, weights = model(draw(53, 3, 15, 14), need_weights=True)
    assert weights.requires_grad
    other = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert buffer.tell() < 8 * count(model) + 60_000
    images = draw(2, 3, 15, 14)
    assert torch.equal(other(images), model(images))
    nn.init.zeros_(other.head.weight)
    assert not torch.equal(other(images), model(images))
    found = [x for m in model.modules() for x in vars(m).values() if torch.is_tensor(x)]
    assert not found
    assert not [*model.buffers()]


def test_a_model_is_saved_and_loaded_by_its_parameters():
    model, images = tall_model(), draw(2, 3, 15, 14)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = ViT((15, 14), (5, 2), 3, 11, width=26, num_heads=2, num_layers=3).double().eval()
    other.load_state_dict(torch.load(buffer))
    assert torch.equal(other(images), model(images))


def test_reading_leaves_images_parameters_and_chance_alone():
    model, images = tall_model(dropout=0.5), draw(2, 3, 20, 6)
    before, state = images.clone(), copy.deepcopy(model.state_dict())
    chance = torch.get_rng_state()
    model(images, need_weights=True)
    assert torch.equal(images, before)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), chance)


def test_a_seed_gives_the_same_model():
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(ViT(**SIZES))
    images = draw(2, 3, 12, 12, dtype=torch.float32)
    first, again, other = (model(images) for model in models)
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_a_model_is_built_and_run_without_memory():
    with torch.device("meta"):
        model = ViT((15, 14), (5, 2), 3, 11, width=26, num_heads=2, num_layers=3)
        logits, weights = model(torch.zeros(2, 3, 20, 6), need_weights=True)
        assert model(torch.zeros(2, 3, 15, 14)).is_meta
    assert logits.is_meta
    assert weights.is_meta
    assert logits.shape == (2, 11)
    moved = tall_model().to("meta")
    assert moved(torch.zeros(2, 3, 15, 14, dtype=torch.double, device="meta")).is_meta


@pytest.mark.parametrize(
    ("sizes", "ffn_width", "number"),
    [
        ((224, 16, 3, 1000, 768, 12, 12), None, 86_567_656),  # ViT-Base
        ((224, 16, 3, 1000, 1024, 16, 24), None, 304_326_632),  # ViT-Large
        (((15, 14), (5, 2), 3, 11, 26, 2, 3), None, 27_103),
        (((15, 14), (5, 2), 3, 11, 26, 2, 3), 17, None),
    ],
)
def test_the_parameters_can_be_counted_beforehand(sizes, ffn_width, number):
    image, patch, channels, classes, width, _, layers = sizes
    (height, across), (tall, wide) = height_and_width(image), height_and_width(patch)
    hidden = ffn_width or 4 * width
    block = 4 * width**2 + 4 * width + 2 * width * hidden + hidden + width + 4 * width
    tokens = 1 + height // tall * (across // wide)
    predicted = (
        (tall * wide * channels + 1) * width + width + tokens * width
        + layers * block + 2 * width + (width + 1) * classes
    )  # fmt: skip
    with torch.device("meta"):
        model = ViT(*sizes, **({} if ffn_width is None else {"ffn_width": ffn_width}))
    assert count(model) == predicted
    assert number in (None, predicted)


def test_a_model_learns_where_a_bright_patch_is():
    torch.manual_seed(0)
    model = ViT((6, 8), (3, 2), 1, 8, width=16, num_heads=2, num_layers=1)
    labels = torch.arange(8)
    images = 3 * join_patches(torch.eye(8)[..., None].expand(8, 8, 6), (2, 4), (3, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    assert (model(images).argmax(-1) == labels).all()


# Roll-out


def test_roll_out_of_one_layer_is_half_its_average():
    weights = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]])  # (H, T, T)
    found = roll_out(weights[None, None])
    torch.testing.assert_close(found, torch.tensor([[[0.75, 0.25], [0.25, 0.75]]]))


def test_roll_out_reads_backwards_from_the_last_layer():
    first = torch.tensor([[1.0, 0.0], [1.0, 0.0]])  # all look at token 0
    second = torch.tensor([[0.0, 1.0], [0.0, 1.0]])  # all look at token 1
    weights = torch.stack([first, second])[None, :, None]  # (1, L, 1, T, T)
    # Half and half: first [[1, 0], [½, ½]], then second [[½, ½], [0, 1]].
    expected = torch.tensor([[[0.75, 0.25], [0.5, 0.5]]])
    torch.testing.assert_close(roll_out(weights), expected)
    other = torch.tensor([[[0.5, 0.5], [0.25, 0.75]]])
    torch.testing.assert_close(roll_out(weights.flip(1)), other)


@FEW
@given(small, small, small, some.integers(1, 7), some.integers(0, 99))
def test_roll_out_is_a_product_over_layers_and_its_rows_sum_to_one(
    batch, layers, heads, size, seed
):
    weights = draw(batch, layers, heads, size, size, seed=seed).softmax(-1)
    before = weights.clone()
    found = roll_out(weights)
    for sample in range(batch):
        total = torch.eye(size, dtype=torch.double)
        for layer in range(layers):
            average = sum(weights[sample, layer, head] for head in range(heads)) / heads
            total = (0.5 * average + 0.5 * torch.eye(size, dtype=torch.double)) @ total
        torch.testing.assert_close(found[sample], total)
    torch.testing.assert_close(found.sum(-1), torch.ones(batch, size, dtype=torch.double))
    assert torch.equal(weights, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_roll_out_keeps_the_kind_of_its_weights(dtype):
    weights = draw(2, 3, 5, 7, 7).softmax(-1)
    found = roll_out(weights.to(dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), roll_out(weights), rtol=0, atol=0.01)


def test_roll_out_of_tokens_that_look_at_themselves_stays_there():
    weights = torch.eye(7).expand(2, 3, 5, 7, 7)
    torch.testing.assert_close(roll_out(weights), torch.eye(7).expand(2, 7, 7))


# Occlusion


class Sums(nn.Module):
    """Score images by fixed maps: a model whose answer is known by hand."""

    def __init__(self, *maps):
        super().__init__()
        self.maps = torch.stack(maps)

    def forward(self, images):
        return torch.einsum("bchw,kchw->bk", images, self.maps)


def test_occlusion_by_hand():
    images = torch.tensor([[[[2.0, 0.0], [1.0, 0.0]]]])
    zero, model = torch.zeros(1, 1, 2, 2), Sums(torch.zeros(1, 2, 2), torch.ones(1, 2, 2))
    # Logits (0, 3): class 1. Without the 2: (0, 1); without the 1: (0, 2).
    fall = [math.log1p(math.exp(-x)) - math.log1p(math.exp(-3)) for x in (1, 3, 2, 3)]
    torch.testing.assert_close(occlude(model, images, zero, 1), torch.tensor([fall]))


def test_occlusion_can_help():
    images = torch.tensor([[[[3.0, -2.0]]]])
    model = Sums(torch.zeros(1, 1, 2), torch.ones(1, 1, 2))
    found = occlude(model, images, torch.zeros(1, 1, 1, 2), 1)
    assert found[0, 0] > 0 > found[0, 1]


@pytest.mark.parametrize("patch", [(5, 2), (3, 7), (15, 1), 1])
def test_occlusion_covers_one_patch_at_a_time_with_the_filler(patch):
    images, filler = draw(3, 2, 15, 7 * 2), draw(1, 2, 15, 14, seed=2)
    if patch == 1:
        images, filler = images[..., :3, :5], filler[..., :3, :5]
    model = Sums(*draw(5, *images.shape[1:], seed=3) / 4)
    before = images.clone(), filler.clone()
    found = occlude(model, images, filler, patch)
    tall, wide = height_and_width(patch)
    whole = model(images).log_softmax(-1)
    named = whole.argmax(-1)
    expected = []
    for top in range(0, images.shape[2], tall):
        for left in range(0, images.shape[3], wide):
            hidden = images.clone()
            place = (..., slice(top, top + tall), slice(left, left + wide))
            hidden[place] = filler[place]
            change = whole - model(hidden).log_softmax(-1)
            expected.append(change[torch.arange(3), named])
    torch.testing.assert_close(found, torch.stack(expected, 1))
    assert len(set(named.tolist())) > 1
    assert torch.equal(images, before[0])
    assert torch.equal(filler, before[1])


def test_hiding_with_the_image_itself_changes_nothing():
    model, images = tall_model(), draw(1, 3, 15, 14)
    found = occlude(model, images, images, (5, 2))
    assert found.shape == (1, 21)
    torch.testing.assert_close(found, torch.zeros(1, 21, dtype=torch.double), rtol=0, atol=1e-12)


def test_occlusion_of_patches_that_do_not_tile_is_refused():
    model, images = tall_model(), draw(2, 3, 15, 14)
    with pytest.raises(ValueError, match="15 × 14 .*4 × 2"):
        occlude(model, images, images[:1], (4, 2))


# Rank correlation


def test_rank_correlation_by_hand():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    y = torch.tensor([5.0, 6.0, 7.0, 8.0, 7.0])
    # Ranks of y: 1, 2, 3.5, 5, 3.5; covariance 8, variances 10 and 9.5.
    assert rank_correlation(x, y).item() == pytest.approx(8 / math.sqrt(95), abs=1e-12)


def test_rank_correlation_knows_the_order_alone():
    x = draw(11)
    assert rank_correlation(x, x.exp() + 3).item() == pytest.approx(1, abs=1e-12)
    assert rank_correlation(x, -(x**3)).item() == pytest.approx(-1, abs=1e-12)
    y = draw(11, seed=2)
    assert rank_correlation(x, y).item() == pytest.approx(rank_correlation(y, x).item())


def test_of_a_constant_list_the_rank_correlation_is_zero():
    x = draw(3, 7)
    found = rank_correlation(x, torch.ones(3, 7))
    assert torch.equal(found, torch.zeros(3, dtype=torch.double))
    assert rank_correlation(torch.ones(1), torch.ones(1)).item() == 0


@pytest.mark.parametrize("shape", [(7,), (2, 7), (2, 3, 7)])
def test_rank_correlation_is_taken_over_the_last_axis(shape):
    x, y = draw(*shape), draw(*shape, seed=2)
    found = rank_correlation(x, y)
    assert found.shape == shape[:-1]
    flat = zip(x.view(-1, 7), y.view(-1, 7))
    torch.testing.assert_close(found.flatten(), torch.stack([rank_correlation(*p) for p in flat]))


lists = some.integers(2, 13).flatmap(
    lambda n: some.tuples(*[some.lists(some.integers(-4, 4), min_size=n, max_size=n)] * 2)
)


@FEW
@given(lists)
def test_rank_correlation_is_that_of_average_ranks(pair):
    def ranks(values):
        below = [sum(a < b for a in values) for b in values]
        return [n + (values.count(b) + 1) / 2 for n, b in zip(below, values)]

    x, y = (torch.tensor(ranks(values), dtype=torch.double) for values in pair)
    x, y = x - x.mean(), y - y.mean()
    norm = (x.pow(2).sum() * y.pow(2).sum()).sqrt()
    expected = 0.0 if norm == 0 else (x * y).sum().item() / norm.item()
    found = rank_correlation(*map(torch.tensor, pair)).item()
    assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_rank_correlation_is_that_of_scipy(seed):
    stats = pytest.importorskip("scipy.stats")
    x, y = draw(37, seed=seed), draw(37, seed=seed + 5)
    y = (x + 2 * y).round()  # with ties
    expected = stats.spearmanr(x.numpy(), y.numpy()).statistic
    assert rank_correlation(x, y).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64, torch.bool, *DTYPES])
def test_ranks_are_right_for_all_kinds_of_numbers(dtype):
    pair = torch.tensor([[0, 1, 100, 1], [1, 100, 0, 1]]).to(dtype)
    torch.testing.assert_close(rank_correlation(*pair), rank_correlation(*pair.double()))


def test_ranks_of_many_halves_do_not_overflow():
    x = torch.arange(601).half()
    assert rank_correlation(x, x).item() == pytest.approx(1, abs=1e-12)
