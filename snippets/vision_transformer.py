"""Cut an image into patches and read them like words.

The layers of the section "Transformers for vision". Sources: Dosovitskiy et
al. (2021), the model; Abnar and Zuidema (2020), roll-out.

Axes: B batch, T tokens (a class token, then the patches, row by row), D model
width, H heads, L layers. An image is (B, channels, height, width); sizes are
an int, for a square, or (height, width).
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional as F

from snippets.attention_scoring_functions import check_sizes
from snippets.transformer import TransformerEncoderBlock, run_encoder


# --8<-- [start:height_and_width]
def height_and_width(size):
    """Give (height, width) of a size that is an int or already a pair.

    Raises `ValueError` for sizes below 1, or not one or two of them.
    """
    pair = tuple(size) if isinstance(size, Iterable) else (size, size)
    if len(pair) != 2:
        raise ValueError(f"a size is (height, width), not {pair}")
    check_sizes(*pair)
    return pair


# --8<-- [end:height_and_width]


# --8<-- [start:grid_for]
def grid_for(image_size, patch_size):
    """Give the numbers of patches, (down, across), that tile an image.

    Both sizes are (height, width). Raises `ValueError` unless they divide.
    """
    (height, width), (tall, wide) = image_size, patch_size
    if height % tall or width % wide or not height or not width:
        raise ValueError(
            f"an image of {height} × {width} pixels cannot be cut into"
            f" patches of {tall} × {wide}"
        )
    return height // tall, width // wide


# --8<-- [end:grid_for]


# --8<-- [start:cut_patches]
def cut_patches(images, patch_size):
    """Cut images into patches; each becomes one vector of its pixels.

    images (B, channels, height, width) → (B, patches, pixels of a patch ·
    channels): patches row by row, in a patch channel by channel and each of
    them row by row. Raises `ValueError` for sizes that do not divide.
    """
    if images.ndim != 4:
        raise ValueError(f"images have 4 axes, not {tuple(images.shape)}")
    tall, wide = height_and_width(patch_size)
    down, across = grid_for(images.shape[-2:], (tall, wide))
    x = images.unflatten(-2, (down, tall)).unflatten(-1, (across, wide))
    x = x.permute(0, 2, 4, 1, 3, 5)  # (B, down, across, channels, tall, wide)
    return x.flatten(3).flatten(1, 2)


# --8<-- [end:cut_patches]


# --8<-- [start:join_patches]
def join_patches(patches, grid, patch_size):
    """Undo `cut_patches`: lay the patches out again on their grid.

    patches (B, down · across, channels · tall · wide), grid (down, across)
    → images (B, channels, height, width).
    """
    tall, wide = height_and_width(patch_size)
    x = patches.unflatten(-1, (-1, tall, wide)).unflatten(1, grid)
    x = x.permute(0, 3, 1, 4, 2, 5)  # (B, channels, down, tall, across, wide)
    return x.flatten(4).flatten(2, 3)


# --8<-- [end:join_patches]


# --8<-- [start:PatchEmbedding]
class PatchEmbedding(nn.Module):
    """Cut images into patches and map each of them to the model width.

    images (B, channels, height, width) → (B, patches, D), row by row. Any
    image that its patches tile will do, not only those of `image_size`.
    """

    def __init__(self, image_size, patch_size, num_channels, width):
        """Raise `ValueError` if the patches do not tile the image."""
        super().__init__()
        check_sizes(num_channels, width)
        self.image_size = height_and_width(image_size)
        self.patch_size = height_and_width(patch_size)
        self.grid = grid_for(self.image_size, self.patch_size)
        self.num_patches = self.grid[0] * self.grid[1]
        self.num_channels = num_channels
        self.projection = nn.Conv2d(
            num_channels, width, self.patch_size, stride=self.patch_size
        )

    def forward(self, images):
        """Raise `ValueError` for other channels, or sizes that do not fit."""
        check_images(images, self.num_channels)
        grid_for(images.shape[-2:], self.patch_size)
        return self.projection(images).flatten(2).mT


# --8<-- [end:PatchEmbedding]


# --8<-- [start:check_images]
def check_images(images, num_channels):
    """Raise `ValueError` unless images are (B, channels, height, width)."""
    if images.ndim != 4 or images.shape[1] != num_channels:
        raise ValueError(
            f"expected images (B, {num_channels}, height, width),"
            f" not {tuple(images.shape)}"
        )


# --8<-- [end:check_images]


# --8<-- [start:resize_positions]
def resize_positions(positions, old_grid, new_grid):
    """Stretch the positions of a grid of patches to another grid.

    positions (1 + old patches, D), the first row that of the class token,
    grids (down, across) → (1 + new patches, D). Bicubic, in float32 at least;
    the class token, which has no place in the image, keeps its row.
    """
    if tuple(old_grid) == tuple(new_grid):
        return positions
    first, patches = positions[:1], positions[1:]
    half = positions.dtype in (torch.float16, torch.bfloat16)
    image = patches.float() if half else patches
    image = image.mT.unflatten(-1, tuple(old_grid))[None]  # (1, D, down, …)
    image = F.interpolate(image, size=tuple(new_grid), mode="bicubic")
    return torch.cat([first, image[0].flatten(1).mT.to(positions.dtype)])


# --8<-- [end:resize_positions]


# --8<-- [start:ViTBlock]
class ViTBlock(TransformerEncoderBlock):
    """Mix the tokens by attention, then send each through a small network.

    x (B, T, D) → x (B, T, D), weights (B, H, T, T) or None. The encoder block
    of section 7 with the norm first and a GELU in its network, whose hidden
    layer is four times as wide as the model unless `ffn_width` says else.
    """

    def __init__(
        self, width, num_heads, *, ffn_width=None, dropout=0.0, eps=1e-6
    ):
        """Raise `ValueError` for sizes that do not fit."""
        ffn_width = 4 * width if ffn_width is None else ffn_width
        options = {"activation": "gelu", "norm_first": True, "eps": eps}
        super().__init__(width, ffn_width, num_heads, dropout, **options)


# --8<-- [end:ViTBlock]


# --8<-- [start:ViTEmbedding]
class ViTEmbedding(nn.Module):
    """Make tokens of images: a class token, then the patches; add positions.

    images (B, channels, height, width) → (B, 1 + patches, D).
    """

    def __init__(self, image_size, patch_size, num_channels, width, dropout):
        super().__init__()
        self.patches = PatchEmbedding(
            image_size, patch_size, num_channels, width
        )
        num_tokens = 1 + self.patches.num_patches
        self.class_token = nn.Parameter(torch.zeros(width))
        self.positions = nn.Parameter(0.02 * torch.randn(num_tokens, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, images):
        """Embed images; for another size the positions are stretched."""
        patches = self.patches(images)  # (B, patches, D)
        first = self.class_token.expand(len(images), 1, -1)
        tokens = torch.cat([first, patches], dim=1)  # (B, 1 + patches, D)
        grid = grid_for(images.shape[-2:], self.patches.patch_size)
        table = resize_positions(self.positions, self.patches.grid, grid)
        return self.dropout(tokens + table)


# --8<-- [end:ViTEmbedding]


# --8<-- [start:ViTEncoder]
class ViTEncoder(nn.Module):
    """Read images as sequences, of the tokens that `embedding` makes.

    images (B, channels, height, width) → tokens (B, T, D), normalised, and
    weights (B, L, H, T, T) or None. The options are those of `ViTBlock`.
    """

    def __init__(
        self, embedding, width, num_heads, num_layers, *, eps=1e-6, **options
    ):
        super().__init__()
        self.embedding = embedding
        self.blocks = nn.ModuleList(
            ViTBlock(width, num_heads, eps=eps, **options)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width, eps=eps)

    def forward(self, images, need_weights=False):
        """Run the blocks one after the other."""
        tokens = self.embedding(images)  # the class token comes first
        x, maps = run_encoder(self, tokens, None, need_weights)
        return x, torch.stack(maps, dim=1) if need_weights else None


# --8<-- [end:ViTEncoder]


# --8<-- [start:ViT]
class ViT(nn.Module):
    """Classify images by what a Transformer wrote into the class token.

    images (B, channels, height, width) → logits (B, num_classes), with
    `need_weights` also weights (B, L, H, T, T). Dosovitskiy et al. (2021).
    """

    def __init__(
        self, image_size, patch_size, num_channels, num_classes, width,
        num_heads, num_layers, *, dropout=0.0, **options,
    ):  # fmt: skip
        """Take `ffn_width` and `eps` as options; raise `ValueError`."""
        super().__init__()
        check_sizes(num_classes, num_layers)
        image = image_size, patch_size, num_channels, width
        embedding = ViTEmbedding(*image, dropout)
        size = width, num_heads, num_layers
        self.encoder = ViTEncoder(embedding, *size, dropout=dropout, **options)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images, need_weights=False):
        """Classify; return weights if they are asked for."""
        tokens, weights = self.encoder(images, need_weights)
        logits = self.head(tokens[:, 0])
        return (logits, weights) if need_weights else logits


# --8<-- [end:ViT]


# --8<-- [start:roll_out]
def roll_out(weights):
    """Follow the attention from the last layer back to the first.

    weights (B, L, H, T, T) → (B, T, T): how much of each input token is in
    each output token if a block passes on half of what it gets, and half of
    the average that its heads take. Abnar and Zuidema (2020), section 3.
    """
    size = weights.shape[-1]
    mixed = weights.mean(dim=2) / 2 + torch.eye(size).to(weights) / 2
    total = mixed[:, 0]
    for layer in mixed.unbind(1)[1:]:
        total = layer @ total  # the later layer reads what came before
    return total


# --8<-- [end:roll_out]


# --8<-- [start:occlude]
def occlude(model, images, filler, patch_size):
    """Hide one patch at a time; measure what the model loses by it.

    images (B, channels, height, width), filler (1, channels, height, width)
    to hide with → (B, patches): the fall of the log-probability of the class
    that the model names for the whole image. Zeiler and Fergus (2014).
    """
    whole = model(images).log_softmax(-1)  # (B, num_classes)
    named = whole.argmax(-1, keepdim=True)
    patches, hidden = (cut_patches(x, patch_size) for x in (images, filler))
    grid = grid_for(images.shape[-2:], height_and_width(patch_size))
    falls = []
    for place in range(patches.shape[1]):
        covered = patches.clone()
        covered[:, place] = hidden[:, place]
        logits = model(join_patches(covered, grid, patch_size))
        falls.append((whole - logits.log_softmax(-1)).gather(-1, named))
    return torch.cat(falls, dim=-1)


# --8<-- [end:occlude]


# --8<-- [start:rank_correlation]
def rank_correlation(x, y):
    """Correlate the ranks of two lists of numbers (Spearman).

    x, y (..., S) → (...), from −1, opposite orders, to 1, the same order.
    Ties share a rank; where one list is constant the result is 0.
    """
    centred = []
    for values in (x.double(), y.double()):  # a difference of bytes wraps
        pairs = values[..., :, None] - values[..., None, :]
        ranks = pairs.sign().sum(-1)  # twice the rank, mean 0
        centred.append(F.normalize(ranks, dim=-1))
    return (centred[0] * centred[1]).sum(-1)


# --8<-- [end:rank_correlation]
