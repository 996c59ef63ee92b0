"""`python -m adapters.medusa` is `lorikeet-heads`."""

import sys

from adapters.medusa.cli import main

if __name__ == "__main__":
    sys.exit(main())
