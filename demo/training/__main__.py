"""`python -m lorikeet.demo.training WHAT` trains the built-in demo models."""

from collections.abc import Sequence

from lorikeet.demo.training.commands import dispatch

COMMANDS = {
    "base": "lorikeet.demo.training.base",
    "draft": "lorikeet.demo.training.draft",
    "adapters": "lorikeet.demo.training.adapters",
    "heads": "lorikeet.demo.training.heads",
    "search": "lorikeet.demo.training.search",
}


def main(arguments: Sequence[str] | None = None) -> None:
    dispatch("python -m lorikeet.demo.training", COMMANDS, arguments)


if __name__ == "__main__":
    main()
