from tests.router.metrics.test_reference import *  # noqa
