"""python -m penstock.cache_prompt is penstock cache_prompt."""

import sys

from penstock.cli.main import main

if __name__ == "__main__":
    main(["cache_prompt", *sys.argv[1:]])
