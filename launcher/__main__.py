"""`python -m lorikeet.launcher` is `lorikeet-launcher`."""

import sys

from lorikeet.launcher.main import main

if __name__ == "__main__":
    sys.exit(main())
