"""The exceptions that users meet, in the module where Horovod's users look for them."""

from sirtaki.bindings.errors import *  # noqa: F403
from sirtaki.bindings.errors import __all__ as __all__
