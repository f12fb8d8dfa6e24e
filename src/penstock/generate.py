"""python -m penstock.generate is penstock generate."""

import sys

from penstock.cli.main import main

if __name__ == "__main__":
    main(["generate", *sys.argv[1:]])
