"""Virtual environments of clients, in a folder that is kept between runs."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path

CACHE_VARIABLE = "LORIKEET_CLIENTS"
SCRIPTS = Path(__file__).parent / "scripts"
INSTALL_S, RUN_S = 900, 300


class NotInstallable(Exception):
    """A client's packages cannot be installed here; the message is the installer's last line."""


def cache() -> Path:
    """The folder of all environments: LORIKEET_CLIENTS, else one in the user's cache."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "lorikeet-clients")


def python(name: str, packages: tuple[str, ...], *, with_ours: bool = False) -> list[str]:
    """The command of an interpreter that has the newest `packages`; `with_ours`: and those of this environment.

    Raises NotInstallable.
    """
    folder = cache() / name
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    interpreter = str(folder / "bin" / "python")
    if with_ours:
        own = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
        ours = [path for path in sys.path if path.endswith("site-packages")]
        (Path(own) / "ours.pth").write_text("\n".join(ours) + "\n")
    _install([interpreter, "-m", "pip", "install", "--quiet", "--upgrade", "--disable-pip-version-check", *packages])
    return [interpreter]


def node(name: str, packages: tuple[str, ...]) -> list[str]:
    """The command of Node.js, to run in the folder that has the newest `packages`. Raises NotInstallable."""
    npm = shutil.which("npm")
    if npm is None:
        raise NotInstallable("Node.js is not installed")
    folder = cache() / name
    folder.mkdir(parents=True, exist_ok=True)
    _install([npm, "install", "--silent", "--prefix", str(folder), *(f"{package}@latest" for package in packages)])
    return ["node", "--input-type=module"]


def run(command: list[str], script: str, variables: Mapping[str, str], folder: Path | None = None) -> str:
    """What a script prints. Raises AssertionError with its output if it fails."""
    path = SCRIPTS / script
    if command[0] == "node":
        done = finish(command, variables, folder, path.read_text())
    else:
        done = finish([*command, str(path)], variables, folder)
    assert done.returncode == 0, f"{script}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def finish(
    command: list[str], variables: Mapping[str, str], folder: Path | None = None, given: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, offline: with few variables of this environment, and `given` as its input."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return subprocess.run(
        command,
        input=given,
        env=kept | {"HF_HUB_OFFLINE": "1"} | dict(variables),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )


def _install(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        raise NotInstallable(f"not installed within {INSTALL_S} s") from None
    if done.returncode:
        raise NotInstallable((done.stderr.strip() or done.stdout.strip()).splitlines()[-1])
