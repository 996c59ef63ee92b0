"""Lists the benchmarks and tools that can be run, by folder: each is `python -m` its name, and has `--help`."""

import ast
from pathlib import Path

from benchmarks.evidence import arguments

HERE = Path(__file__).parent


def runnable() -> dict[str, str]:
    """The first sentence of each module that can be run, by its name."""
    sentences = {}
    for path in sorted(HERE.rglob("*.py")):
        if any(part.startswith(".") for part in path.relative_to(HERE).parts):
            continue  # it belongs to another server's environment
        text = path.read_text()
        if '__name__ == "__main__"' in text and path != Path(__file__):
            name = ".".join(path.relative_to(HERE.parent).with_suffix("").parts).removesuffix(".__main__")
            sentences[name] = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].replace("\n", " ")
    return sentences


if __name__ == "__main__":
    arguments.parser(__doc__).parse_args()
    for module, text in runnable().items():
        print(f"python -m {module:42} {text}")
