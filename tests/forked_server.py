"""The first process of a server, which `tests/forked.py` forks: MODULE ARGUMENT…"""

import sys

from lorikeet.proto.preload import set_title
from tests import forking

if __name__ == "__main__":
    words = sys.argv[1:]
    sys.argv = words
    set_title(["python", "-m", *words])
    sys.exit(forking.run(words[0]))
