"""Proof of `snippets.datasets`: sizes, seeds and what is said of the data."""

import math

import pytest
import torch

from snippets.datasets import handwritten_digits, road_readings, road_temperature


def test_road_temperature_is_two_sines_and_a_slope():
    places = torch.tensor([0.0, math.pi / 2, math.pi], dtype=torch.double)
    expected = torch.tensor([0.0, 2 + math.pi / 2, math.pi], dtype=torch.double)
    torch.testing.assert_close(road_temperature(places), expected)


def test_readings_stand_in_order_on_the_road():
    places, readings = road_readings(3, num_readings=37)
    assert places.shape == readings.shape == (37,)
    assert (places.diff() >= 0).all()
    assert places.min() >= 0
    assert places.max() <= 5


def test_the_noise_of_the_readings_is_that_of_the_text():
    places, readings = road_readings(5, num_readings=20_011)
    noise = readings - road_temperature(places)
    assert noise.mean().item() == pytest.approx(0, abs=0.03)
    assert noise.std().item() == pytest.approx(1, abs=0.03)
    assert abs(torch.corrcoef(torch.stack([places, noise]))[0, 1]) < 0.03


def test_a_seed_gives_the_same_readings_and_leaves_the_global_state():
    state = torch.get_rng_state()
    first, again, other = road_readings(1), road_readings(1), road_readings(2)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[1], other[1])
    assert torch.equal(torch.get_rng_state(), state)


def test_digits_are_split_without_loss_or_overlap():
    pytest.importorskip("sklearn", reason="a package of section 2")
    (images, labels), (test_images, test_labels) = handwritten_digits(num_train=1009)
    assert images.shape == (1009, 64)
    assert test_images.shape == (788, 64)
    assert labels.shape == (1009,)
    assert images.min() == 0
    assert images.max() == 1
    assert set(labels.tolist()) == set(test_labels.tolist()) == set(range(10))
    everything = torch.cat([images, test_images])
    assert len(everything.unique(dim=0)) == 1797


def test_another_seed_gives_another_split():
    pytest.importorskip("sklearn", reason="a package of section 2")
    first, again, other = (handwritten_digits(seed=seed)[0][1] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
