"""`python -m axon_dist.cli` is `axon`."""

import sys

from ..train.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
