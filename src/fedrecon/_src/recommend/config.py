"""All settings of a run, for each task: validated as a whole, from options or from JSON."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from fedrecon._src.core.checks import MOST_INT
from fedrecon._src.core.client_sampling import Sampling as Sampling
from fedrecon._src.recommend.settings import (
    COLUMNS as COLUMNS,
)
from fedrecon._src.recommend.settings import (
    MOST,
    NUM_TRAITS,
    Aggregate,
    ClickData,
    Count,
    Data,
    Factorization,
    NextWord,
    PositiveInt,
    Privacy,
    Ranking,
    Reconstruct,
    Rounds,
    Seed,
    Server,
    Source,
    SplitSettings,
    TextData,
    Update,
    relaxed_rounds,
)
from fedrecon._src.recommend.settings import Reading as Reading
from fedrecon._src.recommend.settings import Scale as Scale
from fedrecon._src.storage.atomic import StorageError, read_json

HARMLESS = ("rounds", "evaluate_every", "checkpoint_every")  # may differ between a run and its continuation
SPLIT = re.compile(r"(redrawn-)?(half|alternate|none|0?\.\d*[1-9]\d*)")
TaskName = Literal["ratings", "clicks", "text"]
_STRICT: Any = {"strict": True, "extra": "forbid", "revalidate_instances": "always", "allow_inf_nan": False}

T = TypeVar("T")


class ConfigError(ValueError):
    """A setting that breaks a rule.

    Attributes:
      field: the setting, as a path such as `model.dim`; empty for a file that cannot be read.
      value: what it is.
      rule: what it should be.
      source: the file that it comes from, if any.
    """

    def __init__(self, field: str, value: Any, rule: str, source: str = ""):
        self.field, self.value, self.rule, self.source = field, value, rule, source
        super().__init__(self.describe(f"`{field}`" if field else ""))

    def describe(self, name: str) -> str:
        """Return the message, with the setting called by `name`."""
        simple = name and isinstance(self.value, str | int | float | list | tuple)
        parts = [self.source, name, self.rule + (f" (got {self.value!r:.60})" if simple else "")]
        return ": ".join(part for part in parts if part)


class Rule(NamedTuple):
    """A rule that no single setting can break."""

    broken: bool
    field: str
    rule: str


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run.

    Attributes:
      task: what is learned: ratings, which items come first (clicks), or the next word of text. Each has options and
        defaults of its own; give --help with it to see them.
      rounds: rounds of training, those before --resume included.
      evaluate_every: evaluate the validation clients every n rounds and at the end; 0 for the end alone.
      patience: of the models before the first round, after the last, and after each relaxation of a prior, keep the one
        that is best on validation clients, of which there must be 10. The best has the lowest loss, or for clicks the
        highest NDCG; popularity is kept unless the best is clearly better. Stop training after this many evaluations
        in a row without improvement. None keeps the model of the last round.
      checkpoint_every: save the state every n rounds: the most that is lost if the process is killed.
      seed: seed of the parameters and of who takes part when.
      jax_devices: how many JAX devices run clients in each process; by default all, with one for each core of a CPU.
      block: how many clients a device runs side by side; by default as many as suit its cache or memory.
    """

    task: TaskName
    data: Source
    model: Any
    split: SplitSettings = field(default_factory=SplitSettings)
    reconstruct: Reconstruct = field(default_factory=Reconstruct)
    update: Update = field(default_factory=Update)
    server: Server = field(default_factory=Server)
    aggregate: Aggregate = field(default_factory=Aggregate)
    privacy: Privacy = field(default_factory=Privacy)
    sampling: Sampling = field(default_factory=Sampling)
    rounds: Rounds = 500
    evaluate_every: Rounds = 100
    patience: PositiveInt | None = None
    checkpoint_every: PositiveInt = 100
    seed: Seed = 0
    jax_devices: PositiveInt | None = None
    block: Count | None = None

    usual_block: ClassVar[int | None] = None  # clients side by side by default; None leaves it to the model
    small_loops: ClassVar[bool] = True  # whether steps are loops over small arrays, see `start_jax_devices`
    divides_clients: ClassVar[bool] = True  # whether `data.fractions` decides who tests; a prepared corpus may say so

    @property
    def most_rounds(self) -> int:
        """How many rounds there are at most, with relaxations of the prior unless every round costs privacy."""
        relaxes = self.patience is not None and not self.privacy.on
        return self.rounds + (relaxed_rounds(self.rounds, self.relaxations) if relaxes else 0)

    @property
    def relaxations(self) -> int:
        """How often the prior may be relaxed after the rounds."""
        return getattr(self.model, "relax", 0)

    @property
    def remedy(self) -> str:
        """What to change if numbers run away."""
        groups: dict[str, Any] = {"update": self.update, "server": self.server}
        groups |= {"reconstruct": self.reconstruct} if self.reconstruct.solver == "gradient-descent" else {}
        rates = ", ".join(f"--{name}.learning-rate (now {group.learning_rate:g})" for name, group in groups.items())
        return f"lower one of {rates}, or set --aggregate.clip-norm"

    def rules(self) -> Iterator[Rule]:
        """Yield the rules for settings that must fit together."""
        shares, norms = self.data.fractions, self.aggregate
        proper = shares[0] > 0 and abs(sum(shares) - 1) <= 1e-6
        yield Rule(not proper, "data.fractions", "must sum to 1, and the training share must be above 0")
        for name in ("train", "evaluate"):
            valid = SPLIT.fullmatch(getattr(self.split, name))
            yield Rule(not valid, f"split.{name}", "must be half, alternate, none or a share of support such as 0.8")
        shuffles = self.split.train.startswith("redrawn-") and self.split.by_time
        yield Rule(shuffles, "split.train", "cannot be combined with `split.by_time`, since it shuffles")
        yield Rule(self.split.evaluate == "none", "split.evaluate", "must leave query examples, such as half")
        most = {"clients_per_round": MOST, "least": MOST, "oversample": 1000, "min_examples": MOST_INT}
        for name, limit in most.items():
            value = getattr(self.sampling, name)
            yield Rule(value is not None and value > limit, f"sampling.{name}", f"must be at most {limit}")
        tokens = norms.weigh == "tokens" and self.task != "text"
        yield Rule(tokens, "aggregate.weigh", f"must be examples, sqrt-examples or uniform for {self.task}")
        follows, fixed = norms.clip_quantile not in (None, "auto"), norms.clip_norm is not None or norms.secure
        both = "cannot be combined with `aggregate.clip_norm` or `aggregate.secure`"
        yield Rule(follows and fixed, "aggregate.clip_quantile", both)
        unbounded = norms.secure and norms.clip_norm is None and not self.privacy.on
        yield Rule(unbounded, "aggregate.secure", "needs `aggregate.clip_norm`: sums of integers must not overflow")
        yield from self._rules_of_privacy()

    def _rules_of_privacy(self) -> Iterator[Rule]:
        privacy, norms = self.privacy, self.aggregate
        low, high = privacy.rating_range or (0, 1)
        yield Rule(not low < high, "privacy.rating_range", "must be the lowest and the highest rating, such as 1 5")
        for name, value in vars(privacy).items():
            idle = bool(value) and not privacy.on
            yield Rule(idle, f"privacy.{name}", "needs `privacy.epsilon` or `privacy.noise_multiplier`")
        computed = privacy.epsilon is not None and privacy.noise_multiplier is None
        yield Rule(computed and self.rounds < 1, "rounds", "must be at least 1 with a privacy budget")
        both = privacy.correlated is not None and privacy.clip_quantile is not None
        yield Rule(both, "privacy.correlated", "cannot be combined with `privacy.clip_quantile`: it needs one norm")
        drawn = privacy.correlated is not None and (norms.secure or self.sampling.poisson)
        yield Rule(drawn, "privacy.correlated", "cannot be combined with `aggregate.secure` or `sampling.poisson`")
        follows = privacy.clip_quantile is not None and norms.secure
        yield Rule(follows, "privacy.clip_quantile", "cannot be combined with `aggregate.secure`: it needs one norm")
        unbounded = privacy.on and privacy.clip_norm is None and not getattr(self.model, "round_zero", False)
        advice = "the median norm of updates is a good start, and `privacy.clip_quantile` 0.5 follows it"
        yield Rule(unbounded, "privacy.clip_norm", f"must be given: {advice}")
        for name in ("clip_norm", "clip_quantile", "zero_norm"):
            set_twice = privacy.on and getattr(norms, name) not in (None, "auto")
            yield Rule(set_twice, f"aggregate.{name}", "cannot be combined with privacy; use `privacy.clip_norm`")


@dataclass(frozen=True, kw_only=True)
class RatingsConfig(Config):
    """All settings of a run on ratings.

    The defaults here are the paper's for MovieLens 1M; `presets` has those of the command line.
    """

    task: Literal["ratings"] = "ratings"
    data: Data = field(default_factory=Data)
    model: Factorization = field(default_factory=Factorization)

    @property
    def remedy(self) -> str:
        """What to change if numbers run away."""
        rate, ridge = self.server.learning_rate, self.reconstruct.ridge
        solved = f"lower --server.learning-rate (now {rate:g}), raise --reconstruct.ridge (now {ridge:g})"
        descends = self.reconstruct.solver == "gradient-descent"
        return f"{super().remedy if descends else solved}, or rescale the ratings"

    def rules(self) -> Iterator[Rule]:
        """Yield the rules for settings that must fit together."""
        yield from super().rules()
        model, scale = self.model, self.model.scale
        yield Rule(model.round_zero and not model.biases, "model.round_zero", "needs `model.biases`")
        yield Rule(model.item_traits and not model.round_zero, "model.item_traits", "needs `model.round_zero`")
        if scale is not None:
            yield Rule(not scale.low <= scale.high, "model.scale.low", f"must be at most `high` ({scale.high})")
            fits = len(scale.trait_ridges) in (0, NUM_TRAITS)
            yield Rule(not fits, "model.scale.trait_ridges", f"must be none or {NUM_TRAITS} numbers")


@dataclass(frozen=True, kw_only=True)
class ClicksConfig(Config):
    """All settings of a run on clicks."""

    task: Literal["clicks"] = "clicks"
    data: ClickData = field(default_factory=ClickData)
    model: Ranking = field(default_factory=Ranking)
    split: SplitSettings = field(default_factory=lambda: SplitSettings(train="redrawn-half", evaluate="0.8"))
    server: Server = field(
        default_factory=lambda: Server(optimizer="adam", learning_rate=0.01, decay="linear", decay_rounds="all")
    )
    aggregate: Aggregate = field(default_factory=lambda: Aggregate(weigh="sqrt-examples"))
    sampling: Sampling = field(default_factory=lambda: Sampling(clients_per_round=None, least=1000))
    rounds: Rounds = 60
    evaluate_every: Rounds = 20
    patience: PositiveInt | None = 1

    usual_block: ClassVar[int | None] = 16  # clients share the Gram matrix, but each has a gradient of it

    @property
    def remedy(self) -> str:
        """What to change if numbers run away."""
        rate, ridge = self.server.learning_rate, self.model.ridge
        return f"lower --server.learning-rate (now {rate:g}), or raise --model.ridge (now {ridge:g})"

    def rules(self) -> Iterator[Rule]:
        """Yield the rules for settings that must fit together."""
        yield from super().rules()
        solved = "cannot be set for clicks, which are solved over all items at once"
        yield Rule(self.reconstruct != Reconstruct(), "reconstruct", solved)
        yield Rule(self.update != Update(), "update", solved)
        yield Rule(self.split.train == "none", "split.train", "must hide items, as redrawn-half does")


@dataclass(frozen=True, kw_only=True)
class TextConfig(Config):
    """All settings of a run on text. The defaults suit a CPU and a corpus of a few thousand people."""

    task: Literal["text"] = "text"
    data: TextData = field(default_factory=TextData)
    model: NextWord = field(default_factory=NextWord)
    split: SplitSettings = field(default_factory=lambda: SplitSettings(train="redrawn-.1"))
    reconstruct: Reconstruct = field(
        default_factory=lambda: Reconstruct(solver="closed-form", learning_rate=1.0, steps=100, epochs=1, batch_size=16)
    )
    update: Update = field(default_factory=lambda: Update(learning_rate=3.0, steps=8, batch_size=16, clip_norm=1.0))
    server: Server = field(default_factory=lambda: Server(optimizer="fedyogi", learning_rate=0.04, decay_rounds="all"))
    aggregate: Aggregate = field(default_factory=lambda: Aggregate(weigh="tokens"))
    sampling: Sampling = field(default_factory=lambda: Sampling(clients_per_round=None))
    rounds: Rounds = 1000
    evaluate_every: Rounds = 250

    small_loops: ClassVar[bool] = False
    divides_clients: ClassVar[bool] = False

    def rules(self) -> Iterator[Rule]:
        """Yield the rules for settings that must fit together."""
        yield from super().rules()
        needed = "closed-form" if self.model.local == "output_bias" else "gradient-descent"
        fits = self.reconstruct.solver == needed
        yield Rule(not fits, "reconstruct.solver", f"must be {needed} if `model.local` is {self.model.local}")


C = TypeVar("C", bound=Config)
CONFIGS: dict[str, type[Config]] = {"ratings": RatingsConfig, "clicks": ClicksConfig, "text": TextConfig}


# ---- validation ----


def check_config(config: T) -> T:
    """Return settings if they are valid, whether they are a config or a command's options.

    Raises:
      ConfigError: a setting has the wrong type, is out of bounds, or does not fit the others.
    """
    return _validate(type(config), config)


def check_choice(field: str, value: Any, choices: Iterable[str], purpose: str = "", source: str = "") -> None:
    """Raise `ConfigError` if a setting is none of some choices."""
    if value not in (names := [*choices]):
        raise ConfigError(field, value, f"must be one of {', '.join(names)}{purpose}", source)


def config_from_json(values: Any, source: str, task: str | None = None, base: Config | None = None) -> Config:
    """Make all settings of a run from JSON.

    Args:
      values: an object as `to_json` returns, or part of one.
      source: where it comes from, for messages.
      task: the task if `values` names none; ratings by default.
      base: settings for what is not given, if they are of the same task; otherwise the type's defaults.

    Raises:
      ConfigError: a setting is unknown, of the wrong type, or breaks a rule.
    """
    _check_object(values, source)
    name = values.get("task", task or "ratings")
    check_choice("task", name, CONFIGS, source=source)
    kind = CONFIGS[name]
    base = base if type(base) is kind else kind(**{})
    return _validate(kind, json.dumps(_merged(to_json(base), values)), source)


def _check_object(values: Any, source: str) -> None:
    if not isinstance(values, Mapping):
        raise ConfigError("", values, "must be an object of settings", source)


def _validate(kind: type[T], values: Any, source: str = "") -> T:
    """Validate an instance of a dataclass, or the text of a JSON object that describes one."""
    from pydantic import ValidationError  # slow to import, and help texts do not need it

    adapter = _adapter(kind)  # type: ignore[arg-type]
    try:
        settings = adapter.validate_json(values) if isinstance(values, str) else adapter.validate_python(values)
    except ValidationError as problem:
        raise _explain(kind, problem, source) from None
    enforce(settings.rules() if hasattr(settings, "rules") else (), settings, source)
    return settings


def enforce(rules: Iterable[Rule], settings: Any, source: str = "") -> None:
    """Raise `ConfigError` with the first rule that settings break."""
    for rule in rules:
        if rule.broken:
            raise ConfigError(rule.field, get_setting(settings, rule.field), rule.rule, source)


@functools.cache
def _adapter(kind: type) -> Any:
    from pydantic import TypeAdapter, with_config

    return TypeAdapter(with_config(_STRICT)(kind))


def _explain(kind: type, problem: Any, source: str) -> ConfigError:
    """Turn a library's error into one about a setting."""
    errors = problem.errors(include_url=False)
    path: list[str] = []
    names: list[str] = []
    for part in errors[0]["loc"]:  # which goes on with the members of a union, and with indices
        if not dataclasses.is_dataclass(kind):
            break
        path, names = [*path, str(part)], [f.name for f in dataclasses.fields(kind)]
        kind = typing.get_type_hints(kind).get(str(part), Any)
    field, value = ".".join(path), errors[0]["input"]
    if errors[0]["type"] == "unexpected_keyword_argument":
        near = difflib.get_close_matches(path[-1], names, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"
        return ConfigError(field, value, f"there is no such setting; {hint}", source)
    same = [error for error in errors if [*map(str, error["loc"][: len(path)])] == path]
    rules = [str(error.get("ctx", {}).get("error", error["msg"])) for error in same]
    return ConfigError(field, value, ", or ".join(dict.fromkeys(rules)), source)


def get_setting(config: Any, path: str) -> Any:
    """Return the setting at a path such as `model.dim`."""
    return functools.reduce(getattr, path.split("."), config)


def change_settings(config: C, values: Mapping[str, Any]) -> C:
    """Return settings with other values at some paths, such as `model.dim`."""
    for path, value in values.items():
        group, _, name = path.rpartition(".")
        if group:
            name, value = group, dataclasses.replace(getattr(config, group), **{name: value})
        config = dataclasses.replace(config, **{name: value})
    return config


def _merged(base: Any, values: Any) -> Any:
    """Return JSON objects with some values replaced, at any depth."""
    if not isinstance(base, Mapping) or not isinstance(values, Mapping):
        return values
    return {**base, **{name: _merged(base.get(name), value) for name, value in values.items()}}


# ---- files ----


def to_json(config: Any) -> dict[str, Any]:
    """Return settings as a JSON value."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def read_config(path: Path) -> dict[str, Any]:
    """Read the settings of a config file, or of the `run.json` of a run."""
    try:
        values = read_json(path)
    except StorageError as problem:
        raise ConfigError("", None, str(problem)) from None
    if isinstance(values, dict) and "config" in values:
        values = values["config"]
    _check_object(values, str(path))
    return values


def changed(settings: Any, kind: type) -> list[str]:
    """Name the settings of `kind`, or of what `kind` extends, that have another value than their default."""
    names = {f.name for f in dataclasses.fields(kind)}
    fields = [f for f in dataclasses.fields(settings) if f.name in names and f.default is not dataclasses.MISSING]
    return [f.name for f in fields if getattr(settings, f.name) != f.default]


def by_path(config: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """Return settings as JSON by their paths, such as `model.dim`."""
    settings: dict[str, Any] = {}
    for name, value in config.items():
        path = f"{within}{name}"
        settings |= by_path(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return settings


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ between two configs as JSON, except those that cannot change the parameters."""
    before, after = by_path(old), by_path(new)
    pairs = {path: (before.get(path), after.get(path)) for path in before | after if path not in HARMLESS}
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}


# ---- presets: whole settings by name, for options and config files to build on ----

Preset = Literal["default", "quick", "paper"]

# One setting of constants for ratings of any scale and size. Round zero finds the scale, the item biases and the
# ridges; besides, the prior on item embeddings matters most: without it, rows with few ratings would fit noise.
DEFAULT = RatingsConfig(
    data=Data(transform="auto"),
    model=Factorization(
        dim=16,
        biases=True,
        implicit_feedback=True,
        round_zero=True,
        item_traits=True,
        init_scale=0.0173,  # so small that the first evaluation is that of the biases
        prior=200.0,
        relax=8,
        implicit_prior=2.0,
        least_ratings=5,
    ),
    split=SplitSettings(train="redrawn-half"),
    reconstruct=Reconstruct(solver="least-squares"),
    update=Update(learning_rate=1.0, steps=1, batch_size=150, second_order=True),
    server=Server(optimizer="adam", learning_rate=0.01, decay="linear", decay_rounds="all"),
    # Updates far longer than the median are clipped; a limit of three times it leaves nearly all others as they are.
    aggregate=Aggregate(clip_quantile="auto", clip_times=3.0),
    sampling=Sampling(clients_per_round=None, least=200),  # cheap where there are few, and steps are less noisy
    rounds=200,
    evaluate_every=25,
    patience=2,
)

TEXT_DEFAULT = TextConfig(aggregate=Aggregate(weigh="tokens", clip_quantile="auto", clip_times=3.0))

# The paper's local part: embeddings of words outside the vocabulary, reconstructed by gradient descent.
TEXT_PAPER = dataclasses.replace(
    TEXT_DEFAULT,
    model=NextWord(local="oov_embedding", ngrams=False, head=0),
    split=SplitSettings(),
    reconstruct=Reconstruct(learning_rate=1.0, steps=100, epochs=1, batch_size=16),
)

PRESETS: Mapping[str, Mapping[str, Config]] = {
    "ratings": {
        "default": DEFAULT,
        "quick": change_settings(DEFAULT, {"rounds": 50, "patience": 1, "model.relax": 0}),
        "paper": RatingsConfig(model=Factorization(least_ratings=5)),
    },
    "clicks": {"default": ClicksConfig(), "quick": ClicksConfig(rounds=20, evaluate_every=10)},
    "text": {"default": TEXT_DEFAULT, "paper": TEXT_PAPER},
}


def preset_of(task: str, name: str = "default") -> Config:
    """Return the settings that options and a config file build on.

    Raises:
      ConfigError: the task has no such preset.
    """
    check_choice("preset", name, PRESETS[task], f" for {task}")
    return PRESETS[task][name]


def is_default(config: Config) -> bool:
    """Return whether a model is trained as the preset `default` says, whatever the data."""
    base = preset_of(config.task)
    names = ("split", "reconstruct", "update", "server", "aggregate", "privacy", "sampling", "rounds", "patience")
    measured = {name: getattr(base.model, name) for name in ("scale", "at_least") if hasattr(base.model, name)}
    same_model = dataclasses.replace(config.model, **measured) == base.model
    return same_model and all(getattr(config, name) == getattr(base, name) for name in names)
