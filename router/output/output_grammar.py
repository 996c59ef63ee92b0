"""Grammars of outputs, in llguidance's variant of Lark: reasoning where the model may reason, and then the answer."""

import json
import re
from dataclasses import dataclass, replace
from typing import Any

import llguidance

from lorikeet.router.errors import ValidationError
from lorikeet.router.schemas.grammar import GrammarFields
from lorikeet.router.text.grammar_process import OVERRIDES, literal
from lorikeet.router.text.json_schemas import SchemaError, enforced
from lorikeet.router.text.reasoning import MAX_GAP, Reasoning, Start

TEXT = r"/(.|\n)*/"
"""Any text, for the inside of another lexeme."""


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens, which text in a grammar does not match. What has the text of one may also be spelled."""

    ids: dict[str, int]
    end_ids: frozenset[int]
    """Ids of special tokens that end the output: a grammar ends before them."""

    def written(self, text: str) -> tuple[str, bool]:
        """`text` in Lark, and whether it ends the output."""
        terms: list[str] = []
        for piece in self.pieces(text):
            number = self.ids.get(piece)
            if number is not None and number in self.end_ids:
                return " ".join(terms), True
            terms.append(literal(piece) if number is None else f"(<[{number}]> | {literal(piece)})")
        return " ".join(terms), False

    def pieces(self, text: str) -> list[str]:
        """The special tokens in `text`, and the texts between them."""
        if not self.ids:
            return [text] if text else []
        names = "|".join(map(re.escape, sorted(self.ids, key=len, reverse=True)))
        return [piece for piece in re.split(f"({names})", text) if piece]


class OutputGrammar:
    """Builds the grammar of one request."""

    def __init__(self, tokens: SpecialTokens, reasoning: Reasoning | None, next_part: str = "") -> None:
        """`next_part` follows the reasoning, before anything else."""
        self._tokens = tokens
        self._reasoning = reasoning
        self._next_part = next_part
        self._rules: list[str] = []

    def text(self, content: GrammarFields, opening: str = "") -> GrammarFields:
        """The answer is as `content` says, after the text `opening`."""
        reasoning = self._thought()
        if not reasoning and not opening:
            return content
        begin = f"{reasoning} {self._tokens.written(opening)[0]}"
        return replace(self._grammar(f"{begin} {self._content(content)}"), field=content.field)

    def _grammar(self, start: str) -> GrammarFields:
        return GrammarFields("grammar", "\n".join([f"start: {start.strip()}", *self._rules, ""]), "tools")

    def _thought(self) -> str:
        """The reasoning that may come first, or must be ended first."""
        reasoning = self._reasoning
        if reasoning is None or reasoning.start is Start.CLOSED:
            return ""
        ends = " | ".join(self._until(f"thought_{at}", closing) for at, closing in enumerate(reasoning.closings))
        self._rules.append(f"thought: {ends}")
        self._rules.append(f"GAP: /\\n{{0,{MAX_GAP}}}/")
        following = self._tokens.written(self._next_part)[0]
        if reasoning.start is Start.OPEN:
            return f"thought GAP {following}"
        return f"({self._tokens.written(reasoning.opening)[0]} thought GAP {following})?"

    def _until(self, name: str, end: str) -> str:
        """Any text up to the first `end`, be it spelled or with special tokens."""
        self._rules.append(f"{name}[lazy]: {TEXT} {literal(end)}")
        first, *others = self._tokens.pieces(end)
        if first not in self._tokens.ids:
            return name
        before, rest = f"BEFORE_{name.upper()}", self._tokens.written("".join(others))[0]
        self._rules.append(f"{before}: {TEXT}")
        return f"({name} | {before} <[{self._tokens.ids[first]}]> {rest})"

    def _content(self, content: GrammarFields) -> str:
        """A rule for the text of an answer."""
        if content.kind == "choice":  # one lexeme, as in `grammar_process`
            self._rules.append("ANSWER: " + " | ".join(map(literal, content.value)))
            return "ANSWER"
        self._rules.append(f"answer: {_lark(content)}")
        return "answer"


def schema_text(schema: Any, is_strict: bool = True) -> str:
    """A JSON schema as text, with options that the schema itself cannot change."""
    if not isinstance(schema, dict):
        return json.dumps(schema)
    return json.dumps({**schema, "x-guidance": {**OVERRIDES, "lenient": not is_strict}})


def enforced_content(content: GrammarFields) -> Any:
    """The schema of an answer as it is enforced. Raises ValidationError for what cannot be."""
    try:
        return enforced(content.value)[0]
    except SchemaError as problem:
        raise ValidationError(f"`{content.field}` is not supported: {problem}", content.field) from None


def _lark(content: GrammarFields) -> str:
    if content.kind == "json_schema":
        return f"%json {schema_text(enforced_content(content))}"
    if content.kind == "regex":
        made = json.loads(llguidance.LLMatcher.grammar_from_regex(content.value))
        return str(made["grammars"][0]["lark_grammar"]).removeprefix("start: ")
    text = llguidance.grammar_from("grammar", content.value)
    return f"%lark {{\n{text}\n}}"
