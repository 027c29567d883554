"""Text without options: the personal part that a small run reconstructs, what people get, and what goes on learning."""

import json

import pytest

import fedrecon as fr
from fedrecon._src.app.cli import main

pytestmark = pytest.mark.slow

SMALL = ["--task", "text", "--model.vocabulary", "12", "--model.oov-buckets", "4", "--model.hidden", "8"]
SMALL += ["--model.embedding", "8", "--model.projection", "8", "--rounds", "30", "--jax-devices", "1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run on posts in which everybody has a name of their own that follows `see`."""
    folder = tmp_path_factory.mktemp("text")
    posts = [
        {"client": f"c{c:02}", "time": t, "text": f"i see name{c} now . we saw you here ."}
        for c in range(60)
        for t in range(10)
    ]
    (folder / "posts.jsonl").write_text("".join(json.dumps(post) + "\n" for post in posts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDRECON_CACHE", str(folder / "cache"))
        assert main(["train", str(folder / "posts.jsonl"), "--out", str(folder / "run"), *SMALL]) == 0
        yield folder / "run"


def test_evaluation_says_what_people_get(run, capsys):
    capsys.readouterr()
    assert main(["evaluate", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for reading in ("impersonal", "personal", "personal_frozen", "counted bigrams", "counted trigrams"):
        assert set(found[reading]) == {"top1", "top3", "own_top3", "perplexity", "keystrokes"}
        assert all(0 <= found[reading][name] <= 1 for name in ("top1", "top3", "own_top3", "keystrokes"))
    assert found["impersonal"]["own_top3"] == 0
    assert found["personal"]["own_top3"] > 0.9  # names follow `see`
    assert found["personal"]["top3"] > found["impersonal"]["top3"]
    assert found["personal"]["perplexity"] <= found["impersonal"]["perplexity"]
    assert found["worse_off"] == 0
    assert found["repeating_people"] > 0
    assert {"counted bigrams", "counted trigrams"} <= set(found["baselines"])


def test_a_person_goes_on_writing(run):
    person = fr.recommend.load_completer(run).person("we saw you here .")
    assert not any(found.personal for found in person.suggest("i see", 5))
    for _ in range(2):
        person.learn("i see zorblax now .")
    assert "zorblax" in [found.word for found in person.suggest("i see", 5)]
    assert person.sentences == 3
