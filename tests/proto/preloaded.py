"""What the processes of `test_preload` share."""

from importlib.util import find_spec

IS_PRELOADED = True
HAS_SCIPY = find_spec("scipy") is not None
"""How libraries look for packages that they can do without."""
