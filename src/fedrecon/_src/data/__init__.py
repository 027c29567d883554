"""Data sets of clients: MovieLens and ratings files; text and Stack Overflow; synthetic ones of the same shape."""

from fedrecon._src.data.corpus import Corpus as Corpus
from fedrecon._src.data.corpus_writer import CorpusOptions as CorpusOptions
from fedrecon._src.data.movielens import load as load
from fedrecon._src.data.movielens import load_movielens as load_movielens
from fedrecon._src.data.posts import load_text as load_text
from fedrecon._src.data.posts import prepare_posts as prepare_posts
from fedrecon._src.data.posts import prepare_text as prepare_text
from fedrecon._src.data.ratings import RatingLimits as RatingLimits
from fedrecon._src.data.ratings import Ratings as Ratings
from fedrecon._src.data.ratings import RatingsSchema as RatingsSchema
from fedrecon._src.data.ratings import Summary as Summary
from fedrecon._src.data.ratings import load_ratings as load_ratings
from fedrecon._src.data.ratings import load_titles as load_titles
from fedrecon._src.data.ratings import unique_labels as unique_labels
from fedrecon._src.data.sentences import PersonalText as PersonalText
from fedrecon._src.data.sentences import Sentences as Sentences
from fedrecon._src.data.sentences import Vocabulary as Vocabulary
from fedrecon._src.data.sentences import input_ids as input_ids
from fedrecon._src.data.sentences import personal_text as personal_text
from fedrecon._src.data.sentences import prompt_columns as prompt_columns
from fedrecon._src.data.sentences import split_text as split_text
from fedrecon._src.data.sources import DataError as DataError
from fedrecon._src.data.stackoverflow import prepare_stackoverflow as prepare_stackoverflow
from fedrecon._src.data.synthetic import synthetic_ratings as synthetic_ratings
from fedrecon._src.data.synthetic import synthetic_text as synthetic_text
from fedrecon._src.data.tables import TextOptions as TextOptions
