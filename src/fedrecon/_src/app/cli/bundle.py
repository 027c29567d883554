"""`fedrecon bundle`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from annotated_types import Ge, Le

from fedrecon._src.app.cli import options, show
from fedrecon._src.recommend.config import Rule
from fedrecon._src.recommend.settings import Epsilon, Noise, NonNegativeInt, Positive, PositiveInt, Share

if TYPE_CHECKING:
    from fedrecon._src.device.model_bundle import DeviceTraining


@dataclass(frozen=True, kw_only=True)
class Devices:
    """How devices train; with --train.

    Attributes:
      rounds: the most rounds of training.
      helper: the public key of the second server (fedrecon helper), with which only sums can be read. Without it, the
        coordinator sees every report.
      least: a sum has at least this many reports.
      most: with helper: a sum has at most this many reports.
      per_round: with noise: how many reports close a round; the sum is divided by this. By default as many as least.
      clip_norm: with helper: changes of a larger norm are shortened to this.
      bits: with helper: bits per number of a report. 24 instead of 32 makes reports a quarter smaller and rounding 256
        times coarser; a smaller most makes it finer.
      reports_per_day: a device sends at most this many reports per day.
      min_examples: devices with fewer examples do not take part.
    """

    rounds: PositiveInt = 100
    helper: str | None = None
    least: PositiveInt = 10
    most: PositiveInt = 1000
    per_round: PositiveInt | None = None
    clip_norm: Positive = 5.0
    bits: Literal[20, 24, 32] = 32
    reports_per_day: PositiveInt = 4
    min_examples: PositiveInt = 2


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Noise that devices add.

    Attributes:
      epsilon: the privacy budget of a device that takes part in all rounds; None for no noise.
      delta: the probability that the guarantee fails; choose it below 1 / devices.
      noise_multiplier: noise in the sum of reports, in units of the clipping norm, instead of what epsilon needs.
    """

    epsilon: Epsilon | None = None
    delta: Share = 1e-6
    noise_multiplier: Noise | None = None


@dataclass(frozen=True, kw_only=True)
class Make:
    """Export a model for phones and browsers.

    The bundle reconstructs and predicts without Python or JAX: with ONNX Runtime on phones and servers, and on a web
    page in browsers. `fedrecon bundle check DIR` checks a bundle and needs only onnxruntime and numpy.

    Example: fedrecon bundle runs/small --out bundles/small --quantise int8

    Attributes:
      run: the folder of a run, or of a saved model.
      out: the folder to write.
      quantise: store tables in int8 (a quarter of the size) or float16 (half of it).
      examples: how many of a person's examples a device uses; the newest are kept.
      least_ratings: recommend only items that at least this many training users have rated; by default as in training.
      train: let devices train the model, too: adds the client's part of a round and a plan of what devices agree to.
      devices: how devices train, with --train.
      privacy: noise that each device adds to its report, with --devices.helper. As many honest reports as
        --devices.least have all the noise that epsilon needs. Needs the extra privacy.
      onnxruntime_web: the dist folder of the npm package onnxruntime-web, which the page needs for text and to train.
      overwrite: replace an existing bundle.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    out: Path
    quantise: Literal["int8", "float16"] | None = None
    examples: Annotated[int, Ge(1), Le(10**5)] = 300
    least_ratings: NonNegativeInt | None = None
    train: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    devices: Devices = field(default_factory=Devices)
    privacy: Privacy = field(default_factory=Privacy)
    onnxruntime_web: Path | None = None
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False

    def rules(self) -> Iterator[Rule]:
        """Yield the rules for options that must fit together."""
        devices, privacy = self.devices, self.privacy
        noised = privacy.epsilon is not None or privacy.noise_multiplier is not None
        yield Rule(not self.train and devices != Devices(), "devices", "needs --train")
        yield Rule(not self.train and privacy != Privacy(), "privacy", "needs --train")
        alone = noised and devices.helper is None
        yield Rule(alone, "devices.helper", "is missing: without it, the coordinator sees reports with little noise")
        both = privacy.epsilon is not None and privacy.noise_multiplier is not None
        yield Rule(both, "privacy.noise_multiplier", "cannot be combined with `privacy.epsilon`: it follows from it")
        unused = not noised and (devices.per_round is not None or privacy != Privacy())
        yield Rule(unused, "privacy.epsilon", "is missing: `devices.per_round` and `privacy.delta` are about noise")
        few = devices.per_round is not None and not devices.least <= devices.per_round <= devices.most
        yield Rule(few, "devices.per_round", "must be from `devices.least` to `devices.most`")


@dataclass(frozen=True, kw_only=True)
class Check:
    """Check a bundle: every file has the digest in its manifest, and every test vector is reproduced to 1e-5.

    Attributes:
      folder: the bundle.
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]


def parse(argv: Sequence[str]) -> Make | Check:
    """Parse the options of `bundle`, or of `bundle check`."""
    if argv and argv[0] == "check":
        return options.parse(Check, "bundle check", argv[1:])
    return options.parse(Make, "bundle", argv)


def run(args: Make | Check) -> int:
    """Write a bundle, or check one."""
    if isinstance(args, Check):
        from fedrecon_device.__main__ import main

        return main(["check", str(args.folder)])
    from fedrecon._src.device.bundle_writer import check_bundle
    from fedrecon._src.device.model_bundle import bundle_model
    from fedrecon._src.device.web_page import page_lacks
    from fedrecon._src.recommend.saved_models import open_model
    from fedrecon._src.storage.ownership import file_lock
    from fedrecon_device.files import read_manifest

    lock = args.out.absolute().with_name(f".{args.out.absolute().name}.lock")
    with file_lock(lock, f"the bundle in {args.out}"):
        check_bundle(args.out)
        if args.out.exists() and any(args.out.iterdir()) and not args.overwrite:
            raise options.UsageError(f"{args.out} holds a bundle: replace it with --overwrite, or give another --out")
        folder = bundle_model(
            open_model(args.run),
            args.out,
            most=args.examples,
            quantise=args.quantise,
            least_count=args.least_ratings,
            onnxruntime_web=args.onnxruntime_web,
            train=_training(args) if args.train else None,
            replace=True,  # an empty folder, or the bundle that --overwrite is about
        )
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {size / 1e6:.2f} MB; ONNX Runtime reproduces all test vectors")
    if "web/index.html" in (manifest := read_manifest(folder))["files"] and not page_lacks(manifest):
        show.following(f"page {shlex.quote(str(folder))}")
    return 0


def _training(args: Make) -> DeviceTraining:
    from fedrecon._src.device.model_bundle import DeviceTraining
    from fedrecon._src.device.update_graph import DevicePlan

    devices, privacy = args.devices, args.privacy
    plan = DevicePlan(
        devices.rounds, devices.least, devices.helper, devices.reports_per_day, devices.min_examples, privacy.delta
    )
    noise = privacy.epsilon, privacy.noise_multiplier, devices.per_round
    return DeviceTraining(plan, devices.clip_norm, devices.bits, devices.most, *noise)
