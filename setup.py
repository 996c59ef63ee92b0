"""Adds CPU kernels compiled in advance to the wheel, which names its platform. All else is in pyproject.toml."""

import platform
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent / "src"))

from lorikeet.shard.system import prebuilt


class BuildWithKernels(build_py):
    """Compiles for every level of processors that this machine has a compiler for; a checkout compiles for itself."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for line in prebuilt.build(Path(self.build_lib) / "lorikeet" / "shard" / prebuilt.FOLDER.name):
                print(line, file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """Names the platform: any Python 3, on Linux with at least the C library that the kernels need."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        """Interface, ABI, platform."""
        library, version = platform.libc_ver()
        kind = "linux"
        if library == "glibc":
            own = tuple(map(int, version.split(".")[:2]))  # an older one than tested can install what it has built
            kind = "manylinux_{}_{}".format(*min(own, prebuilt.needed_glibc(Path(self.bdist_dir))))
        return "py3", "none", f"{kind}_{platform.machine()}"


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
