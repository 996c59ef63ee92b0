"""`python -m lorikeet.router CONFIG.json`: reads the configuration, sets up logs, and runs `router/server.py`."""

import json
import sys
from dataclasses import replace

from lorikeet.proto import logs
from lorikeet.router.config import RouterConfig


def main(path: str) -> int:
    """Run a router with the configuration at `path`; returns the exit code."""
    try:
        config = RouterConfig.read(path)
        if config.secrets_on_stdin:
            config = replace(config, **json.load(sys.stdin))
        logs.configure(config.json_output, config.log_level, "router", silenced=["uvicorn.access"])
    except (ValueError, OSError) as error:
        print(f"router: {error}", file=sys.stderr)
        return 2
    # Libraries may warn while they are imported, so logs are set up before.
    from lorikeet.router.server import serve

    return serve(config)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m lorikeet.router CONFIG.json")
    sys.exit(main(sys.argv[1]))
