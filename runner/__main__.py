"""`python -m sirtaki.runner` is hvdrun."""

import sys

from sirtaki.runner.cli import main

sys.exit(main())
