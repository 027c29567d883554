"""From what clients upload to what the server takes: aggregators, one per file, and how to chain them."""

from fedrecon.aggregate.adaptive import adaptive_clip as adaptive_clip
from fedrecon.aggregate.aggregator import Aggregator as Aggregator
from fedrecon.aggregate.aggregator import chain as chain
from fedrecon.aggregate.aggregator import stateless as stateless
from fedrecon.aggregate.averaging import Weigh as Weigh
from fedrecon.aggregate.averaging import by_weight as by_weight
from fedrecon.aggregate.averaging import clip as clip
from fedrecon.aggregate.averaging import finite as finite
from fedrecon.aggregate.averaging import mean as mean
from fedrecon.aggregate.averaging import weight_of as weight_of
from fedrecon.aggregate.averaging import zero as zero
from fedrecon.aggregate.noised import private as private
from fedrecon.aggregate.rescaling import rescaled as rescaled
from fedrecon.aggregate.ring_sums import secure as secure
from fedrecon.upload import Summand as Summand
from fedrecon.upload import Total as Total
