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
from studies import claims, figures, movielens
from studies.numbers import Measured, Spread, measured, spread
from studies.rating_jobs import Divided, Setting, run_job, shortened
from studies.rating_tables import RATINGS, Row, beyond_section, few_section, paper_section
from studies.report import compose, to_html, to_markdown
from studies.reproduce import Plan, reproduce
from studies.runner import Runner
from studies.study import Claim, Figure, Job, Study, Table, digest

import fedrecon as fr
from fedrecon._src.app.cli import main
from fedrecon._src.app.config import Factorization, Reconstruct, Update

pytestmark = pytest.mark.slow

TINY = Setting(
    model=Factorization(dim=2, biases=True, init_mean=3.5),
    reconstruct=Reconstruct(steps=3),
    update=Update(steps=2),
    clients_per_round=4,
    rounds=2,
    every=1,
)
NONE = dataclasses.replace(TINY, reconstruct=Reconstruct(steps=0))
CENTRAL = dataclasses.replace(
    TINY,
    train="centralized",
    update=Update(learning_rate=0.5, batch_size=20, steps=None),
    measures=("random", "recon"),
    rounds=1,
)
STUDY = Study(
    name="tiny",
    title="A tiny study",
    kind=RATINGS,
    jobs=(
        Job("base", "base", TINY, {"server.learning_rate": (0.5, 1.0)}),
        Job("central", "central", CENTRAL),
        Job("none", "no steps", dataclasses.replace(NONE, on_to=4)),
    ),
    sections=(
        paper_section((Row("Base", "base", "recon", (0.9, 40.0)), Row("Central", "central", "random", (3.8, 0.0)))),
        beyond_section((Row("No steps", "none", "recon"),)),
    ),
    figures=(
        Figure(
            "steps",
            "Accuracy against steps",
            "Each point trained.",
            ("none", "base"),
            figures.relative_accuracy({0: "none", 3: "base"}, "base"),
            figures.draw_relative_accuracy("reconstruction"),
        ),
        Figure(
            "loss",
            "Loss",
            "A.",
            ("base", "none"),
            figures.losses({"a": "base", "b": "none"}),
            figures.draw_losses("loss", "server"),
        ),
        Figure("sent", "Sent", "B.", ("base",), figures.communication({"a": "base"}), figures.draw_communication),
        Figure(
            "users",
            "Users",
            "C.",
            ("central",),
            figures.distribution({"a": ("central", "recon")}),
            figures.draw_distribution,
        ),
    ),
    claims=(
        Claim(
            "No steps give nothing",
            ("none", "base"),
            lambda found: claims.gives_nothing(claims.of(found, "none"), claims.of(found, "base"), "no steps"),
        ),
    ),
)


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
    said = []
    reproduce(STUDY, Plan(str(csv), folder, seeds=1, workers=1), say=said.append)
    return folder, said


def test_a_study_leaves_a_file_for_every_job_and_seed(finished):
    folder, said = finished
    names = {path.name for path in (folder / "rows").glob("*.json")}
    assert names == {"base-0.json", "central-0.json", "none-0.json"}
    assert sum(line.startswith("[") for line in said) == 3
    assert said[0].startswith("[1 of 3] base, seed 0")
    assert said[1].startswith("    base, seed 0: recon: RMSE ")


def test_a_study_never_runs_a_finished_job_again(finished, csv):
    folder, _ = finished
    before = {path: path.read_bytes() for path in (folder / "rows").iterdir()}
    (folder / "rows" / "base-0.json").write_text('{"digest": "cut o')
    said = []
    reproduce(STUDY, Plan(str(csv), folder, seeds=1, workers=1), say=said.append)
    assert [line for line in said if line.startswith("[")] == ["[1 of 1] base, seed 0"]
    same = {path: data for path, data in before.items() if path.name != "base-0.json"}
    assert all(path.read_bytes() == data for path, data in same.items())


def test_a_job_is_run_again_when_its_settings_or_the_data_change(finished, csv, ratings):
    folder, _ = finished
    job = STUDY.jobs[0]
    same, changed = (Runner(RATINGS, folder, Divided(data, 300)) for data in (fr.data.load(csv), ratings.cap(5)))
    other = dataclasses.replace(job, setting=dataclasses.replace(TINY, rounds=3))
    assert same.finished(job, 0) is not None
    assert same.finished(other, 0) is None
    assert changed.finished(job, 0) is None
    assert len({digest(TINY, 0, "a"), digest(TINY, 1, "a"), digest(TINY, 0, "b"), digest(NONE, 0, "a")}) == 4


def test_a_result_depends_on_the_seed_alone(finished, csv):
    folder, _ = finished
    divided = Divided(fr.data.load(csv), 300)
    first = json.loads((folder / "rows" / "base-0.json").read_text())["evaluations"]
    again, other = (run_job(TINY, divided, seed)["evaluations"] for seed in (0, 1))
    assert json.loads(json.dumps(again)) == first
    assert again != other


def test_spreads_are_over_seeds():
    assert spread([1.0, 3.0]) == (2.0, pytest.approx(2**0.5), 2)
    assert spread([1.0]) == (1.0, 0.0, 1)


def test_running_on_reports_the_shorter_run_unchanged(finished):
    folder, _ = finished
    result = json.loads((folder / "rows" / "none-0.json").read_text())
    assert [entry["round"] for entry in result["evaluations"]] == [1, 2, 3, 4]
    assert len(result["losses"]) == 4
    assert measured([result]).rounds == 2
    assert measured([result], rounds=4).rounds == 4
    report = (folder / "report.md").read_text()
    assert "No steps, run on" in report


def test_only_runs_what_a_row_or_figure_needs(csv, tmp_path):
    reproduce(STUDY, Plan(str(csv), tmp_path, seeds=1, only=("sent",), workers=1), say=lambda line: None)
    assert [path.name for path in (tmp_path / "rows").iterdir()] == ["base-0.json"]
    report = (tmp_path / "report.md").read_text()
    assert "Missing, not run: Central." in report
    assert "not measured; missing none" in report
    with pytest.raises(ValueError, match="no row or figure 'bass'"):
        STUDY.choose(["bass"])
    assert [job.name for job in STUDY.choose(["steps"])] == ["base", "none"]


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
    argv = ["reproduce", "movielens", "--data", str(csv), "--out", str(out), "--quick", "--tune", "--page", str(page)]
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
    tried = json.loads((out / "tune.json").read_text())["tried"]
    assert [one["values"] for one in tried] == [{"server.learning_rate": 0.5}, {"server.learning_rate": 1.0}]
    assert sum(one["best"] for one in tried) == 1
    assert str(tmp_path) not in page.read_text()
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", page.read_text())
    assert len(pictures) == 4
    assert all((tmp_path / picture).read_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert "Settings tried on validation data" in page.read_text()
    assert main(["reproduce", "movielens", "--data", str(csv), "--out", str(out), "--only", "bass"]) == 1


@pytest.mark.parametrize("train", ["fedavg", "fedavg-dense", "centralized"])
def test_seen_users_are_measured_with_what_they_kept(ratings, train):
    setting = dataclasses.replace(TINY, train=train, users="seen", measures=("kept",))
    found = run_job(setting, Divided(ratings, 300), 0)
    last = found["evaluations"][-1]["kept"]
    assert last["protocol"] == "standard"
    assert last["clients"] <= 40
    assert found["local"] == (3 if train == "fedavg" else 0)
    whole = 91 + (0 if train == "fedavg" else 40 * 3)
    assert found["global"] == whole
    assert found["sent"] == (0 if train == "centralized" else 2 * whole)


def test_centralized_training_is_descent_on_all_examples(ratings):
    pooled = fr.pooled(ratings, seed=3)
    assert len(pooled) == 1
    assert pooled.num_examples == ratings.num_examples
    owned = fr.with_owner(ratings.take([5, 2]))
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
    found = run_job(dataclasses.replace(TINY, few=(0, 2)), Divided(ratings, 300), 0)
    assert {n: one["examples"] for n, one in found["few"].items()} == dict.fromkeys(
        ("0", "2"), found["evaluations"][-1]["recon"]["examples"]
    )


def of(rmse, accuracy, deviation=0.001):
    return Measured(Spread(rmse, deviation, 3), Spread(accuracy, 0.1, 3), 500, 604, 2.0)


@pytest.mark.parametrize(
    ("verdict", "held", "says"),
    [
        (claims.matches(of(0.91, 43.3), of(0.923, 43.2), ("a", "b")), True, "1.4% lower"),
        (claims.matches(of(0.96, 43.3), of(0.923, 43.2), ("a", "b")), False, "4.0% higher"),
        (claims.matches(of(0.91, 41.0), of(0.923, 43.2), ("a", "b")), False, "accuracy 41.0 %"),
        (claims.much_worse(of(1.36, 40.8), of(0.907, 43.3), ("a", "b")), True, "2.0 of 604 users diverged"),
        (claims.much_worse(of(0.95, 40.8), of(0.907, 43.3), ("a", "b")), False, "5% higher"),
        (claims.recovers_most(of(0.95, 40.0), of(0.9, 43.3), "one step"), True, "92% of the accuracy"),
        (claims.recovers_most(of(2.0, 20.0), of(0.9, 43.3), "one step"), False, "46% of the accuracy"),
        (claims.gives_nothing(of(3.8, 0.0), of(0.9, 43.3), "no steps"), True, "0.0% of the accuracy"),
        (claims.gives_nothing(of(1.1, 35.0), of(0.9, 43.3), "no steps"), False, "80.8% of the accuracy"),
        (claims.cost_little({"x": of(0.912, 42.5), "y": of(0.915, 42.1)}, of(0.907, 43.3)), True, "+0.9%"),
        (claims.cost_little({"x": of(0.912, 42.5), "y": of(0.97, 40.0)}, of(0.907, 43.3)), False, "+6.9%"),
        (claims.helps(of(0.883, 44.1), of(0.907, 43.3), ("a", "b")), True, "0.024 lower"),
        (claims.helps(of(0.906, 44.1, 0.002), of(0.907, 43.3), ("a", "b")), False, "spread over seeds (0.002)"),
        (claims.helps(of(0.92, 42.0), of(0.907, 43.3), ("a", "b")), False, "0.013 higher"),
    ],
)
def test_verdicts_follow_from_the_numbers(verdict, held, says):
    assert verdict[0] is held
    assert says in verdict[1]


def test_a_report_says_of_every_claim_whether_it_held(finished):
    folder, _ = finished
    text = (folder / "report.md").read_text()
    assert re.search(r"\*\*No steps give nothing\*\*: (held|did not hold)\. no steps: RMSE", text)
    empty = to_markdown(compose(movielens.STUDY, {}, [], folder), folder)
    for claim in movielens.STUDY.claims:
        assert f"**{claim.text}**: not measured" in empty


def test_a_quick_study_judges_no_claim(finished):
    folder, _ = finished
    found = {job: [{"setting": {"rounds": 1}}] for job in ("base", "none")}
    study = dataclasses.replace(
        STUDY, sections=(), figures=(), claims=(Claim("It holds", ("base",), lambda results: (True, "By a lot.")),)
    )
    told = to_markdown(compose(study, {"base": found["base"]}, [], folder, quick=True), folder)
    assert "**No claim is judged**" in told
    assert "**It holds**: not judged. By a lot." in told


def test_a_page_has_no_marks_of_markdown():
    page = to_html(["# Title", "Run `a < b` **now**.", ["`one`"], Table(("`head`",), [("`cell`",)])])
    assert "<code>a &lt; b</code> <strong>now</strong>" in page
    assert page.count("<code>") == 4
    assert "`" not in page


def test_baselines_of_a_study_are_those_of_the_library_on_the_same_query(ratings):
    divided = Divided(ratings, 300)
    parts = divided.of("unseen", 1)
    names = ("global mean", "item + user bias")
    setting = Setting(train="baselines", measures=names, rounds=1, every=1)
    (found,) = run_job(setting, divided, 1)["evaluations"]
    expected = fr.recommend.rating_baselines(parts.train, parts.test, which=names, num_items=ratings.num_items)
    trained = fr.evaluate(*_nothing_learned(ratings), parts.test)
    for name in names:
        assert found[name]["micro"] == expected.table[name]
        assert found[name]["examples"] == trained.examples
        assert found[name]["clients"] == trained.clients
    assert measured([{"evaluations": [found], "setting": {"rounds": 1}}], names[0]).users == trained.clients


def _nothing_learned(ratings):
    algorithm = fr.federated_reconstruction(
        fr.models.matrix_factorization(ratings.num_items, dim=1),
        reconstruct=fr.least_squares(1.0),
        update=fr.gradient_descent(optax.sgd(0.1), batch_size=5, steps=1),
        server=optax.sgd(1.0),
    )
    return algorithm, algorithm.params(algorithm.init(jax.random.key(0)))


def test_the_movielens_study_has_the_papers_rows_in_order():
    paper = [row for row in movielens.ROWS if row.paper]
    in_order = list(dict.fromkeys(row.paper[0] for row in paper))
    assert in_order == [0.923, 3.80, 1.36, 0.939, 0.934, 0.907, 0.912, 0.915, 0.883]
    quick = [shortened(job, 100, 5) for job in movielens.STUDY.jobs]
    assert all(job.setting.last_round <= 100 and job.setting.rounds % job.setting.every == 0 for job in quick)
    assert all(
        job.setting.last_round % job.setting.every == 0 and job.setting.rounds % job.setting.every == 0
        for job in movielens.STUDY.jobs
    )


def test_jobs_side_by_side_find_what_they_find_one_after_another(finished, csv, tmp_path):
    alone, said = finished[0], []
    plan = Plan(str(csv), tmp_path, seeds=1, only=("base", "central"), workers=2)
    reproduce(STUDY, plan, say=said.append)
    assert sorted(line for line in said if line.startswith("[")) == [
        "[1 of 2] base, seed 0",
        "[2 of 2] central, seed 0",
    ]
    assert sum(line.startswith("    ") for line in said) == 2
    for name in ("base-0.json", "central-0.json"):
        one, other = (json.loads((folder / "rows" / name).read_text()) for folder in (tmp_path, alone))
        assert one["losses"] == pytest.approx(other["losses"], 1e-4)
        assert one["digest"] == other["digest"]
    said.clear()
    reproduce(STUDY, plan, say=said.append)
    assert said == [], "finished jobs were run again"


def test_a_job_that_fails_in_a_process_is_an_error_here(csv, tmp_path):
    impossible = dataclasses.replace(TINY, split="nothing")
    study = dataclasses.replace(STUDY, jobs=(Job("base", "base", impossible), *STUDY.jobs[1:]))
    with pytest.raises(ValueError, match="unknown split 'nothing'"):
        reproduce(study, Plan(str(csv), tmp_path, seeds=1, only=("base",), workers=2), say=print)


def test_users_with_few_ratings_are_told_of_as_far_as_they_were_measured():
    jobs = [Job(name, name, dataclasses.replace(TINY, few=(0, 2))) for name in ("short", "gone")] + [STUDY.jobs[0]]
    section = few_section(jobs)
    assert section.jobs == ("short", "gone")
    measured = {"micro": {"rmse": 1.0, "accuracy": 0.35}, "clients": 9, "diverged": 0}
    table = section.compose({"short": [{"setting": {"rounds": 2}, "few": {"0": measured}}]})[0]
    assert table.lines == [("short", "0", "1.000", "35.0", "2")]


def test_a_killed_study_leaves_no_process_behind(csv, tmp_path):
    command = [sys.executable, "-m", "fedrecon", "reproduce", "movielens", "--data", str(csv), "--out", str(tmp_path)]
    with subprocess.Popen([*command, "--quick", "--workers", "2"], stderr=subprocess.PIPE, text=True) as study:
        first = study.stderr.readline()
        study.send_signal(signal.SIGKILL)
        # The pipe ends when nobody holds it any more: neither the study nor a process that it began.
        study.communicate(timeout=120)
    assert first.startswith("[1 of ")
