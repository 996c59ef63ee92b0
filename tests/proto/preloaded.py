"""What the processes of `test_preload` share."""

IS_PRELOADED = True
