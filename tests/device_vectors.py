"""What the page must compute as Python does: shared test vectors, written by `python tests/device_vectors.py`."""

import base64
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

import device_models
import fedrecon as fr
from device_models import algorithm_of, solver_of, trained
from fedrecon._src.core.clients import Clients
from fedrecon._src.core.cohort import Needs, Packer, lengths_for
from fedrecon._src.core.keys import as_number, client_keys, round_key
from fedrecon._src.core.keys import words_of as key_words
from fedrecon._src.core.pytrees import flatten
from fedrecon._src.data.sentences import prompt_columns, word_hash
from fedrecon._src.device.export import export_form, of_weighed, packed, tables_file
from fedrecon._src.device.update_graph import describe_rows, describe_split
from fedrecon._src.privacy.secure_sum.primitives import public_of
from fedrecon._src.recommend.tasks.clicks import click_weight
from fedrecon.data import Vocabulary, personal_text, split_text
from fedrecon_device import BundleError
from fedrecon_device.plan import read_plan
from fedrecon_device.ranking import clipped, nearest, rank
from fedrecon_device.sealing import Purpose, Secrets, expand, make_report
from fedrecon_device.tensors import GLOBAL, as_float32
from fedrecon_device.words import PersonalWords
from fedrecon_device.words import Vocabulary as DeviceVocabulary

FILE = Path(__file__).parent / "web" / "vectors.json"
TEXTS = [
    "",
    "Hello, World! How are you?   Fine...",
    'It\'s a well-known fact... but no. Really?! YES!!! "Quoted." Next (one.) two',
    "see https://example.org/a?b=c. and www.test.com, ok",
    "caf\u00e9 cafe\u0301 \u2018single\u2019 \u201cdouble\u201d na\u00efve \u00dcBER stra\u00dfe"
    " \u0130stanbul \u03a3\u03af\u03c3\u03c5\u03c6\u03bf\u03c2",
    "line one\nline two\r\nline three\x0bfour\x1cfive\x85six\u2028seven",
    "tab\there\u00a0nbsp\u3000wide\u2009thin",
    "emoji \U0001f600\U0001f600 and \U0001f1e9\U0001f1ea 100% $5.00 a@b.c x_y --- -- ....",
    "zero\u200bwidth soft\u00adhyphen \ufeffbom \ud800",
    "\u65e5\u672c\u8a9e\u306e\u6587\u3002\u6b21 \u0430\u0431\u0432 \u05e9\u05dc\u05d5\u05dd e\u0301\u0301",
    "Mr. Smith went. to 3.14 e.g. this... And that",
]
HASHED = [
    "",
    "a",
    "the",
    "zebra-fish",
    "caf\u00e9",
    "\u65e5\u672c\u8a9e",
    "\U0001f600",
    "x" * 127,
    "y" * 128,
    "z" * 129,
    "w" * 300,
]


def numbers(values):
    return [float(f"{value:.9g}") for value in np.asarray(values, np.float32).reshape(-1)]


def words_of():
    vocabulary, length = Vocabulary(tuple(device_models.WORDS), 5), 7
    device = DeviceVocabulary(device_models.WORDS, 5, length)
    text = "The zebra-fish ate my sandwich. I told you so, again and again and again!\nWe met Kwame and Kwame."
    mine = personal_text(text, vocabulary, length)
    logits = np.random.default_rng(0).normal(0, 2, vocabulary.num_ids).astype(np.float32)
    logits[vocabulary.first_oov :] += 3
    person = PersonalWords(device, split_text(text))
    prompt, place = prompt_columns("we met the", vocabulary, length)
    return {
        "vocabulary": {"words": device_models.WORDS, "buckets": 5, "max_words": length},
        "text": text,
        "columns": {name: column.reshape(-1).tolist() for name, column in mine.columns.items()},
        "own": person.uses,
        "prompt": {
            "words": ["we", "met", "the"],
            "place": place,
            **{n: c.reshape(-1).tolist() for n, c in prompt.items()},
        },
        "logits": numbers(logits),
        "suggested": [
            {"words": words, "n": n, "prefix": prefix, "found": [one._asdict() for one in found]}
            for words, n, prefix in (([], 12, ""), (["we", "met"], 5, ""), (["again"], 4, ""), (["the"], 3, "a"))
            for found in [person.suggest(logits, words, n, prefix)]
        ],
    }


def ranking_of():
    draw = np.random.default_rng(1)
    cases = []
    for n in (1, 4, 20):
        scores = draw.integers(0, 4, 12).astype(np.float32)
        counts, left_out = draw.integers(0, 6, 12), draw.integers(0, 12, 3).tolist()
        found = rank(scores, n, left_out=left_out, counts=counts, least=2).tolist()
        cases.append(
            {"scores": numbers(scores), "n": n, "left_out": left_out, "counts": counts.tolist(), "found": found}
        )
    table = draw.normal(size=(8, 3)).astype(np.float32)
    near = [{"item": k, "found": nearest(table, k, [0, 1, 2, 3, 4], 3)} for k in range(8)]
    clips = [{"score": s, "clipped": clipped(np.float64(s), (0.5, 5)).item()} for s in (-1.0, 0.5, 3.25, 7.2)]
    return {"ranked": cases, "table": numbers(table), "nearest": near, "clipped": clips}


def solved():
    cases = []
    kinds = [("least-squares", {}), ("least-squares", {"default": True, "feedback": True}), ("sgd", {"biases": False})]
    kinds += [("momentum", {"default": True}), ("adagrad", {"feedback": True}), ("adam", {})]
    kinds += [("clicks", {}), ("clicks", {"weight": "weight"})]
    for name, parts in kinds:
        algorithm, settings = clicks(**parts) if name == "clicks" else ratings(name, **parts)
        model = algorithm.model
        params = trained(model, seed=3)
        if name == "clicks":
            params["gram"] = params["item_embedding"].T @ params["item_embedding"]
        form = export_form(algorithm, params, 0)
        form = of_weighed(form, click_weight) if "weight" in parts else form
        start = jax.tree.map(np.asarray, form.start)
        run = jax.jit(lambda p, s, columns, n, form=form: form.reconstruct(p, s, form.prepare(columns), n))
        for count in (0, 1, 7, 12):
            draw = np.random.default_rng(count)
            columns = {
                "item": draw.integers(0, 12, count).astype(np.int32),
                "rating": draw.integers(1, 6, count).astype(np.float32),
            }
            full = {name: np.resize(np.append(column, 0), 12).astype(column.dtype) for name, column in columns.items()}
            local = jax.tree.map(np.asarray, run(params, form.start, full, jnp.int32(count)))
            scores = fr.predict(model, params, local, {"item": np.arange(12)})
            cases.append(
                {
                    "solver": name,
                    "parts": parts,
                    "settings": settings,
                    "roles": device_models.roles_of(params),
                    "tables": {
                        path: {"data": numbers(leaf), "shape": list(np.shape(leaf))}
                        for path, leaf in flatten(params)[0].items()
                    },
                    "start": {
                        path: {"data": numbers(leaf), "shape": list(np.shape(leaf))} for path, leaf in start.items()
                    },
                    "items": columns["item"].tolist(),
                    "ratings": columns["rating"].tolist(),
                    "local": {path: numbers(leaf) for path, leaf in local.items()},
                    "scores": numbers(scores),
                }
            )
    return cases


def ratings(solver, **parts):
    reconstruct, settings = solver_of(solver)
    return algorithm_of(small(**parts), reconstruct), settings


def clicks(weight=None):
    model = fr.models.ranking_factorization(12, 3, weight=weight)
    algorithm = fr.federated_ials(model, unobserved=0.3, ridge=1.5, server=optax.sgd(1.0))
    settings = {"solver": "least-squares", "ridge": 1.5, "unobserved": 0.3, "counts": "log" if weight else "ignore"}
    return algorithm, settings | {"blend_after": [0, 1, 2, 5, 10, 20]}


def small(*, biases=True, default=False, feedback=False):
    model = fr.models.matrix_factorization(12, 3, biases=biases)
    model = fr.models.learned_default(model) if default else model
    return fr.models.implicit_feedback(model, 12) if feedback else model


def tables_of():
    params = {"table": np.random.default_rng(2).normal(size=(200, 6)).astype(np.float32), "mean": np.float32(3.5)}
    params["table"][7] = 0
    found = {}
    for kind in ("int8", "float16", None):
        stored = packed(params, kind)
        file = tables_file(stored, {"own": np.arange(3, dtype=np.float32)})
        found[str(kind)] = {
            "file": base64.b64encode(file).decode(),
            "table": numbers(as_float32(stored, GLOBAL)["table"][:20]),
        }
    return found


def keys_of():
    """Return keys of clients, and the order of a redrawn split, as JAX and the packer draw them."""
    cases = []
    for number, name in enumerate(["ann", "7", "\u00dcn\u00ef-\U0001f600", "0f" * 16, "a", ""]):
        key, size = round_key(7, number), (0, 1, 2, 9, 40, 3)[number]
        clients = Clients({"at": np.arange(size)}, np.array([0]), np.array([size]), np.array([name]))
        packer = Packer(clients, Needs(fr.split.redrawn(fr.split.query_only())))
        order = packer.pack(np.array([0]), np.array([as_number(key_words(key))])).query.columns["at"][0, :size]
        cases.append(
            {
                "round": key_words(key).tolist(),
                "name": name,
                "hash": f"{as_number(clients.identities())[0]:016x}",
                "key": key_words(client_keys(key, jnp.asarray(clients.identities()))[0]).tolist(),
                "order": order.tolist(),
            }
        )
    return cases


PACKED = [
    (fr.split.redrawn(fr.split.half()), 12, {"item": (40, ["item"])}, True),
    (fr.split.half(by="time"), 12, {"item": (40, ["item"])}, False),
    (fr.split.at_most(3, fr.split.fraction(0.8)), 10, {}, False),
    (fr.split.alternate(2), 9, {"item/pair": (40, ["item", "pair"])}, True),
    (fr.split.query_only(), 5, {"item": (40, ["item"])}, False),
]


def packed_examples():
    """Return inputs of the update graph, as the packer makes them, for several plans and numbers of examples."""
    draw, cases = np.random.default_rng(3), []
    for number, (split, most, groups, support_rows) in enumerate(PACKED):
        needs = Needs(split, None, 6, groups, support_rows)
        lengths = lengths_for(most, needs)
        for size in (0, 1, 2, 7, 15):
            columns = {
                "item": draw.integers(0, 40, size).astype(np.int32),
                "pair": draw.integers(0, 40, (size, 2)).astype(np.int32),
                "rating": draw.integers(1, 6, size).astype(np.float32),
                "time": draw.integers(0, 5, size).astype(np.int32),
            }
            last, key = {name: column[-most:] for name, column in columns.items()}, round_key(5, number)
            clients = Clients(last, np.array([0]), np.array([min(size, most)]), np.array(["ann"]))
            cohort = Packer(clients, needs, lengths).pack(np.array([0]), np.array([as_number(key_words(key))]))
            inputs = {f"{side}_count": getattr(cohort, side).count[0] for side in ("support", "query")}
            for side in ("support", "query"):
                inputs |= {f"{side}/{name}": x[0] for name, x in getattr(cohort, side).columns.items()}
            for field in ("rows", "num_rows", "slots", "support_slots"):
                inputs |= {f"{field}/{name}": x[0] for name, x in getattr(cohort, field).items()}
            about = {name: {"dtype": str(x.dtype), "shape": list(x.shape[1:])} for name, x in columns.items()}
            plan = {
                "examples": {**lengths._asdict(), "most": most, "columns": about},
                "split": describe_split(needs, most, lengths),
                "rows": describe_rows(
                    needs, {name: np.zeros((1, *x.shape[1:])) for name, x in columns.items()}, lengths
                ),
            }
            cases.append(
                {
                    "plan": plan,
                    "round": key_words(key).tolist(),
                    "name": "ann",
                    "columns": {name: x.tolist() for name, x in columns.items()},
                    "inputs": {name: np.asarray(x).tolist() for name, x in inputs.items()},
                }
            )
    return cases


def whole_plan(part):
    """Complete a plan that says how examples are packed."""
    return {
        "format": "fedrecon-device-plan",
        "version": 1,
        "graph": "0" * 64,
        "rounds": 3,
        **part,
        "state": {},
        "vector": {"length": 4, "dtype": "uint32", "layout": [{"at": 0, "values": "delta/w"}]},
        "sum": {"protocol": "two-servers", "bits": 20, "helper": "ab" * 32, "least": 3},
        "noise": None,
        "limits": {"reports_per_day": 1, "min_examples": 1},
    }


def places_in(value, path=()):
    """Yield the paths of all values in JSON."""
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places_in(value[key], (*path, key))


def changed(plan, path, *values):
    """Return a plan with another value at a path; without values, with nothing there."""
    plan = json.loads(json.dumps(plan))
    *parents, last = path
    parent = plan
    for key in parents:
        parent = parent[key]
    if values:
        parent[last] = values[0]
    else:
        del parent[last]
    return plan


def is_read(plan):
    """Return whether a device agrees to read a plan."""
    try:
        read_plan(json.dumps(plan).encode())
    except BundleError:
        return False
    return True


DAMAGE = [None, -1, 0, 1, 2, 7, 41, 1001, 2**40, 0.5, 1e30, "x", "item", "float32", "ef" * 32, [], [3], {}, True]


def plans():
    """Return plans, what to put at every place in them, and whether a device then reads them: 1 or 0 for each."""
    private, public = (whole_plan(case["plan"]) for case in (packed_examples()[k] for k in (0, 5)))
    private["noise"] = {"variance": 2.5, "least": 2, "epsilon": 8.0, "delta": 1e-6}
    public["sum"] = {"protocol": "open", "bits": 32, "helper": None, "least": 1}
    public |= {"state": {"w": {"dtype": "float32", "shape": [2]}}, "state_key": [0, 7]}
    public["vector"]["layout"].append({"at": 1, "values": "v", "ids": "i", "count": "n"})
    cases = []
    for plan in (private, public):
        plan = json.loads(json.dumps(plan))
        assert is_read(plan)
        verdicts = []
        for path in places_in(plan):
            removed = [changed(plan, path)]
            damaged = removed + [changed(plan, path, value) for value in DAMAGE]
            verdicts.append([list(path), "".join(str(int(is_read(other))) for other in damaged)])
        cases.append({"plan": plan, "verdicts": verdicts})
    return {"values": DAMAGE, "cases": cases}


def sealed():
    """Return reports for two servers, with everything that is random in them given."""
    helper, draw = X25519PrivateKey.from_private_bytes(bytes(range(32))), np.random.default_rng(4)
    public, cases = helper.public_key().public_bytes_raw(), []
    for bits, length in ((32, 5), (24, 4), (20, 4), (20, 5)):
        vector, secrets = draw.integers(0, 2**bits, length), Secrets(draw.bytes(16), draw.bytes(32), draw.bytes(32))
        purpose = Purpose(draw.bytes(32), "a run \u00e9", draw.bytes(16), 2**33 + bits, length)
        names = {"plan": purpose.plan.hex(), "batch": purpose.batch.hex()}
        cases.append(
            {
                "bits": bits,
                "vector": vector.tolist(),
                "helper": public.hex(),
                "purpose": purpose._asdict() | names,
                "secrets": {name: secret.hex() for name, secret in secrets._asdict().items()},
                "ephemeral_public": public_of(secrets.ephemeral).hex(),
                "mask": expand(secrets.seed, length).tolist(),
                "bound": purpose.bind(secrets.id).hex(),
                "report": make_report(vector, public, purpose, bits, secrets).hex(),
            }
        )
    return cases


def vectors():
    """Return all vectors."""
    return {
        "texts": [{"text": text, "sentences": split_text(text)} for text in TEXTS],
        "hashes": [{"word": word, "hash": word_hash(word)} for word in HASHED],
        "words": words_of(),
        "ranking": ranking_of(),
        "solved": solved(),
        "tables": tables_of(),
        "sealed": sealed(),
        "keys": keys_of(),
        "device_inputs": packed_examples(),
        "plans": plans(),
    }


def write(sections):
    """Write vectors as JSON, one line for each section, so that changes of different sections merge."""
    lines = (f"{json.dumps(name)}:{json.dumps(section, separators=(',', ':'))}" for name, section in sections.items())
    FILE.write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    write(vectors())
