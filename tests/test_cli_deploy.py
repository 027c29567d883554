"""The commands of a deployment: plans and keys are made, wrong use ends with a sentence, example files are sound."""

import contextlib
import json
import resource
import shutil
import ssl
import stat
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from deployed import Waiting, files_of, grid_of, node_of
from fedrecon._src.app.cli import FAILED, join, main, serve
from fedrecon._src.deploy.admission import read_private_key
from fedrecon._src.deploy.certificates import KeyExists, make_node
from fedrecon._src.deploy.messages import Envelope, pack, unpack
from fedrecon._src.deploy.plan import is_prefix
from fedrecon._src.storage.atomic import StorageError
from fedrecon._src.storage.ownership import file_lock
from fedrecon.deploy import Memory, Plan

EXAMPLES = Path(__file__).parent.parent / "examples" / "deploy"


def test_a_plan_numbers_items_by_their_ids_whatever_the_order_of_the_file(tmp_path, capsys):
    for name, lines in {"a": ["20,Brazil", "3,Alien"], "b": ["3,Alien", "20,Brazil"]}.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(["item,title", *lines]) + "\n")
        assert (
            main(["plan", "--items", f"{tmp_path}/{name}.csv", "--out", f"{tmp_path}/{name}", "--model.dim", "2"]) == 0
        )
    first, second = (Plan.open(tmp_path / name) for name in "ab")
    assert first.digest == second.digest
    assert first.legend.ids.tolist() == [3, 20]
    assert first.legend.titles.tolist() == ["Alien", "Brazil"]
    assert first.config.data.source == ""
    shown = capsys.readouterr().out
    assert first.digest in shown
    assert "no differential privacy is promised" in shown


@pytest.mark.slow
def test_a_plan_of_text_takes_the_first_words(tmp_path):
    (tmp_path / "words.txt").write_text("the\nof\nand\nrare\n")
    words = ["plan", "--task", "text", "--words", f"{tmp_path}/words.txt", "--out", f"{tmp_path}/plan"]
    assert main([*words, "--model.vocabulary", "3"]) == 0
    assert Plan.open(tmp_path / "plan").legend.words == ("the", "of", "and")


def test_a_plan_from_a_config_names_none_of_its_files(tmp_path):
    (tmp_path / "items.csv").write_text("item\n1\n2\n")
    config = {"data": {"source": "mine.csv", "titles": "secret.csv"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["plan", "--config", f"{tmp_path}/config.json", "--items", f"{tmp_path}/items.csv"]
    assert main([*words, "--out", f"{tmp_path}/plan"]) == 0
    plan = (tmp_path / "plan" / "plan.json").read_text()
    assert "mine.csv" not in plan
    assert "secret.csv" not in plan


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["plan", "--items", "none.csv", "--out", "p"], "none.csv is not a file"),
        (["plan", "data.csv", "--items", "items.csv", "--out", "p"], "Unrecognized options: data.csv"),
        (["plan", "--titles", "t.csv", "--items", "items.csv", "--out", "p"], "Unrecognized options: --titles"),
        (["plan", "--items", "items.csv", "--out", "p", "--item-column", "id"], "no column 'id'"),
        (["plan", "--items", "items.csv", "--out", "p", "--secure"], "--least-nodes: must be at least 2"),
        (["plan", "--items", "items.csv", "--out", "p", "--share", "2"], "--share: "),
        (["plan", "--items", "items.csv", "--out", "p", "--privacy.epsilon", "4"], "give --users"),
        (
            ["plan", "--items", "items.csv", "--out", "p", "--sampling.drop-out", "0.1"],
            "use --share, the participation rate of",
        ),
        (["plan", "--items", "items.csv", "--out", "p", "--patience", "7"], "a deployment always trains for --rounds"),
        (["serve", "none", "--out", "run", "--insecure"], "none holds no plan"),
        (["serve", "none", "--out", "run"], "--keys: is missing"),
        (["join", "x.csv", "--server", "a:1"], "--ca: is missing"),
        (["join", "x.csv", "--server", "a:1", "--insecure", "--key", "k"], "--insecure: cannot be combined with `key`"),
        (["join", "x.csv", "--server", "a:1", "--insecure"], "x.csv does not exist"),
        (["keys", "k", "--nodes", "../x"], "'../x'"),
    ],
)
def test_wrong_use_ends_with_a_sentence(words, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("items.csv").write_text("item\n1\n2\n")
    assert main(words) in (1, 2)
    assert sentence in capsys.readouterr().err


def test_keys_are_made_once_and_only_their_owner_reads_them(tmp_path):
    assert main(["keys", str(tmp_path), "--host", "fed.example.org", "--nodes", "north", "south"]) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert sorted(path.name for path in before) == sorted(
        ["ca.crt", "ca.key", "server.crt", "server.key", "north.key", "north.pub", "south.key", "south.pub"]
    )
    for path in before:
        open_to_others = stat.S_IMODE(path.stat().st_mode) & 0o077
        assert bool(open_to_others) == (path.suffix != ".key")
    assert main(["keys", str(tmp_path), "--nodes", "west"]) == 0
    assert all(path.read_bytes() == content for path, content in before.items())
    with pytest.raises(KeyExists, match="never replaced"):
        make_node(tmp_path / "nodes", "north")


@pytest.mark.parametrize("host", ["fed.example.org:8000", "a b", "https://x", "a\nb", "", "*", "[::1]", "a" * 300, "é"])
def test_a_host_that_no_node_could_call_is_refused_before_anything_is_made(host, tmp_path, capsys):
    assert main(["keys", str(tmp_path / "keys"), "--host", host]) == 1
    assert f"(got {host[:60]!r})" in capsys.readouterr().err
    assert not (tmp_path / "keys").exists()


def test_certificates_that_do_not_belong_together_are_refused(tmp_path, capsys):
    for name in ("one", "other"):
        assert main(["keys", str(tmp_path / name), "--nodes", "north"]) == 0
    one, other = tmp_path / "one", tmp_path / "other"
    (tmp_path / "items.csv").write_text("item\n1\n2\n")
    main(["plan", "--items", f"{tmp_path}/items.csv", "--out", f"{tmp_path}/plan", "--model.dim", "2"])
    serving = ["serve", str(tmp_path / "plan"), "--out", str(tmp_path / "run"), "--keys", str(one), "--min-nodes", "1"]
    capsys.readouterr()

    def refused(sentence):
        for command in (["keys", str(one), "--nodes", "south"], serving):
            assert main(command) == 1
            assert sentence in capsys.readouterr().err
        assert not (one / "nodes" / "south.key").exists()
        assert not list(tmp_path.glob("run*"))

    (one / "ca.crt").write_bytes((other / "ca.crt").read_bytes())
    refused("server.crt was not signed by")
    (one / "server.key").write_bytes((other / "server.key").read_bytes())
    refused("server.key is not the key of")
    (one / "server.key").write_bytes(b"-----BEGIN")
    refused("server.key is damaged")
    (one / "server.key").unlink()
    refused("server.key is missing")


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_an_encrypted_key_of_a_node_is_refused(tmp_path):
    options = ["-q", "-t", "ed25519", "-N", "secret", "-f", str(tmp_path / "north.key")]
    subprocess.run(["ssh-keygen", *options], check=True)
    with pytest.raises(ValueError, match=r"north.key is damaged, or is not an unencrypted private Ed25519 key"):
        read_private_key(tmp_path / "north.key")


def test_half_a_pair_of_keys_is_never_left(tmp_path, capsys):
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "north.pub").write_text("mine")
    assert main(["keys", str(tmp_path), "--nodes", "south", "north"]) == 1
    assert "north.pub exists; keys are never replaced" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["north.pub"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, before[1]))  # the key is smaller, the certificate is not
    try:
        assert main(["keys", str(tmp_path / "full")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "ca.crt cannot be written: File too large" in capsys.readouterr().err
    assert list((tmp_path / "full").iterdir()) == []


def test_foreign_folders_are_not_touched(tmp_path, capsys):
    _, parts = files_of(tmp_path)
    (tmp_path / "items.csv").write_text("item\n1\n2\n")
    plan = ["plan", "--items", f"{tmp_path}/items.csv", "--model.dim", "2"]
    assert main([*plan, "--out", f"{tmp_path}/plan"]) == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    server = ["serve", f"{tmp_path}/plan", "--insecure"]
    node = ["join", str(parts[0]), "--server", "127.0.0.1:1", "--insecure"]
    capsys.readouterr()
    for command in (
        [*plan, "--out", f"{tmp_path}/mine"],
        [*server, "--out", f"{tmp_path}/mine"],
        [*node, "--state", f"{tmp_path}/mine"],
    ):
        assert main(command) == 1
        assert "mine holds thesis.tex, and fedrecon did not make it" in capsys.readouterr().err
        assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_an_item_with_two_titles_is_refused(tmp_path, capsys):
    (tmp_path / "items.csv").write_text("item,title\n1,Alien\n2,Brazil\n1,Alien\n1,Aliens\n")
    assert main(["plan", "--items", f"{tmp_path}/items.csv", "--out", f"{tmp_path}/plan"]) == 1
    assert "line 5: item '1' has the title 'Aliens', but 'Alien' above" in capsys.readouterr().err


def test_one_node_at_a_time_uses_a_memory(tmp_path, capsys):
    _, parts = files_of(tmp_path)
    state = tmp_path / f"{parts[0].name}.node"
    with file_lock(state / ".lock"):
        assert main(["join", str(parts[0]), "--server", "127.0.0.1:1", "--insecure"]) == 1
    assert f"what this node remembers in {state} is in use by process" in capsys.readouterr().err


def test_a_damaged_memory_is_noticed(tmp_path):
    memory = Memory(tmp_path / "state")
    memory.begin("first")
    memory.see(12)
    assert Memory(tmp_path / "state").round == 12
    assert stat.S_IMODE((tmp_path / "state" / "node.json").stat().st_mode) == 0o600
    written = (tmp_path / "state" / "node.json").read_text()
    (tmp_path / "state" / "node.json").write_text(written.replace("12", "02"))
    with pytest.raises(StorageError, match=r"node.json is not valid JSON|damaged"):
        Memory(tmp_path / "state")
    (tmp_path / "state" / "node.json").write_text(written.replace("12", "11"))
    with pytest.raises(StorageError, match=r"sha256 differs.*remove it to accept a plan again"):
        Memory(tmp_path / "state")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--oversample", "nan"),
        ("--oversample", "inf"),
        ("--deadline", "inf"),
        ("--stage-deadline", "nan"),
        ("--wait", "-1"),
        ("--min-nodes", str(2**70)),
        ("--listen", "127.0.0.1:65536"),
        ("--listen", "127.0.0.1:٣"),
        ("--algorithm", "os:getcwd"),
    ],
)
def test_a_server_refuses_numbers_and_names_that_make_no_sense(option, value, tmp_path, capsys):
    (tmp_path / "items.csv").write_text("item\n1\n2\n")
    main(["plan", "--items", f"{tmp_path}/items.csv", "--out", f"{tmp_path}/plan", "--model.dim", "2"])
    capsys.readouterr()
    words = ["serve", f"{tmp_path}/plan", "--out", f"{tmp_path}/run", "--insecure", option, value]
    assert main(words) in (1, 2)
    assert value in capsys.readouterr().err
    assert not list(tmp_path.glob("run*"))


def test_the_certificate_is_good_for_its_names_and_no_others(tmp_path):
    """A handshake in memory, as Python's own TLS sees it."""
    main(["keys", str(tmp_path), "--host", "fed.example.org"])
    accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    accepting.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    calling = ssl.create_default_context(cafile=tmp_path / "ca.crt")

    def shake(name):
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = calling.wrap_bio(to_client, to_server, server_hostname=name)
        listener = accepting.wrap_bio(to_server, to_client, server_side=True)
        for _ in range(4):
            for side in (client, listener):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
        return client.version()

    for name in ("fed.example.org", "localhost", "127.0.0.1"):
        assert shake(name) == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError):
        shake("other.example.org")


@pytest.mark.slow
def test_a_node_in_a_script_accepts_the_named_plan_only(tmp_path, capsys):
    _, parts = files_of(tmp_path)
    (tmp_path / "items.csv").write_text("item\n" + "\n".join(map(str, range(100, 112))) + "\n")
    main(["plan", "--items", f"{tmp_path}/items.csv", "--out", f"{tmp_path}/plan", "--model.dim", "2"])
    plan = Plan.open(tmp_path / "plan")
    assert is_prefix(plan.digest, plan.digest[:16].upper())
    offer = pack(Envelope("join", plan.digest, "run", 0, {}, plan.content))
    for accept, kind in ((plan.digest[:20], "ok"), ("0" * 64, "refused"), (None, "refused")):
        words = [str(parts[0]), "--server", "a:1", "--insecure", *(["--accept", accept] if accept else [])]
        asking = join.acceptance(join.parse(words), print)
        assert unpack(node_of(parts[0], accept=asking).handle(offer), 2**20).kind == kind
    assert f"--accept {plan.digest[:16]}" in capsys.readouterr().out


class Both(Waiting):
    """Nodes of this process, and a clock that does not wait."""

    def __init__(self, grid):
        super().__init__()
        self.nodes, self.name, self.send, self.poll, self.cancel = (
            grid.nodes,
            grid.name,
            grid.send,
            grid.poll,
            grid.cancel,
        )


def serving(words, grid, monkeypatch, capsys):
    """Run `fedrecon serve` with nodes of this process; return its exit code and what it prints."""

    @contextlib.contextmanager
    def within(*args, **options):
        yield Both(grid), SimpleNamespace(problems={})

    monkeypatch.setattr("fedrecon._src.deploy.tasks.serve_tasks", within)
    code = main(["serve", *map(str, words), "--insecure", "--min-nodes", "3"])
    return code, capsys.readouterr().out


def made_plan(folder, capsys, *words):
    (folder / "items.csv").write_text("item\n" + "\n".join(map(str, range(100, 112))) + "\n")
    made = ["--items", folder / "items.csv", "--out", folder / "plan", "--preset", "paper", "--model.dim", 2]
    made += ["--data.max-examples", 10, "--data.fractions", "0.6", "0.2", "0.2", "--rounds", 2, *words]
    assert main(["plan", *map(str, made)]) == 0
    capsys.readouterr()
    return folder / "plan"


@pytest.mark.slow
def test_serve_prints_a_line_per_round_or_json_and_other_commands_accept_its_run(tmp_path, monkeypatch, capsys):
    union, parts = files_of(tmp_path)
    plan, run = made_plan(tmp_path, capsys, "--reconstruct.solver", "least-squares"), tmp_path / "run"
    code, out = serving((plan, "--out", run), grid_of(parts), monkeypatch, capsys)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split()[:5] == ["round", "nodes", "answered", "late", "failed"]
    assert [line.split()[:5] for line in lines[1:3]] == [["1", "3", "3", "0", "0"], ["2", "3", "3", "0", "0"]]
    assert "test users of all nodes" in out
    code, out = serving((plan, "--out", tmp_path / "again", "--json"), grid_of(parts), monkeypatch, capsys)
    records = [json.loads(line) for line in out.splitlines()]
    assert (code, [record["kind"] for record in records]) == (0, ["round", "round", "evaluation", "test"])
    assert main(["evaluate", str(run), "--ratings", str(union)]) == 0
    assert main(["recommend", str(run), "--ratings", str(union), "--user", "u001"]) == 0


@pytest.mark.slow
def test_a_server_whose_training_fails_says_why_and_ends_as_train_does(tmp_path, monkeypatch, capsys):
    _, parts = files_of(tmp_path)
    plan = made_plan(tmp_path, capsys, "--update.learning-rate", "1e30", "--reconstruct.learning-rate", "1e30")
    code, out = serving((plan, "--out", tmp_path / "run"), grid_of(parts), monkeypatch, capsys)
    assert code == FAILED == 3
    assert "updates were not finite" in json.loads((tmp_path / "run" / "run.json").read_text())["failed"]
    assert "next:" not in out


def test_a_plan_for_clicks_says_what_is_sent_first(tmp_path, capsys):
    (tmp_path / "items.csv").write_text("item\n1\n2\n3\n")
    words = ["plan", "--task", "clicks", "--items", f"{tmp_path}/items.csv", "--out", f"{tmp_path}/plan"]
    assert main([*words, "--data.at-least", "4", "--model.dim", "2"]) == 0
    assert "first sums over users by item (counts, and the products of a spectral start); then the sum" in " ".join(
        capsys.readouterr().out.split()
    )
    plan = Plan.open(tmp_path / "plan")
    assert plan.config.model.at_least == 4
    assert plan.unprepared


def test_commands_of_the_example_files_are_understood(monkeypatch):
    monkeypatch.setenv("ACCEPT", "0" * 64)
    found = []
    for file in sorted(path for path in EXAMPLES.iterdir() if path.suffix in (".yaml", ".service")):
        text = file.read_text().replace("\\\n", " ")
        text = text.replace("${SERVER}", "https://host:8000").replace("${ACCEPT}", "0" * 64)
        for line in text.splitlines():
            start = line.strip()
            if start.startswith("ExecStart="):
                found.append(start.split()[1:])
            elif start.startswith("command: "):
                found.append(start.removeprefix("command: ").split())
    assert len(found) == 6
    services = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())["services"]
    assert set(services) == {"server", "north", "south", "west"}
    assert all(service["image"] == "fedrecon" for service in services.values())
    for command, *words in found:
        {"serve": serve, "join": join}[command].parse(words)


# ---- devices ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["serve", "bundle", "--insecure", "--devices.tokens", "t"], "--devices.run: is missing"),
        (["serve", "bundle", "--insecure", "--devices.run", "r"], "--devices.tokens: is missing"),
        (
            ["serve", "bundle", "--insecure", "--devices.run", "r", "--devices.tokens", "t", "--devices.helper", "h:1"],
            "needs `devices.sign`",
        ),
        (["helper", "plan.json", "--key", "k", "--coordinator", "c", "--state", "s"], "--keys: is needed"),
    ],
)
def test_device_options_that_do_not_fit_together(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    more = ["--out", "run"] if options[0] == "serve" else []
    assert main([*options, *more]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_keys_makes_a_secret_for_tokens_and_keys_of_a_helper_once(tmp_path, capsys):
    from fedrecon._src.deploy.admission import read_secret
    from fedrecon._src.deploy.certificates import read_helper

    assert main(["keys", str(tmp_path), "--tokens", "--helper"]) == 0
    assert len(read_secret(tmp_path / "tokens.key")) == 32
    public = (tmp_path / "helper.pub").read_text().strip()
    assert read_helper(tmp_path / "helper.key").public_key().public_bytes_raw().hex() == public
    assert public in capsys.readouterr().out
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("tokens.key", "helper.key")] == [0o600] * 2
    assert main(["keys", str(tmp_path), "--tokens"]) == 1
    assert "never replaced" in capsys.readouterr().err
    with pytest.raises(ValueError, match="is not a helper's key"):
        read_helper(tmp_path / "server.key")
    (tmp_path / "tokens.key").write_text("short")
    with pytest.raises(ValueError, match="hexadecimal"):
        read_secret(tmp_path / "tokens.key")
