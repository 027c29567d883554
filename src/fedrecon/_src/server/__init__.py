"""From what clients upload to what the server takes: aggregators, one per file, and how to chain them."""

from fedrecon._src.core.upload import Summand as Summand
from fedrecon._src.core.upload import Total as Total
from fedrecon._src.server.aggregator import Aggregator as Aggregator
from fedrecon._src.server.aggregator import chain as chain
from fedrecon._src.server.aggregator import stateless as stateless
from fedrecon._src.server.averaging import Weigh as Weigh
from fedrecon._src.server.averaging import adaptive_clip as adaptive_clip
from fedrecon._src.server.averaging import by_weight as by_weight
from fedrecon._src.server.averaging import clip as clip
from fedrecon._src.server.averaging import finite as finite
from fedrecon._src.server.averaging import mean as mean
from fedrecon._src.server.averaging import rescale as rescale
from fedrecon._src.server.averaging import weight_of as weight_of
from fedrecon._src.server.averaging import zero as zero
from fedrecon._src.server.fixed_point import ClientNoise as ClientNoise
from fedrecon._src.server.fixed_point import secure as secure
from fedrecon._src.server.gaussian import private as private
