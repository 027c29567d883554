"""The settings of a run in groups, for the command line and config files: names, help and valid values.

Groups are plain dataclasses, quick to import. `config.check_config` validates whole configs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from fedrecon._src.core.checks import MOST_FLOAT, MOST_INT

MOST = 10**7  # of anything that there is an array of
MEDIAN = 0.5
FOUND = ("*item_bias", "*mean", "*item_traits")  # parameters that round zero found: the server leaves them as they are
NUM_TRAITS = 2  # of an item, in round zero: its bias and its popularity

Finite = Annotated[float, Ge(-MOST_FLOAT), Le(MOST_FLOAT)]
NonNegative = Annotated[float, Ge(0), Le(MOST_FLOAT)]
Positive = Annotated[float, Gt(0), Le(MOST_FLOAT)]
Share = Annotated[float, Gt(0), Lt(1)]
Count = Annotated[int, Ge(1), Le(MOST)]
Width = Annotated[int, Ge(1), Le(2**16)]  # of a layer or an embedding
PositiveInt = Annotated[int, Ge(1), Le(MOST_INT)]
NonNegativeInt = Annotated[int, Ge(0), Le(MOST_INT)]
Rounds = NonNegativeInt
Seed = Annotated[int, Ge(0), Lt(2**32)]  # JAX would take only the last 32 bits of a larger seed
Epsilon = Annotated[float, Gt(0), Le(1e4)]
Noise = Annotated[float, Ge(0.05), Le(1e6)]  # multipliers: less promises nothing
Optimizer = Literal["sgd", "momentum", "adagrad", "adam"]
ServerOptimizer = Literal["sgd", "momentum", "adagrad", "fedadagrad", "adam", "fedyogi"]
AS_TRAINED = "as-trained"
COLUMNS = ("user", "item", "rating", "time")  # the settings of `Reading` that say where columns are


def relaxed_rounds(rounds: int, times: int) -> int:
    """Return how many rounds `times` relaxations of a prior take, after `rounds` rounds."""
    return times * -(-rounds // 4)


# ---- training, whatever is learned ----


@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    """Which of a client's examples are support (to reconstruct from) and which are query (to learn from or measure on).

    Attributes:
      train: in training: half, alternate, none (all examples are both), or the share of support, such as 0.8; with
        the prefix redrawn- (redrawn-half), a client's examples are reshuffled in every round.
      evaluate: in evaluation, which always splits: half, alternate, or the share of support.
      by_time: order a client's examples by time before splitting, so that the query is later than the support.
    """

    train: str = "half"
    evaluate: str = "half"
    by_time: bool = False


@dataclass(frozen=True, kw_only=True)
class Reconstruct:
    """R: how a client reconstructs its local parameters on its support, with the global ones frozen.

    Attributes:
      solver: gradient descent; least squares, which is exact for ratings; or closed form, for the output bias of
        text, which is computed from counts.
      optimizer: the optimizer of gradient descent, fresh for every client.
      learning_rate: its learning rate.
      steps: at most this many steps; None for no limit.
      epochs: how often a client goes through its support.
      batch_size: examples per step.
      ridge: with least squares: the penalty on the squared distance from the initial parameters; with
        --model.round-zero, a multiple of the penalties that it estimated.
    """

    solver: Literal["gradient-descent", "least-squares", "closed-form"] = "gradient-descent"
    optimizer: Optimizer = "sgd"
    learning_rate: NonNegative = 0.1
    steps: NonNegativeInt | None = 50
    epochs: Count = 5
    batch_size: Count = 5
    ridge: NonNegative = 1.0


@dataclass(frozen=True, kw_only=True)
class Update:
    """U: how a client updates the global parameters on its query.

    Attributes:
      optimizer: the optimizer, fresh for every client.
      learning_rate: its learning rate.
      steps: at most this many steps; None for no limit.
      epochs: how often a client goes through its query.
      batch_size: examples per step.
      clip_norm: clip the gradient of each step to this norm; None for no clipping.
      joint: change the local parameters too (they are still discarded).
      second_order: differentiate through the reconstruction; slow, so use few steps.
      both_ways: run every client twice, the second time with support and query swapped, at twice the cost.
    """

    optimizer: Optimizer = "sgd"
    learning_rate: NonNegative = 0.5
    steps: NonNegativeInt | None = 50
    epochs: Count = 1
    batch_size: Count = 5
    clip_norm: Positive | None = None
    joint: bool = False
    second_order: bool = False
    both_ways: bool = False


@dataclass(frozen=True, kw_only=True)
class Server:
    """What the server does with the mean of the clients' updates.

    Attributes:
      optimizer: takes the negative mean update as a gradient; sgd at 1.0 is plain averaging; fedadagrad is Adagrad
        with accumulators from 0 instead of 0.1.
      learning_rate: its learning rate.
      decay: learning-rate schedule: cosine to a fiftieth, or linear to zero.
      decay_rounds: length of the schedule in rounds; all for the whole run; None for a constant rate.
    """

    optimizer: ServerOptimizer = "sgd"
    learning_rate: NonNegative = 1.0
    decay: Literal["cosine", "linear"] = "cosine"
    decay_rounds: PositiveInt | Literal["all"] | None = None


@dataclass(frozen=True, kw_only=True)
class Aggregate:
    """How the clients' updates are averaged.

    Attributes:
      weigh: weigh clients by their query examples, by the square root of their number, by the tokens of their query
        (text only), or all the same.
      clip_norm: clip updates to this norm; None for no clipping.
      zero_norm: ignore updates with a larger norm than this; None for no limit.
      clip_quantile: adaptive clipping: the norm follows this quantile of the clients' norms, such as 0.5, to limit
        outliers; in the first round all updates get the same norm. Not private. auto is 0.5 unless clip-norm, secure or
        privacy set a norm. None for no adaptive clipping.
      clip_times: clip at this multiple of the quantile.
      secure: simulate secure sums: add integers, with the same result as the protocol; needs clip_norm.
    """

    weigh: Literal["examples", "sqrt-examples", "tokens", "uniform"] = "examples"
    clip_norm: Positive | None = None
    zero_norm: Positive | None = None
    clip_quantile: Share | Literal["auto"] | None = None
    clip_times: Positive = 1.0
    secure: bool = False

    @property
    def followed(self) -> float | None:
        """The share of the clients' norms that the clipping norm follows; None if it follows none."""
        if self.clip_quantile != "auto":
            return self.clip_quantile
        return MEDIAN if self.clip_norm is None and not self.secure else None


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Differential privacy for clients: clipped uploads, noise, and a budget. Needs the extra privacy.

    With epsilon, the noise for round zero and all --rounds together is computed. With noise_multiplier as well, epsilon
    is a budget, and training stops before it exceeds it. Clients are drawn by Poisson sampling, unless correlated is
    given.

    Attributes:
      epsilon: the privacy budget; None for no budget.
      delta: the probability that the guarantee fails; by default a little below 1 / training clients.
      noise_multiplier: noise in the sum of updates, in units of the clipping norm, instead of what epsilon needs.
      clip_norm: the largest norm of an update; with clip_quantile, that of the first round. After round zero it is
        chosen by default, else it must be given.
      clip_quantile: private adaptive clipping: the norm follows this quantile of the clients' norms; None to fix it.
      correlated: correlate the noise of this many rounds in a row, for when clients cannot be drawn at random and in
        secret. Instead, a client must take part at most once in this many rounds. None draws clients at random (Poisson
        sampling) and relies on that.
      rating_range: the lowest and the highest possible rating, if they are public, such as 1 5; by default they are
        estimated in round zero, with noise.
      round_zero: round zero's share of the budget (of 1 / noise^2); by default more with fewer clients.
    """

    epsilon: Epsilon | None = None
    delta: Share | None = None
    noise_multiplier: Noise | None = None
    clip_norm: Positive | None = None
    clip_quantile: Share | None = None
    correlated: PositiveInt | None = None
    rating_range: tuple[float, float] | None = None
    round_zero: Share | None = None

    @property
    def on(self) -> bool:
        """Whether differential privacy is on."""
        return self.epsilon is not None or self.noise_multiplier is not None


# ---- data ----


@dataclass(frozen=True, kw_only=True)
class Source:
    """The data, and which clients train on it.

    Attributes:
      source: what to train on.
      fractions: shares of the clients for training, validation and test. No client is in two of them.
      split_seed: seed of the split into training, validation and test clients; separate from --seed, so that runs
        with other seeds share their test clients.
    """

    source: str = ""
    fractions: tuple[NonNegative, NonNegative, NonNegative] = (0.8, 0.1, 0.1)
    split_seed: Seed = 0

    caps_everyone: ClassVar[bool] = True  # whether `max_examples` limits all clients, or only those that train
    expected: ClassVar[str] = "a path or the name of a data set"
    bounds: ClassVar[tuple[str, str]]  # how few examples a client may have, and how many are used at most: settings


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a ratings file is read (MovieLens archives need none of this).

    Attributes:
      user: header of the column with user ids, or its position counted from 0. Common names such as
        userId or 'Customer ID' need not be given; the same for item and rating.
      item: the same for item ids; ids may be numbers or text.
      rating: the same for ratings; 'auto' takes one if there is one, None takes none, and every row counts 1.
      time: the same for times, in seconds or as ISO dates; 'auto' takes a column 'time' or 'timestamp' if there is one,
        None takes none.
      delimiter: what separates fields; by default whichever of tab, comma, semicolon, '::' or spaces the first line
        has.
      header: whether the first line names the columns; by default a line without any number does.
      skip_lines: how many lines to skip before the header or the data.
      encoding: the encoding of a text file.
      duplicates: how to combine several ratings of one item by one user; error refuses them.
      bad_rows: whether a row that cannot be read is an error or is skipped and counted.
    """

    user: int | str = "user"
    item: int | str = "item"
    rating: int | str | None = "rating"
    time: int | str | None = "auto"
    delimiter: str | None = None
    header: bool | None = None
    skip_lines: NonNegativeInt = 0
    encoding: str = "utf-8"
    duplicates: Literal["last", "first", "mean", "sum", "error"] = "last"
    bad_rows: Literal["error", "skip"] = "error"


@dataclass(frozen=True, kw_only=True)
class OtherReading(Reading):
    """How to read a file other than the training data.

    Attributes:
      user: header of the column with user ids, or its position counted from 0; by default as in training, or a common
        name such as userId.
      item: the same for item ids.
      rating: the same for ratings or counts; None takes none.
      time: the same for times; None takes none.
    """

    user: int | str = AS_TRAINED
    item: int | str = AS_TRAINED
    rating: int | str | None = AS_TRAINED
    time: int | str | None = AS_TRAINED


@dataclass(frozen=True, kw_only=True)
class Data(Source, Reading):
    """Which ratings, how they are read, and which users train.

    Attributes:
      source: what to train on: movielens-small, movielens-100k, movielens-1m, synthetic, the path of a MovieLens zip
        or folder, or any file of ratings (text or Parquet; - for standard input). With --task text: a corpus.
      titles: a text file with the columns item and title, to show titles instead of ids.
      min_ratings: users with fewer ratings are left out.
      max_examples: at most this many ratings of a user are used, after shuffling; None for all.
      transform: none takes ratings as they are; log1p takes log(1 + x), for counts; auto takes log1p where they look
        like counts.
      shuffle_seed: seed of the order of each user's ratings; None keeps the order of the file.
    """

    titles: str | None = None
    min_ratings: NonNegativeInt = 1
    max_examples: Annotated[int, Ge(2)] | None = 300
    transform: Literal["none", "log1p", "auto"] = "none"
    shuffle_seed: Seed | None = 0

    bounds = ("min_ratings", "max_examples")


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
    max_examples: Annotated[int, Ge(2)] | None = 500

    caps_everyone: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class TextData(Source):
    """The text, how it is read, and which clients train on it.

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
      unpack: unpack a compressed Stack Overflow database next to the archive, and keep it.
    """

    max_sentences: Annotated[int, Ge(2)] = 1_000
    min_sentences: NonNegativeInt = 1
    bad_rows: Literal["error", "skip"] = "error"
    word_count: str | None = None
    unpack: bool = False

    expected = "a text file or a prepared corpus"
    bounds = ("min_sentences", "max_sentences")


# ---- models ----


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Estimates of round zero from the training users' ratings; saved with the model, never set by hand.

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
    mean: Finite = 0.0
    deviation: Positive = 1.0
    low: Finite
    high: Finite
    standardized: bool = False
    noise: Positive = 1.0
    user_ridge: Positive = 1.0
    trait_ridges: tuple[Positive, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Factorization:
    """The model: a rating is the product of an item's embedding (global) and a user's (local).

    Attributes:
      dim: length of the embeddings.
      biases: add a global mean, a bias of each item (global) and a bias of the user (local).
      init_mean: initial value of the global mean; only with biases.
      learned_default: learn the initial local parameters (warm start), which helps users with few ratings.
      implicit_feedback: shift the initial local parameters by which items a user rated, whatever the ratings.
      round_zero: before the first round, estimate the scale, the item biases (frozen afterwards) and the ridges from
        sums over the training users; needs biases.
      item_traits: let users differ in how they respond to an item's bias and popularity; needs round-zero.
      init_scale: embeddings are initialized uniformly between minus and plus this.
      prior: the server's ridge on item embeddings, against the sum over all ratings; for adaptive server optimizers.
      relax: after the rounds, continue with a quarter of the prior for a quarter as many rounds, up to this many times,
        as long as validation results improve; needs patience.
      implicit_prior: the same as prior, for what implicit feedback learns.
      least_ratings: recommend only items with at least this many ratings by training users.
    """

    dim: Width = 50
    biases: bool = False
    init_mean: Finite = 0.0
    learned_default: bool = False
    implicit_feedback: bool = False
    round_zero: bool = False
    item_traits: bool = False
    init_scale: NonNegative = 0.05
    prior: NonNegative = 0.0
    relax: Annotated[int, Ge(0), Le(100)] = 0
    implicit_prior: NonNegative = 0.0
    least_ratings: NonNegativeInt = 1
    scale: Scale | None = None


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The model: an item's score is the product of its embedding (global) and a user's (local), which is reconstructed
    by least squares over all items: 1 for what the user has, 0 for all else at a lower weight.

    Attributes:
      dim: length of the embeddings; auto takes the least of 128, 256, 512 and 1024 that ranks within 2 % of the best
        for validation users before training; 32 or 64 only if that ranks clearly better; 128 with fewer than 10
        validation users; 64 in deployments and private runs. Never more than `upload_bytes` allows, or than there are
        items or training users.
      upload_bytes: how much a user may send in a round, on average, where `dim` is auto.
      unobserved: the weight of an item that a user does not have; one that they have weighs 1.
      ridge: the penalty on a user's embedding.
      prior: the server's ridge on changes of item embeddings, against the sum over all clicks; auto takes 10, or
        1 if that ranks clearly better for validation users after a third of the rounds; 10 with fewer than 10
        validation users, without patience, in deployments and in private runs.
      init_scale: item embeddings of a private run start normal, with lengths of about this; others start spectral.
      second_order: differentiate through the reconstruction.
      both_ways: run every user twice in a round, the second time with support and query exchanged.
      counts: ignore, or log: an item weighs 1 + log(count), for counts of 1 and more.
      least_ratings: recommend only items that at least this many training users have.
    """

    dim: Width | Literal["auto"] = "auto"
    upload_bytes: Count = 5_000_000
    unobserved: Positive = 0.4
    ridge: Positive = 1.0
    prior: NonNegative | Literal["auto"] = "auto"
    init_scale: Positive = 0.4
    second_order: bool = True
    both_ways: bool = True
    counts: Literal["ignore", "log"] = "ignore"
    least_ratings: NonNegativeInt = 1
    at_least: float | None = None  # copied from the data's: it also applies to other files


@dataclass(frozen=True, kw_only=True)
class NextWord:
    """The model: an LSTM that predicts the next word. Words outside the vocabulary fall into buckets.

    Attributes:
      vocabulary: how many words are known: the most used of the training clients; all if they use fewer.
      oov_buckets: how many buckets all other words share.
      embedding: length of the embeddings.
      hidden: width of the LSTM.
      projection: width of the projection that is compared with the outputs.
      max_words: use at most this many words of a sentence, the first ones.
      local: what is reconstructed for every client: an output_bias, from how often they use each word; the
        oov_embedding of each bucket, as in the paper; or nothing.
      head: how many of the most used words are compared directly, the others only where one of them comes next; 0 for
        all words at once, as in the paper.
      ngrams: add hashed tables of bigrams and trigrams, global like the rest.
      loss_over: average the loss over tokens, or over all positions with padding as zero, as the paper's code did.
    """

    vocabulary: Count = 5000
    oov_buckets: Count = 500
    embedding: Width = 48
    hidden: Width = 96
    projection: Width = 48
    max_words: Width = 20
    local: Literal["output_bias", "oov_embedding", "nothing"] = "output_bias"
    ngrams: bool = True
    head: Annotated[int, Ge(0), Le(2**16)] = 1000
    loss_over: Literal["tokens", "positions"] = "tokens"
