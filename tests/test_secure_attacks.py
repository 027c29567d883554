"""Secure sums under attack: a server that lies, clients that lie, inputs at and beyond every bound."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

import fedrecon as fr
from fedrecon._src.privacy import ring
from fedrecon._src.privacy import secure_sum as ss
from fedrecon._src.privacy.noise import share_of_noise
from fedrecon._src.privacy.secure_sum import primitives, sum_messages
from fedrecon._src.privacy.secure_sum.primitives import add_mask
from fedrecon._src.server.fixed_point import to_vectors
from rehearsal import Dropouts, rehearse
from test_private import through, uploads
from test_secure_sum import MARGIN, Host, exact, until_request, write_request

# ---- a server that lies ----


def shares_of(reveal, host, me):
    return sum_messages.read_entries("reveal", reveal, host.terms, me)


def test_an_equivocating_server_never_gets_both_secrets_of_a_client():
    """Some are told that client 2 answered, some that it did not: neither secret has enough shares."""
    host = until_request(clients=5, threshold=3)
    revealed = {}
    for me in (0, 1, 3, 4):
        asked = {k: not (k == 2 and me in (0, 1)) for k in range(5)}
        host.state[me], reveal = ss.unmask(host.state[me], write_request(host.terms, me, asked))
        revealed[me] = shares_of(reveal, host, me)[2]
    seeds, roots = ({me: revealed[me] for me in some} for some in ((3, 4), (0, 1)))
    hello = sum_messages.read_hello(host.hellos[2], host.terms, 2, None)
    digest, circle = host.terms.digest(), tuple(range(5))
    # With client 2's own share of its own secrets unknown to the server, two of three shares say nothing.
    for shares in (seeds, roots):
        for guess in (bytes(17), bytes(range(17))):
            wrong = primitives.combine({**shares, 2: guess}, 3, circle)
            assert primitives.derive(wrong, digest, b"commitment", 2) != hello.commitment
            assert primitives.public_of(primitives.mask_private(wrong, digest, 2)) != hello.mask


def test_the_masks_of_one_client_need_both_of_its_secrets():
    """Whoever has the seed alone still sees noise: the masks with others are on."""
    host = until_request(clients=5, threshold=3)
    host.unmask()
    circle = tuple(range(5))
    seed = primitives.combine({me: shares_of(host.reveals[me], host, me)[2] for me in circle}, 3, circle)
    open_to_server = np.frombuffer(host.masked[2][MARGIN:], "<u4").copy()
    add_mask(open_to_server, primitives.derive(seed, host.terms.digest(), b"own mask", 2), subtract=True)
    assert (open_to_server != host.vectors[2]).all()
    # And the sum is right, so that this was the seed.
    assert host.total().total.tolist() == exact(host.vectors, circle).tolist()


def test_a_server_cannot_shrink_the_sum_below_the_threshold_by_dropping_answers():
    host = until_request(clients=6, threshold=4)
    alone = {k: k == 0 for k in range(6)}
    few = {k: k < 3 for k in range(6)}
    for asked in (alone, few):
        with pytest.raises(ss.Refusal, match="answered, and the threshold is 4"):
            ss.unmask(host.state[0], write_request(host.terms, 0, asked))


def test_a_server_cannot_lower_the_threshold_after_clients_agreed():
    """Terms are part of every key: shares made for one threshold are worth nothing under another."""
    host = Host(clients=5, threshold=4).introduce().share()
    weaker = host.terms._replace(threshold=3)
    state, _ = ss.advertise(weaker, 0, least=0)
    with pytest.raises(ss.MessageError, match="from another session, round or group"):
        ss.share(state, host.rosters[0])
    with pytest.raises(ss.Refusal, match="takes part in sums of 4 or more; the terms allow 3"):
        ss.advertise(weaker, 0, least=4)


@pytest.mark.parametrize("stage", ["rosters", "deliveries", "requests"])
def test_messages_of_an_earlier_round_are_refused_at_every_stage(stage):
    old, host = until_request(), Host()
    assert old.terms.session != host.terms.session
    step = {"rosters": ss.share, "deliveries": ss.mask, "requests": ss.unmask}[stage]
    if stage != "rosters":
        host.introduce().share()
    if stage == "requests":
        host.deliver().mask()
    options = (host.vectors[0],) if stage == "deliveries" else ()
    with pytest.raises(ss.MessageError, match="from another session, round or group"):
        step(host.state[0], getattr(old, stage)[0], *options)


def test_invented_clients_unmask_a_surrounded_client_unless_keys_are_signed():
    """What the page says of a lying server is true: it is shown here, and so is what stops it."""
    terms = ss.plan(4, 3, threshold=3)
    vector = np.array([7, 8, 9], np.uint32)
    states = {me: ss.advertise(terms, me, least=3) for me in range(4)}  # 1 to 3 are the server's
    server, rosters = ss.introduce(terms, ((me, hello) for me, (_, hello) in states.items()))
    shared = {me: ss.share(states[me][0], rosters[me]) for me in range(4)}
    server, deliveries = ss.deliver(server, ((me, message) for me, (_, message) in shared.items()))
    zeros = np.zeros(3, np.uint32)
    masked = {me: ss.mask(shared[me][0], deliveries[me], zeros if me else vector) for me in range(4)}
    server, requests = ss.collect(server, ((me, message) for me, (_, message) in masked.items()))
    found = ss.total(server, [(me, ss.unmask(masked[me][0], requests[me])[1]) for me in range(4)])
    assert found.total.tolist() == [7, 8, 9]
    known = {0: Ed25519PrivateKey.generate().public_key()}
    with pytest.raises(ss.MessageError, match=r"has not signed|no verify key"):
        ss.share(states[0][0], rosters[0], verify_keys=known)


def test_a_signature_does_not_fit_other_terms_or_another_client():
    signing = [Ed25519PrivateKey.generate() for _ in range(3)]
    known = {k: key.public_key() for k, key in enumerate(signing)}
    first = Host(clients=3, signing_key=signing)
    other = Host(clients=3, signing_key=signing).introduce()
    # A hello of another session, with its address rewritten to this one: all but the signature fits.
    stolen = sum_messages.read_hello(first.hellos[1], first.terms, 1, known)
    for forged in (stolen, stolen._replace(signature=bytes(64))):
        roster = sum_messages.write_roster(other.terms, 0, {**other.circle(), 1: forged})
        with pytest.raises(ss.MessageError, match="has not signed"):
            ss.share(other.state[0], roster, verify_keys=known)


# ---- clients that lie ----


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 3), st.binary(min_size=17, max_size=17), st.sampled_from([3, 4]))
def test_no_made_up_share_gives_a_wrong_sum(liar, share, threshold):
    host = until_request(clients=4, threshold=threshold).unmask()
    true = shares_of(host.reveals[liar], host, liar)
    host.reveals[liar] = sum_messages.write_entries("reveal", host.terms, liar, {**true, 2: share})
    if threshold == 3 and liar == 3:  # three shares are enough, and its own is not looked at
        assert host.total().total.tolist() == exact(host.vectors, range(4)).tolist()
    elif share != true[2]:
        with pytest.raises(ss.SecureSumError, match="nobody's data is known"):
            host.total()


def test_too_many_dropouts_give_an_error_with_both_numbers():
    vectors = np.ones((6, 3), np.uint32)
    for stage in ("advertise", "share", "mask", "unmask"):
        gone = Dropouts(**{stage: [0, 1, 2]})
        with pytest.raises(ss.TooFewClients, match="3") as failure:
            rehearse(vectors, ss.plan(6, 3, threshold=4), dropouts=gone)
        assert (failure.value.present, failure.value.needed) == (3, 4)
        assert "nobody's data is known" in str(failure.value)


# ---- inputs at and beyond the bounds ----


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([1, 7, 200]), st.floats(1e-6, 1e9), st.sampled_from([1, -1]), st.floats(1, 1e6))
def test_everybody_at_the_largest_norm_and_weight_is_no_overflow(clients, clip, sign, weight):
    """One entry has all of the norm, the largest float that clipping lets through, times the largest weight."""
    values = ring.grid(clip * weight, clients)
    largest = np.float32(clip) * np.float32(1 + 2**-22) * np.float32(weight)
    sent = np.asarray(ring.quantise(values, jnp.full(clients, sign * largest, jnp.float32), jnp))
    total = sent.sum(dtype=np.uint32)
    exact_sum = sent.astype(np.int32).astype(np.int64).sum()
    assert abs(exact_sum) < 2**31
    assert int(total.astype(np.int32)) == exact_sum


@pytest.mark.slow
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("noise", [None, 1e-3], ids=["plain", "noise of the clients"])
def test_uploads_that_are_no_numbers_leave_the_sum_of_the_others(poison, noise):
    options = {} if noise is None else {"noise": fr.aggregators.ClientNoise(noise, per_round=3, least=3)}
    aggregator = fr.aggregators.secure(1.0, clients=3, weigh="uniform", **options)
    mean, *_ = through(aggregator, uploads([0.5, 0.25], [poison, 0.1], [-0.25, 0.5]))
    found = np.asarray(mean.parts["delta"]["w"])
    assert np.isfinite(found).all()
    assert np.abs(found).max() <= 1.01
    if not np.isfinite(poison):
        expected = np.array([0.25, 0.75]) / (2 if noise is None else 3)
        np.testing.assert_allclose(found, expected, atol=5e-3)


@pytest.mark.parametrize("examples", [[1e30, 1, 1], [np.inf, 1, 1], [-5, 1, 1], [0, 1, 1]])
def test_extreme_weights_are_bounded_or_left_out(examples):
    aggregator = fr.aggregators.secure(1.0, clients=3, max_weight=10)
    mean, _, report, _ = through(aggregator, uploads([1.0, 0.0], [0.0, 0.5], [0.0, 0.5], examples=examples))
    weight = float(report["weight"])
    assert weight == (12 if examples[0] == 1e30 else 2)
    expected = np.array([10.0, 1.0]) / 12 if examples[0] == 1e30 else np.array([0.0, 0.5])
    np.testing.assert_allclose(np.asarray(mean.parts["delta"]["w"]), expected, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e15])
def test_what_a_client_sends_is_never_longer_than_its_share_of_noise_counts_on(scale):
    """Clipping in single precision and rounding to integers included, for uploads of many entries."""
    length = 200_000
    rng = np.random.default_rng(0)
    aggregator = fr.aggregators.secure(
        2.0, clients=4, noise=fr.aggregators.ClientNoise(1.0, per_round=4, least=4, simulated=False)
    )
    deltas = [scale * rng.standard_normal(length), np.full(length, scale), np.eye(1, length)[0] * scale]
    parts = {"delta": {"w": np.zeros(length, np.float32)}}
    share = aggregator.share(parts)
    summand = encoded(aggregator, uploads(*deltas), parts)
    for vector in to_vectors(summand):
        assert np.linalg.norm(vector.astype(np.int32).astype(np.float64)) <= share.steps


def encoded(aggregator, upload, parts):
    import jax

    from fedrecon._src.core.upload import summand_of

    message = aggregator.message(aggregator.init(parts))
    return aggregator.encode(message, summand_of(upload), jax.random.split(jax.random.key(0), len(upload.examples)))


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([2, 12]), st.sampled_from([0.01, 3.7, 100.0]), st.sampled_from([1, 500]))
def test_the_mean_of_a_secure_sum_is_within_its_stated_error(seed, clients, clip, most):
    rng = np.random.default_rng(seed)
    deltas = rng.normal(0, clip / 3, (clients, 6)).astype(np.float32)
    weights = rng.integers(1, most + 1, clients)
    secure = through(fr.aggregators.secure(clip, clients=clients, max_weight=most), uploads(*deltas, examples=weights))[
        0
    ]
    norms = np.linalg.norm(deltas.astype(np.float64), axis=1, keepdims=True)
    clipped = deltas * np.minimum(1, clip / np.maximum(norms, 1e-30))
    expected = np.average(clipped, axis=0, weights=weights)
    grid = ring.grid(clip * most, clients)
    bound = clients * grid.step / 2 / weights.sum() + 1e-5 * clip  # rounding to integers, and single precision
    assert np.abs(np.asarray(secure.parts["delta"]["w"]) - expected).max() <= bound


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-3, 1e3), st.integers(1, 10**6), st.floats(0.05, 50), st.integers(1, 5000), st.floats(0.01, 1))
def test_noise_in_integers_is_never_less_than_was_asked_for(clip, length, noise, clients, share):
    least = max(1, int(share * clients))
    found = share_of_noise(clip, length, noise, clients=clients, least=least)
    together = least * found.variance * found.grid.step**2
    assert together >= (noise * clip) ** 2 * (1 - 1e-9)
    assert found.steps * found.grid.step >= clip
    assert clients * found.grid.levels + 12 * math.sqrt(clients * found.variance) < 2**31


def test_a_reveal_with_more_or_fewer_shares_than_asked_for_is_left_out():
    host = until_request(clients=5, threshold=3).unmask()
    true = shares_of(host.reveals[1], host, 1)
    host.reveals[1] = sum_messages.write_entries("reveal", host.terms, 1, {**true, 9: bytes(17)})
    host.reveals[2] = sum_messages.write_entries("reveal", host.terms, 2, {k: true[k] for k in range(4)})
    found = host.total()
    assert "no reveal message of this sum has" in found.refused[1]
    assert "must name exactly [0, 1, 2, 3, 4]" in found.refused[2]
    assert found.total.tolist() == exact(host.vectors, range(5)).tolist()


def test_a_request_cannot_name_somebody_with_a_third_answer():
    host = until_request()
    asked = {k: bytes([2 if k == 3 else 1]) for k in range(5)}
    with pytest.raises(ss.Refusal, match="a kind of share that does not exist"):
        ss.unmask(host.state[0], sum_messages.write_entries("request", host.terms, 0, asked))


def test_keys_and_circles_are_drawn_by_the_system():
    """What a step draws is another each time."""
    terms = ss.plan(30, 3, circle=5)
    assert terms.session != ss.plan(30, 3, circle=5).session
    hellos = [sum_messages.read_hello(ss.advertise(terms, 1, least=0)[1], terms, 1, None) for _ in range(2)]
    assert len({(hello.cipher, hello.mask, hello.commitment) for hello in hellos}) == 2
    assert ss.circles(range(30), 5) != ss.circles(range(30), 5)
