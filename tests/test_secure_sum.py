"""Secure sums: the sum is exact whoever drops out, and clients and server refuse what they should."""

import dataclasses
import functools
import secrets
import struct
import tracemalloc

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrecon._src.privacy import secure_sum as ss
from fedrecon._src.privacy.secure_sum import primitives, sum_messages
from fedrecon._src.privacy.secure_sum.primitives import add_mask
from rehearsal import Dropouts, rehearse, system_entropy_from

MARGIN = len(sum_messages._header("masked", ss.plan(3, 1), 0))


def draw(clients, length=5, bits=32, seed=0):
    kind = np.uint32 if bits == 32 else np.uint64
    return np.random.default_rng(seed).integers(0, 2**bits, (clients, length), dtype=kind)


def exact(vectors, clients):
    return sum((vectors[k] for k in clients), np.zeros_like(vectors[0]))


class Host:
    """Carries messages between `clients` and a server, one step at a time."""

    def __init__(self, clients=5, threshold=None, circle=41, length=4, **advertise):
        self.terms = ss.plan(clients, length, circle=circle, threshold=threshold)
        self.vectors = draw(clients, length)
        self.state, self.hellos = {}, {}
        for me in range(clients):
            options = {name: value[me] for name, value in advertise.items()}
            self.state[me], self.hellos[me] = ss.advertise(self.terms, me, least=0, **options)

    def circle(self, *clients):
        """What clients advertised, by default all."""
        members = clients or self.hellos
        return {k: sum_messages.read_hello(self.hellos[k], self.terms, k, None) for k in members}

    def introduce(self, **options):
        self.server, self.rosters = ss.introduce(self.terms, self.hellos.items(), **options)
        return self

    def share(self, **options):
        self.shares = {}
        for me, roster in self.rosters.items():
            self.state[me], self.shares[me] = ss.share(self.state[me], roster, **options)
        return self

    def deliver(self):
        self.server, self.deliveries = ss.deliver(self.server, self.shares.items())
        return self

    def mask(self):
        self.masked = {}
        for me, delivery in self.deliveries.items():
            self.state[me], self.masked[me] = ss.mask(self.state[me], delivery, self.vectors[me])
        return self

    def collect(self):
        self.server, self.requests = ss.collect(self.server, self.masked.items())
        return self

    def unmask(self):
        self.reveals = {}
        for me, request in self.requests.items():
            self.state[me], self.reveals[me] = ss.unmask(self.state[me], request)
        return self

    def total(self):
        return ss.total(self.server, self.reveals.items())


def write_request(terms, client, answered):
    flags = {other: sum_messages.ANSWERED if yes else sum_messages.DROPPED for other, yes in answered.items()}
    return sum_messages.write_entries("request", terms, client, flags)


def until_request(**options):
    return Host(**options).introduce().share().deliver().mask().collect()


# ---- the sum ----


@st.composite
def cohorts(draw):
    """Draw how many clients, a threshold, and after which message each is silent; 4 stays to the end."""
    clients = draw(st.integers(2, 9))
    threshold = draw(st.integers(clients // 2 + 1, clients))
    leaves = draw(st.lists(st.integers(0, 4), min_size=clients, max_size=clients))
    return clients, threshold, leaves, draw(st.sampled_from([32, 64]))


@settings(max_examples=60, deadline=None)
@given(cohorts())
def test_any_dropouts_give_the_exact_sum_of_those_who_answered_or_nothing(cohort):
    clients, threshold, leaves, bits = cohort
    vectors = draw(clients, bits=bits)
    terms = ss.plan(clients, 5, bits=bits, threshold=threshold)
    gone = Dropouts(*([k for k in range(clients) if leaves[k] == step] for step in range(4)))
    answered = [k for k in range(clients) if leaves[k] >= 3]
    if leaves.count(4) < threshold:
        with pytest.raises(ss.TooFewClients, match="nobody's data is known") as failure:
            rehearse(vectors, terms, dropouts=gone)
        heard = [sum(leave > step for leave in leaves) for step in range(4)]
        first = next(step for step in range(4) if heard[step] < threshold)
        assert failure.value.stage == ("advertise", "share", "mask", "unmask")[first]
        assert (failure.value.present, failure.value.needed) == (heard[first], threshold)
    else:
        result = rehearse(vectors, terms, dropouts=gone)
        assert result.clients == tuple(answered)
        assert result.total.tolist() == exact(vectors, answered).tolist()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([4] * 9 + [0, 1, 2, 3]), min_size=16, max_size=24), st.integers(0, 99))
def test_a_ring_of_circles_gives_the_exact_sum_or_nothing(leaves, seed):
    clients, vectors = len(leaves), draw(len(leaves))
    terms = ss.plan(clients, 5, circle=7, threshold=4)
    gone = Dropouts(*([k for k in range(clients) if leaves[k] == step] for step in range(4)))
    try:
        with system_entropy_from(seed):
            result = rehearse(vectors, terms, dropouts=gone)
    except ss.TooFewClients:
        return
    assert result.total.tolist() == exact(vectors, result.clients).tolist()
    # Whoever sent its input is in the sum, but for clients whose circle was too small to go on.
    silent = {k for k in range(clients) if leaves[k] < 3}
    assert not silent & set(result.clients)


def test_one_dropout_at_each_message_of_a_ring_is_no_trouble():
    vectors = draw(30)
    terms = ss.plan(30, 5, circle=9)
    assert (terms.circle, terms.threshold) == (9, 6)
    result = rehearse(vectors, terms, dropouts=Dropouts([0], [1], [2], [3]))
    assert result.clients == tuple(range(3, 30))
    assert result.total.tolist() == exact(vectors, range(3, 30)).tolist()


def test_a_client_whose_circle_shrank_too_far_is_left_out_and_the_others_go_on():
    terms, vectors = ss.plan(40, 5, circle=9, threshold=5), draw(40)
    states = {me: ss.advertise(terms, me, least=0) for me in range(40)}
    with system_entropy_from(7):
        server, rosters = ss.introduce(terms, ((me, hello) for me, (_, hello) in states.items()))
    lonely = 11
    gone = [member for member in server.circles[lonely] if member != lonely][:5]  # which leaves 4 of 9, and needs 5
    shared = {me: ss.share(states[me][0], rosters[me]) for me in range(40) if me not in gone}
    server, deliveries = ss.deliver(server, ((me, message) for me, (_, message) in shared.items()))
    assert not {lonely, *gone} & server.shared
    masked = {me: ss.mask(shared[me][0], delivery, vectors[me]) for me, delivery in deliveries.items()}
    server, requests = ss.collect(server, ((me, message) for me, (_, message) in masked.items()))
    reveals = [(me, ss.unmask(masked[me][0], request)[1]) for me, request in requests.items()]
    result = ss.total(server, reveals)
    assert len(result.clients) > 25
    assert result.total.tolist() == exact(vectors, result.clients).tolist()


def test_the_sum_does_not_depend_on_the_entropy():
    vectors = draw(4)
    terms = ss.plan(4, 5)
    with system_entropy_from(1):
        seeded = rehearse(vectors, terms)
    assert rehearse(vectors, terms).total.tolist() == seeded.total.tolist()


def test_masked_inputs_look_like_noise_and_only_their_sum_cancels():
    host = Host(clients=5, length=20_000)
    host.vectors[:] = 7
    host.introduce().share().deliver().mask()
    sent = np.stack([np.frombuffer(message[MARGIN:], "<u4") for message in host.masked.values()])
    for k in range(5):
        assert np.bincount(sent[k] >> 28, minlength=16).min() > 1000  # 1250 expected of each; 7 would be all in one
    # The masks of pairs cancel in the sum; those of the clients themselves do not.
    assert (sent.sum(0, dtype=np.uint32) != 35).mean() > 0.99
    host.collect().unmask()
    assert set(host.total().total.tolist()) == {35}


def test_a_client_forgets_its_secrets_once_its_input_is_masked():
    host = Host()
    host.introduce().share().deliver()
    again = ss.mask(host.state[1], host.deliveries[1], host.vectors[1])
    host.mask()
    assert again == (host.state[1], host.masked[1])
    assert not host.state[1].seed
    assert not host.state[1].root


# ---- circles ----


@given(st.integers(1, 60), st.integers(2, 20), st.integers(0, 9))
def test_circles_are_mutual_and_of_one_size(clients, size, seed):
    with system_entropy_from(seed):
        drawn = ss.circles(range(clients), size)
    expected = clients if clients <= size else 2 * ((size - 1) // 2) + 1
    assert {len(set(circle)) for circle in drawn.values()} == {expected}
    assert all(client in drawn[other] for client, circle in drawn.items() for other in circle)
    assert all(client in drawn[client] for client in drawn)


def test_a_ring_is_one_connected_whole():
    drawn = ss.circles(range(50), 5)
    reached = {0}
    while (wider := reached | {other for client in reached for other in drawn[client]}) != reached:
        reached = wider
    assert reached == set(range(50))


# ---- primitives ----


@pytest.mark.parametrize(("kind", "length"), [("<u4", 3), ("<u4", 70_000), ("<u8", 40_001)])
def test_a_mask_is_the_keystream_of_chacha20(kind, length):
    key, vector = bytes(range(32)), np.zeros(length, kind)
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor().update(bytes(vector.nbytes))
    add_mask(vector, key)
    assert vector.tobytes() == stream
    add_mask(vector, key, subtract=True)
    assert not vector.any()


def test_any_threshold_of_shares_gives_the_secret_and_fewer_do_not():
    secret, holders = bytes(range(16)), (3, 8, 11, 20, 21)
    shares = primitives.split(secret, 3, holders)
    for kept in ((3, 8, 11), (20, 3, 21), (8, 11, 20, 21), holders, (3, 21, 11)):
        assert primitives.combine({k: shares[k] for k in kept}, 3, holders) == secret
    assert primitives.combine({k: shares[k] for k in (3, 8)}, 3, holders) != secret
    assert primitives.combine({k: shares[k] for k in (3, 8)}, 2, holders) != secret


def test_a_polynomial_computed_by_hand():
    """The secret is 7, and the polynomial 7 + 2x + 5x**2."""
    draws = iter([5, 2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "randbelow", lambda most: next(draws))
        shares = primitives.split((7).to_bytes(16), 3, (10, 11, 12, 13))
    assert [int.from_bytes(share) for share in shares.values()] == [14, 31, 58, 95]
    # Lagrange's polynomials at 0, for the positions 1, 2 and 4: 8/3, -2 and 1/3; 8/3 * 14 - 2 * 31 + 95/3 = 7.
    assert primitives.combine({10: shares[10], 11: shares[11], 13: shares[13]}, 3, (10, 11, 12, 13)) == (7).to_bytes(16)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_right_shares_give_the_secret_and_a_wrong_one_or_too_few_do_not(data):
    count = data.draw(st.integers(2, 9))
    threshold = data.draw(st.integers(count // 2 + 1, count))
    holders = tuple(data.draw(st.lists(st.integers(0, 99), min_size=count, max_size=count, unique=True)))
    secret = data.draw(st.binary(min_size=16, max_size=16))
    shares = primitives.split(secret, threshold, holders)
    kept = data.draw(st.permutations(holders))[:threshold]
    assert primitives.combine({k: shares[k] for k in kept}, threshold, holders) == secret
    assert primitives.combine({k: shares[k] for k in kept[1:]}, threshold, holders) != secret
    wrong = (int.from_bytes(shares[kept[0]]) + data.draw(st.integers(2**100, 2**120))).to_bytes(17)
    assert primitives.combine({**{k: shares[k] for k in kept}, kept[0]: wrong}, threshold, holders) != secret


# ---- what a client refuses ----


def test_a_client_refuses_terms_below_its_least_size():
    with pytest.raises(ss.Refusal, match=r"client 4 takes part in sums of 10 or more; the terms allow 3"):
        ss.advertise(ss.plan(5, 2), 4, least=10)


def test_a_client_refuses_a_circle_below_the_threshold():
    host = Host(clients=5, threshold=4).introduce()
    with pytest.raises(ss.Refusal, match="a circle of 3 clients; the terms allow 4"):
        ss.share(host.state[0], sum_messages.write_roster(host.terms, 0, host.circle(0, 1, 2)))


def test_a_client_refuses_a_circle_larger_than_the_terms_say():
    terms = ss.plan(9, 2, circle=4, threshold=3)
    begun = {me: ss.advertise(terms, me, least=0) for me in range(5)}
    circle = {me: sum_messages.read_hello(message, terms, me, None) for me, (_, message) in begun.items()}
    with pytest.raises(ss.MessageError, match="no roster message of this sum has 886 bytes"):
        ss.share(begun[0][0], sum_messages.write_roster(terms, 0, circle))


def test_a_client_refuses_a_roster_without_it_or_with_one_key_twice():
    host = Host(clients=5).introduce()
    with pytest.raises(ss.Refusal, match="does not have client 0 with the keys"):
        ss.share(host.state[0], sum_messages.write_roster(host.terms, 0, host.circle(1, 2, 3, 4)))
    circle = host.circle()
    with pytest.raises(ss.Refusal, match="names one client twice"):
        ss.share(host.state[0], sum_messages.write_roster(host.terms, 0, {**circle, 2: circle[1]}))


def test_a_client_refuses_when_too_few_of_its_circle_shared():
    host = Host(clients=5, threshold=4).introduce().share()
    sealed = {k: sum_messages.read_entries("shares", host.shares[k], host.terms, k)[0] for k in (1, 2)}
    with pytest.raises(ss.Refusal, match="3 of this circle shared, below the threshold 4"):
        ss.mask(host.state[0], sum_messages.write_entries("delivery", host.terms, 0, sealed), host.vectors[0])


def test_a_client_never_reveals_both_shares_of_one_client():
    host = until_request()
    both = sum_messages._header("request", host.terms, 0)
    both += b"".join(struct.pack(">QB", *entry) for entry in [(0, 1), (1, 1), (2, 1), (3, 1), (2, 0)])
    with pytest.raises(ss.MessageError, match="a request message names client 2 twice"):
        ss.unmask(host.state[0], both)
    # Nor one after the other: the state after the first request has no shares left.
    after, _ = ss.unmask(host.state[0], host.requests[0])
    other = write_request(host.terms, 0, {k: k != 2 for k in range(5)})
    with pytest.raises(ss.Refusal, match="was asked for 'unmask', and its next step is 'done'"):
        ss.unmask(after, other)
    assert not after.held


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({0: True, 1: True, 2: False, 3: False, 4: False}, "2 clients of this client's circle answered"),
        ({0: False, 1: True, 2: True, 3: True, 4: True}, "says that client 0 did not answer"),
        ({0: True, 1: True, 2: True, 3: True}, "are not those that shared"),
        ({0: True, 1: True, 2: True, 3: True, 9: True}, "are not those that shared"),
    ],
)
def test_a_client_refuses_requests_that_give_too_much_away(asked, sentence):
    host = until_request()
    with pytest.raises(ss.Refusal, match=sentence):
        ss.unmask(host.state[0], write_request(host.terms, 0, asked))


def test_a_step_out_of_order_or_taken_again_is_refused():
    host = Host().introduce()
    with pytest.raises(ss.Refusal, match="asked for 'mask', and its next step is 'share'"):
        ss.mask(host.state[0], b"", host.vectors[0])
    host.share()
    with pytest.raises(ss.Refusal, match="asked for 'share', and its next step is 'mask'"):
        ss.share(host.state[0], host.rosters[0])
    with pytest.raises(ss.SecureSumError, match="asked for 'total', and its next step is 'deliver'"):
        ss.total(host.server, [])


def test_messages_of_another_round_session_or_client_are_refused():
    host = Host().introduce()
    for other in (host.terms._replace(round=1), host.terms._replace(session=bytes(16)), host.terms._replace(length=9)):
        state, _ = ss.advertise(other, 0, least=0)
        with pytest.raises(ss.MessageError, match="from another session, round or group"):
            ss.share(state, host.rosters[0])
    with pytest.raises(ss.MessageError, match="names client 1; it should name client 0"):
        ss.share(host.state[0], host.rosters[1])
    host.share().deliver()
    # Shares that were meant for client 2, with the address changed to client 0.
    foreign = sum_messages.read_entries("delivery", host.deliveries[2], host.terms, 2)
    moved = sum_messages.write_entries("delivery", host.terms, 0, {k: foreign[k] for k in (1, 3, 4)})
    with pytest.raises(ss.MessageError, match="shares of client 1 are damaged, or for another client"):
        ss.mask(host.state[0], moved, host.vectors[0])


def test_every_derived_key_is_bound_to_the_terms_and_to_whom_it_is_for():
    secret, terms = bytes(range(32)), ss.plan(5, 3)
    others = [terms._replace(round=1), terms._replace(session=bytes(16)), terms._replace(threshold=4)]
    derived = {primitives.derive(secret, other.digest(), b"mask key", 1) for other in (terms, *others)}
    derived |= {
        primitives.derive(secret, terms.digest(), b"mask key", 2),
        primitives.derive(secret, terms.digest(), b"share", 1),
    }
    assert len(derived) == 6
    # So one entropy in two rounds gives other masks, whatever else is the same.
    hellos = []
    for each in (terms, others[0]):
        with system_entropy_from(4):
            hellos.append(ss.advertise(each, 1, least=0)[1])
    first, second = (
        sum_messages.read_hello(m, each, 1, None) for m, each in zip(hellos, (terms, others[0]), strict=True)
    )
    assert first.cipher == second.cipher
    assert first.mask != second.mask
    assert first.commitment != second.commitment


def test_a_key_with_which_nothing_secret_can_be_agreed_is_refused():
    host = Host()
    hello = sum_messages.Hello(bytes(32), bytes([1] + 31 * [0]), bytes(32))
    host.hellos[1] = sum_messages.write_hello(host.terms, 1, hello, None)
    host.introduce()
    with pytest.raises(ss.MessageError, match="no secret can be agreed"):
        ss.share(host.state[0], host.rosters[0])


def test_an_input_of_another_type_or_length_is_refused():
    host = Host().introduce().share().deliver()
    for vector in (host.vectors[0].astype(np.int64), host.vectors[0][:-1], host.vectors[:1]):
        with pytest.raises(ss.SecureSumError, match=r"`vector` must be uint32\[4\]"):
            ss.mask(host.state[0], host.deliveries[0], vector)


# ---- hostile bytes ----


def test_a_share_that_is_wrong_by_a_multiple_of_the_largest_secret_is_noticed():
    holders = (1, 2, 3)
    shares = primitives.split(bytes(16), 3, holders)
    value = int.from_bytes(shares[3]) + (2**128 if shares[3] < (2**128).to_bytes(17) else -(2**128))
    # The third share counts once, so the secret is wrong by as much.
    assert primitives.combine({**shares, 3: value.to_bytes(17)}, 3, holders) != bytes(16)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_damaged_messages_are_sentences_and_never_a_wrong_sum(data):
    signing = [ed25519.Ed25519PrivateKey.generate() for _ in range(4)] if data.draw(st.booleans()) else None
    known = signing and {k: key.public_key() for k, key in enumerate(signing)}
    host = Host(clients=4, threshold=3, **({"signing_key": signing} if signing else {}))
    step = data.draw(st.sampled_from(["hellos", "shares", "masked", "reveals"]))

    def damage():
        bag = getattr(host, step)
        message = bytearray(bag[2])
        how = data.draw(st.sampled_from(["flip", "cut", "append", "replace"]))
        if how == "flip":
            read = len(message) - 64 * (step == "hellos" and not signing)  # a signature that nobody checks
            message[data.draw(st.integers(0, read - 1))] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "cut":
            del message[data.draw(st.integers(0, len(message) - 1)) :]
        elif how == "append":
            message += data.draw(st.binary(min_size=1, max_size=9))
        else:
            message = bytearray(data.draw(st.binary(max_size=60)))
        bag[2] = bytes(message)

    # What is damaged within a masked input cannot be noticed: one such bit is as good as another. All else must be.
    try:
        for bag, make in (("hellos", None), ("shares", "share"), ("masked", "mask"), ("reveals", "unmask")):
            if make:
                introduce = functools.partial(host.introduce, verify_keys=known)
                {"share": introduce, "mask": host.deliver, "unmask": host.collect}[make]()
                getattr(host, make)()
            if bag == step:
                damage()
        result = host.total()
    except ss.SecureSumError:
        return
    if step == "masked" and 2 in result.clients:
        return
    assert result.total.tolist() == exact(host.vectors, result.clients).tolist()
    assert 2 in result.refused


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(["share", "mask", "unmask"]))
def test_a_client_answers_any_bytes_with_a_sentence(junk, step):
    host = Host(clients=3)
    state = dataclasses.replace(host.state[0], stage=step)
    kind = {"share": "roster", "mask": "delivery", "unmask": "request"}[step]
    for message in (junk, sum_messages._header(kind, host.terms, 0) + junk):
        with pytest.raises(ss.SecureSumError):
            ss.mask(state, message, host.vectors[0]) if step == "mask" else getattr(ss, step)(state, message)


@pytest.mark.parametrize("step", ["share", "mask", "unmask"])
def test_a_message_with_more_entries_than_a_circle_takes_no_memory(step):
    host = Host(clients=3)
    state = dataclasses.replace(host.state[0], stage=step)
    kind = {"share": "roster", "mask": "delivery", "unmask": "request"}[step]
    message = sum_messages._header(kind, host.terms, 0) + bytes(10**5 * sum_messages.ENTRIES[kind].size)
    tracemalloc.start()
    with pytest.raises(ss.MessageError):
        ss.mask(state, message, host.vectors[0]) if step == "mask" else getattr(ss, step)(state, message)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_terms_of_a_huge_length_take_no_memory_either():
    terms = ss.Terms.from_bytes(ss.plan(3, 2**50).to_bytes())
    tracemalloc.start()
    state, _ = ss.advertise(terms, 0, least=0)
    with pytest.raises(ss.SecureSumError, match="`vector` must be"):
        ss.mask(dataclasses.replace(state, stage="mask"), b"", np.zeros(4, np.uint32))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_terms_travel_as_bytes_and_bad_ones_are_refused():
    terms = ss.plan(10, 7, bits=64, round=3)
    assert ss.Terms.from_bytes(terms.to_bytes()) == terms
    for damaged in (b"", terms.to_bytes()[:-1], b"X" + terms.to_bytes()[1:]):
        with pytest.raises(ss.MessageError, match="not the terms"):
            ss.Terms.from_bytes(damaged)
    with pytest.raises(ss.MessageError, match="protocol version"):
        ss.Terms.from_bytes(terms.to_bytes()[:4] + b"\x09" + terms.to_bytes()[5:])
    with pytest.raises(ss.SecureSumError, match="must be above half"):
        ss.Terms.from_bytes(terms._replace(threshold=5).to_bytes())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"cohort": 1}, "`circle`, at most the cohort, must be from 2 to 65535"),
        ({"threshold": 5}, "`threshold` must be above half"),
        ({"threshold": 11}, "and not above `circle`"),
        ({"bits": 16}, "`bits` must be 32 or 64"),
        ({"length": 0}, "`length` must be from 1"),
    ],
)
def test_terms_that_make_no_sense_are_refused(change, sentence):
    with pytest.raises(ss.SecureSumError, match=sentence):
        ss.plan(**({"cohort": 10, "length": 7} | change))


def test_a_session_has_16_bytes():
    with pytest.raises(ss.SecureSumError, match="`session` must have 16 bytes"):
        ss.plan(10, 7)._replace(session=b"short").check()


# ---- what the server does with liars ----


def test_wrong_shares_are_noticed():
    host = until_request(clients=4, threshold=4).unmask()
    host.reveals[1] = host.reveals[1][:-1] + bytes([host.reveals[1][-1] ^ 1])
    with pytest.raises(ss.SecureSumError, match="the shares of client 3 do not give its secret"):
        host.total()


def test_a_client_that_does_not_share_with_all_its_circle_is_left_out():
    host = Host(clients=5, threshold=3).introduce().share()
    sealed = sum_messages.read_entries("shares", host.shares[2], host.terms, 2)
    del sealed[4]
    host.shares[2] = sum_messages.write_entries("shares", host.terms, 2, sealed)
    result = host.deliver().mask().collect().unmask().total()
    assert result.clients == (0, 1, 3, 4)
    assert "must name exactly [0, 1, 3, 4]" in result.refused[2]


def test_one_that_speaks_twice_or_for_another_is_left_out():
    host = Host(clients=5, threshold=3).introduce().share().deliver().mask()
    twice = [*host.masked.items(), (1, host.masked[1]), (9, host.masked[1])]
    host.masked[4] = host.masked[3]
    host.server, host.requests = ss.collect(host.server, [*[(4, host.masked[3])], *twice[:-3], *twice[-2:]])
    result = host.unmask().total()
    assert result.clients == (0, 1, 2, 3)
    assert result.total.tolist() == exact(host.vectors, range(4)).tolist()
    assert "names client 3; it should name client 4" in result.refused[4]
    assert "twice" in result.refused[1]
    assert "no longer, part" in result.refused[9]


# ---- signatures ----


def test_signed_keys_are_verified_and_invented_clients_refused():
    make = ed25519.Ed25519PrivateKey.generate
    signing = [make() for _ in range(4)]
    known = {k: key.public_key() for k, key in enumerate(signing)}
    host = Host(clients=4, signing_key=signing).introduce(verify_keys=known).share(verify_keys=known)
    host.deliver().mask().collect().unmask()
    assert host.total().total.tolist() == exact(host.vectors, range(4)).tolist()

    host = Host(clients=4, signing_key=[*signing[:3], make()]).introduce()
    with pytest.raises(ss.MessageError, match="client 3 has not signed its keys, or not with the key"):
        ss.share(host.state[0], host.rosters[0], verify_keys=known)
    with pytest.raises(ss.MessageError, match="client 3 has no verify key here"):
        ss.share(host.state[0], host.rosters[0], verify_keys={k: known[k] for k in range(3)})
    server, rosters = ss.introduce(host.terms, host.hellos.items(), verify_keys=known)
    assert set(rosters) == {0, 1, 2}
    assert "has not signed" in server.refused[3]


def test_an_unsigned_hello_is_refused_where_keys_are_known():
    known = dict.fromkeys(range(3), ed25519.Ed25519PrivateKey.generate().public_key())
    host = Host(clients=3).introduce()
    with pytest.raises(ss.MessageError, match="has not signed"):
        ss.share(host.state[0], host.rosters[0], verify_keys=known)
