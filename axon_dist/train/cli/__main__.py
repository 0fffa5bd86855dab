"""`python -m axon_dist.train.cli` is `axon`."""

import sys

from .main import main

sys.exit(main())
