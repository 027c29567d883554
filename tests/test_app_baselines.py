"""What a model predicts when nothing is rebuilt."""

import jax
import numpy as np
import pytest

from fedrecon._src.core.clients import Clients
from fedrecon._src.recommend.config import Data, RatingsConfig
from fedrecon._src.recommend.evaluation_table import without_reconstruction
from fedrecon._src.simulation.evaluation import reconstruct

pytestmark = pytest.mark.slow

CLIENTS = Clients.from_columns(
    {
        "item": np.array([0, 1, 0, 2, 1, 2], np.int32),
        "rating": np.array([1.0, 3.0, 5.0, 9.0, 2.0, 4.0], np.float32),
    },
    client=np.array([7, 7, 8, 8, 9, 9]),
)


def test_without_reconstruction_ratings_change_nothing():
    algorithm = without_reconstruction(RatingsConfig(data=Data(source="x")), 3)
    params = algorithm.params(algorithm.init(jax.random.key(0)))
    other = Clients(
        {**CLIENTS.columns, "rating": 6 - CLIENTS.columns["rating"]}, CLIENTS.starts, CLIENTS.ends, CLIENTS.names
    )
    one, two = (reconstruct(algorithm, params, clients) for clients in (CLIENTS, other))
    np.testing.assert_array_equal(one["user_embedding"], two["user_embedding"])
