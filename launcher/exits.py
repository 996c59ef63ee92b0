"""Why the launcher ended: one code per reason, and the error that carries a reason and one sentence for the user."""

from enum import IntEnum


class Exit(IntEnum):
    """The exit codes. Names follow LoRAX's reasons where it has one."""

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
    Exit.OK: "It was asked to end and every request was answered, or it had only something to print.",
    Exit.ARGUMENT_VALIDATION: "A flag or a variable is unknown, wrong, impossible together with another, or refused.",
    Exit.NOT_ENOUGH_CUDA_DEVICES: "A CUDA device was asked for that this machine does not have.",
    Exit.DOWNLOAD_ERROR: "The model could not be found, read or downloaded.",
    Exit.SHARD_CANNOT_START: "A shard ended before it was ready: its last lines say why.",
    Exit.SHARD_FAILED: "A shard ended while the server was draining.",
    Exit.WEBSERVER_CANNOT_START: "The address is taken, or the router ended before it was ready.",
    Exit.WEBSERVER_FAILED: "The router ended again and again while serving, or could not drain in time.",
    Exit.FORCED: "A second signal ended it at once; running requests were cut.",
    Exit.LOADER_FAILED: "The loader of adapters could not start, or ended again and again while serving.",
    Exit.SHARD_KEEPS_ENDING: "A shard ended five times running without having completed a request.",
}


class LauncherError(Exception):
    """Ends the launcher with `exit` and one sentence for the user."""

    def __init__(self, exit: Exit, sentence: str) -> None:
        super().__init__(sentence)
        self.exit = exit
