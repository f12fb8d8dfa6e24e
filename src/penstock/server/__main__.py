"""python -m penstock.server is penstock serve."""

import sys

from penstock.cli.main import main

if __name__ == "__main__":
    main(["serve", *sys.argv[1:]])
