import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrecon._src.core.clients import Clients, Totals
from fedrecon._src.storage.arrays import FORMAT
from fedrecon._src.storage.manifest import write_manifest

quick = settings(max_examples=40, deadline=None)


def make(sizes, **columns):
    """Clients of these sizes whose `x` numbers all examples, with random times."""
    total = int(sum(sizes))
    ends = np.cumsum(sizes).astype(np.int64)
    time = np.random.default_rng(0).integers(0, 5, total)
    columns = {"x": np.arange(total), "time": time, **columns}
    return Clients(columns, ends - np.asarray(sizes, np.int64), ends, names=np.arange(len(sizes)) * 10)


def rows(clients):
    """Every client's examples as lists, to compare."""
    return [{name: values.tolist() for name, values in client.items()} for client in clients]


sizes_lists = st.lists(st.integers(0, 12), min_size=1, max_size=12)
fractions = st.lists(st.integers(0, 10), min_size=1, max_size=4).filter(sum).map(lambda w: [x / sum(w) for x in w])


def test_a_client_is_a_view_of_its_rows():
    clients = make([3, 0, 2])
    assert len(clients) == 3
    assert clients.num_examples == 5
    assert clients.sizes.tolist() == [3, 0, 2]
    assert clients.max_size == 3
    assert clients[2]["x"].tolist() == [3, 4]
    assert clients[-1]["x"].tolist() == [3, 4]
    assert np.shares_memory(clients[0]["x"], clients.columns["x"])
    assert repr(clients) == "Clients(3 clients, 5 examples: x int64, time int64)"


@pytest.mark.parametrize("i", [3, -4])
def test_an_index_out_of_range_is_named(i):
    with pytest.raises(IndexError, match=f"no client {i}: indices go from 0 to 2"):
        make([3, 0, 2])[i]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"columns": {}}, "`columns` must have at least one column"),
        ({"columns": {"x": np.zeros(4), "y": np.zeros(3)}}, "same number of rows"),
        ({"ends": [2]}, "one entry per client"),
        ({"starts": 0, "ends": 4}, "one entry per client"),
        ({"ends": [2, 9]}, "0 <= start <= end <= 4"),
        ({"starts": [-1, 2]}, "0 <= start <= end <= 4"),
        ({"starts": [3, 2]}, "0 <= start <= end <= 4"),
        ({"names": np.arange(3)}, "`names` must have one entry per client .got 3 for 2"),
        ({"columns": {"x": 1.0}}, "column 'x' is a single value"),
    ],
)
def test_parts_that_do_not_fit_are_refused(fields, message):
    whole = {"columns": {"x": np.zeros(4)}, "starts": [0, 2], "ends": [2, 4]}
    with pytest.raises(ValueError, match=message):
        Clients(**{**whole, **fields})


def test_python_objects_are_refused():
    with pytest.raises(TypeError, match="column 'x' must be numbers or fixed-width text"):
        Clients({"x": np.array([1, None])}, [0], [2])


@pytest.mark.parametrize(("names", "name", "index"), [([5, 7], 7, 1), ([5, 7], "7", 1), (["a", "b"], "b", 1)])
def test_a_client_is_found_by_name(names, name, index):
    assert Clients({"x": np.zeros(2)}, [0, 1], [1, 2], names=np.array(names)).index_of(name) == index


@pytest.mark.parametrize("name", [6, "z", 10**30])
def test_an_unknown_name_is_named(name):
    clients = Clients({"x": np.zeros(2)}, [0, 1], [1, 2], names=np.array([5, 7]))
    with pytest.raises(KeyError, match=r"no client is named .* among 2 clients named \[5"):
        clients.index_of(name)
    with pytest.raises(KeyError, match="without names"):
        dataclasses.replace(clients, names=None).index_of(name)


# ---- grouping ----


@quick
@given(st.lists(st.integers(-3, 3), max_size=40))
def test_grouping_is_stable_and_in_order_of_id(ids):
    clients = Clients.from_columns({"x": np.arange(len(ids))}, client=np.array(ids, np.int64))
    assert clients.names.tolist() == sorted(set(ids))
    for name, client in zip(clients.names, clients, strict=True):
        assert client["x"].tolist() == [k for k, owner in enumerate(ids) if owner == name]


def test_the_column_grouped_by_is_left_out():
    clients = Clients.from_columns({"who": ["b", "a", "b"], "x": [1, 2, 3]}, client="who")
    assert list(clients.columns) == ["x"]
    assert rows(clients) == [{"x": [2]}, {"x": [1, 3]}]


def test_rows_already_in_order_are_shared():
    x = np.arange(4)
    assert np.shares_memory(Clients.from_columns({"x": x}, client=[0, 0, 1, 1]).columns["x"], x)


@pytest.mark.parametrize(
    ("columns", "client", "message"),
    [
        ({"x": [1]}, "who", "'who'"),
        ({"x": [1]}, [1, 2], "one row per client id"),
        ({"x": [1, 2]}, [0.0, np.nan], "some client ids are NaN"),
    ],
)
def test_grouping_refuses_what_it_cannot_group(columns, client, message):
    with pytest.raises(ValueError, match=message):
        Clients.from_columns(columns, client=client)


def test_a_csv_file_is_grouped_and_its_types_found(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('"user",n,x,word\n7,1,0.5,"a, b"\n3,2,1,c#\n7,3,2,é\n', encoding="utf-8")
    clients = Clients.from_csv(path)
    assert clients.names.tolist() == [3, 7]
    assert [clients.columns[name].dtype.kind for name in ("n", "x", "word")] == ["i", "f", "U"]
    assert clients[1]["word"].tolist() == ["a, b", "é"]
    some = Clients.from_csv(path, columns={"x": np.float32})
    assert {name: values.dtype for name, values in some.columns.items()} == {"x": np.dtype("float32")}


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        ("user,x\n", None, "has no rows"),
        ("who,x\n1,2\n", None, "no column 'user'"),
        ("user,x\n1,2\n", {"y": int}, "'y'"),
        ("user,x\n1,a\n", {"x": float}, "a.csv cannot be read: .*'a'"),
    ],
)
def test_a_csv_file_that_does_not_fit_is_refused(tmp_path, text, columns, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        Clients.from_csv(tmp_path / "a.csv", columns=columns)


def test_a_parquet_file_is_grouped(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="pyarrow (the extra `parquet`) is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"user": ["b", "a", "b"], "x": [1, 2, 3], "y": [0.5, None, 1.5]})
    parquet.write_table(table, tmp_path / "a.parquet")
    clients = Clients.from_parquet(tmp_path / "a.parquet", columns=["x"])
    assert rows(clients) == [{"x": [2]}, {"x": [1, 3]}]
    assert clients.index_of("b") == 1
    with pytest.raises(ValueError, match="no column 'z'; it has: user, x, y"):
        Clients.from_parquet(tmp_path / "a.parquet", columns=["z"])
    with pytest.raises(ValueError, match="column 'y' has 1 empty entries"):
        Clients.from_parquet(tmp_path / "a.parquet")


# ---- views ----


@quick
@given(sizes_lists, fractions, st.integers(0, 5))
def test_client_splits_are_disjoint_and_complete(sizes, shares, seed):
    clients = make(sizes)
    parts = clients.split_clients(*shares, seed=seed)
    assert sorted(np.concatenate([part.names for part in parts]).tolist()) == clients.names.tolist()
    for part in parts:
        assert np.shares_memory(part.columns["x"], clients.columns["x"]) or clients.num_examples == 0
        for name, client in zip(part.names, part, strict=True):
            assert client["x"].tolist() == clients[clients.index_of(name)]["x"].tolist()


@pytest.mark.parametrize(
    ("shares", "counts"),
    [((0.8, 0.1, 0.1), [4832, 604, 604]), ((0.1, 0.2), [604, 1208]), ((1,), [6040]), ((0.5, 0.0), [3020, 0])],
)
def test_client_splits_have_about_the_expected_sizes(shares, counts):
    """Every client is drawn by itself: a size is binomial, and 5 standard deviations are never passed."""
    found = [len(part) for part in make([1] * 6040).split_clients(*shares, seed=1)]
    for size, expected in zip(found, counts, strict=True):
        assert abs(size - expected) <= 5 * np.sqrt(expected * (1 - expected / 6040))


def test_client_splits_depend_on_the_seed_and_on_names():
    clients = make([1] * 50)
    first = clients.split_clients(0.5, seed=3)[0].names.tolist()
    np.random.seed(9)
    assert clients.split_clients(0.5, seed=3)[0].names.tolist() == first
    assert clients.split_clients(0.5, seed=4)[0].names.tolist() != first


@quick
@given(st.permutations(range(12)), st.integers(1, 12), st.integers(0, 99))
def test_client_groups_and_shuffles_do_not_depend_on_other_clients(order, some, seed):
    clients = make([3] * 12)
    others = clients.take(np.array(order)[:some])
    everybody = set(clients.split_clients(0.5, seed=seed)[0].names.tolist())
    assert set(others.split_clients(0.5, seed=seed)[0].names.tolist()) == everybody & set(others.names.tolist())
    shuffled = clients.shuffle(seed)
    for name, mine in zip(others.names, others.shuffle(seed), strict=True):
        assert mine["x"].tolist() == shuffled[clients.index_of(name)]["x"].tolist()


def test_a_client_is_who_it_is_called_whether_by_number_or_text():
    numbers = Clients({"x": np.arange(3)}, [0, 1, 2], [1, 2, 3], np.array([7, 12, 100]))
    texts = Clients({"x": np.arange(3)}, [0, 1, 2], [1, 2, 3], np.array(["12", "a longer name", "7"]))
    np.testing.assert_array_equal(numbers.identities([0, 1]), texts.identities([2, 0]))
    unnamed = Clients({"x": np.arange(3)}, [0, 1, 2], [1, 2, 3])
    np.testing.assert_array_equal(unnamed.take(np.array([2, 0])).identities(), unnamed.identities([2, 0]))
    assert len({tuple(words) for words in make([1] * 500).identities()}) == 500


@pytest.mark.parametrize("shares", [(), (0.8, 0.3), (-0.1, 0.5)])
def test_impossible_fractions_are_refused(shares):
    for split in (lambda c: c.split_clients(*shares, seed=0), lambda c: c.split_time(*shares)):
        with pytest.raises(ValueError, match="`fractions` must be at least 0 and sum to at most 1"):
            split(make([2, 3]))


@quick
@given(sizes_lists, fractions)
def test_time_splits_are_complete_and_in_order_with_ties_as_stored(sizes, shares):
    clients = make(sizes)
    parts = clients.split_time(*shares)
    for i, client in enumerate(clients):
        together = np.concatenate([part[i]["x"] for part in parts])
        order = np.argsort(client["time"], kind="stable")
        assert together.tolist() == client["x"][order].tolist()
    if clients.num_examples:
        assert all(np.shares_memory(part.columns["x"], parts[0].columns["x"]) for part in parts)


@pytest.mark.parametrize(
    ("n", "shares", "counts"),
    [
        (10, (0.8, 0.1, 0.1), [8, 1, 1]),
        (3, (1 / 3, 1 / 3, 1 / 3), [1, 1, 1]),
        (7, (0.8, 0.1, 0.1), [5, 1, 1]),
        (1, (0.8, 0.1, 0.1), [0, 0, 1]),
        (1000, (0.1,) * 10, [100] * 10),
        (10, (0.3,), [3]),
    ],
)
def test_time_splits_cut_at_the_floor_of_the_running_fraction(n, shares, counts):
    assert [int(part.sizes[0]) for part in make([n]).split_time(*shares)] == counts


def test_a_split_by_a_missing_column_is_refused():
    with pytest.raises(ValueError, match="'when'"):
        make([2]).split_time(0.5, column="when")


@quick
@given(sizes_lists, st.integers(0, 15))
def test_cap_keeps_the_first_examples(sizes, n):
    clients = make(sizes)
    capped = clients.cap(n)
    assert [c["x"].tolist() for c in capped] == [c["x"][:n].tolist() for c in clients]
    assert capped.max_size == min(n, clients.max_size)


@quick
@given(sizes_lists, st.integers(0, 9))
def test_shuffle_reorders_within_clients_only(sizes, seed):
    clients = make(sizes)
    shuffled = clients.shuffle(seed)
    assert rows(shuffled) == rows(clients.shuffle(seed))
    for before, after in zip(clients, shuffled, strict=True):
        assert sorted(after["x"].tolist()) == before["x"].tolist()
        assert (clients.columns["time"][after["x"]] == after["time"]).all()


def test_shuffle_changes_the_order():
    assert make([50]).shuffle(0)[0]["x"].tolist() != make([50]).shuffle(1)[0]["x"].tolist()


def test_small_clients_are_filtered():
    assert make([3, 0, 2]).at_least(2).names.tolist() == [0, 20]


def test_take_keeps_the_given_order_and_accepts_a_mask():
    clients = make([3, 0, 2])
    assert clients.take([2, 0]).names.tolist() == [20, 0]
    assert clients.take(np.array([True, False, True])).names.tolist() == [0, 20]
    assert len(clients.take([])) == 0
    with pytest.raises(IndexError, match="size 3"):
        clients.take([3])
    with pytest.raises(IndexError, match="boolean index"):
        clients.take(np.array([True]))


def test_a_negative_cap_is_refused():
    with pytest.raises(ValueError, match="`n`"):
        make([2]).cap(-1)


# ---- on disk ----


@quick
@given(sizes=sizes_lists, seed=st.integers(0, 3))
def test_a_saved_view_opens_to_the_same_examples(tmp_path_factory, sizes, seed):
    clients = make(sizes, word=np.array([f"w{k}" for k in range(sum(sizes))], dtype="U4"))
    view = clients.split_clients(0.7, seed=seed)[0].cap(5)
    path = tmp_path_factory.mktemp("saved") / "clients"
    view.save(path)
    opened = Clients.open(path)
    assert rows(opened) == rows(view)
    assert opened.names.tolist() == view.names.tolist()
    assert (opened.max_size, opened.num_examples) == (view.max_size, view.num_examples)
    assert len(opened.columns["x"]) == view.num_examples
    assert opened.fingerprint() == view.fingerprint()


def test_rows_of_any_shape_are_saved(tmp_path):
    clients = make([2, 1], tokens=np.arange(12).reshape(3, 4).astype(np.int16))
    clients.save(tmp_path / "a")
    assert Clients.open(tmp_path / "a")[1]["tokens"].tolist() == [[8, 9, 10, 11]]


def test_names_may_be_missing(tmp_path):
    dataclasses.replace(make([2, 1]), names=None).save(tmp_path / "a")
    assert Clients.open(tmp_path / "a").names is None


@pytest.mark.parametrize("name", ["a/b", "..", "", "é"])
def test_unsafe_column_names_are_refused_and_leave_nothing(tmp_path, name):
    with pytest.raises(ValueError, match="cannot be a file name"):
        Clients({name: np.zeros(2)}, [0], [2]).save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_overwritten(tmp_path):
    make([2]).save(tmp_path / "a")
    with pytest.raises(FileExistsError, match="exists already: remove it or choose another name"):
        make([2]).save(tmp_path / "a")


def break_manifest(folder, **changes):
    manifest = json.loads((folder / "manifest.json").read_text())
    write_manifest(folder / "manifest.json", FORMAT, {**manifest, **changes})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest.json"),
        (
            lambda folder: break_manifest(folder, version=99),
            "'fedrecon-clients' 99",
        ),
        (lambda folder: break_manifest(folder, num_examples=4), "lengths that manifest.json records"),
        (lambda folder: break_manifest(folder, num_clients=4), "lengths that manifest.json records"),
        (lambda folder: (folder / "column-x.npy").unlink(), "column-x.npy"),
        (lambda folder: (folder / "column-x.npy").write_bytes(b"\x93NUMPY"), "column-x.npy"),
    ],
)
def test_a_damaged_or_foreign_folder_is_refused(tmp_path, damage, message):
    make([2, 1]).save(tmp_path / "a")
    damage(tmp_path / "a")
    with pytest.raises(ValueError, match=message):
        Clients.open(tmp_path / "a")


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere/manifest\.json is missing"):
        Clients.open(tmp_path / "nowhere")


@pytest.mark.parametrize("names", [["anna", "bo", ""], [30, 10, 20]])
def test_streamed_clients_equal_the_same_clients_in_memory(tmp_path, names):
    sizes = [2, 0, 3]
    streamed = Clients.from_generator(
        tmp_path / "a",
        ((n, {"x": np.arange(k), "y": np.ones((k, 2), np.float32)}) for n, k in zip(names, sizes, strict=True)),
    )
    assert streamed.names.tolist() == names
    assert streamed.sizes.tolist() == sizes
    assert streamed.max_size == 3
    assert streamed[2]["x"].tolist() == [0, 1, 2]
    assert streamed[2]["y"].shape == (3, 2)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [
        "column-x.npy",
        "column-y.npy",
        "manifest.json",
        "names.npy",
        "offsets.npy",
    ]


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([], "yielded no clients"),
        ([("a", {"x": [1]}), ("b", {"y": [1]})], "client 'b' has columns {'y': .*expected rows of {'x'"),
        ([("a", {"x": [1], "y": [1, 2]})], "client 'a' has columns .* all of one length"),
        ([("a", {"x": [1]}), ("b", {"x": [1.5]})], r"'x': 'float64\[1\]'.*expected rows of {'x': 'int64\[\]'}"),
        ([("a", {"x": ["ab"]}), ("b", {"x": ["abc"]})], "expected rows of"),
        ([("a", {"x": [[1]]}), ("b", {"x": [[1, 2]]})], "expected rows of"),
        ([("a", {"x": [1]}), (3, {"x": [1]})], "all integers or all text"),
        ([("a\nb", {"x": [1]})], "all integers or all text of a single line"),
    ],
)
def test_streams_that_do_not_fit_are_refused_and_leave_nothing(tmp_path, clients, message):
    with pytest.raises(ValueError, match=message):
        Clients.from_generator(tmp_path / "a", clients)
    assert list(tmp_path.iterdir()) == []


def test_streaming_many_clients_keeps_names_of_several_blocks_in_order(tmp_path):
    count = 40_000
    clients = Clients.from_generator(tmp_path / "a", ((f"c{k}", {"x": np.array([k])}) for k in range(count)))
    assert len(clients) == count
    assert clients.names[[0, 20_000, count - 1]].tolist() == ["c0", "c20000", f"c{count - 1}"]
    assert (clients.columns["x"] == np.arange(count)).all()


@pytest.fixture(scope="module")
def million(tmp_path_factory):
    path = tmp_path_factory.mktemp("million") / "clients"
    n = 1_000_000
    clients = Clients({"x": np.arange(2 * n, dtype=np.int32)}, np.arange(n) * 2, np.arange(n) * 2 + 2, np.arange(n))
    clients.save(path)
    return path


def mapped(array):
    """Whether an array's memory is a mapped file."""
    while array is not None and not isinstance(array, np.memmap):
        array = array.base
    return array is not None


def resident_kilobytes(folder):
    """How much of the files mapped from this folder is in memory."""
    found, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            found = str(folder) in line
        elif found and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def test_opening_a_million_clients_maps_every_file(million):
    clients = Clients.open(million)
    assert (len(clients), clients.num_examples, clients.max_size) == (1_000_000, 2_000_000, 2)
    assert all(mapped(a) for a in (clients.starts, clients.ends, clients.names, clients.columns["x"]))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells which mapped pages are in memory")
def test_opening_a_million_clients_reads_none_of_them(million):
    clients = Clients.open(million)
    assert clients[999_999]["x"].tolist() == [1_999_998, 1_999_999]
    assert repr(clients)
    # the kernel maps a few pages around each one touched; all files together are over 20,000 kB
    assert 0 < resident_kilobytes(million) < 2_000


# ---- fingerprints ----


def test_a_fingerprint_sees_every_kind_of_change():
    base = make([3, 2])
    x = base.columns["x"].copy()
    x[4] = 99
    others = [
        dataclasses.replace(base, columns={**base.columns, "x": x}),
        dataclasses.replace(base, columns={**base.columns, "x": base.columns["x"].astype(np.int32)}),
        dataclasses.replace(base, columns={**base.columns, "z": x}),
        dataclasses.replace(base, names=None),
        dataclasses.replace(base, names=base.names + 1),
        base.cap(2),
        base.take([1, 0]),
        base.shuffle(1),
    ]
    prints = [c.fingerprint() for c in (base, *others)]
    assert len(set(prints)) == len(prints)
    assert base.fingerprint() == make([3, 2]).fingerprint()
    assert all(len(p) == 16 for p in prints)


def test_a_large_fingerprint_reads_a_sample(million, monkeypatch):
    clients = Clients.open(million)
    seen = []
    take = Clients.take
    monkeypatch.setattr(Clients, "take", lambda self, indices: seen.append(len(indices)) or take(self, indices))
    assert clients.fingerprint() == clients.fingerprint()
    assert seen == [4096, 4096]
    assert clients.fingerprint() != clients.take(np.arange(len(clients) - 1)).fingerprint()


# ---- subclasses ----


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Labelled(Clients):
    labels: np.ndarray = dataclasses.field(kw_only=True)
    note: str = dataclasses.field(default="", kw_only=True)


def test_fields_of_a_subclass_survive_views_and_disk(tmp_path):
    clients = Labelled.from_columns({"x": np.arange(4)}, client=[1, 0, 1, 0], labels=np.array(["a", "b"]), note="n")
    for view in (clients.cap(1), clients.shuffle(0), clients.take([0]), *clients.split_clients(0.5, seed=0)):
        assert isinstance(view, Labelled)
        assert view.labels.tolist() == ["a", "b"]
    clients.save(tmp_path / "a")
    opened = Labelled.open(tmp_path / "a")
    assert (opened.labels.tolist(), opened.note) == (["a", "b"], "n")
    assert rows(Clients.open(tmp_path / "a")) == rows(clients)


def test_a_folder_of_another_class_is_refused(tmp_path):
    make([2]).save(tmp_path / "a")
    with pytest.raises(ValueError, match="holds Clients, not Labelled: it has no"):
        Labelled.open(tmp_path / "a")


def test_known_totals_are_trusted():
    assert Clients({"x": np.zeros(4)}, [0], [4], totals=Totals(4, 4)).max_size == 4
