"""Why the launcher exits: one code per reason, and the error that carries a code and one sentence for the user."""

from enum import IntEnum
from typing import Never


class Exit(IntEnum):
    """The exit codes. Names follow LoRAX's reasons if it has one."""

    OK = 0
    ARGUMENT_VALIDATION = 2
    NOT_ENOUGH_CUDA_DEVICES = 3
    DOWNLOAD_ERROR = 4
    SHARD_CANNOT_START = 5
    SHARD_FAILED = 6
    WEBSERVER_CANNOT_START = 7
    WEBSERVER_FAILED = 8
    FORCED = 9
    LOADER_FAILED = 10
    SHARD_KEEPS_ENDING = 11


MEANINGS: dict[Exit, str] = {
    Exit.OK: "Clean shutdown, or an informational command completed.",
    Exit.ARGUMENT_VALIDATION: "A flag or a variable is unknown, invalid, in conflict with another, or not supported.",
    Exit.NOT_ENOUGH_CUDA_DEVICES: "The machine has fewer CUDA devices than requested.",
    Exit.DOWNLOAD_ERROR: "The model could not be found, read or downloaded.",
    Exit.SHARD_CANNOT_START: "A shard exited before it was ready; its last log lines give the reason.",
    Exit.SHARD_FAILED: "A shard exited while the server was draining.",
    Exit.WEBSERVER_CANNOT_START: "The address is in use, or the router exited before it was ready.",
    Exit.WEBSERVER_FAILED: "The router exited repeatedly while serving, or did not drain in time.",
    Exit.FORCED: "A second signal ended the server at once; running requests were aborted.",
    Exit.LOADER_FAILED: "The adapter loader could not start, or exited repeatedly while serving.",
    Exit.SHARD_KEEPS_ENDING: "A shard exited five times in a row without completing a request.",
}


class LauncherError(Exception):
    """Ends the launcher with `exit` and one sentence for the user."""

    def __init__(self, exit: Exit, sentence: str) -> None:
        super().__init__(sentence)
        self.exit = exit


def refuse(sentence: str) -> Never:
    """Reject the arguments. Raises LauncherError."""
    raise LauncherError(Exit.ARGUMENT_VALIDATION, sentence)
