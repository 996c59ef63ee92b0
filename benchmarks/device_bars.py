"""The bars about CUDA devices and models on several of them, as far as a machine without any can measure them; those
that need one are in benchmarks/cuda.
"""

from benchmarks import marked_tests, planted, quantized
from benchmarks.case import Bar, Over, Part

PARTS: tuple[Part, ...] = (
    Part("devices-planted", planted.of_devices, planted.SETTINGS_OF_DEVICES),
    Part("devices-tests", marked_tests.of_devices, marked_tests.settings("device")),
    Part("devices-quantized", quantized.measure, quantized.SETTINGS),
)
BARS: tuple[Bar, ...] = (
    Bar("planted faults of several devices that no test notices", "devices-planted", planted.NUM_OF_DEVICES,
        planted.num_unnoticed, 0, at_least=False, over=Over.SUM),
    Bar("failed tests of kernels for devices, interpreted", "devices-tests", marked_tests.NUM_OF_DEVICES,
        marked_tests.num_failed, 0, at_least=False, over=Over.SUM),
    Bar("failed tests of quantised bases, with their packages", "devices-quantized", quantized.NUM_TESTS,
        quantized.num_failed, 0, at_least=False, over=Over.SUM),
)  # fmt: skip
