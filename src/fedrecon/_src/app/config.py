"""All settings of a run, for each task: the command line's options, and what a config file holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro

from fedrecon._src.app.click_settings import Ranking as Ranking
from fedrecon._src.app.config_files import ConfigError as ConfigError
from fedrecon._src.app.config_files import differences as differences
from fedrecon._src.app.config_files import from_json as from_json
from fedrecon._src.app.config_files import read_config as read_config
from fedrecon._src.app.config_files import to_json as to_json
from fedrecon._src.app.settings import (
    MOST,
    MOST_FLOAT,
    MOST_RELAXATIONS,
    MOST_ROUNDS,
    MOST_WIDTH,
    check_number,
    check_run,
    check_seed,
    relaxed_rounds,
)
from fedrecon._src.app.settings import Aggregate as Aggregate
from fedrecon._src.app.settings import Privacy as Privacy
from fedrecon._src.app.settings import Reconstruct as Reconstruct
from fedrecon._src.app.settings import Server as Server
from fedrecon._src.app.settings import Split as Split
from fedrecon._src.app.settings import Update as Update
from fedrecon._src.core.client_sampling import Sampling as Sampling

NUM_TRAITS = 2  # of an item, in round zero: its bias and its popularity
TaskName = Literal["ratings", "clicks", "text"]
_TASKS = tyro.conf.arg(metavar="{ratings,clicks,text}")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Which data, and who trains.

    Attributes:
      source: what to train on.
      fractions: shares of the clients for training, validation and test. No client is in two of them.
      split_seed: seed of who trains, validates and tests; apart from --seed, so that runs share their test clients.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(name="DATA", metavar="DATA")]
    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1)
    split_seed: int = 0

    def __post_init__(self) -> None:
        """Check the settings."""
        check_seed("split_seed", self.split_seed)
        if not (min(self.fractions) >= 0 and self.fractions[0] > 0 and abs(sum(self.fractions) - 1) <= 1e-6):
            raise ValueError(
                f"fractions are {self.fractions}; give shares for training (above 0), validation and test that sum to 1"
            )


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
        highest NDCG. For clicks, the model before the first round is popularity, unless the run is private. Stop
        training after this many evaluations in a row without improvement. None keeps the model of the last round.
      checkpoint_every: save the state every n rounds: the most that is lost if the process is killed.
      seed: seed of the parameters and of who takes part when.
      jax_devices: how many JAX devices run clients in each process; by default all, with one for each core of a CPU.
      block: how many clients a device runs side by side; by default as many as suit its cache or memory.
    """

    task: TaskName
    data: Source
    model: Any
    split: Split = field(default_factory=Split)
    reconstruct: Reconstruct = field(default_factory=Reconstruct)
    update: Update = field(default_factory=Update)
    server: Server = field(default_factory=Server)
    aggregate: Aggregate = field(default_factory=Aggregate)
    privacy: Privacy = field(default_factory=Privacy)
    sampling: Sampling = field(default_factory=Sampling)
    rounds: int = 500
    evaluate_every: int = 100
    patience: int | None = None
    checkpoint_every: int = 100
    seed: int = 0
    jax_devices: int | None = None
    block: int | None = None

    @property
    def most_rounds(self) -> int:
        """How many rounds there are at most: more than `rounds` if validation clients can call for more."""
        return self.rounds

    def __post_init__(self) -> None:
        """Check the settings."""
        check_run(self)
        if self.aggregate.secure and self.aggregate.clip_norm is None and not self.privacy.on:
            raise ValueError("aggregate.secure needs aggregate.clip_norm: sums of integers must not overflow")
        if self.privacy.on and self.privacy.clip_norm is None and not getattr(self.model, "round_zero", False):
            raise ValueError(
                "privacy.clip_norm is missing: what one client can add must be bounded; the median norm of updates is "
                "a good start, and --privacy.clip-quantile 0.5 follows it"
            )
        norms = (self.aggregate.clip_norm, self.aggregate.clip_quantile, self.aggregate.zero_norm)
        if self.privacy.on and not set(norms) <= {None, "auto"}:
            raise ValueError("with privacy, the norm is privacy.clip_norm; leave out the norms of aggregate")
        if self.privacy.correlated and (self.aggregate.secure or self.sampling.poisson):
            raise ValueError(
                "privacy.correlated cannot be used with aggregate.secure, whose noise is the clients' own and "
                "independent, nor with sampling.poisson, since it is for clients that are not drawn at random"
            )
        if self.privacy.clip_quantile and self.aggregate.secure:
            raise ValueError(
                "privacy.clip_quantile cannot be used with aggregate.secure, which needs one norm for all rounds"
            )


# ---- ratings ----


COLUMNS = ("user", "item", "rating", "time")  # the settings of `Reading` that say where columns are


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a ratings file is read (MovieLens archives need none of this).

    Attributes:
      user: header of the column with user ids, or its position counted from 0. Common names such as userId or
        'Customer ID' need not be given; the same for item and rating.
      item: the same for item ids; ids may be numbers or text.
      rating: the same for ratings; 'auto' takes one if there is one, None takes none, and every row counts 1.
      time: the same for times, in seconds or as ISO dates; 'auto' takes a column 'time' or 'timestamp' if there is one,
        None takes none.
      delimiter: what separates fields; by default whichever of tab, comma, semicolon or '::' the first line has.
      header: whether the first line names the columns; by default a line without any number does.
      skip_lines: how many lines to skip before the header or the data.
      encoding: the encoding of a text file.
      duplicates: which of several ratings of one item by one user counts, their mean or sum, or that they are an error.
      bad_rows: whether a row that cannot be read is an error or is skipped and counted.
    """

    user: int | str = "user"
    item: int | str = "item"
    rating: int | str | None = "rating"
    time: int | str | None = "auto"
    delimiter: str | None = None
    header: bool | None = None
    skip_lines: int = 0
    encoding: str = "utf-8"
    duplicates: Literal["last", "first", "mean", "sum", "error"] = "last"
    bad_rows: Literal["error", "skip"] = "error"


@dataclass(frozen=True, kw_only=True)
class Data(Source, Reading):
    """Which ratings, how they are read, and which users train.

    Attributes:
      source: what to train on: movielens-small, movielens-100k, movielens-1m, synthetic, the path of a MovieLens zip
        or folder, or any file of ratings (text or Parquet; - for standard input). With --task text: a corpus.
      items: a text file with the columns item and title, to call items by their titles.
      min_ratings: users with fewer ratings are left out.
      max_examples: at most this many ratings of a user are used, after shuffling; None for all.
      transform: none takes ratings as they are; log1p takes log(1 + x), for counts; auto takes log1p where they look
        like counts.
      shuffle_seed: seed of the order of each user's ratings; None keeps the order of the file.
    """

    items: str | None = None
    min_ratings: int = 1
    max_examples: int | None = 300
    transform: Literal["none", "log1p", "auto"] = "none"
    shuffle_seed: int | None = 0

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        check_number("min_ratings", self.min_ratings, most=MOST_ROUNDS)
        check_seed("shuffle_seed", self.shuffle_seed)
        if self.max_examples is not None and self.max_examples < 2:
            raise ValueError(f"max_examples is {self.max_examples}; support and query need at least 2")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What round zero found in the training users' ratings; saved with the model, never set by hand.

    Attributes:
      transform: log1p if what is learned and predicted is log(1 + rating).
      mean: the mean of the ratings, transformed.
      deviation: the deviation of the ratings, transformed.
      low: the lowest prediction.
      high: the highest prediction.
      standardized: whether the model works with mean 0 and deviation 1.
      noise: the ridge on a user's embedding.
      user_ridge: the ridge on a user's bias.
      trait_ridges: the ridges on a user's coefficients of item traits; none if the model has no traits.
    """

    transform: Literal["none", "log1p"] = "none"
    mean: float = 0.0
    deviation: float = 1.0
    low: float
    high: float
    standardized: bool = False
    noise: float = 1.0
    user_ridge: float = 1.0
    trait_ridges: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check that a model can be built from it."""
        numbers = (self.mean, self.low, self.high, *self.ridges)
        finite = all(abs(number) <= MOST_FLOAT for number in numbers)
        if not finite or not self.low <= self.high or not min(self.ridges) > 0:
            raise ValueError(f"scale is {self}; it must be finite, with deviation and ridges above 0")
        if len(self.trait_ridges) not in (0, NUM_TRAITS):
            raise ValueError(f"scale.trait_ridges are {self.trait_ridges[:9]}; expected none or {NUM_TRAITS}")

    @property
    def ridges(self) -> tuple[float, ...]:
        """All that must be above 0."""
        return (self.deviation, self.noise, self.user_ridge, *self.trait_ridges)


@dataclass(frozen=True, kw_only=True)
class Factorization:
    """The model: a rating is the product of an item's embedding (global) and a user's (local).

    Attributes:
      dim: length of the embeddings.
      biases: add a global mean, a bias of each item (global) and a bias of the user (local).
      init_mean: where the global mean starts; only with biases.
      learned_default: learn where reconstruction starts, which serves users with few ratings.
      implicit_feedback: let what a user rated, whatever the ratings, move where reconstruction starts.
      round_zero: begin with the scale, the item biases (which stay as they are) and the ridges that follow from sums
        over the training users; needs biases.
      item_traits: let users differ in how they respond to an item's bias and popularity; needs round-zero.
      init_scale: embeddings start uniform between minus and plus this.
      prior: the server's ridge on item embeddings, against the sum over all ratings; for adaptive server optimizers.
      relax: after the rounds, continue with a quarter of the prior for a quarter as many rounds, up to this many times,
        as long as validation users gain from it; needs patience.
      implicit_prior: the same as prior, for what implicit feedback learns.
      least_ratings: recommend only items with at least this many ratings by training users.
    """

    dim: int = 50
    biases: bool = False
    init_mean: float = 0.0
    learned_default: bool = False
    implicit_feedback: bool = False
    round_zero: bool = False
    item_traits: bool = False
    init_scale: float = 0.05
    prior: float = 0.0
    relax: int = 0
    implicit_prior: float = 0.0
    least_ratings: int = 1
    scale: tyro.conf.Suppress[Scale | None] = None

    def __post_init__(self) -> None:
        """Check the settings."""
        check_number("dim", self.dim, least=1, most=MOST_WIDTH)
        for name in ("init_scale", "prior", "implicit_prior"):
            check_number(f"model.{name}", getattr(self, name))
        check_number("model.relax", self.relax, most=MOST_RELAXATIONS)
        check_number("model.least_ratings", self.least_ratings, most=MOST_ROUNDS)
        if self.round_zero and not self.biases:
            raise ValueError("model.round_zero finds item biases, so it needs model.biases")
        if self.item_traits and not self.round_zero:
            raise ValueError("model.item_traits are found in round zero, so they need model.round_zero")
        check_number("init_mean", self.init_mean, least=-MOST_FLOAT)


@dataclass(frozen=True, kw_only=True)
class RatingsConfig(Config):
    """All settings of a run on ratings.

    The defaults here are the paper's for MovieLens 1M; `presets.PRESETS` has those of the command line.
    """

    task: Annotated[Literal["ratings"], _TASKS] = "ratings"
    data: Data
    model: Factorization = field(default_factory=Factorization)

    @property
    def most_rounds(self) -> int:
        """How many rounds there are at most, with relaxations of the prior unless every round costs privacy."""
        relaxes = self.patience is not None and not self.privacy.on
        return self.rounds + (relaxed_rounds(self.rounds, self.model.relax) if relaxes else 0)

    def __post_init__(self) -> None:
        """Check that the groups fit together."""
        super().__post_init__()
        if self.aggregate.weigh == "tokens":
            raise ValueError("aggregate.weigh is 'tokens', which ratings do not have: use 'examples' or 'uniform'")


# ---- clicks ----


@dataclass(frozen=True, kw_only=True)
class ClickData(Data):
    """Which clicks, plays or purchases, how they are read, and which users train.

    Attributes:
      source: what to train on: any file of user, item and maybe count and time (text or Parquet; - for standard input),
        or what --task ratings takes.
      rating: header or position of the column with counts or ratings; 'auto' takes one by its name, or the third of a
        file without a header, if there is one. Without it (None) all rows count alike.
      at_least: rows with a smaller count or rating are left out: 4 keeps ratings of 4 and 5.
      max_examples: at most this many items of a training user are used, after shuffling; None for all.
    """

    rating: int | str | None = "auto"
    duplicates: Literal["last", "first", "mean", "sum", "error"] = "sum"
    at_least: float | None = None
    max_examples: int | None = 500
    transform: tyro.conf.Suppress[Literal["none", "log1p", "auto"]] = "none"


@dataclass(frozen=True, kw_only=True)
class ClicksConfig(Config):
    """All settings of a run on clicks. Clients weigh the same by default, as they do in the metrics."""

    task: Annotated[Literal["clicks"], _TASKS] = "clicks"
    data: ClickData
    model: Ranking = field(default_factory=Ranking)
    split: Split = field(default_factory=lambda: Split(train="redrawn-half", evaluate="0.8"))
    reconstruct: tyro.conf.Suppress[Reconstruct] = field(default_factory=Reconstruct)
    update: tyro.conf.Suppress[Update] = field(default_factory=Update)
    server: Server = field(
        default_factory=lambda: Server(optimizer="adam", learning_rate=0.01, decay="linear", decay_rounds="all")
    )
    aggregate: Aggregate = field(default_factory=lambda: Aggregate(weigh="uniform"))
    sampling: Sampling = field(default_factory=lambda: Sampling(clients_per_round=None))
    rounds: int = 200
    evaluate_every: int = 50
    patience: int | None = 1

    def __post_init__(self) -> None:
        """Check that the groups fit together."""
        super().__post_init__()
        if self.reconstruct != Reconstruct() or self.update != Update():
            raise ValueError(
                "clicks are solved over all items at once: there is nothing to set in reconstruct or update"
            )
        if self.aggregate.weigh == "tokens":
            raise ValueError("aggregate.weigh is 'tokens', which clicks do not have: use 'examples' or 'uniform'")
        if self.split.train == "none":
            raise ValueError("split.train is 'none', so known items would also be the hidden ones: use 'redrawn-half'")


# ---- text ----


@dataclass(frozen=True, kw_only=True)
class TextData(Source):
    """Which text, how it is read, and whose text trains.

    A file is prepared once, and the corpus kept in $FEDRECON_CACHE or ~/.cache/fedrecon.

    Attributes:
      source: text to train on: JSON lines (client, text and maybe time; plain or gzip), the Posts.xml of a Stack
        Exchange dump, federated Stack Overflow (stackoverflow.sqlite), or the folder of a prepared corpus.
      fractions: shares of the clients for training, validation and test. No client is in two of them. Federated Stack
        Overflow has shares of its own, of which the held-out users test.
      max_sentences: at most this many sentences of a client are used, the first in the file.
      min_sentences: clients with fewer are left out.
      bad_rows: whether a line that cannot be read is an error or is skipped and counted.
      word_count: the file stackoverflow.word_count, whose first words become the vocabulary.
      unpack: unpack a compressed Stack Overflow database to a file beside it, which stays.
    """

    max_sentences: int = 1_000
    min_sentences: int = 1
    bad_rows: Literal["error", "skip"] = "error"
    word_count: str | None = None
    unpack: bool = False

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        check_number("min_sentences", self.min_sentences, most=MOST_ROUNDS)
        if self.max_sentences < 2:
            raise ValueError(f"max_sentences is {self.max_sentences}; support and query need at least 2")


@dataclass(frozen=True, kw_only=True)
class NextWord:
    """The model: an LSTM that predicts the next word. Words outside the vocabulary fall into buckets, whose
    embeddings are local: every client has words of its own.

    Attributes:
      vocabulary: how many words are known: the most used of the training clients; all if they use fewer.
      oov_buckets: how many buckets all other words share.
      embedding: length of the embeddings.
      hidden: width of the LSTM.
      projection: width of the projection that is compared with the outputs.
      max_words: use at most this many words of a sentence, the first ones.
      local_oov: keep the embeddings of buckets local; otherwise they are global and nothing is reconstructed.
      loss_over: average the loss over tokens, or over all positions with padding as zero, as the paper's code did.
    """

    vocabulary: int = 5000
    oov_buckets: int = 500
    embedding: int = 48
    hidden: int = 96
    projection: int = 48
    max_words: int = 20
    local_oov: bool = True
    loss_over: Literal["tokens", "positions"] = "tokens"

    def __post_init__(self) -> None:
        """Check the settings."""
        for name in ("vocabulary", "oov_buckets"):
            check_number(name, getattr(self, name), least=1, most=MOST)
        for name in ("embedding", "hidden", "projection", "max_words"):
            check_number(name, getattr(self, name), least=1, most=MOST_WIDTH)


@dataclass(frozen=True, kw_only=True)
class TextConfig(Config):
    """All settings of a run on text.

    The defaults suit a CPU and a corpus of a few thousand people. The paper's sizes want an accelerator; `fedrecon
    reproduce text --scale paper` has them.
    """

    task: Annotated[Literal["text"], _TASKS] = "text"
    data: TextData
    model: NextWord = field(default_factory=NextWord)
    split: Split = field(default_factory=lambda: Split(by_time=True))
    reconstruct: Reconstruct = field(
        default_factory=lambda: Reconstruct(learning_rate=1.0, steps=100, epochs=1, batch_size=16)
    )
    update: Update = field(default_factory=lambda: Update(learning_rate=3.0, steps=8, batch_size=16, clip_norm=1.0))
    server: Server = field(default_factory=lambda: Server(optimizer="fedyogi", learning_rate=0.02))
    aggregate: Aggregate = field(default_factory=lambda: Aggregate(weigh="tokens"))
    sampling: Sampling = field(default_factory=lambda: Sampling(clients_per_round=5))
    rounds: int = 400

    def __post_init__(self) -> None:
        """Check that the groups fit together."""
        super().__post_init__()
        if self.reconstruct.solver != "gradient-descent":
            raise ValueError(
                f"reconstruct.solver is {self.reconstruct.solver!r}, which is for ratings: text needs gradient-descent"
            )


# ---- any task ----

CONFIGS: dict[str, type[Config]] = {"ratings": RatingsConfig, "clicks": ClicksConfig, "text": TextConfig}


def config_from_json(values: Any, source: str, task: str | None = None, base: Config | None = None) -> Config:
    """Make all settings of a run from JSON.

    Args:
      values: an object as `to_json` returns, or part of one.
      source: where it comes from, for messages.
      task: the task if `values` names none; ratings by default, which once was the only task.
      base: settings for what is not given, if they are of the same task; otherwise the type's defaults.

    Raises:
      ConfigError: a setting is unknown, missing or of the wrong type; the message names it.
    """
    found = values.get("task", task or "ratings") if isinstance(values, Mapping) else "ratings"
    if not isinstance(found, str) or found not in CONFIGS:
        raise ConfigError(f"{source}: task is {found!r}; expected one of {', '.join(CONFIGS)}")
    return from_json(CONFIGS[found], values, source, default=base if type(base) is CONFIGS[found] else None)
