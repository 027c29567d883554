"""Round zero with user-level differential privacy: few questions, bounded answers, noised sums.

It finds what `recommend.round_zero` finds, and differs where privacy requires it. Clients are asked four or five times
rather than sixteen. Each answer is a vector of norm 1 at most, whatever a client has rated, so that noise of a known
size hides any client in the sum. The server works with the noised sums alone:

    message = round_zero.start(num_items, clients=1000)
    while not round_zero.done(message):
        total = noised sum of round_zero.answer(message, item, rating) over clients
        message = round_zero.advance(message, total, noise)

1. `range`: which powers of two the ratings lie between, and whether they look like counts. Left out where the range is
   declared.
2. `scale`: mean and deviation, a histogram for the ends, and how many ratings clients have, for the weights.
3. `biases`, twice: by item, the weighted sum and number of ratings; beside them the variances of biases and noise.
4. `traits`: how much users differ in how they follow an item's bias and popularity.

A client with many ratings weighs each of them less, so that all have an answer of about the same norm. Item biases are
shrunk for the ratings that are missing and for the noise that was added.
"""

from fedrecon._src.recommend.private_round_zero.answers import answer as answer
from fedrecon._src.recommend.private_round_zero.estimation import advance as advance
from fedrecon._src.recommend.private_round_zero.message import PURPOSE as PURPOSE
from fedrecon._src.recommend.private_round_zero.message import Entries as Entries
from fedrecon._src.recommend.private_round_zero.message import Message as Message
from fedrecon._src.recommend.private_round_zero.message import done as done
from fedrecon._src.recommend.private_round_zero.message import noise_of as noise_of
from fedrecon._src.recommend.private_round_zero.message import start as start
from fedrecon._src.recommend.private_round_zero.together import Found as Found
from fedrecon._src.recommend.private_round_zero.together import gaussian as gaussian
from fedrecon._src.recommend.private_round_zero.together import integers as integers
from fedrecon._src.recommend.private_round_zero.together import prepare as prepare
