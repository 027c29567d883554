"""What a client answers: vectors of norm 1 at most, whatever it has rated."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedrecon._src.recommend.private_round_zero.message import (
    COUNT,
    LATER,
    LOWEST,
    MOST_ERROR,
    MOST_SQUARE,
    PER_DOUBLING,
    SCALARS,
    SIDE,
    SIZES,
    SPREAD,
    Entries,
    Message,
    norm_of,
    transformed,
)
from fedrecon._src.recommend.round_zero import BINS, user_biases, user_tastes


def answer(message: Message, item: Any, rating: Any, client: Any | None = None) -> Entries:
    """Return clients' answers: for each a vector of norm 1 at most.

    Args:
      message: what the server sent.
      item: `(ratings,)` which items were rated.
      rating: `(ratings,)` the ratings.
      client: `(ratings,)` by which client, from 0; None if all are one client's.
    """
    item, rating = np.asarray(item), np.asarray(rating, np.float64)
    if not np.isfinite(rating).all():
        raise ValueError("some ratings are not finite numbers; leave them out")
    owner = np.zeros(len(item), np.int64) if client is None else np.asarray(client)
    if message.question == "range":
        return _shares(owner, _power(rating), message.length)
    y = np.clip(transformed(rating, message.found.transform), message.low, message.high)
    if message.question == "scale":
        return _histograms(message, y, owner)
    y = (y - message.found.mean) / message.found.deviation
    if message.question == "traits":
        return _squares(message, item, y, owner)
    return _weighted(message, item, y, owner)


def _counts(owner: np.ndarray) -> np.ndarray:
    return np.bincount(owner, minlength=int(owner.max(initial=-1)) + 1)


def _shares(owner: np.ndarray, place: np.ndarray, length: int) -> Entries:
    """Say which share of a client's ratings is where: shares sum to 1, so their norm is 1 at most."""
    pairs, count = np.unique(owner * length + place, return_counts=True)
    return Entries(pairs // length, pairs % length, count / _counts(owner)[pairs // length], length)


def _power(rating: np.ndarray) -> np.ndarray:
    """Return the bin of a rating: quarters of powers of two, with their sign."""
    size = np.maximum(np.abs(rating), 2.0 ** (LOWEST - 1))
    power = np.floor((np.log2(size) - LOWEST) * PER_DOUBLING).astype(np.int64) + 1
    return SIDE + np.sign(rating).astype(np.int64) * np.clip(power, 0, SIDE)


def _histograms(message: Message, y: np.ndarray, owner: np.ndarray) -> Entries:
    width = (message.high - message.low) / BINS
    place = np.clip(np.floor((y - message.low) / width).astype(np.int64), 0, BINS - 1)
    ratings = _shares(owner, place, BINS)
    count = _counts(owner)
    who = np.flatnonzero(count)
    sizes = np.clip(np.floor(2 * np.log2(np.maximum(count[who], 1))).astype(np.int64), 0, SIZES - 1)
    unit = 2 * (y - message.low) / (message.high - message.low) - 1
    moments = [(np.bincount(owner, unit**power)[who] / count[who]) for power in (1, 2)]
    return Entries(
        np.concatenate([ratings.client, who, who, who]),
        np.concatenate([ratings.place, BINS + sizes, *(np.full(len(who), message.length - 2 + k) for k in (0, 1))]),
        np.concatenate([ratings.value, np.ones(len(who)), *moments]) / 2,  # four parts of norm 1 at most
        message.length,
    )


def _weighted(message: Message, item: np.ndarray, y: np.ndarray, owner: np.ndarray) -> Entries:
    items = len(message.found.item_bias)
    found = user_biases(message.found, item, y, owner)
    pairs, inverse, times = np.unique(owner * items + item, return_inverse=True, return_counts=True)
    who, which = pairs // items, pairs % items
    first = message.question == "first biases"
    # Later, clients send what the item biases miss, which is shorter.
    sums = np.bincount(inverse, y - found.bias[owner] - (0.0 if first else message.found.item_bias[item]))
    users = len(found.size)
    # Ratings of one item count once each; what decides is how long the client's vector of counts is.
    weight = np.minimum(1.0, np.sqrt(message.size / np.maximum(np.bincount(who, times**2.0, users), 1e-30)))
    length = np.sqrt(np.bincount(who, sums**2, users)) * weight
    shorter = np.minimum(1.0, (SPREAD if first else LATER) * math.sqrt(message.size) / np.maximum(length, 1e-30))
    unit = math.sqrt(1 - SCALARS) / norm_of(message)
    client, place, value = [who], [which], [sums * (weight * shorter)[who] * unit]
    if first:
        client, place = [*client, who], [*place, items + which]
        value.append(COUNT * times * weight[who] * unit)
    rated = np.flatnonzero(found.size)
    scalars = (
        np.minimum(found.square, MOST_SQUARE) / MOST_SQUARE,
        np.minimum(found.error / np.maximum(found.size, 1), MOST_ERROR) / MOST_ERROR,
    )
    for number, scalar in enumerate(scalars):
        client, place = [*client, rated], [*place, np.full(len(rated), message.length - 2 + number)]
        value.append(scalar[rated] * math.sqrt(SCALARS / 2))
    return Entries(np.concatenate(client), np.concatenate(place), np.concatenate(value), message.length)


def _squares(message: Message, item: np.ndarray, y: np.ndarray, owner: np.ndarray) -> Entries:
    zero = message.found
    found = user_tastes(zero, zero.traits()[item], y - zero.item_bias[item], owner)
    rated = np.flatnonzero(found.size)
    error = np.minimum(found.error / np.maximum(found.size, 1), MOST_ERROR) / MOST_ERROR
    values = np.concatenate([np.minimum(found.square, MOST_SQUARE) / MOST_SQUARE, error[:, None]], 1)[rated]
    values /= math.sqrt(values.shape[1])
    place = np.broadcast_to(np.arange(values.shape[1]), values.shape)
    return Entries(np.repeat(rated, values.shape[1]), place.reshape(-1), values.reshape(-1), message.length)
