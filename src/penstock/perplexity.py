"""python -m penstock.perplexity is penstock perplexity."""

import sys

from penstock.cli.main import main

if __name__ == "__main__":
    main(["perplexity", *sys.argv[1:]])
