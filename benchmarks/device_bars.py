"""The bars about models on several devices, as far as a machine without any can measure them."""

from benchmarks import planted
from benchmarks.case import Bar, Over, Part

PARTS: tuple[Part, ...] = (Part("devices-planted", planted.of_devices, planted.SETTINGS_OF_DEVICES),)
BARS: tuple[Bar, ...] = (
    Bar("planted faults of several devices that no test notices", "devices-planted", planted.NUM_OF_DEVICES,
        planted.num_unnoticed, 0, at_least=False, over=Over.SUM),
)  # fmt: skip
