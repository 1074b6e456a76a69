"""`python -m sirtaki.runner` is hvdrun."""

import sys

from sirtaki.runner.cli.hvdrun import main

sys.exit(main())
