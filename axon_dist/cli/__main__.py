"""`python -m axon_dist.cli` is `axon`."""

import sys

from .main import main

sys.exit(main())
