"""Secure sums: the server learns the sum of many clients' integers and no single one of them.

The four-message protocol of Bonawitz et al. 2017, as pure functions from message to message. A host carries bytes back
and forth and adds nothing:

    client                                   server
    state, hello = advertise(terms, me, …)   state, rosters = introduce(terms, hellos)
    state, shares = share(state, roster)     state, deliveries = deliver(state, shares)
    state, masked = mask(state, delivery, v) state, requests = collect(state, masked)
    state, reveal = unmask(state, request)   result = total(state, reveals)

Clients may drop out between any two messages. The result is the exact sum of those whose masked input arrived, as long
as at least `Terms.threshold` of every circle are left; otherwise the server gets `TooFewClients` and nobody's data.

**Circles.** A client exchanges keys and shares with its circle only: the whole cohort if that is small, otherwise a few
dozen clients next to it on a ring in random order (Bell et al. 2020). We prefer this to cutting the cohort into
separate groups. The cost is the same, but the server learns one sum of the whole cohort instead of a sum for each
group, so noise that clients add for differential privacy need only be large enough for the cohort. The price: if one
circle falls below the threshold, the whole round is lost, not one group.

**What a curious server learns**, one that follows the protocol: the sum, who took part, who dropped out. The same holds
if it works together with fewer than `threshold` members of each circle.

**What a lying server can do.**
- Tell clients different things about who dropped out. A client reveals one kind of share for each member of its circle,
  once, and a threshold above half of the circle means that nobody can collect both. So the least a server learns is
  a sum of `threshold` members of a circle, instead of the whole cohort. With c members of a circle on its side, this
  holds while c < 2 threshold - circle, and those c hide nobody.
- Invent clients, and surround a real one with them: it knows their masks, so the input of the real one is open.
  Only signatures prevent this. Give `share` the verify keys of the devices that exist.
- Choose who takes part, spoil a sum, or send a model made to leak. Nothing here prevents that; see noise and clipping.
We do not run the consistency round of Bonawitz et al., section 6, in which clients sign to each other who answered.

**What a lying client can do**: send any input it likes, or wrong shares. The latter are noticed; the round is lost.

References: Bonawitz et al., Practical secure aggregation for privacy-preserving machine learning, CCS 2017.
Bell et al., Secure single-server aggregation with (poly)logarithmic overhead, CCS 2020.
"""

from fedrecon._src.privacy.secure_sum.client_steps import ClientState as ClientState
from fedrecon._src.privacy.secure_sum.client_steps import advertise as advertise
from fedrecon._src.privacy.secure_sum.client_steps import mask as mask
from fedrecon._src.privacy.secure_sum.client_steps import share as share
from fedrecon._src.privacy.secure_sum.client_steps import unmask as unmask
from fedrecon._src.privacy.secure_sum.server_steps import Sum as Sum
from fedrecon._src.privacy.secure_sum.server_steps import SumState as SumState
from fedrecon._src.privacy.secure_sum.server_steps import collect as collect
from fedrecon._src.privacy.secure_sum.server_steps import deliver as deliver
from fedrecon._src.privacy.secure_sum.server_steps import introduce as introduce
from fedrecon._src.privacy.secure_sum.server_steps import total as total
from fedrecon._src.privacy.secure_sum.terms import MessageError as MessageError
from fedrecon._src.privacy.secure_sum.terms import Refusal as Refusal
from fedrecon._src.privacy.secure_sum.terms import SecureSumError as SecureSumError
from fedrecon._src.privacy.secure_sum.terms import Terms as Terms
from fedrecon._src.privacy.secure_sum.terms import TooFewClients as TooFewClients
from fedrecon._src.privacy.secure_sum.terms import circles as circles
from fedrecon._src.privacy.secure_sum.terms import plan as plan
