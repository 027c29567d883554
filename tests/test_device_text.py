"""Text on devices: the words of training, bundles of the next word, suggestions with a person's own words."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedrecon as fr
from fedrecon._src.data import sentences as training_words
from fedrecon._src.data.sentences import prompt_columns
from fedrecon.data import Vocabulary, personal_text
from fedrecon_device import words as device_words

pytestmark = pytest.mark.slow

KNOWN = ["the", "a", "i", "you", "we", "my", "it", "is", "so", "at", "to", "in", "met"]
WRITTEN = st.text(
    st.one_of(st.sampled_from(" .,!?'\"-\n\u2026\u2019\x85\x1c\u2028\xad\u200b"), st.characters(codec="utf-8")),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(WRITTEN)
def test_text_is_split_on_a_device_as_in_training(text):
    assert device_words.split_text(text) == training_words.split_text(text)


@given(st.text(max_size=20))
def test_words_have_the_bucket_of_training(word):
    assert device_words.word_hash(word) == training_words.word_hash(word)


@settings(max_examples=100, deadline=None)
@given(WRITTEN, st.integers(1, 6))
def test_sentences_and_prompts_look_to_a_device_as_to_training(text, max_words):
    training, device = Vocabulary(tuple(KNOWN), 3), device_words.Vocabulary(KNOWN, 3, max_words)
    mine, sentences = personal_text(text, training, max_words), device_words.split_text(text)
    for name, column in device.columns(sentences).items():
        assert np.array_equal(column, mine.columns[name])
    uses = {word: count for words in mine.words.values() for word, count in words.items()}
    assert device_words.PersonalWords(device, sentences).uses == uses
    (ours, words), (theirs, expected) = device.prompt(text), prompt_columns(text, training, max_words)
    assert len(words) == expected
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


# ---- bundles ----


@pytest.fixture(scope="module", params=["oov_embedding", "output_bias"])
def made(request, tmp_path_factory):
    pytest.importorskip("jax2onnx", reason="needs fedrecon[device]")
    from device_models import text_bundle

    out = tmp_path_factory.mktemp("text") / "bundle"
    MADE.clear()
    return out, *text_bundle(out, page=False, local=request.param)


def reconstructed(algorithm, params, columns, most=10):
    """Reconstruct with JAX from the newest examples, padded to one shape so that it is compiled once."""
    from fedrecon._src.device.export import export_form

    if "run" not in MADE:
        MADE["form"] = export_form(algorithm, params, 0)
        MADE["run"] = jax.jit(MADE["form"].reconstruct)
    count = min(most, len(columns["word"]))
    padded = {}
    for name, column in columns.items():
        padded[name] = np.zeros((most, column.shape[1]), np.int32)
        padded[name][:count] = column[len(column) - count :]
    return MADE["run"](params, MADE["form"].start, padded, jnp.int32(count))


MADE = {}


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from(["the", "we", "met", "so", "zebra", "yak", "gnu", "emu"]), min_size=1, max_size=9),
        max_size=13,
    )
)
def test_a_text_bundle_reconstructs_and_suggests_what_jax_does(made, tmp_path_factory, sentences):
    from fedrecon_device import Personal

    folder, algorithm, params, vocabulary = made
    text = "\n".join(map(" ".join, sentences))
    person = Personal(folder, tmp_path_factory.mktemp("me") / "me.json")
    person.add(text=text)
    mine = personal_text(text, vocabulary, 7)
    expected = reconstructed(algorithm, params, mine.columns)
    local = person.refresh()
    assert local.keys() == expected.keys()
    assert all(np.max(np.abs(local[path] - expected[path])) <= 1e-5 for path in local)
    ours = person.complete("we met the", 6)
    columns, position = prompt_columns("we met the", vocabulary, 7)
    logits = fr.predict(algorithm.model, params, expected, columns)[:, position]
    words = fr.recommend.PersonalWords(vocabulary, biased=False)  # the bias is in the logits
    for sentence in sentences:
        words.learn(sentence[:7], np.zeros(vocabulary.first_oov + 1), ended=len(sentence) < 7)
    theirs = words.suggest(np.asarray(jax.nn.softmax(logits)), ["we", "met", "the"], 6)
    assert [one.probability for one in ours] == pytest.approx([one.probability for one in theirs], abs=1e-5)
    assert {one.word for one in ours} == {one.word for one in theirs}


def test_the_exported_form_of_text_is_the_one_that_serves(made):
    _, algorithm, params, vocabulary = made
    mine = personal_text("we met the zebra\nso is the yak\nmy emu", vocabulary, 7).columns
    expected, found = fr.reconstruct(algorithm, params, mine), reconstructed(algorithm, params, mine)
    assert all(np.max(np.abs(found[path] - expected[path])) <= 1e-5 for path in expected)


def test_a_text_bundle_says_what_it_needs(made, tmp_path):
    from fedrecon_device import Personal

    person = Personal(made[0], tmp_path / "me.json")
    with pytest.raises(ValueError, match="`text` must be given"):
        person.add(item=[1], rating=[2])
    with pytest.raises(ValueError, match="needs a model of ratings or clicks"):
        person.recommend()
    assert person.bundle.warm_start == ("oov_embedding" in person.bundle.start)


def test_a_saved_model_of_text_becomes_a_bundle_that_suggests(tmp_path):
    pytest.importorskip("jax2onnx", reason="needs fedrecon[device]")
    from device_models import WORDS, trained
    from fedrecon._src.device.model_bundle import bundle_model
    from fedrecon._src.recommend.config import TextConfig
    from fedrecon._src.recommend.saved_models import SavedModel
    from fedrecon._src.recommend.tasks import TEXT
    from fedrecon_device import Personal, check

    sizes = {"embedding": 6, "hidden": 8, "projection": 7, "max_words": 7, "oov_buckets": 5}
    config = dataclasses.replace(TextConfig(), model=dataclasses.replace(TextConfig().model, **sizes))
    vocabulary = Vocabulary(tuple(WORDS), 5)
    saved = SavedModel(config, trained(TEXT.build_model(config, vocabulary)), vocabulary)
    bundle_model(saved, tmp_path / "b", most=6, quantise="int8")
    assert check(tmp_path / "b").difference <= 1e-5
    person = Personal(tmp_path / "b", tmp_path / "me.json")
    person.add(text="we met a zebra. so is the yak")
    assert {"zebra", "yak"} == {one.word for one in person.complete("we met", 50) if one.personal}
