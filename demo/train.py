"""`python -m demo.train WHAT` trains the members of the embedded family. Knows only which module trains what."""

from collections.abc import Sequence

from demo.commands import dispatch

COMMANDS = {
    "base": "demo.train_base",
    "draft": "demo.train_draft",
    "adapters": "demo.train_adapters",
    "heads": "demo.train_heads",
}


def main(arguments: Sequence[str] | None = None) -> None:
    dispatch("python -m demo.train", COMMANDS, arguments)


if __name__ == "__main__":
    main()
