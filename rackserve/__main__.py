"""`python -m rackserve`."""

import sys

from rackserve.cli import main

sys.exit(main())
