import dataclasses
import json
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from studies import figures, movielens
from studies.__main__ import main
from studies.ratings import KIND, RatingsData, Row, Scores, beyond_section, few_section, paper_section, run_job, scores
from studies.report import compose, to_html, to_markdown
from studies.runner import Plan, Store, reproduce
from studies.study import Claim, Figure, Job, Spread, Study, Table, spread

import fedrecon as fr
from fedrecon._src.recommend.config import Data, Factorization, RatingsConfig, Reconstruct, Update

pytestmark = pytest.mark.slow

TINY = RatingsConfig(
    data=Data(source=""),
    model=Factorization(dim=2, biases=True, init_mean=3.5),
    reconstruct=Reconstruct(steps=3),
    update=Update(steps=2),
    sampling=fr.Sampling(4),
    rounds=2,
    evaluate_every=1,
)
BASE = Job("base", "base", TINY, grid={"server.learning_rate": (0.5, 1.0)})
NONE = Job("none", "no steps", dataclasses.replace(TINY, reconstruct=Reconstruct(steps=0)), continue_to=4)
CENTRAL = Job(
    "central",
    "central",
    dataclasses.replace(TINY, update=Update(learning_rate=0.5, batch_size=20, steps=None), rounds=1),
    "centralized",
    measures=("random", "recon"),
)
STUDY = Study(
    name="movielens",
    title="A tiny study",
    kind=KIND,
    jobs=(BASE, CENTRAL, NONE),
    sections=(
        paper_section((Row("Base", "base", "recon", (0.9, 40.0)), Row("Central", "central", "random", (3.8, 0.0)))),
        beyond_section((Row("No steps", "none"),)),
    ),
    figures=(
        Figure(
            "steps",
            "Accuracy against steps",
            "Each point trained.",
            ("none", "base"),
            *figures.relative_accuracy({0: "none", 3: "base"}, "base", "reconstruction"),
        ),
        Figure("loss", "Loss", "A.", ("base", "none"), *figures.losses({"a": "base", "b": "none"}, "loss", "server")),
        Figure("sent", "Sent", "B.", ("base",), *figures.communication({"a": ("base", "recon")})),
        Figure("users", "Users", "C.", ("central",), *figures.rmse_distribution({"a": "central"})),
    ),
    claims=(movielens.claim("No steps give nothing", ("none", "base"), movielens.gives_nothing, "no steps"),),
)


def with_config(job, **changes):
    return dataclasses.replace(job, config=dataclasses.replace(job.config, **changes))


@pytest.fixture(scope="module")
def ratings():
    return fr.data.synthetic_ratings(num_users=40, num_items=30, mean_ratings=12, seed=1)


@pytest.fixture(scope="module")
def csv(ratings, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "ratings.csv"
    lines = ["user,item,rating,time"]
    for name, client in zip(ratings.names, ratings, strict=True):
        rows = zip(client["item"], client["rating"], client["time"], strict=True)
        lines += [f"{name},{item},{rating:g},{time}" for item, rating, time in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def finished(csv, tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    lines = []
    reproduce(STUDY, Plan(str(csv), folder, seeds=1, workers=1), log=lines.append)
    return folder, lines


def test_a_study_leaves_a_file_for_every_job_and_seed(finished):
    folder, lines = finished
    names = {path.name for path in (folder / "rows").glob("*.json")}
    assert names == {"base-0.json", "central-0.json", "none-0.json"}
    assert len(lines) == 3
    assert re.match(r"\[1 of 3, about \d+ min left\] base, seed 0: recon: rmse \d", lines[0])


def test_a_study_never_runs_a_finished_job_again(finished, csv):
    folder, _ = finished
    before = {path: path.read_bytes() for path in (folder / "rows").iterdir()}
    (folder / "rows" / "base-0.json").write_text('{"digest": "cut o')
    lines = []
    reproduce(STUDY, Plan(str(csv), folder, seeds=1, workers=1), log=lines.append)
    assert len(lines) == 1
    assert lines[0].startswith("[1 of 1, about 0 min left] base, seed 0")
    same = {path: data for path, data in before.items() if path.name != "base-0.json"}
    assert all(path.read_bytes() == data for path, data in same.items())


def test_a_job_is_run_again_when_its_settings_or_the_data_change(finished, csv, ratings):
    folder, _ = finished
    same, changed = (Store(folder, clients.fingerprint()) for clients in (fr.data.load(csv), ratings.cap(5)))
    assert same.load(BASE, 0) is not None
    assert same.load(with_config(BASE, rounds=3), 0) is None
    assert changed.load(BASE, 0) is None
    assert len({BASE.digest(0, "a"), BASE.digest(1, "a"), BASE.digest(0, "b"), NONE.digest(0, "a")}) == 4


def test_a_result_depends_on_the_seed_alone(finished, csv):
    folder, _ = finished
    data = RatingsData(fr.data.load(csv))
    first = json.loads((folder / "rows" / "base-0.json").read_text())["evaluations"]
    again, other = (run_job(BASE, data, seed)["evaluations"] for seed in (0, 1))
    assert json.loads(json.dumps(again)) == first
    assert again != other


def test_spreads_are_over_seeds():
    assert spread([1.0, 3.0]) == (2.0, pytest.approx(2**0.5), 2)
    assert spread([1.0]) == (1.0, 0.0, 1)


def test_continuing_reports_the_shorter_run_unchanged(finished):
    folder, _ = finished
    result = json.loads((folder / "rows" / "none-0.json").read_text())
    assert [entry["round"] for entry in result["evaluations"]] == [1, 2, 3, 4]
    assert len(result["losses"]) == 4
    assert scores([result]).rounds == 2
    assert scores([result], rounds=4).rounds == 4
    report = (folder / "report.md").read_text()
    assert "No steps, continued" in report


def test_only_runs_what_a_row_or_figure_needs(csv, tmp_path):
    reproduce(STUDY, Plan(str(csv), tmp_path, seeds=1, only=("sent",), workers=1), log=lambda line: None)
    assert [path.name for path in (tmp_path / "rows").iterdir()] == ["base-0.json"]
    report = (tmp_path / "report.md").read_text()
    assert "Not run: Central." in report
    assert "not measured; missing none" in report
    with pytest.raises(ValueError, match="'bass'"):
        STUDY.select(["bass"])
    assert [job.name for job in STUDY.select(["steps"])] == ["base", "none"]


def test_figures_hold_their_points(finished):
    folder, _ = finished
    steps = json.loads((folder / "figures" / "steps.json").read_text())
    assert [point["steps"] for point in steps["points"]] == [0, 3]
    assert steps["points"][1]["relative"] == 1
    loss = json.loads((folder / "figures" / "loss.json").read_text())
    assert [len(line["loss"]) for line in loss["series"]] == [2, 2]
    sent = json.loads((folder / "figures" / "sent.json").read_text())["series"][0]
    assert sent["sent_per_client_and_round"] == 2 * 91
    assert sent["communicated"] == [4 * 182, 8 * 182]
    users = json.loads((folder / "figures" / "users.json").read_text())["series"][0]
    assert len(users["rmse"]) + users["diverged"] == users["users"] > 0
    assert all((folder / "figures" / f"{name}.png").exists() for name in ("steps", "loss", "sent", "users"))


def test_the_command_writes_a_report_that_needs_no_other_file(csv, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(movielens, "STUDY", STUDY)
    page = tmp_path / "page.md"
    out = tmp_path / "out"
    argv = ["movielens", "--data", str(csv), "--out", str(out), "--quick", "--tune", "--page", str(page)]
    argv += ["--workers", "1"]
    assert main(argv) == 0
    assert "report.html" in capsys.readouterr().out
    text = (out / "report.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert len(sources) == 4
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "<script" not in text
    assert "No steps give nothing" in text
    assert (out / "rows" / "base-0-quick.json").exists()
    trials = json.loads((out / "tune.json").read_text())
    assert [trial["values"] for trial in trials] == [{"server.learning_rate": 0.5}, {"server.learning_rate": 1.0}]
    assert page.read_text().count("(best)") == 1
    assert str(tmp_path) not in page.read_text()
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", page.read_text())
    assert len(pictures) == 4
    assert all((tmp_path / picture).read_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert "Settings tried on validation data" in page.read_text()
    assert main(["movielens", "--data", str(csv), "--out", str(out), "--only", "bass"]) == 1


@pytest.mark.parametrize("train", ["fedavg", "fedavg-dense", "centralized"])
def test_seen_users_are_measured_with_their_trained_parameters(ratings, train):
    job = dataclasses.replace(BASE, method=train, users="seen", measures=("trained",))
    result = run_job(job, RatingsData(ratings), 0)
    last = result["evaluations"][-1]["trained"]
    assert last["protocol"] == "standard"
    assert last["clients"] <= 40
    assert result["local"] == (3 if train == "fedavg" else 0)
    whole = 91 + (0 if train == "fedavg" else 40 * 3)
    assert result["global"] == whole
    assert result["sent"] == (0 if train == "centralized" else 2 * whole)


def test_centralized_training_is_descent_on_all_examples(ratings):
    pooled = fr.data.pooled(ratings, seed=3)
    assert len(pooled) == 1
    assert pooled.num_examples == ratings.num_examples
    owned = fr.data.with_owner(ratings.take([5, 2]))
    assert set(owned[0]["client"]) == {0}
    np.testing.assert_array_equal(owned[1]["item"], ratings[2]["item"])
    counts = np.bincount(pooled.columns["client"], minlength=len(ratings))
    np.testing.assert_array_equal(counts, ratings.sizes)


def test_few_support_ratings_leave_the_query_alone(ratings):
    few = fr.split.at_most(2, fr.split.half())
    sizes = np.array([0, 1, 3, 10])
    support, query = few.counts(sizes)
    np.testing.assert_array_equal(support, [0, 1, 2, 2])
    np.testing.assert_array_equal(query, fr.split.half().counts(sizes)[1])
    result = run_job(dataclasses.replace(BASE, few=(0, 2)), RatingsData(ratings), 0)
    examples = result["evaluations"][-1]["recon"]["examples"]
    assert {n: entry["examples"] for n, entry in result["few"].items()} == {"0": examples, "2": examples}


def of(rmse, accuracy, deviation=0.001):
    return Scores(Spread(rmse, deviation, 3), Spread(accuracy, 0.1, 3), 500, 604, 2.0)


@pytest.mark.parametrize(
    ("verdict", "held", "says"),
    [
        (movielens.matches(of(0.91, 43.3), of(0.923, 43.2), ("a", "b")), True, "1.4% lower"),
        (movielens.matches(of(0.96, 43.3), of(0.923, 43.2), ("a", "b")), False, "4.0% higher"),
        (movielens.matches(of(0.91, 41.0), of(0.923, 43.2), ("a", "b")), False, "accuracy 41.0 %"),
        (movielens.much_worse(of(1.36, 40.8), of(0.907, 43.3), ("a", "b")), True, "2.0 of 604 users diverged"),
        (movielens.much_worse(of(0.95, 40.8), of(0.907, 43.3), ("a", "b")), False, "5% higher"),
        (movielens.recovers_most(of(0.95, 40.0), of(0.9, 43.3), "one step"), True, "92% of the accuracy"),
        (movielens.recovers_most(of(2.0, 20.0), of(0.9, 43.3), "one step"), False, "46% of the accuracy"),
        (movielens.gives_nothing(of(3.8, 0.0), of(0.9, 43.3), "no steps"), True, "0.0% of the accuracy"),
        (movielens.gives_nothing(of(1.1, 35.0), of(0.9, 43.3), "no steps"), False, "80.8% of the accuracy"),
        (movielens.cost_little({"x": of(0.912, 42.5), "y": of(0.915, 42.1)}, of(0.907, 43.3)), True, "+0.9%"),
        (movielens.cost_little({"x": of(0.912, 42.5), "y": of(0.97, 40.0)}, of(0.907, 43.3)), False, "+6.9%"),
        (movielens.helps(of(0.883, 44.1), of(0.907, 43.3), ("a", "b")), True, "0.024 lower"),
        (movielens.helps(of(0.906, 44.1, 0.002), of(0.907, 43.3), ("a", "b")), False, "spread over seeds (0.002)"),
        (movielens.helps(of(0.92, 42.0), of(0.907, 43.3), ("a", "b")), False, "0.013 higher"),
    ],
)
def test_verdicts_follow_from_the_numbers(verdict, held, says):
    assert verdict[0] is held
    assert says in verdict[1]


def test_a_report_says_of_every_claim_whether_it_held(finished):
    folder, _ = finished
    text = (folder / "report.md").read_text()
    assert re.search(r"\*\*No steps give nothing\*\*: (holds|does not hold)\. no steps: RMSE", text)
    empty = to_markdown(compose(movielens.STUDY, {}, [], folder), folder)
    for claim in movielens.STUDY.claims:
        assert f"**{claim.text}**: not measured" in empty


def test_a_quick_study_judges_no_claim(tmp_path):
    claims = (Claim("It holds", ("base",), lambda results: (True, "By a lot.")),)
    study = dataclasses.replace(STUDY, sections=(), figures=(), claims=claims)
    report = to_markdown(compose(study, {"base": [{}]}, [], tmp_path, quick=True), tmp_path)
    assert "**No claim is judged**" in report
    assert "**It holds**: not judged. By a lot." in report


def test_a_page_has_no_marks_of_markdown():
    page = to_html(["# Title", "Run `a < b` **now**.", ["`one`"], Table(("`head`",), [("`cell`",)])])
    assert "<code>a &lt; b</code> <strong>now</strong>" in page
    assert page.count("<code>") == 4
    assert "`" not in page


def test_baselines_of_a_study_are_those_of_the_library_on_the_same_query(ratings):
    data = RatingsData(ratings)
    division = data.divide("unseen", 1)
    names = ("global mean", "item + user bias")
    job = dataclasses.replace(with_config(BASE, rounds=1), method="baselines", measures=names)
    (entry,) = run_job(job, data, 1)["evaluations"]
    expected = fr.recommend.rating_baselines(division.train, division.test, num_items=ratings.num_items)
    trained = fr.evaluate(*_nothing_learned(ratings), division.test)
    for name in names:
        assert entry[name]["micro"] == expected.table[name]
        assert entry[name]["examples"] == trained.examples
        assert entry[name]["clients"] == trained.clients
    result = {"evaluations": [entry], "settings": {"config": {"rounds": 1}}}
    assert scores([result], names[0]).users == trained.clients


def _nothing_learned(ratings):
    algorithm = fr.federated_reconstruction(
        fr.models.matrix_factorization(ratings.num_items, dim=1),
        reconstruct=fr.least_squares(1.0),
        update=fr.gradient_descent(optax.sgd(0.1), batch_size=5, steps=1),
        server=optax.sgd(1.0),
    )
    return algorithm, algorithm.params(algorithm.init(jax.random.key(0)))


def test_the_movielens_study_has_the_papers_rows_in_order():
    rmse = [row.paper[0] for row in movielens.ROWS if row.paper]
    assert list(dict.fromkeys(rmse)) == [0.923, 3.80, 1.36, 0.939, 0.934, 0.907, 0.912, 0.915, 0.883]
    for job in movielens.STUDY.jobs:
        config, quick = job.config, job.shorten(40, {})
        assert (job.continue_to or 0) % config.evaluate_every == config.rounds % config.evaluate_every == 0
        assert quick.continue_to is None
        assert quick.config.rounds <= 40
        assert quick.config.rounds % quick.config.evaluate_every == 0


def test_jobs_side_by_side_give_what_they_give_one_after_another(finished, csv, tmp_path):
    sequential, lines = finished[0], []
    plan = Plan(str(csv), tmp_path, seeds=1, only=("base", "central"), workers=2)
    reproduce(STUDY, plan, log=lines.append)
    assert [line[:6] for line in lines] == ["[1 of ", "[2 of "]
    for name in ("base-0.json", "central-0.json"):
        parallel, expected = (json.loads((folder / "rows" / name).read_text()) for folder in (tmp_path, sequential))
        assert parallel["losses"] == pytest.approx(expected["losses"], 1e-4)
        assert parallel["digest"] == expected["digest"]
    lines.clear()
    reproduce(STUDY, plan, log=lines.append)
    assert lines == [], "finished jobs were run again"


def test_a_job_that_fails_in_a_process_is_an_error_here(csv, tmp_path):
    impossible = dataclasses.replace(BASE, measures=("recon", "nothing"), method="baselines")
    study = dataclasses.replace(STUDY, jobs=(impossible, *STUDY.jobs[1:]))
    with pytest.raises(ValueError, match="nothing"):
        reproduce(study, Plan(str(csv), tmp_path, seeds=1, only=("base", "central"), workers=2), log=print)


def test_users_with_few_ratings_have_rows_as_far_as_they_were_measured():
    jobs = [dataclasses.replace(BASE, name=name, title=name, few=(0, 2)) for name in ("short", "gone")] + [BASE]
    section = few_section(jobs)
    assert section.jobs == ("short", "gone")
    entry = {"micro": {"rmse": 1.0, "accuracy": 0.35}, "clients": 9, "diverged": 0}
    table = section.compose({"short": [{"settings": {"config": {"rounds": 2}}, "few": {"0": entry}}]})[0]
    assert table.rows == [("short", "0", "1.000", "35.0", "2")]


def test_a_study_is_only_written_to_its_own_folder(tmp_path, capsys):
    (tmp_path / "report.md").write_text("mine")
    assert main(["movielens", "--data", "none.zip", "--out", str(tmp_path)]) == 1
    assert "`out`" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]
    page = tmp_path / "thesis.md"
    page.write_text("# Mine\n")
    argv = ["movielens", "--data", "none.zip", "--out", str(tmp_path / "study"), "--page", str(page)]
    assert main(argv) == 1
    assert "`page`" in capsys.readouterr().err
    assert page.read_text() == "# Mine\n"


def test_a_killed_study_leaves_no_process_behind(csv, tmp_path):
    command = [sys.executable, "-m", "studies", "movielens", "--data", str(csv), "--out", str(tmp_path)]
    with subprocess.Popen([*command, "--quick", "--workers", "2"], stderr=subprocess.PIPE, text=True) as study:
        first = study.stderr.readline()
        study.send_signal(signal.SIGKILL)
        # The pipe ends when nobody holds it any more: neither the study nor a process that it began.
        study.communicate(timeout=120)
    assert first.startswith("[1 of ")
