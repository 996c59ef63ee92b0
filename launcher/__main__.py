"""`lorikeet-launcher`: reads the settings and runs a server. Imports little before a command line is right."""

import os
import socket
import sys
from collections.abc import Sequence

from lorikeet.launcher.config import settings
from lorikeet.launcher.exits import Exit, LauncherError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process, and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if "--version" in arguments:
            from lorikeet.proto.version import version

            print(f"lorikeet {version()}")
            return Exit.OK
        if page := settings.help_page(arguments):
            print(page)
            return Exit.OK
        read = settings.read(arguments, os.environ, socket.gethostname())
        from lorikeet.launcher.config import rules

        rules.check(read)
        from lorikeet.launcher.run import run

        return run(read)
    except LauncherError as error:
        if settings.asks_for_json(arguments, os.environ):
            from lorikeet.proto import logs

            logs.start_launcher(True, "error", sys.stderr).error("launcher_failed: %s", error)
        else:
            print(f"lorikeet-launcher: {error}", file=sys.stderr, flush=True)
        return error.exit


if __name__ == "__main__":
    sys.exit(main())
