"""`python -m launcher` is `lorikeet-launcher`."""

import sys

from launcher.main import main

if __name__ == "__main__":
    sys.exit(main())
