"""Adds CPU kernels compiled in advance to the wheel. Everything else is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import setup
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


setup(cmdclass={"build_py": BuildWithKernels})
