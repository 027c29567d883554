import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedrecon as fr
from fedrecon._src.core.cohort import Needs, Packer
from fedrecon.split import named, query_only, support_only

quick = settings(max_examples=60, deadline=None)
sizes_lists = st.lists(st.integers(0, 15), min_size=1, max_size=6).filter(sum)


def divide(split, sizes, time=None, **limits):
    """The examples, by number, that each client gives to support and to query."""
    ends = np.cumsum(sizes)
    columns = {"x": np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)}
    if time is not None:
        columns["time"] = np.asarray(time)
    clients = fr.Clients(columns, ends - sizes, ends)
    cohort = Packer(clients, Needs(split, **limits)).pack(np.arange(len(sizes)))

    def sides(side):
        return [x[:n].tolist() for x, n in zip(side.columns["x"], side.count, strict=True)]

    return list(zip(sides(cohort.support), sides(cohort.query), strict=True))


WHOLE = {
    "half": fr.split.half(),
    "fraction .8": fr.split.fraction(0.8),
    "fraction 0": fr.split.fraction(0.0, min_support=0),
    "fraction 1": fr.split.fraction(1.0, min_query=0),
    "alternate": fr.split.alternate(),
    "alternate by 3": fr.split.alternate(3),
    "minima": fr.split.fraction(0.3, min_support=3, min_query=4),
}


@pytest.mark.parametrize("split", WHOLE.values(), ids=WHOLE)
@quick
@given(sizes=sizes_lists)
def test_support_and_query_are_disjoint_and_complete(split, sizes):
    for (support, query), size in zip(divide(split, sizes), sizes, strict=True):
        assert sorted(support + query) == list(range(size))


@quick
@given(sizes=sizes_lists, share=st.floats(0, 1), min_support=st.integers(0, 5), min_query=st.integers(0, 5))
def test_minima_are_kept_wherever_there_is_enough(sizes, share, min_support, min_query):
    split = fr.split.fraction(share, min_support=min_support, min_query=min_query)
    for (support, query), size in zip(divide(split, sizes), sizes, strict=True):
        if size < min_support + min_query:
            assert (len(support), len(query)) == (size, 0)
        else:
            assert len(support) >= min_support
            assert len(query) >= min_query
            exact = share * size
            if min_support < len(support) < size - min_query:
                assert abs(len(support) - exact) <= 0.5 + 1e-6


CASES = [
    (fr.split.half(), 6, ([0, 1, 2], [3, 4, 5])),
    (fr.split.half(), 5, ([0, 1, 2], [3, 4])),
    (fr.split.half(), 2, ([0], [1])),
    (fr.split.half(), 1, ([0], [])),
    (fr.split.half(), 0, ([], [])),
    (fr.split.fraction(0.8), 10, (list(range(8)), [8, 9])),
    (fr.split.fraction(0.1), 3, ([0], [1, 2])),
    (fr.split.fraction(1.0), 4, ([0, 1, 2], [3])),
    (fr.split.fraction(0.5, min_query=3), 4, ([0], [1, 2, 3])),
    (fr.split.fraction(0.7), 10, (list(range(7)), [7, 8, 9])),
    (fr.split.alternate(), 5, ([0, 2, 4], [1, 3])),
    (fr.split.alternate(2), 7, ([0, 1, 4, 5], [2, 3, 6])),
    (fr.split.none(), 3, ([0, 1, 2], [0, 1, 2])),
    (query_only(), 3, ([], [0, 1, 2])),
    (support_only(), 3, ([0, 1, 2], [])),
]


@pytest.mark.parametrize(("split", "size", "expected"), CASES)
def test_examples_go_where_they_should(split, size, expected):
    assert divide(split, [4, size])[1] == expected


def test_a_split_by_time_takes_the_oldest_first_and_ties_as_stored():
    time = [5, 1, 3, 1, 9, 2, 2]
    assert divide(fr.split.half(by="time"), [4, 3], time) == [([1, 3], [2, 0]), ([1, 2], [0])]
    assert divide(fr.split.alternate(by="time"), [4, 3], time) == [([1, 2], [3, 0]), ([1, 0], [2])]
    assert divide(fr.split.none(by="time"), [4, 3], time)[0] == ([1, 3, 2, 0], [1, 3, 2, 0])


@quick
@given(sizes=sizes_lists, seed=st.integers(0, 99))
def test_a_split_by_time_is_complete_and_never_looks_ahead(sizes, seed):
    time = np.random.default_rng(seed).integers(0, 6, sum(sizes))
    start = 0
    for (support, query), size in zip(divide(fr.split.half(by="time"), sizes, time), sizes, strict=True):
        mine = time[start : start + size]
        start += size
        assert sorted(support + query) == list(range(size))
        if support and query:
            assert mine[support].max() <= mine[query].min()


def test_a_split_by_a_column_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="'when'"):
        divide(fr.split.half(by="when"), [3])


@pytest.mark.parametrize("split", [fr.split.half(), fr.split.alternate(2), fr.split.none()])
@quick
@given(sizes=sizes_lists, support_limit=st.integers(1, 6), query_limit=st.integers(1, 6))
def test_limits_keep_the_first_of_each_side(split, sizes, support_limit, query_limit):
    whole = divide(split, sizes)
    limited = divide(split, sizes, support_limit=support_limit, query_limit=query_limit)
    assert limited == [(s[:support_limit], q[:query_limit]) for s, q in whole]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("half", fr.split.half()),
        ("alternate", fr.split.alternate()),
        ("none", fr.split.none()),
        ("0.8", fr.split.fraction(0.8)),
        ("0", fr.split.fraction(0)),
    ],
)
def test_splits_have_names(name, split):
    sizes = [7, 3, 10]
    assert divide(named(name), sizes) == divide(split, sizes)


@pytest.mark.parametrize("name", ["halves", "", "1.5", "-0.1", "nan"])
def test_an_unknown_name_is_answered_with_the_known_ones(name):
    with pytest.raises(ValueError, match=f"unknown split '{name}'; use half, alternate, none, or a fraction"):
        named(name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fr.split.fraction(1.1), "`support`.*1.1"),
        (lambda: fr.split.fraction(float("nan")), "`support`"),
        (lambda: fr.split.half(min_query=-1), "`min_query`"),
        (lambda: fr.split.alternate(0), "`chunk`"),
    ],
)
def test_impossible_splits_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


REDRAWN = fr.split.redrawn(fr.split.half())


def drawn(sizes, draws, order=None):
    """The support examples of each client, packed in an order, with one number to draw by each."""
    ends = np.cumsum(sizes)
    columns = {"x": np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)}
    packer = Packer(fr.Clients(columns, ends - sizes, ends), Needs(REDRAWN))
    order = np.arange(len(sizes)) if order is None else np.asarray(order)
    cohort = packer.pack(order, None if draws is None else np.asarray(draws, np.uint64)[order])
    return {
        int(c): x[:n].tolist() for c, x, n in zip(order, cohort.support.columns["x"], cohort.support.count, strict=True)
    }


@quick
@given(sizes=sizes_lists)
def test_a_redrawn_split_is_disjoint_and_complete(sizes):
    for (support, query), size in zip(divide(REDRAWN, sizes), sizes, strict=True):
        assert sorted(support + query) == list(range(size))
        assert len(support) == (size + 1) // 2


def test_a_redrawn_split_depends_on_the_draw_and_the_client_not_on_the_packing():
    sizes, draws = [40, 40, 40], [7, 7, 8]
    found = drawn(sizes, draws)
    assert drawn(sizes, draws, [2, 0, 1]) == found
    assert found[0] != found[1] != found[2]
    assert drawn(sizes, [9, 9, 9])[0] != found[0]
    assert drawn(sizes, None) == drawn(sizes, [0, 0, 0])


def test_a_redrawn_split_gives_every_example_the_same_chance():
    times = np.zeros(6)
    for draw in range(2000):
        times[drawn([6], [draw])[0]] += 1
    assert times.min() > 900  # 1,000 expected, with a standard deviation of 22
    assert times.max() < 1100


def test_a_redrawn_split_has_a_name():
    assert named("redrawn-half").redrawn
    assert named("redrawn-0.8").counts(np.array([10]))[0] == [8]
    with pytest.raises(ValueError, match="unknown split 'nothing'"):
        named("redrawn-nothing")


def test_a_split_by_time_cannot_be_redrawn():
    with pytest.raises(ValueError, match="sorts examples by 'time', and cannot shuffle them"):
        fr.split.redrawn(fr.split.half(by="time"))
