"""`python -m demo.evaluate WHAT` measures the members of the embedded family. Knows only which module measures what."""

from collections.abc import Sequence

from demo.commands import dispatch

COMMANDS = {
    "base": "demo.evaluate_base",
    "draft": "demo.evaluate_draft",
    "adapters": "demo.evaluate_adapters",
    "heads": "demo.evaluate_heads",
    "tool": "demo.evaluate_tool",
}


def main(arguments: Sequence[str] | None = None) -> None:
    dispatch("python -m demo.evaluate", COMMANDS, arguments)


if __name__ == "__main__":
    main()
