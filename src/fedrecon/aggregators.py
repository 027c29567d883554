"""From what clients upload to what the server takes: aggregators, one per file, and how to chain them."""

from fedrecon._src.server import Aggregator as Aggregator
from fedrecon._src.server import ClientNoise as ClientNoise
from fedrecon._src.server import Summand as Summand
from fedrecon._src.server import Total as Total
from fedrecon._src.server import Weigh as Weigh
from fedrecon._src.server import adaptive_clip as adaptive_clip
from fedrecon._src.server import by_weight as by_weight
from fedrecon._src.server import chain as chain
from fedrecon._src.server import clip as clip
from fedrecon._src.server import finite as finite
from fedrecon._src.server import mean as mean
from fedrecon._src.server import private as private
from fedrecon._src.server import rescale as rescale
from fedrecon._src.server import secure as secure
from fedrecon._src.server import stateless as stateless
from fedrecon._src.server import weight_of as weight_of
from fedrecon._src.server import zero as zero
