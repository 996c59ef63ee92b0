"""`python -m lorikeet.adapters.medusa` runs `lorikeet-heads`."""

import sys

from lorikeet.adapters.medusa.cli import main

if __name__ == "__main__":
    sys.exit(main())
