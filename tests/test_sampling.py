import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedrecon as fr
from fedrecon._src.core.cohort import ABSENT
from fedrecon._src.simulation.sampling import sample


def words(seed):
    return np.asarray(jax.random.key_data(jax.random.key(seed)))


def sized(sizes):
    ends = np.cumsum(sizes)
    return fr.Clients({"x": np.zeros(ends[-1])}, ends - sizes, ends)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=30),
    wanted=st.integers(1, 12),
    oversample=st.sampled_from([1.0, 1.5, 3.0]),
    drop_out=st.sampled_from([0.0, 0.3, 0.9]),
    min_examples=st.integers(0, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_round_takes_the_first_that_answer(sizes, wanted, oversample, drop_out, min_examples, seed):
    sizes = np.array([1, *sizes])
    clients, key = sized(sizes), words(seed)
    found = sample(key, 4, clients, fr.Sampling(wanted, oversample, drop_out, min_examples))
    invited = min(len(sizes), int(np.ceil(wanted * oversample)))
    asked = sample(key, 4, clients, fr.Sampling(invited, min_examples=0)).clients
    assert len(found.clients) == wanted
    taken = found.clients[found.clients >= 0]
    assert (found.clients[len(taken) :] == ABSENT).all()
    assert len(np.unique(taken)) == len(taken)
    assert (sizes[taken] >= min_examples).all()
    small = int((sizes[asked] < min_examples).sum())
    assert found.counts["invited"] == invited
    assert found.counts["too_small"] == small
    answered = invited - small - found.counts["dropped"]
    assert len(taken) == min(wanted, answered)
    order = [int(np.flatnonzero(asked == client)[0]) for client in taken]
    assert order == sorted(order), "not in the order in which they were invited"
    if drop_out == 0:
        assert found.counts["dropped"] == 0
        np.testing.assert_array_equal(taken, asked[sizes[asked] >= min_examples][:wanted])


def test_a_sampling_of_ones_own_decides_who_answers_first():
    class Slow(fr.Sampling):
        def replies(self, generator, drawn, sizes):
            return np.argsort(sizes, kind="stable")[:-1]  # who has least is fastest, and the last never answers

    found = sample(words(3), 0, sized(np.arange(1, 9)), Slow(4, oversample=2.0))
    np.testing.assert_array_equal(found.clients, [0, 1, 2, 3])
    assert found.counts == {"invited": 8, "too_small": 0, "dropped": 1}


def test_one_key_and_round_draw_the_same_clients_and_others_draw_others():
    clients = sized(np.ones(1000, int))
    sampling = fr.Sampling(50, 1.3, 0.1)
    one, same, later, other = (
        sample(words(seed), number, clients, sampling) for seed, number in ((1, 0), (1, 0), (1, 1), (2, 0))
    )
    np.testing.assert_array_equal(one.clients, same.clients)
    assert one.counts == same.counts
    assert len(np.intersect1d(one.clients, later.clients)) < 20
    assert len(np.intersect1d(one.clients, other.clients)) < 20


def test_every_client_is_as_likely_as_any_other():
    clients = sized(np.ones(20, int))
    seen = np.concatenate([sample(words(0), number, clients, fr.Sampling(5)).clients for number in range(800)])
    counts = np.bincount(seen, minlength=20)
    assert counts.min() > 140  # 200 expected, with a standard deviation of 12
    assert counts.max() < 260


def test_the_share_that_drops_out_is_as_asked_for():
    clients = sized(np.ones(5000, int))
    found = sample(words(0), 0, clients, fr.Sampling(5000, drop_out=0.3))
    assert found.counts["dropped"] == pytest.approx(1500, abs=150)


@pytest.mark.parametrize(
    "settings",
    [{"clients_per_round": 0}, {"oversample": 0.5}, {"drop_out": 1.0}, {"drop_out": -0.1}, {"least": 0}, {"apart": 0}],
)
def test_impossible_sampling_is_refused(settings):
    with pytest.raises(ValueError, match=f"`{next(iter(settings))}`"):
        fr.Sampling(**settings)


def test_a_tenth_of_the_population_takes_part_but_no_fewer_than_asked_for():
    sampling = fr.Sampling(None, least=200)
    assert [sampling.cohort_size(people) for people in (30, 500, 5000)] == [30, 200, 500]
    assert fr.Sampling(None).cohort_size(300) == 50
    assert fr.Sampling(7, least=200).cohort_size(300) == 7


@pytest.mark.parametrize("settings", [{"apart": 2}, {"oversample": 1.5}])
def test_poisson_sampling_is_independent(settings):
    with pytest.raises(ValueError, match=r"`poisson`.*`apart` or `oversample`"):
        fr.Sampling(4, poisson=True, **settings)
