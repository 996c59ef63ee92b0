"""The corpus is large enough, its split is deterministic, and its functions compile by themselves."""

import ast
from pathlib import Path

from lorikeet.demo.data import corpus


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(text.encode())


def test_this_interpreters_library_is_enough_to_train_on() -> None:
    assert sum(path.stat().st_size for path in corpus.standard_library().rglob("*.py")) >= corpus.MIN_CORPUS_BYTES


def test_the_split_depends_on_the_path_alone() -> None:
    # Pinned: a change of the split would let modules the committed weights were trained on into the held-out set.
    assert corpus.is_held_out("typing.py")
    assert corpus.is_held_out("test/test_calendar.py")
    assert not corpus.is_held_out("json/decoder.py")
    assert not corpus.is_held_out("test/test_json/test_unicode.py")


def test_the_two_sides_share_no_path_and_no_text(tmp_path: Path) -> None:
    names = [f"module_{i}.py" for i in range(200)]
    for i, name in enumerate(names):
        write(tmp_path, name, f"x = {i % 150}\n")
    training, held_out = corpus.training_files(tmp_path), corpus.held_out_files(tmp_path)
    assert training
    assert held_out
    assert not {file.path for file in training} & {file.path for file in held_out}
    assert not {file.text for file in training} & {file.text for file in held_out}
    assert len(training) + len(held_out) == 150


def test_files_outside_the_library_are_skipped(tmp_path: Path) -> None:
    write(tmp_path, "good.py", "x = 1\n")
    write(tmp_path, "site-packages/other.py", "x = 2\n")
    write(tmp_path, "encodings/cp037.py", "x = 3\n")
    write(tmp_path, "config-3.11-x/build.py", "x = 4\n")
    write(tmp_path, "bad_syntax.py", "def\n")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nx = '\xe9'\n")
    assert [file.path for file in corpus.training_files(tmp_path) + corpus.held_out_files(tmp_path)] == ["good.py"]


def test_functions_are_dedented_and_compile() -> None:
    text = (
        "import x\n\f\nclass A:\n    @property\n    def b(self,\n          c=1):\n        '''Say b.'''\n"
        "        return c\n\n"
        "def outer():\n    n = 1\n    def inner():\n        nonlocal n\n        n = 2\n    return inner\n"
    )
    found = {f.name: f for f in corpus.functions(corpus.SourceFile("a.py", text))}
    assert set(found) == {"b", "outer"}  # a lone `inner` has no `n` to be nonlocal
    b = found["b"]
    assert b.source == "@property\ndef b(self,\n      c=1):\n    '''Say b.'''\n    return c\n"
    assert b.docstring == "Say b."
    assert b.source.split("\n")[b.body_line] == "    return c"
    for function in found.values():
        ast.parse(function.source)
