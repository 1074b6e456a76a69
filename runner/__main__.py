"""`python -m sirtaki.runner` is hvdrun."""

import sys

from .cli import main

sys.exit(main())
