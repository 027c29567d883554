"""`fedrecon train`."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fedrecon.cli import options, show
from fedrecon.config import Config, Data, from_json, read_config


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a recommender by Federated Reconstruction: item parameters are learned by the server, user parameters
    are rebuilt by every user from their own ratings and never leave them.

    Ends by evaluating on test users, none of whom took part in training. The defaults are the paper's settings for
    MovieLens 1M. Example: fedrecon train ratings.csv --out runs/mine --data.user userId --data.item movieId

    Attributes:
      out: the folder for everything the run leaves: run.json, metrics.jsonl, checkpoint/, model/, plots/.
      config: a JSON file of settings, or the run.json of an earlier run; options given here override it.
      resume: go on with the run in the folder, to the same parameters as if it had never stopped.
      overwrite: replace the run in the folder.
    """

    settings: Annotated[Config, tyro.conf.arg(name="")]
    out: Path
    config: Path | None = None
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    typed: tyro.conf.Suppress[tuple[str, ...]] = ()


def parse(argv: Sequence[str]) -> Train:
    """Parse the options; those of `--config` become the defaults of the others."""
    default = Config(data=Data(source=tyro.MISSING))
    file = _config_file(argv)
    if file is not None:
        values = read_config(file)
        named = isinstance(values.get("data"), dict) and "source" in values["data"]
        if not named and isinstance(values.setdefault("data", {}), dict):
            values["data"]["source"] = ""
        default = from_json(Config, values, str(file))
        if not named:
            default = dataclasses.replace(default, data=dataclasses.replace(default.data, source=tyro.MISSING))
    found = options.parse(Train, "train", argv, default=Train(settings=default, out=tyro.MISSING))
    return dataclasses.replace(found, typed=tuple(argv))


def _config_file(argv: Sequence[str]) -> Path | None:
    for k, here in enumerate(argv):
        if here == "--config" and k + 1 < len(argv):
            return Path(argv[k + 1])
        if here.startswith("--config="):
            return Path(here.removeprefix("--config="))
    return None


def run(args: Train) -> int:
    """Train, evaluate on the test users, and say what to do next."""
    from fedrecon.experiment import run_experiment
    from fedrecon.plots import learning_curve
    from fedrecon.progress import bars
    from fedrecon.run import RunFolder

    folder = RunFolder(args.out)
    found = run_experiment(
        args.settings,
        folder,
        resume=args.resume,
        overwrite=args.overwrite,
        progress=bars,
        on_record=show.progress_of,
    )
    learning_curve(found.run.history, folder.plots_path / "learning_curve.png")
    if found.run.interrupted:
        again = [word for word in args.typed if word not in ("--overwrite", "--resume")]
        done = f"{found.run.rounds} of {args.settings.rounds} rounds"
        show.remark(f"stopped after {done}; what was learned is saved in {args.out}")
        show.remark(f"to go on: {shlex.join(['fedrecon', 'train', *again, '--resume'])}")
        return 130
    if found.test is None:
        show.remark("there are no test users to evaluate on")
    else:
        show.evaluation(f"{len(found.users.test)} test users, none seen in training", found.test)
    out = shlex.quote(str(args.out))
    print(f"saved: {args.out} (model/ is all that is needed to serve; plots/learning_curve.png shows the training)")
    print(f"next:  fedrecon evaluate {out} --json")
    print(f"       fedrecon recommend {out} --ratings FILE")
    return 0
