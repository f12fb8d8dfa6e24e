"""python -m penstock.benchmark is penstock benchmark."""

import sys

from penstock.cli.main import main

if __name__ == "__main__":
    main(["benchmark", *sys.argv[1:]])
