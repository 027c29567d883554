"""Tasks: what text may come from, who trains, what is refused, and what a table shows."""

import json

import jax
import numpy as np
import pytest

import fedrecon as fr
from fedrecon._src.core.display import silent
from fedrecon._src.core.model import evaluated_names
from fedrecon._src.core.upload import summand_of
from fedrecon._src.data.sentences import PAIR_ROWS
from fedrecon._src.recommend.config import (
    CONFIGS,
    Factorization,
    NextWord,
    RatingsConfig,
    Reading,
    Scale,
    TextConfig,
    TextData,
)
from fedrecon._src.recommend.recipe import check_some_can_learn
from fedrecon._src.recommend.tasks import TASKS, TEXT, Measure, build_algorithm
from fedrecon._src.recommend.tasks import text as text_task
from fedrecon._src.recommend.tasks.text import build_next_word
from fedrecon.data import Corpus, DataError, Vocabulary, input_ids, load_text, prepare_text
from stackoverflow_files import write_database


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDRECON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_posts(path, clients=10, sentences=3):
    """Write posts in which client c writes `the cat`, `the own<c>`, ..., a word more each time."""
    posts = [
        {"client": f"c{c}", "time": t, "text": " ".join(["the", "cat", f"own{c}"][: t + 1])}
        for c in range(clients)
        for t in range(sentences)
    ]
    path.write_text("".join(json.dumps(post) + "\n" for post in posts))
    return path


def config(source, *, vocabulary=2, buckets=3, max_words=4, **data):
    model = NextWord(vocabulary=vocabulary, oov_buckets=buckets, max_words=max_words)
    return TextConfig(data=TextData(source=str(source), **data), model=model)


def load(settings):
    corpus = TEXT.load(settings, silent)
    return corpus, TEXT.divide(settings, corpus, silent)


def names(clients):
    return set(clients.names.tolist())


# ---- sources ----


def test_a_file_of_posts_is_divided_as_the_settings_say(tmp_path):
    path = write_posts(tmp_path / "posts.jsonl")
    corpus, users = load(config(path, fractions=(0.5, 0.3, 0.2), split_seed=4))
    expected = corpus.clients.split_clients(0.5, 0.3, 0.2, seed=4)
    assert [names(part) for part in users] == [names(part) for part in expected]
    assert set.union(*map(names, users)) == names(corpus.clients)
    _, others = load(config(path, fractions=(0.5, 0.3, 0.2), split_seed=5))
    assert names(users.train) != names(others.train)
    assert TEXT.facts(config(path), corpus) == {"sentences": 30, "words": 60, "vocabulary": 2, "coverage": 0.8333}


def test_plain_settings_find_the_corpus_that_was_prepared_without_any(tmp_path, cache):
    path = write_posts(tmp_path / "posts.jsonl")
    load_text(path)
    load(config(path))
    assert len(list((cache / "text").iterdir())) == 1


def test_a_prepared_folder_trains_as_it_was_prepared(tmp_path):
    prepare_text(write_posts(tmp_path / "posts.jsonl"), tmp_path / "corpus", fractions=(0.4, 0.3, 0.3))
    _, users = load(config(tmp_path / "corpus"))
    assert sum(len(part) for part in users) == 10
    assert min(len(part) for part in users) > 0


def test_posts_of_a_dump_train(tmp_path):
    row = '  <row Id="{0}" PostTypeId="2" CreationDate="2008-07-31T22:17:57" Body="&lt;p&gt;a cat&lt;/p&gt;" {1}/>\n'
    rows = "".join(row.format(k, f'OwnerUserId="{k % 10}"') for k in range(1, 31))
    path = tmp_path / "Posts.xml"
    path.write_text(f'<?xml version="1.0" encoding="utf-8"?>\n<posts>\n{rows}</posts>')
    _, users = load(config(path))
    assert sum(len(part) for part in users) == 10


def test_held_out_users_of_stack_overflow_test_and_some_training_users_validate(tmp_path):
    date = "2010-01-08 09:34:05 UTC"
    rows = [("train", f"{100 + k}", date, "the cat sat") for k in range(20)]
    rows += [("heldout", f"{200 + k}", date, "the dog") for k in range(4)]
    rows += [("test", f"{100 + k}", date, "later on") for k in range(3)]
    path = write_database(tmp_path / "stackoverflow.sqlite", rows)
    corpus, users = load(config(path))
    assert len(users.train) + len(users.valid) == 20
    assert len(users.valid) > 0
    assert len(users.test) == 4
    assert names(users.test) == {"200", "201", "202", "203"}
    assert not names(users.train) & names(users.valid)
    assert names(users.train) | names(users.valid) == {f"{100 + k}" for k in range(20)}
    assert set(corpus.words) == {"the", "cat", "sat"}
    _, others = load(config(path, split_seed=1))
    assert names(users.valid) != names(others.valid)


def test_a_word_count_is_the_vocabulary_and_a_new_one_a_new_corpus(tmp_path):
    rows = [("train", "1", "2010-01-08 09:34:05 UTC", "the cat sat")]
    path = write_database(tmp_path / "stackoverflow.sqlite", rows)
    count = tmp_path / "stackoverflow.word_count"
    count.write_text("sat 9\nthe 2\n")
    settings = config(path, word_count=str(count))
    assert load(settings)[0].words == ("sat", "the")
    count.write_text("cat 9\n")
    assert load(settings)[0].words == ("cat",)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("", {}, "data source is empty"),
        ("gone.jsonl", {}, "is neither a file nor a prepared corpus"),
        ("corpus", {"max_sentences": 5}, "data.max_sentences cannot be used: .* is a prepared corpus"),
        ("corpus", {"fractions": (0.5, 0.5, 0.0)}, "data.fractions cannot be used"),
        ("posts.jsonl", {"word_count": "x"}, "data.word_count cannot be used: .* is a file of posts"),
        ("so.sqlite", {"fractions": (1.0, 0.0, 0.0)}, "data.fractions cannot be used: .* federated Stack"),
        ("posts.jsonl", {"min_sentences": 99}, "none of 0 training clients have 99 sentences or more"),
    ],
)
def test_what_cannot_be_used_is_named(source, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare_text(write_posts(tmp_path / "posts.jsonl"), tmp_path / "corpus")
    write_database(tmp_path / "so.sqlite", [("train", "1", "2010-01-08 09:34:05 UTC", "the")])
    settings = config(source, **options)
    with pytest.raises(DataError, match=message):
        check_some_can_learn(settings, TEXT, load(settings)[1])


def test_clients_with_few_sentences_are_left_out(tmp_path):
    path = write_posts(tmp_path / "posts.jsonl")
    with path.open("a") as file:
        file.write(json.dumps({"client": "brief", "text": "the"}) + "\n")
    _, users = load(config(path, min_sentences=2))
    assert sum(map(len, users)) == 10


# ---- examples ----


def test_a_vocabulary_holds_all_words_where_there_are_fewer_than_asked_for(tmp_path):
    settings = config(write_posts(tmp_path / "posts.jsonl"), vocabulary=10_000)
    corpus, users = load(settings)
    assert len(TEXT.legend(settings, corpus)) == len(corpus.words) == users.train.vocab_size


def test_a_large_vocabulary_keeps_more_words(tmp_path, monkeypatch):
    monkeypatch.setattr(text_task, "KEPT_WORDS", 3)
    path = write_posts(tmp_path / "posts.jsonl")
    assert len(load(config(path, vocabulary=5))[0].words) == 5


def test_many_examples_are_mapped_from_the_cache(tmp_path, cache, monkeypatch):
    divided = {"fractions": (0.5, 0.3, 0.2), "split_seed": 4}  # somebody in every part
    settings = config(write_posts(tmp_path / "posts.jsonl"), **divided)
    _, there = load(settings)
    monkeypatch.setattr(text_task, "IN_MEMORY", 2)
    for _ in range(2):
        _, mapped = load(settings)
        for one, other in zip(there, mapped, strict=True):
            assert all(np.array_equal(column, one.columns[name]) for name, column in other.columns.items())
            assert isinstance(other.columns["word"].base, np.memmap) or isinstance(other.columns["word"], np.memmap)
    assert len(list((cache / "examples").iterdir())) == 3
    load(config(settings.data.source, buckets=4, **divided))
    assert len(list((cache / "examples").iterdir())) == 6


def test_another_corpus_is_read_in_the_words_of_the_model(tmp_path):
    # `own3` is in the vocabulary but is not kept here; `cat` is kept here but is not in the vocabulary
    vocabulary = Vocabulary(("own3", "the"), 5)
    settings = config("", max_words=4)
    path = write_posts(tmp_path / "posts.jsonl", clients=4)
    for source in (path, prepare_text(path, tmp_path / "corpus", kept_words=2) and tmp_path / "corpus"):
        found = TEXT.read(settings, vocabulary, source, Reading(), silent)
        assert found.clients.names.tolist() == ["c0", "c1", "c2", "c3"]
        for c in range(4):
            expected = [vocabulary.encode(["the", "cat", f"own{c}"][: t + 1], 4) for t in range(3)]
            own = found.clients[c]
            assert input_ids(own, 2).tolist() == [ids[:-1].tolist() for ids in expected]
            assert own["target"].tolist() == [ids[1:].tolist() for ids in expected]


def test_one_client_is_enough_to_read(tmp_path):
    path = write_posts(tmp_path / "posts.jsonl", clients=1)
    found = TEXT.read(config(""), Vocabulary(("the",), 1), path, Reading(), silent)
    assert len(found.clients) == 1
    with pytest.raises(DataError, match=r"data\.user cannot be used: .* is read as text"):
        TEXT.read(config(""), Vocabulary(("the",), 1), path, Reading(user="who"), silent)


def test_bad_lines_of_another_corpus_are_refused_or_counted(tmp_path):
    path = write_posts(tmp_path / "posts.jsonl", clients=1)
    path.write_text(path.read_text() + "{\n")
    with pytest.raises(DataError, match=r"posts\.jsonl line 4"):
        TEXT.read(config(""), Vocabulary(("the",), 1), path, Reading(), silent)
    assert (
        TEXT.read(config(""), Vocabulary(("the",), 1), path, Reading(bad_rows="skip"), silent).skipped["bad_rows"] == 1
    )


# ---- fingerprints ----


def test_a_fingerprint_is_of_the_content(tmp_path, monkeypatch):
    path = write_posts(tmp_path / "posts.jsonl")
    first = prepare_text(path, tmp_path / "first").fingerprint()
    assert prepare_text(path, tmp_path / "again").fingerprint() == first
    assert Corpus.open(tmp_path / "first", mapped=False).fingerprint() == first
    assert prepare_text(path, tmp_path / "other division", seed=1).fingerprint() != first
    path.write_text(path.read_text().replace("the cat own3", "the own3 cat"))
    assert prepare_text(path, tmp_path / "other words").fingerprint() != first


def test_of_much_text_a_fingerprint_looks_at_a_sample(tmp_path, monkeypatch):
    corpus = prepare_text(write_posts(tmp_path / "posts.jsonl"), tmp_path / "corpus")
    monkeypatch.setattr("fedrecon._src.data.corpus.HASHED_TOKENS", 4)
    monkeypatch.setattr("fedrecon._src.data.corpus.HASHED_BLOCKS", 3)
    first = corpus.fingerprint()
    tokens = np.array(corpus.tokens)
    tokens[-1] += 1  # in the last block
    changed = Corpus(**{**vars(corpus), "tokens": tokens})
    assert changed.fingerprint() != first


# ---- models ----


def test_settings_of_the_model_reach_it():
    settings = NextWord(embedding=4, hidden=5, projection=6)
    key = jax.random.key(0)
    model = build_next_word(settings, Vocabulary(("the", "a"), 3))
    shapes = jax.eval_shape(model.init_global, key)
    assert shapes["word_embedding"].shape == (5, 4)
    assert shapes["lstm"]["recurrent"].shape == (5, 20)
    assert shapes["output"]["kernel"].shape == (6, 6)  # padding, both words, beginning, end, and one for all buckets
    assert shapes["output"]["group_0"]["kernel"].shape == (6, 3)
    assert shapes["trigrams"].shape == (PAIR_ROWS, 6)
    assert jax.eval_shape(model.init_local, key)["count"].shape == (6,)
    paper = build_next_word(NextWord(local="oov_embedding", ngrams=False, embedding=4), Vocabulary(("the", "a"), 3))
    assert jax.eval_shape(paper.init_local, key)["oov_embedding"].shape == (3, 4)
    assert not {"oov_embedding", "trigrams"} & set(jax.eval_shape(paper.init_global, key))


@pytest.mark.parametrize("loss_over", ["tokens", "positions"])
def test_clients_are_weighed_by_tokens_whatever_the_loss_is_over(loss_over):
    settings = TextConfig(data=TextData(source=""), model=NextWord(hidden=3, loss_over=loss_over))
    model = build_next_word(settings.model, Vocabulary(("the",), 1))
    places = ["loss", *model.metrics]
    sums = np.zeros((2, len(places), 2))
    sums[:, places.index("perplexity"), 1] = [7, 9]
    aggregator = build_algorithm(settings, model).aggregator
    state = aggregator.init({"delta": {"w": np.zeros(1)}})
    uploads = fr.kit.Upload({"delta": {"w": np.ones((2, 1), np.float32)}}, np.array([1, 1]), sums.astype(np.float32))
    summand = aggregator.encode(aggregator.message(state), summand_of(uploads), jax.random.split(jax.random.key(0)))
    assert summand.scalars["weight"].tolist() == [7, 9]


# ---- tables ----


def test_a_measure_is_written_as_people_read_it():
    assert Measure("rmse", "RMSE").text({"rmse": 0.90714}) == "0.9071"
    assert Measure("accuracy", "accuracy", 1, percent=True).text({"accuracy": 0.4331}) == "43.3 %"
    assert Measure("loss", "loss").text({"loss": float("nan")}) == "nan"


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_task_fits_together(task):
    config = CONFIGS[task.name]()
    assert config.task == task.name
    legend = task.recall({"item_ids": [3, 7], "titles": None, "vocabulary": {"words": ["the"], "buckets": 2}})
    model = task.build_model(config, legend)
    assert {measure.name for measure in (*task.measures, *task.curve)} <= {*evaluated_names(model), "coverage@20"}
    again = task.recall(json.loads(json.dumps(task.describe(legend))))
    assert len(again) == len(legend)


@pytest.mark.parametrize(("low", "high", "shown"), [(1, 5, True), (0.5, 5, True), (1, 100, False), (-10, 10, False)])
def test_accuracy_is_for_scales_of_stars(low, high, shown):
    model = Factorization(scale=Scale(low=low, high=high))
    measures = TASKS["ratings"].shown(TASKS["ratings"].measures, RatingsConfig(model=model))
    assert ("accuracy" in [measure.name for measure in measures]) == shown


@pytest.mark.parametrize(("train", "cohort"), [(5, 5), (400, 8), (1200, 12), (100_000, 16)])
def test_the_cohort_of_text_follows_from_the_number_of_clients(train, cohort):
    assert text_task.cohort_size(train) == cohort
    assert text_task.cohort_size(train, private=True) == min(train, 100)
