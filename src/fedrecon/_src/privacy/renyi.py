"""Rényi differential privacy of noise in integers, and of random participation.

Only whole orders: that is what the bounds are proven for.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.special import gammaln, logsumexp

from fedrecon._src.core.extras import require

ORDERS = (*range(2, 65), *range(68, 129, 4), *range(144, 257, 16), 512)
Divergence = Callable[[int], float]  # of an order


def gaussian(noise_multiplier: float) -> Divergence:
    """Return the divergence of Gaussian noise of `noise_multiplier` times the sensitivity."""
    return lambda order: order / (2 * noise_multiplier**2)


def skellam(variance: float, l2: float, length: int) -> Divergence:
    """Return a bound on the divergence of Skellam noise of a variance, on integer vectors.

    Args:
      variance: of the noise in the sum, in steps squared.
      l2: the largest norm of what a client adds to the sum, in steps.
      length: how many entries it has.

    References: Agarwal, Kairouz and Liu, The Skellam mechanism for differentially private federated learning, NeurIPS
    2021, theorem 3.5.
    """
    l1 = l2 * min(math.sqrt(length), l2)  # of integers no sum of absolute values exceeds the sum of squares

    def divergence(order: int) -> float:
        more = min(((2 * order - 1) * l2**2 + 6 * l1) / (4 * variance**2), 3 * l1 / (2 * variance))
        return order * l2**2 / (2 * variance) + more

    return divergence


def sampled(divergence: Divergence, rate: float, *, gaussian: bool = False) -> Divergence:
    """Return the divergence if each client takes part with probability `rate`, independently and unseen.

    Args:
      divergence: without sampling.
      rate: above 0, at most 1.
      gaussian: whether the noise is Gaussian, for which the bound is exact and without the factor of three.

    References: Zhu and Wang, Poisson subsampled Rényi differential privacy, ICML 2019, theorems 5 and 6.
    Mironov, Talwar and Zhang, Rényi differential privacy of the sampled Gaussian mechanism, 2019.
    """
    if rate == 1:
        return divergence

    def amplified(order: int) -> float:
        k = np.arange(2, order + 1)
        choose = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        loss = np.array([(j - 1) * divergence(int(j)) for j in k])
        terms = choose + (order - k) * math.log1p(-rate) + k * math.log(rate) + loss
        if not gaussian:
            terms = terms + np.where(k > 2, math.log(3), 0.0)
        first = (order - 1) * math.log1p(-rate) + math.log1p((order - 1) * rate)
        return min(float(logsumexp([first, *terms])) / (order - 1), divergence(order))

    return amplified


def epsilon(divergences: list[tuple[Divergence, int]], delta: float) -> float:
    """Return epsilon of several mechanisms, each used some number of times.

    Args:
      divergences: `(divergence, times)` of each.
      delta: of the guarantee.
    """
    total = [sum(times * divergence(order) for divergence, times in divergences) for order in ORDERS]
    return float(require("dp_accounting.rdp").compute_epsilon(ORDERS, total, delta)[0])
