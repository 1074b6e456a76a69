"""`python -m sirtaki` is the program `sirtaki`."""

import sys

from sirtaki.runner.cli.commands import main

sys.exit(main())
