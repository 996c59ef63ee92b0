"""`python -m lorikeet.demo.evaluation WHAT` measures the built-in demo models."""

from collections.abc import Sequence

from lorikeet.demo.training.commands import dispatch

COMMANDS = {
    "base": "lorikeet.demo.evaluation.base",
    "draft": "lorikeet.demo.evaluation.draft",
    "adapters": "lorikeet.demo.evaluation.adapters",
    "calls": "lorikeet.demo.evaluation.calls",
    "heads": "lorikeet.demo.evaluation.heads",
    "search": "lorikeet.demo.evaluation.search",
    "tool": "lorikeet.demo.evaluation.tool",
}


def main(arguments: Sequence[str] | None = None) -> None:
    dispatch("python -m lorikeet.demo.evaluation", COMMANDS, arguments)


if __name__ == "__main__":
    main()
