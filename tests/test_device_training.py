"""Training on a device: keys and packed examples as in JAX."""

import numpy as np
import pytest

from device_vectors import keys_of, packed_examples
from fedrecon_device import BundleError
from fedrecon_device.keys import client_key, name_hash, redrawn_order
from fedrecon_device.training import pack_examples


def test_a_device_draws_keys_and_orders_as_jax_does():
    for case in keys_of():
        round_key, name = tuple(case["round"]), case["name"]
        assert f"{name_hash(name):016x}" == case["hash"]
        assert list(client_key(round_key, name)) == case["key"]
        assert redrawn_order(round_key, name, len(case["order"])) == case["order"]


def test_a_device_packs_examples_as_the_simulator_does():
    for case in packed_examples():
        inputs = pack_examples(case["plan"], case["columns"], tuple(case["round"]), case["name"])
        assert {name: np.asarray(x).tolist() for name, x in inputs.items()} == case["inputs"]


def test_ids_outside_the_table_and_columns_that_do_not_fit_are_refused():
    case = packed_examples()[3]
    with pytest.raises(BundleError, match="40 rows"):
        pack_examples(case["plan"], {**case["columns"], "item": [40] * 7}, (0, 0), "ann")
    with pytest.raises(BundleError, match="same length"):
        pack_examples(case["plan"], {**case["columns"], "item": [4]}, (0, 0), "ann")
