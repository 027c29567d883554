import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedrecon as fr
from fedrecon._src.client.lookup_tables import rows_in_order, slots_in_order
from fedrecon._src.core import cohort as cohort_module
from fedrecon._src.core.cohort import ABSENT, Drawn, Needs, Packer, arrange
from fedrecon._src.simulation.engine import put_on_devices
from toy_models import ITEMS, TAGS, lookup_clients

quick = settings(max_examples=40, deadline=None)
GROUPS = {"item": (ITEMS, ("item",)), "tag": (TAGS, ("main_tag", "tags"))}
sizes_lists = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(sum)


def pack(clients, order=None, **needs):
    needs = Needs(**{"split": fr.split.half(), "groups": GROUPS, **needs})
    found = Packer(clients, needs).pack(np.arange(len(clients)) if order is None else np.asarray(order))
    return with_rows(found, needs.groups)


def with_rows(cohort, groups):
    """Add the rows and slots that packing leaves out, since they follow from the examples."""
    query = cohort.query
    for group, (rows, features) in groups.items():
        if group not in cohort.rows:
            cohort.rows[group] = np.asarray(rows_in_order(query.columns, query.count, features, rows))
            slots = slots_in_order(query.columns, features)
            # Packing pads slots with zeros.
            own = {feature: np.arange(query.columns[feature].shape[1]) < query.count[:, None] for feature in features}
            cohort.slots.update(
                {f: np.where(own[f].reshape(*own[f].shape, *[1] * (s.ndim - 2)), s, 0) for f, s in slots.items()}
            )
    return cohort


def check_rows(cohort, support_rows):
    """Rows are each client's own ids, once each; slots lead back to every example's ids."""
    for group, (_, features) in GROUPS.items():
        for i in range(len(cohort.client)):
            rows = cohort.rows[group][i][: cohort.num_rows[group][i]]
            sides = [(cohort.query, cohort.slots)] + ([(cohort.support, cohort.support_slots)] * support_rows)
            ids = []
            for side, slots in sides:
                for feature in features:
                    here = side.columns[feature][i, : side.count[i]]
                    np.testing.assert_array_equal(rows[slots[feature][i, : side.count[i]]], here)
                    ids.append(here.ravel())
            assert sorted(rows) == np.unique(np.concatenate(ids)).tolist()
            assert (cohort.rows[group][i][cohort.num_rows[group][i] :] == 0).all()


@pytest.mark.parametrize("support_rows", [False, True])
@quick
@given(sizes=sizes_lists, seed=st.integers(0, 1000), data=st.data())
def test_rows_are_exactly_the_ids_of_the_client_and_slots_point_to_them(support_rows, sizes, seed, data):
    order = data.draw(st.lists(st.integers(ABSENT, len(sizes) - 1), min_size=1, max_size=6))
    check_rows(pack(lookup_clients(sizes, seed), order, support_rows=support_rows), support_rows)


@pytest.mark.parametrize("entries", [1, 2 * ITEMS, 5 * ITEMS])
@pytest.mark.parametrize("support_rows", [False, True])
@quick
@given(sizes=sizes_lists, seed=st.integers(0, 1000))
def test_large_tables_that_are_numbered_in_groups_of_clients_come_out_the_same(entries, support_rows, sizes, seed):
    clients = lookup_clients(sizes, seed)
    whole = pack(clients, support_rows=support_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cohort_module, "SCRATCH_ENTRIES", entries)
        found = pack(clients, support_rows=support_rows)
    for field in ("rows", "num_rows", "slots", "support_slots"):
        for name, value in getattr(whole, field).items():
            np.testing.assert_array_equal(getattr(found, field)[name], value)


@pytest.mark.parametrize("repeated", [False, True])
def test_finding_repeated_ids_before_or_during_packing_gives_the_same_result(repeated):
    items = np.array([4, 1, 3, 0, 2, 4, 4, 3], np.int32)
    items[6] = 4 if repeated else 1
    clients = fr.Clients({"item": items}, np.array([0, 5]), np.array([5, 8]))
    needs = {"split": fr.split.none(), "groups": {"item": (ITEMS, ("item",))}}
    before = pack(clients, **needs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cohort_module, "LOOKED_THROUGH", 0)
        while_packing = pack(clients, **needs)
    for field in ("rows", "num_rows", "slots"):
        np.testing.assert_array_equal(getattr(before, field)["item"], getattr(while_packing, field)["item"])
    assert before.num_rows["item"].tolist() == ([5, 2] if repeated else [5, 3])


def test_rows_that_follow_from_the_examples_are_not_packed():
    items = np.array([4, 1, 3, 0, 2, 4, 1, 3], np.int32)
    needs = Needs(fr.split.none(), groups={"item": (ITEMS, ("item",))})
    packers = [Packer(fr.Clients({"item": items}, np.array([0, 5]), np.array([k, 8])), needs) for k in (5, 6)]
    once, repeated = (packer.pack(np.array([0, 1])) for packer in packers)
    assert (once.rows, once.slots, once.num_rows["item"].tolist()) == ({}, {}, [5, 3])
    assert repeated.slots["item"][0, 5] == repeated.slots["item"][0, 0]


def test_a_table_of_millions_of_rows_is_packed_by_the_rows_in_use():
    ids = np.array([9_999_999, 3, 9_999_999, 5_000_000, 3, 0], np.int32)
    clients = fr.Clients({"item": ids}, np.array([0, 3]), np.array([3, 6]))
    found = pack(clients, split=fr.split.none(), groups={"item": (10_000_000, ("item",))})
    assert found.num_rows["item"].tolist() == [2, 3]
    assert found.rows["item"][0, :2].tolist() == [9_999_999, 3]
    assert found.rows["item"][1, :3].tolist() == [5_000_000, 3, 0]
    assert found.slots["item"].tolist() == [[0, 1, 0], [0, 1, 2]]


@pytest.mark.parametrize("support_rows", [False, True])
def test_nobody_is_packed_as_arrays_without_clients(support_rows):
    found = pack(lookup_clients([5, 8]), np.zeros(0, np.int64), support_rows=support_rows)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(found)} == {0}


def test_one_packer_packs_one_cohort_after_another_without_mixing_them_up():
    clients = lookup_clients([5, 8, 3, 6])
    packer = Packer(clients, Needs(fr.split.half(), groups=GROUPS))
    for order in ([0, 1], [3, 2], [1, ABSENT], [2, 1], [0, 1]):
        found, fresh = with_rows(packer.pack(np.array(order)), GROUPS), pack(clients, order)
        np.testing.assert_array_equal(found.rows["item"], fresh.rows["item"])
        np.testing.assert_array_equal(found.slots["tags"], fresh.slots["tags"])


def test_everybody_is_packed_as_one_by_one_with_an_empty_slot_at_the_end():
    packer = Packer(lookup_clients([5, 8, 3, 6]), Needs(fr.split.half(), groups=GROUPS))
    everybody, order = packer.pack_everybody(2**20), np.array([[3, ABSENT], [1, 0]])
    drawn = Drawn.from_indices(everybody, order)
    assert drawn.places.tolist() == [[3, 4], [1, 0]]
    taken, packed = jax.tree.map(lambda leaf: leaf[drawn.places.ravel()], everybody), packer.pack(order.ravel())
    jax.tree.map(np.testing.assert_array_equal, taken, packed)
    assert [leaf.dtype for leaf in jax.tree.leaves(taken)] == [leaf.dtype for leaf in jax.tree.leaves(packed)]


def test_devices_of_a_cpu_do_not_copy_a_population_that_is_packed_once():
    everybody = Packer(lookup_clients([5, 8, 3]), Needs(fr.split.half(), groups=GROUPS)).pack_everybody(2**20)
    for leaf, there in zip(*map(jax.tree.leaves, (everybody, put_on_devices(everybody, fr.layout(1, 2)))), strict=True):
        assert {part.data.unsafe_buffer_pointer() for part in there.addressable_shards} == {leaf.ctypes.data}


@pytest.mark.parametrize(
    ("split", "most"),
    [(fr.split.half(), 100), (fr.split.redrawn(fr.split.half()), 2**20)],
    ids=["too large", "redrawn in every round"],
)
def test_a_population_that_is_large_or_changes_is_not_packed_once(split, most):
    clients = lookup_clients([5, 8, 3, 6])
    assert Packer(clients, Needs(split, groups=GROUPS)).pack_everybody(most) is None


def test_work_is_what_a_client_goes_through():
    packer = Packer(lookup_clients([5, 8, 3]), Needs(fr.split.half(), query_limit=2))
    assert packer.work(np.array([[0, 1], [2, ABSENT]])).tolist() == [[5, 6], [3, 0]]


@quick
@given(sizes=sizes_lists, seed=st.integers(0, 1000), data=st.data())
def test_a_client_is_packed_the_same_wherever_it_stands(sizes, seed, data):
    clients = lookup_clients(sizes, seed)
    order = data.draw(st.permutations([*range(len(sizes)), ABSENT]))
    straight, found = pack(clients), pack(clients, order)
    for place, who in enumerate(order):
        if who == ABSENT:
            assert found.client[place] == ABSENT
            assert found.support.count[place] == found.query.count[place] == 0
            continue
        for one, other in zip((found.support, found.query), (straight.support, straight.query), strict=True):
            assert one.count[place] == other.count[who]
            for name in one.columns:
                np.testing.assert_array_equal(one.columns[name][place], other.columns[name][who])
        np.testing.assert_array_equal(found.rows["tag"][place], straight.rows["tag"][who])


@quick
@given(sizes=sizes_lists, data=st.data())
def test_the_shape_of_a_cohort_does_not_depend_on_who_is_in_it(sizes, data):
    clients = lookup_clients(sizes)
    orders = [data.draw(st.lists(st.integers(ABSENT, len(sizes) - 1), min_size=4, max_size=4)) for _ in range(2)]
    shapes = [
        [np.shape(leaf) for side in (c.support, c.query) for leaf in side.columns.values()]
        + [leaf.shape for leaf in (*c.rows.values(), *c.slots.values())]
        for c in (pack(clients, order) for order in orders)
    ]
    assert shapes[0] == shapes[1]


def test_examples_are_those_of_the_client():
    clients = lookup_clients([5, 3])
    found = pack(clients, [1, 0])
    np.testing.assert_array_equal(found.support.columns["y"][0, :2], clients[1]["y"][:2])
    np.testing.assert_array_equal(found.query.columns["tags"][1, :2], clients[0]["tags"][3:])
    assert found.client.tolist() == [1, 0]


@pytest.mark.parametrize("place", [4, 0], ids=["query", "support"])
@pytest.mark.parametrize("bad", [-1, ITEMS])
def test_an_id_out_of_range_is_named(bad, place):
    clients = lookup_clients([5, 3])
    clients.columns["item"][place] = bad
    message = f"feature item holds id {bad}; the table has rows 0 to {ITEMS - 1}"
    with pytest.raises(ValueError, match=message):
        pack(clients)


def test_a_feature_that_is_not_there_is_named():
    message = "'film'"
    with pytest.raises(ValueError, match=message):
        pack(lookup_clients([3]), columns=["item", "film"])


def test_only_the_features_asked_for_are_packed():
    found = pack(lookup_clients([3, 2]), columns=["y"], groups={})
    assert list(found.query.columns) == ["y"]


@quick
@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=30),
    absent=st.integers(0, 3),
    devices=st.integers(1, 4),
    block=st.integers(1, 6),
)
def test_arranging_keeps_every_client_once_and_fills_up_blocks(sizes, absent, devices, block):
    indices = np.concatenate([np.arange(len(sizes)), np.full(absent, ABSENT)])
    found = arrange(indices, np.array(sizes + [0] * absent), devices, block)
    assert len(found) % (devices * block) == 0
    assert len(found) - len(indices) < devices * block
    assert sorted(found[found >= 0]) == list(range(len(sizes)))
    assert (np.delete(found, np.flatnonzero(found >= 0)) == ABSENT).all()


def test_arranging_puts_similar_clients_together_and_deals_blocks_evenly():
    sizes = np.array([1, 8, 2, 7, 3, 6, 4, 5])
    found = arrange(np.arange(8), sizes, devices=2, block=2)
    assert [sorted(sizes[found[i : i + 2]].tolist()) for i in (0, 2, 4, 6)] == [[7, 8], [1, 2], [5, 6], [3, 4]]


def test_arranging_gives_the_next_largest_block_to_the_device_with_least_to_do():
    sizes = np.array([9, 5, 4, 4, 2, 1])
    found = arrange(np.arange(6), sizes, devices=2, block=1)
    assert [sizes[found[:3]].sum(), sizes[found[3:]].sum()] == [9 + 4 + 1, 5 + 4 + 2]
    assert sorted(sizes[found[3:]].tolist()) == [2, 4, 5]


def test_arranging_does_not_depend_on_the_order_in_which_clients_were_drawn():
    sizes = np.array([3, 3, 5, 1, 3])
    one = arrange(np.arange(5), sizes, 2, 2)
    turned = np.array([4, 2, 0, 3, 1])
    np.testing.assert_array_equal(arrange(turned, sizes[turned], 2, 2), one)
