"""`python -m threed`: the same as the console script `threed`."""

import sys

from threed.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
