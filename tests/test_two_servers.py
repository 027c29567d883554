"""One message per device, two servers: the sum is exact for those counted; the helper refuses what tells more."""

import contextlib
import dataclasses
import hashlib
import json
import resource

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrecon._src.privacy.secure_sum import two_servers
from fedrecon._src.privacy.secure_sum.terms import MessageError, Refusal
from fedrecon._src.privacy.secure_sum.two_servers import (
    Helper,
    ServedPlan,
    Spool,
    TooFewReports,
    read_served_plan,
    unmask,
)
from fedrecon._src.storage.atomic import StorageError
from fedrecon_device import sealing
from fedrecon_device.sealing import RECORD, Purpose, draw_secrets, make_report

KEY = X25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
BATCH, BROADCAST = bytes(16), "b" * 64


def plan_of(length=5, bits=32, least=2):
    about = {"format": "fedrecon-device-plan", "protocol": "two-servers", "algorithm": "", "dtype": "uint32"}
    sums = {"length": length, "bits": bits, "least": least, "helper": PUBLIC, "rounds": 9}
    return ServedPlan(**about, **sums, reports_per_day=1, content=b"plan")


def reports_of(plan, vectors, run="run", number=0, batch=BATCH, broadcast=BROADCAST):
    purpose = plan.purpose(run, number, batch, broadcast)
    return [make_report(vector, PUBLIC, purpose, plan.bits) for vector in vectors]


def records_of(reports):
    return b"".join(report[:RECORD] for report in reports)


@pytest.mark.parametrize("bits", sealing.BITS)
@given(values=st.lists(st.integers(0, 2**32 - 1), max_size=9))
def test_packed_integers_come_back_modulo_the_ring(bits, values):
    data = sealing.pack(np.array(values, np.uint32), bits)
    assert len(data) == sealing.packed_size(len(values), bits)
    assert sealing.unpack(data, len(values), bits).tolist() == [value % 2**bits for value in values]


def test_packed_bytes_by_hand():
    values = np.array([0x12345, 0xABCDE, 0x00001], np.uint32)
    assert sealing.pack(values, 20).hex() == "4523e1cdab" + "0100000000"
    assert sealing.pack(values, 24).hex() == "452301" + "debc0a" + "010000"
    assert sealing.pack(values, 32).hex() == "45230100" + "debc0a00" + "01000000"
    with pytest.raises(ValueError, match="3 integers of 24 bits have 9 bytes"):
        sealing.unpack(bytes(8), 3, 24)


def test_the_mask_is_the_key_stream_of_aes():
    # AES-256 with a zero key of a zero block, from the NIST known-answer tests.
    assert sealing.expand(bytes(32), 4).astype("<u4").tobytes().hex() == "dc95c078a2408989ad48a21492842087"


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_sum_is_exact_for_those_counted(tmp_path_factory, data):
    bits, length = data.draw(st.sampled_from(sealing.BITS)), data.draw(st.integers(1, 20))
    states = data.draw(st.lists(st.sampled_from(["good", "dropped out", "unreadable"]), min_size=2, max_size=20))
    plan, folder = plan_of(length, bits), tmp_path_factory.mktemp("sum")
    vectors = np.random.default_rng(0).integers(0, 2**32, (len(states), length), dtype=np.uint32)
    helper, good = Helper(plan, KEY, folder), vectors[[state == "good" for state in states]]
    with contextlib.closing(Spool(folder / "spool", plan.report_bytes)) as spool:
        for state, report in zip(states, reports_of(plan, vectors), strict=True):
            if state != "dropped out":
                spool.add(bytes(16), report if state == "good" else report[:20] + bytes([report[20] ^ 1]) + report[21:])
        count, records = len(spool), spool.records(len(spool))
        if len(good) < plan.least:
            with pytest.raises(TooFewReports, match="reports can be opened, and 2 are needed"):
                helper.answer("run", 0, BATCH, records, BROADCAST)
            return
        total, counted = unmask(plan, spool.reports(count), helper.answer("run", 0, BATCH, records, BROADCAST), count)
    assert counted == len(good)
    np.testing.assert_array_equal(total, good.sum(0, dtype=np.uint32) & np.uint32(2**bits - 1))


@pytest.mark.parametrize(
    "other",
    [
        {"run": "another"},
        {"broadcast": "c" * 64},
        {"number": 1},
        {"batch": bytes(15) + b"1"},
        {"digest": bytes(32)},
        {"length": 4},
        {"id": True},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_seed_opens_for_nothing_else(tmp_path, other):
    plan, fields = plan_of(), {"run": "run", "number": 0, "batch": BATCH}
    sealed_for = Purpose(
        other.get("digest", bytes.fromhex(plan.digest)),
        run=f"{other.get('run', 'run')} {other.get('broadcast', BROADCAST)}",
        batch=other.get("batch", BATCH),
        round=other.get("number", 0),
        length=other.get("length", 5),
    )
    strangers = [make_report(np.zeros(sealed_for.length), PUBLIC, sealed_for, 32) for _ in range(2)]
    if "id" in other:
        strangers = [bytes([k] * 16) + report[16:] for k, report in enumerate(strangers)]
    helper, good = Helper(plan, KEY, tmp_path), reports_of(plan, np.ones((3, 5)), **fields)
    with pytest.raises(TooFewReports, match="0 of"):
        helper.answer("run", 0, BATCH, records_of(strangers), BROADCAST)
    answer = helper.answer("run", 0, BATCH, records_of([strangers[0], *good]), BROADCAST)
    assert answer[0] == 0b1110
    padded = [strangers[0][:RECORD] + bytes(20), *good]
    assert unmask(plan, padded, answer, 4)[0].tolist() == [3] * 5


def test_all_reports_of_a_sum_answer_the_same_broadcast(tmp_path):
    """Or a coordinator would send the model to one device, and to all others one whose updates it knows."""
    plan, helper = plan_of(least=3), Helper(plan_of(least=3), KEY, tmp_path)
    victim = reports_of(plan, [np.arange(5)])
    others = reports_of(plan, np.zeros((3, 5)), broadcast="c" * 64)
    with pytest.raises(TooFewReports, match="1 of 4 reports"):
        helper.answer("run", 0, BATCH, records_of([*victim, *others]), BROADCAST)
    answer = helper.answer("run", 0, BATCH, records_of([*victim, *others]), "c" * 64)
    assert answer[0] == 0b1110
    assert unmask(plan, [*victim, *others], answer, 4)[0].tolist() == [0] * 5
    with pytest.raises(Refusal, match="round 0 was answered"):  # nor are both groups opened, one after the other
        helper.answer("run", 0, BATCH, records_of([*victim, *others]), BROADCAST)


def test_twice_counts_once(tmp_path):
    """So a report cannot hide behind copies of itself, and devices that agree on an id or a seed stop no round."""
    plan, helper = plan_of(), Helper(plan_of(), KEY, tmp_path)
    one, two = reports_of(plan, np.arange(10).reshape(2, 5))
    with pytest.raises(TooFewReports, match="1 of"):
        helper.answer("run", 0, BATCH, records_of([one] * 9), BROADCAST)
    secrets = draw_secrets()
    twins = [secrets._replace(id=bytes([k] * 16)) for k in range(2)]
    reports = [make_report(np.ones(5), PUBLIC, plan.purpose("run", 0, BATCH, BROADCAST), 32, twin) for twin in twins]
    garbage = [bytes(plan.report_bytes)] * 2
    batch = [one, one, *garbage, *reports, two]
    answer = helper.answer("run", 0, BATCH, records_of(batch), BROADCAST)
    assert answer[0] == 0b1010001
    total, counted = unmask(plan, batch, answer, 7)
    assert (total.tolist(), counted) == ([6, 8, 10, 12, 14], 3)


def test_a_round_is_answered_once_also_after_a_restart(tmp_path):
    plan, vectors = plan_of(), np.arange(20, dtype=np.uint32).reshape(4, 5)
    reports = reports_of(plan, vectors, number=3)
    first = Helper(plan, KEY, tmp_path).answer("run", 3, BATCH, records_of(reports), BROADCAST)
    helper = Helper(plan, KEY, tmp_path)
    assert helper.answer("run", 3, BATCH, records_of(reports), BROADCAST) == first  # the very same request
    other_batch, other = bytes([1] * 16), reports_of(plan, vectors, number=3, batch=bytes([1] * 16))
    for number, batch, batch_reports in [
        (3, BATCH, reports[:3]),  # would show the fourth by a difference
        (3, BATCH, reports[::-1]),
        (3, other_batch, other),
        (2, BATCH, reports_of(plan, vectors, number=2)),
    ]:
        with pytest.raises(Refusal, match="round 3 was answered"):
            helper.answer("run", number, batch, records_of(batch_reports), BROADCAST)
    with pytest.raises(TooFewReports, match="0 of"):  # a batch that overlaps an earlier one
        helper.answer("run", 4, BATCH, records_of(reports), BROADCAST)
    helper.answer("another run", 0, BATCH, records_of(reports_of(plan, vectors, run="another run")), BROADCAST)
    helper.answer("run", 4, BATCH, records_of(reports_of(plan, vectors, number=4)), BROADCAST)


def test_a_refused_request_leaves_no_trace(tmp_path):
    plan, helper = plan_of(), Helper(plan_of(), KEY, tmp_path)
    reports = reports_of(plan, np.ones((2, 5)))
    with pytest.raises(TooFewReports, match="1 of"):
        helper.answer("run", 0, BATCH, records_of(reports[:1]), BROADCAST)
    with pytest.raises(MessageError, match="96 bytes"):
        helper.answer("run", 0, BATCH, records_of(reports)[1:], BROADCAST)
    assert not list(tmp_path.iterdir())
    helper.answer("run", 0, BATCH, records_of(reports), BROADCAST)


def test_a_damaged_memory_is_loud(tmp_path):
    plan = plan_of()
    Helper(plan, KEY, tmp_path).answer("run", 0, BATCH, records_of(reports_of(plan, np.ones((2, 5)))), BROADCAST)
    file = tmp_path / two_servers.MEMORY
    whole = file.read_bytes()
    for damaged in (b"", whole[:-20], whole.replace(b'"round": 0', b'"round": 7')):
        file.write_bytes(damaged)
        with pytest.raises(StorageError, match=file.name):
            Helper(plan, KEY, tmp_path)
    file.write_bytes(whole)
    with pytest.raises(StorageError, match="is of the plan"):
        Helper(dataclasses.replace(plan, content=b"other"), KEY, tmp_path)
    with pytest.raises(StorageError, match="names the helper"):
        Helper(plan, X25519PrivateKey.generate(), tmp_path)
    with pytest.raises(StorageError, match="need no helper"):
        Helper(dataclasses.replace(plan, protocol="open", helper=None), KEY, tmp_path)


def test_the_memory_is_written_before_the_answer(tmp_path):
    plan = plan_of()
    helper = Helper(plan, KEY, tmp_path / "gone")  # there is no such folder: it cannot be written
    with pytest.raises(StorageError, match="cannot be written"):
        helper.answer("run", 0, BATCH, records_of(reports_of(plan, np.ones((2, 5)))), BROADCAST)


def test_an_answer_that_does_not_fit_is_refused():
    plan = plan_of()
    reports = reports_of(plan, np.ones((3, 5)))
    for answer in (b"", b"\x07" + bytes(19), b"\x01" + bytes(20), b"\x0f" + bytes(20)):
        with pytest.raises(MessageError):
            unmask(plan, reports, answer, 3)


def test_a_spool_survives_a_restart(tmp_path):
    spool = Spool(tmp_path / "spool", 10)
    spool.add(b"a" * 16, b"0123456789")
    spool.add(b"b" * 16, b"9876543210")
    spool.close()
    with open(tmp_path / "spool", "ab") as file:
        file.write(b"cut off")
    spool = Spool(tmp_path / "spool", 10)
    assert spool.owners == [b"a" * 16, b"b" * 16]
    spool.add(b"c" * 16, b"abcdefghij")
    assert list(spool.reports(3)) == [b"0123456789", b"9876543210", b"abcdefghij"]
    with pytest.raises(MessageError, match="10 bytes"):
        spool.add(b"d" * 16, b"")
    spool.close()


def test_a_report_that_cannot_be_written_leaves_no_trace(tmp_path):
    with contextlib.closing(Spool(tmp_path / "spool", 10)) as spool:
        spool.add(b"a" * 16, b"0123456789")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (26 + 20, limits[1]))  # as a disk with room for 20 bytes more
        try:
            with pytest.raises(OSError, match="too large"):
                spool.add(b"b" * 16, b"9876543210")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (tmp_path / "spool").stat().st_size == 26
        spool.add(b"c" * 16, b"abcdefghij")
        assert spool.owners == [b"a" * 16, b"c" * 16]
        assert list(spool.reports(2)) == [b"0123456789", b"abcdefghij"]


PLAN = {
    "format": "fedrecon-device-plan",
    "algorithm": "0123",
    "rounds": 7,
    "vector": {"length": 5, "dtype": "uint32"},
    "sum": {"protocol": "two-servers", "bits": 24, "helper": PUBLIC.hex(), "least": 3},
    "limits": {"reports_per_day": 4},
}


def test_a_plan_says_what_the_servers_need(tmp_path):
    data = json.dumps(PLAN).encode()
    (tmp_path / "plan.json").write_bytes(data)
    plan = read_served_plan(tmp_path)
    assert (plan.digest, plan.length, plan.bits, plan.least) == (hashlib.sha256(data).hexdigest(), 5, 24, 3)
    assert (plan.helper, plan.rounds, plan.report_bytes) == (PUBLIC, 7, RECORD + 15)
    for change in ({"bits": 21}, {"least": 0}, {"helper": None}, {"helper": "00"}, {"protocol": "open"}):
        (tmp_path / "plan.json").write_text(json.dumps(PLAN | {"sum": PLAN["sum"] | change}))
        with pytest.raises(StorageError, match="not a device plan"):
            read_served_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    "change",
    [
        {"noise": "much"},
        {"noise": {"variance": 2.0}},
        {"noise": {"variance": "2", "delta": 1e-6}},
        {"aggregator": 5},
        {"aggregator": {"make": "secure"}},
        {"aggregator": {"make": "secure", "settings": {"clients": "many"}}},
        {"aggregator": {"make": "secure", "settings": {"clients": 9, "noise": [1.0, 2.0]}}},
    ],
)
def test_malformed_noise_and_aggregators_are_refused_and_not_read_as_absent(tmp_path, change):
    (tmp_path / "plan.json").write_text(json.dumps(PLAN | change))
    with pytest.raises(StorageError, match=f"not a device plan.*{next(iter(change))}"):
        read_served_plan(tmp_path)


def test_the_sum_of_one_report_is_no_sum(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(PLAN | {"sum": PLAN["sum"] | {"least": 1}}))
    with pytest.raises(StorageError, match=r"`least` in .* must be at least 2 \(got 1\)"):
        read_served_plan(tmp_path)


def test_a_round_beyond_the_plan_is_not_answered(tmp_path):
    plan = plan_of()
    with pytest.raises(Refusal, match=r"the plan has 9 rounds, from 0 \(got 9\)"):
        Helper(plan, KEY, tmp_path).answer(
            "run", 9, BATCH, records_of(reports_of(plan, np.ones((2, 5)), number=9)), BROADCAST
        )


def test_noise_of_a_device_is_skellam_from_fresh_entropy():
    zeros = np.zeros(40_000, np.uint32)
    first, second = (sealing.add_noise(zeros, 9.0).astype(np.int32) for _ in range(2))
    assert first.mean() == pytest.approx(0, abs=0.1)
    assert first.var() == pytest.approx(9.0, rel=0.05)
    assert np.abs(np.corrcoef(first, second)[0, 1]) < 0.05
    assert (sealing.add_noise(zeros + 7, 9.0).astype(np.int32) - 7).mean() == pytest.approx(0, abs=0.1)


# ---- who can do what: the table in docs/privacy.md ----


def test_the_coordinator_alone_sees_random_numbers():
    plan = plan_of(length=100_000)
    vector = np.full(plan.length, 7, np.uint32)
    report, again = reports_of(plan, [vector, vector])
    masked, other = (sealing.unpack(data[RECORD:], plan.length, 32) for data in (report, again))
    for numbers in (masked, other, masked - other):
        assert numbers.mean() == pytest.approx(2.0**31, rel=0.02)
        assert len(np.unique(numbers & np.uint32(255))) == 256
    stranger = X25519PrivateKey.generate()
    purpose = plan.purpose("run", 0, BATCH, BROADCAST)
    assert sealing.open_seed(stranger, stranger.public_key().public_bytes_raw(), report[:RECORD], purpose) is None
    assert sealing.open_seed(stranger, PUBLIC, report[:RECORD], purpose) is None


def test_the_helper_alone_sees_nothing_that_depends_on_a_vector():
    plan, secrets = plan_of(), draw_secrets()
    purpose = plan.purpose("run", 0, BATCH, BROADCAST)
    reports = [make_report(np.full(5, value), PUBLIC, purpose, 32, secrets) for value in (0, 2**31)]
    assert reports[0][:RECORD] == reports[1][:RECORD]
    assert reports[0][RECORD:] != reports[1][RECORD:]


def test_both_servers_together_open_every_report():
    plan, vector = plan_of(), np.arange(5, dtype=np.uint32)
    (report,) = reports_of(plan, [vector])
    seed = sealing.open_seed(KEY, PUBLIC, report[:RECORD], plan.purpose("run", 0, BATCH, BROADCAST))
    np.testing.assert_array_equal(sealing.unpack(report[RECORD:], 5, 32) - sealing.expand(seed, 5), vector)


@given(place=st.integers(0, RECORD - 1), bit=st.integers(0, 7))
def test_a_changed_id_or_seed_is_left_out_of_the_sum(place, bit):
    """Which is what somebody on the network could change, were there no TLS; what follows them is only masked."""
    plan = plan_of()
    (report,) = reports_of(plan, np.ones((1, 5)))
    changed = bytearray(report[:RECORD])
    changed[place] ^= 1 << bit
    seed = sealing.open_seed(KEY, PUBLIC, bytes(changed), plan.purpose("run", 0, BATCH, BROADCAST))
    # X25519 ignores the last bit of a public key, but the key is derived from all of it.
    assert seed is None


def test_a_coordinator_that_invents_devices_learns_the_one_that_it_did_not(tmp_path):
    """What this protocol does not solve: only admission by somebody else, and noise, help."""
    plan, vector = plan_of(least=10), np.arange(5, dtype=np.uint32)
    reports = reports_of(plan, [vector, *np.ones((9, 5))])
    answer = Helper(plan, KEY, tmp_path).answer("run", 0, BATCH, records_of(reports), BROADCAST)
    np.testing.assert_array_equal(unmask(plan, reports, answer, 10)[0] - 9, vector)


def test_a_lying_device_moves_a_sum_by_anything(tmp_path):
    """A mask hides a vector's size, too: nobody can check that it was clipped."""
    plan, lie = plan_of(bits=20), np.full(5, 2**19 - 1)
    reports = reports_of(plan, [np.zeros(5), np.zeros(5), lie])
    answer = Helper(plan, KEY, tmp_path).answer("run", 0, BATCH, records_of(reports), BROADCAST)
    np.testing.assert_array_equal(unmask(plan, reports, answer, 3)[0], lie)


def test_a_coordinator_that_changes_masked_vectors_spoils_the_sum_and_learns_nothing_more(tmp_path):
    plan = plan_of()
    reports = reports_of(plan, np.ones((3, 5)))
    spoiled = [reports[0][:RECORD] + (9).to_bytes(4, "little") * 5, *reports[1:]]
    answer = Helper(plan, KEY, tmp_path).answer("run", 0, BATCH, records_of(spoiled), BROADCAST)
    assert answer == Helper(plan, KEY, tmp_path).answer("run", 0, BATCH, records_of(reports), BROADCAST)
    assert (unmask(plan, spoiled, answer, 3)[0] != 3).any()
