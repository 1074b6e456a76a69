"""The package that stands for Horovod: its modules have the names of sirtaki's."""

import sys

STANDS_FOR_SIRTAKI = True

from sirtaki.as_horovod.activation import activate  # noqa: E402  # it looks for the mark
from sirtaki.as_horovod.finder import fill  # noqa: E402
from sirtaki.as_horovod.table import VERSION  # noqa: E402

__version__ = VERSION

activate()
fill(sys.modules[__name__])
