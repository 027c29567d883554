"""Recommenders: round zero, baselines, ranking and its metrics."""

from fedrecon._src.recommend.baselines import BaselineResults as BaselineResults
from fedrecon._src.recommend.baselines import rating_baselines as rating_baselines
from fedrecon._src.recommend.estimate import Estimate as Estimate
from fedrecon._src.recommend.ranking import Holdout as Holdout
from fedrecon._src.recommend.ranking import ItemSets as ItemSets
from fedrecon._src.recommend.ranking import RankingResult as RankingResult
from fedrecon._src.recommend.ranking import Recommendation as Recommendation
from fedrecon._src.recommend.ranking import ease as ease
from fedrecon._src.recommend.ranking import item_knn as item_knn
from fedrecon._src.recommend.ranking import item_sets as item_sets
from fedrecon._src.recommend.ranking import popularity as popularity
from fedrecon._src.recommend.ranking import rank as rank
from fedrecon._src.recommend.ranking import recommend_items as recommend_items
from fedrecon._src.recommend.ranking import score_by_model as score_by_model
from fedrecon._src.recommend.ranking import split_items as split_items
from fedrecon._src.recommend.ranking import top_items as top_items
from fedrecon._src.recommend.round_zero import RoundZero as RoundZero
from fedrecon._src.recommend.round_zero import estimate_ratings as estimate_ratings
