"""`lorax-client` in a separate environment, since it pins libraries that are too old for the server.

    python -m tests.router.api.lorax_client install

makes the environment (it needs a package index); tests that need it say that it is absent, or fail where the variable
LORIKEET_REQUIRE_LORAX_CLIENT is set. The second half of this file runs inside it and imports nothing of ours.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[3] / "benchmarks" / ".venvs" / "lorax-client"
VERSION = "0.6.3"


def python() -> Path | None:
    """The interpreter that has the client, if there is one."""
    chosen = os.environ.get("LORAX_CLIENT_PYTHON")
    path = Path(chosen) if chosen else FOLDER / "bin" / "python"
    return path if path.is_file() else None


def install() -> None:
    """Create the environment, unless it exists."""
    if python() is not None:
        return
    venv.create(FOLDER, with_pip=True)
    try:
        subprocess.run([FOLDER / "bin" / "pip", "install", "--quiet", f"lorax-client=={VERSION}"], check=True)
    except subprocess.CalledProcessError:
        shutil.rmtree(FOLDER)  # an incomplete folder would be taken for a complete one
        raise


async def calls(interpreter: Path, base_url: str, operations: list[dict[str, Any]]) -> list[Any]:
    """The client's result of each `{"call", "is_async"?, **arguments}`: a dictionary, or `{"raised", "message"}`."""
    process = await asyncio.create_subprocess_exec(
        interpreter, __file__, base_url, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    output, _ = await process.communicate(json.dumps(operations).encode())
    assert process.returncode == 0
    answers: list[Any] = json.loads(output)
    return answers


def _inside(base_url: str, operations: list[dict[str, Any]]) -> list[Any]:
    from lorax import AsyncClient, Client  # type: ignore[import-not-found]

    answers = []
    for operation in operations:
        call, is_async = operation.pop("call"), operation.pop("is_async", False)
        client = (AsyncClient if is_async else Client)(base_url, timeout=20)
        try:
            if is_async:
                answers.append(asyncio.run(_awaited(getattr(client, call)(**operation))))
            else:
                answers.append(_plain(getattr(client, call)(**operation)))
        except Exception as error:
            answers.append({"raised": type(error).__name__, "message": str(error)})
    return answers


async def _awaited(result: Any) -> Any:
    if hasattr(result, "__aiter__"):
        return [_plain(item) async for item in result]
    return _plain(await result)


def _plain(result: Any) -> Any:
    if hasattr(result, "model_dump"):
        return result.model_dump(mode="json")
    if isinstance(result, str | dict):
        return result
    return [_plain(item) for item in result]


if __name__ == "__main__":
    if sys.argv[1] == "install":
        install()
    else:
        json.dump(_inside(sys.argv[1], json.load(sys.stdin)), sys.stdout)
