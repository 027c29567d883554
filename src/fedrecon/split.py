"""S: which of a client's examples are support and which are query."""

from fedrecon._src.core.split import Split as Split
from fedrecon._src.core.split import alternate as alternate
from fedrecon._src.core.split import at_most as at_most
from fedrecon._src.core.split import fraction as fraction
from fedrecon._src.core.split import half as half
from fedrecon._src.core.split import named as named
from fedrecon._src.core.split import none as none
from fedrecon._src.core.split import query_only as query_only
from fedrecon._src.core.split import redrawn as redrawn
from fedrecon._src.core.split import support_only as support_only
