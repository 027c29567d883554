"""Data sets of clients: MovieLens and ratings files; text and Stack Overflow; synthetic ones of the same shape."""

from fedrecon._src.data import Corpus as Corpus
from fedrecon._src.data import CorpusOptions as CorpusOptions
from fedrecon._src.data import DataError as DataError
from fedrecon._src.data import PersonalText as PersonalText
from fedrecon._src.data import RatingLimits as RatingLimits
from fedrecon._src.data import Ratings as Ratings
from fedrecon._src.data import RatingsSchema as RatingsSchema
from fedrecon._src.data import Sentences as Sentences
from fedrecon._src.data import Summary as Summary
from fedrecon._src.data import TextOptions as TextOptions
from fedrecon._src.data import Vocabulary as Vocabulary
from fedrecon._src.data import input_ids as input_ids
from fedrecon._src.data import load as load
from fedrecon._src.data import load_movielens as load_movielens
from fedrecon._src.data import load_ratings as load_ratings
from fedrecon._src.data import load_text as load_text
from fedrecon._src.data import load_titles as load_titles
from fedrecon._src.data import personal_text as personal_text
from fedrecon._src.data import prepare_posts as prepare_posts
from fedrecon._src.data import prepare_stackoverflow as prepare_stackoverflow
from fedrecon._src.data import prepare_text as prepare_text
from fedrecon._src.data import prompt_columns as prompt_columns
from fedrecon._src.data import split_text as split_text
from fedrecon._src.data import synthetic_ratings as synthetic_ratings
from fedrecon._src.data import synthetic_text as synthetic_text
from fedrecon._src.data import unique_labels as unique_labels
