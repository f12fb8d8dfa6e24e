"""python -m penstock.convert is penstock convert."""

import sys

from penstock.cli.main import main

if __name__ == "__main__":
    main(["convert", *sys.argv[1:]])
