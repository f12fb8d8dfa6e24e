"""python -m penstock.chat is penstock chat."""

import sys

from penstock.cli.main import main

if __name__ == "__main__":
    main(["chat", *sys.argv[1:]])
