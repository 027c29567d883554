"""The audit: silent where a mechanism keeps its promise, loud where it does not."""

import json

import numpy as np
import pytest
from studies import audit as auditing
from studies.audit import audit_run

from fedrecon._src.privacy.accounting import Release, epsilon_of

CANARIES, LENGTH, ROUNDS, NOISE, CLIP, DELTA = 1200, 6000, 4, 2.0, 5.0, 1e-5


def clipped(upload):
    return upload * min(1, CLIP / np.linalg.norm(upload))


def honest(sum_of, rng):
    return sum_of + NOISE * CLIP * rng.standard_normal(LENGTH)


def half_the_noise(sum_of, rng):
    return sum_of + 0.5 * NOISE * CLIP * rng.standard_normal(LENGTH)


def measure(release=honest, clip=clipped, times=1, length_of_canaries=1.0, seed=0):
    """Train for some rounds with canaries among real clients, and audit what was released."""
    rng = np.random.default_rng(seed)
    canaries = auditing.Canaries(CANARIES, LENGTH, seed)
    people = rng.standard_normal((40, LENGTH))
    uploads = [canaries.upload(k, length_of_canaries * CLIP) for k in np.flatnonzero(canaries.inside)]
    total = np.sum([clip(person) for person in people], 0) + times * np.sum([clip(upload) for upload in uploads], 0)
    released = sum(release(total, rng) for _ in range(ROUNDS))
    scores, inside = canaries.scores(released), canaries.inside
    claimed = epsilon_of([Release(NOISE, 1.0, ROUNDS)], DELTA)
    return auditing.audit(scores[inside], scores[~inside], claimed=claimed, delta=DELTA)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_sound_mechanism_is_measured_below_its_claim(seed):
    found = measure(seed=seed, length_of_canaries=10)  # longer than the norm, and clipped to it
    assert found.claimed == pytest.approx(4.38, abs=0.01)
    assert 1 < found.measured < found.claimed  # a bound that says something, and no more than is true
    assert not found.broken
    assert "nothing speaks against the promise" in found.summary()


@pytest.mark.parametrize(
    "sabotage",
    [
        {"release": half_the_noise},
        {"clip": lambda upload: upload, "length_of_canaries": 10},
        {"times": 2},
    ],
    ids=["half the noise", "no clipping", "everybody twice"],
)
def test_every_sabotage_is_found(sabotage):
    found = measure(**sabotage)
    assert found.measured > 1.4 * found.claimed
    assert found.broken
    assert "the promise is broken" in found.summary()


# ---- the audit of whole mechanisms, as `python -m studies.audit` runs it ----


@pytest.mark.parametrize("seed", [0, 1])
def test_noise_of_round_zero_is_measured_below_its_claim_and_sabotage_above(seed):
    sound = audit_run(noise_by="round-zero", seed=seed)
    assert sound.claimed == pytest.approx(4.38, abs=0.02)
    assert 1 < sound.measured < sound.claimed
    for sabotage in ("half-noise", "twice"):
        broken = audit_run(noise_by="round-zero", sabotage=sabotage, seed=seed)
        assert broken.broken
        assert broken.measured > 1.2 * broken.claimed
    with pytest.raises(ValueError, match="round zero does not clip"):
        audit_run(noise_by="round-zero", sabotage="no-clipping")


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", ["none", "half-noise", "no-clipping", "twice"])
def test_noise_of_the_clients_in_integers_is_audited_too(sabotage):
    found = audit_run(noise_by="clients", sabotage=sabotage)
    assert found.claimed == pytest.approx(4.75, abs=0.02)
    assert found.broken == (sabotage != "none")
    assert found.measured > (1 if sabotage == "none" else 1.3 * found.claimed)


def test_scores_of_pure_noise_measure_next_to_nothing():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        found = auditing.audit(rng.normal(size=400), rng.normal(size=400), claimed=0.5, delta=1e-5)
        assert found.measured == 0
        assert 0.4 < found.auc < 0.6


@pytest.mark.parametrize("shift", [0.5, 1.0, 2.0, 4.0])
def test_the_bound_holds_as_often_as_it_says_and_comes_near(shift):
    bounds = []
    for seed in range(40):
        rng = np.random.default_rng((seed, 1))
        bounds.append(auditing.least_shift(rng.normal(shift, 1, 2000), rng.normal(0, 1, 2000), 0.95))
    assert np.mean(np.array(bounds) <= shift) >= 0.95
    assert np.median(bounds) > shift - 0.25 if shift < 4 else np.median(bounds) > 3.4


def test_epsilon_of_a_shift_is_that_of_the_gaussian_mechanism():
    assert auditing.epsilon_of_shift(1.0, DELTA) == pytest.approx(epsilon_of([Release(1.0, 1.0, 1)], DELTA), rel=1e-2)
    assert auditing.epsilon_of_shift(0.0, DELTA) == 0


def test_canaries_are_of_the_clipping_norm_and_at_right_angles():
    canaries = auditing.Canaries(40, 1010, 3)
    uploads = np.stack([canaries.upload(k, 2.5) for k in range(40)])
    assert uploads @ uploads.T == pytest.approx(2.5**2 * np.eye(40), abs=1e-9)
    assert canaries.scores(uploads[7] + 3 * uploads[9]) == pytest.approx(2.5 * np.eye(40)[7] + 7.5 * np.eye(40)[9])
    assert 150 < auditing.Canaries(400, 400, 0).inside.sum() < 250
    with pytest.raises(ValueError, match="must be from 20 to 49, the length of an upload"):
        auditing.Canaries(50, 49, 0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"inside": np.zeros(3)}, r"`inside` must be .* finite scores \(got shape \(3,\)\)"),
        ({"outside": np.full(20, np.nan)}, "`outside` must be .* finite scores"),
        ({"confidence": 1.0}, "`confidence`"),
        ({"claimed": 0.0}, "`claimed`"),
        ({"delta": 1.0}, "`delta`"),
    ],
)
def test_audits_that_cannot_be_are_refused(change, sentence):
    values = {"inside": np.zeros(20), "outside": np.zeros(20), "claimed": 1.0, "delta": 1e-5} | change
    with pytest.raises(ValueError, match=sentence):
        auditing.audit(**values)


@pytest.mark.slow
def test_the_command_is_silent_on_a_sound_run_and_finds_a_sabotage(capsys):
    assert auditing.main(["--json"]) == 0
    sound = json.loads(capsys.readouterr().out)
    assert 1 < sound["measured"] < sound["claimed"]
    assert auditing.main(["--sabotage", "no-clipping"]) == 1
    assert "the promise is broken" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", ["half-noise", "twice"])
def test_every_sabotage_of_a_run_is_found(sabotage, capsys):
    assert auditing.main(["--sabotage", sabotage]) == 1
    assert "the promise is broken" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("noise_multiplier", "1e-300"),
        ("rounds", str(2**70)),
        ("rounds", "0"),
        ("canaries", str(2**70)),
        ("seed", str(2**70)),
    ],
)
def test_an_error_of_the_command_names_the_option(option, value, capsys):
    assert auditing.main([f"--{option.replace('_', '-')}", value]) == 1
    assert f"`{option}`" in capsys.readouterr().err
