"""`python -m router CONFIG.json`."""

import sys

from router.server import main

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m router CONFIG.json")
    sys.exit(main(sys.argv[1]))
