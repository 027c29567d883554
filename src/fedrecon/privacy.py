"""Privacy against the server: accounting, noise, secure sums."""

from fedrecon._src.privacy.accounting import Release as Release
from fedrecon._src.privacy.accounting import epsilon_of as epsilon_of
from fedrecon._src.privacy.accounting import noise_for as noise_for
from fedrecon._src.privacy.ledger import Ledger as Ledger
from fedrecon._src.privacy.noise import coefficients as coefficients
from fedrecon._src.privacy.noise import correlate as correlate
from fedrecon._src.privacy.noise import nothing_yet as nothing_yet
from fedrecon._src.server.averaging import adaptive_clip as adaptive_clip
from fedrecon._src.server.averaging import rescale as rescale
from fedrecon._src.server.fixed_point import from_vector as from_vector
from fedrecon._src.server.fixed_point import secure as secure
from fedrecon._src.server.fixed_point import to_vectors as to_vectors
from fedrecon._src.server.gaussian import private as private
