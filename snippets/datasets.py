"""Make or load the data that several sections of the book share.

Each loader says what is generated and what was measured; the same seed gives
the same data.
"""

import torch


# --8<-- [start:road_temperature]
def road_temperature(position):
    """Give the true temperature at a place of the road: 2 sin x + x.

    position (...) in units of 10 km -> temperature (...) in degrees above
    that of the road's start. Made up, so that estimates have a truth to meet.
    """
    return 2 * torch.sin(position) + position


# --8<-- [end:road_temperature]


# --8<-- [start:road_readings]
def road_readings(seed, num_readings=40):
    """Draw stations along a road of 50 km and read their thermometers.

    seed -> positions (S,), in order, in units of 10 km; readings (S,), the
    true temperature and noise of standard deviation 1. Generated.
    """
    generator = torch.Generator().manual_seed(seed)
    places = 5 * torch.rand(num_readings, generator=generator)
    positions = places.sort().values
    noise = torch.randn(num_readings, generator=generator)
    return positions, road_temperature(positions) + noise


# --8<-- [end:road_readings]


# --8<-- [start:handwritten_digits]
def handwritten_digits(num_train=1200, seed=0):
    """Load scikit-learn's 1,797 handwritten digits and split them.

    -> (images (S, 64) in 0..1, labels (S,)) to learn from and the same
    for the test, the images of 8 x 8 pixels as rows. Measured, not generated.
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32) / 16
    labels = torch.tensor(labels)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator)
    train, test = order[:num_train], order[num_train:]
    return (images[train], labels[train]), (images[test], labels[test])


# --8<-- [end:handwritten_digits]
