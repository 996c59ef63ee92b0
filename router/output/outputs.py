"""Prepares a conversation with tools: its prompt, the grammar of its output, and readers of its output.

A model or adapter with a tool format gets the tools through its chat template. Every other one is served in LoRAX's
form.
"""

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import structlog

from lorikeet.router.adapters.chat_templates import ChosenTemplate, Templates
from lorikeet.router.errors import ChatTemplateError, InternalError, ToolError
from lorikeet.router.output.formats import ResponseTemplate, format_of, reasoning_of, syntax_of, text_opening
from lorikeet.router.output.lorax_form import LoraxReader, plain_turns, schema_of, with_tools
from lorikeet.router.output.output_grammar import EnforcedParameters, OutputGrammar, SpecialTokens, ToolGrammar
from lorikeet.router.output.reader import (
    AnswerReader,
    ParsedReader,
    ParserFailed,
    ParserProcess,
    ParserUnavailable,
    PlainReader,
    Reader,
)
from lorikeet.router.requests.request import Adapter
from lorikeet.router.schemas.chat import NO_TOOLS, Conversation, ToolFields
from lorikeet.router.schemas.grammar import GrammarFields
from lorikeet.router.text.chat_template import Rendered
from lorikeet.router.text.stop import ReasoningSyntax
from lorikeet.router.text.tokenizer import Tokenizer

log = structlog.get_logger()

SLOW_OWNER_S = 60.0
"""So long after a slow step the outputs of an owner's response templates are parsed apart."""
_MAX_OWNERS = 1000


@dataclass(frozen=True)
class Prepared:
    """What is generated for a conversation, and how it is read."""

    prompt: Rendered
    grammar: GrammarFields | None
    reader: Callable[[], Reader]
    """Makes the reader of one output."""
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that the reader needs in the text."""
    reasoning: ReasoningSyntax | None = None
    """How the output writes reasoning."""
    left_out: tuple[str, ...] = ()
    """Paths of what the grammar leaves out of schemas that are not strict."""
    looser: "Callable[[], Prepared] | None" = None
    """What is generated if `grammar` cannot be compiled: any arguments for functions that are not strict."""


@dataclass(frozen=True)
class _Output:
    """How the outputs of one conversation are parsed."""

    form: ResponseTemplate
    process: ParserProcess
    prefix: str
    owner: str
    reasoning: ReasoningSyntax | None


class OutputPreparer:
    """Output readers and grammars of one router."""

    def __init__(self, templates: Templates, tokenizer: Tokenizer) -> None:
        self._templates = templates
        self._tokenizer = tokenizer
        self.parser = ParserProcess()
        self.adapters_parser = ParserProcess(self._note_slow)
        """For response templates of adapters: what they use up is taken from no other."""
        self.slow_parser = ParserProcess(self._note_slow)
        """For those whose steps were slow: they delay one another only."""
        self._slow: OrderedDict[str, float] = OrderedDict()
        """When a step of an owner's response template was slow, by owner."""
        special = {tokenizer.vocabulary.raw(token_id): token_id for token_id in tokenizer.special_ids}
        self._tokens = SpecialTokens({text: token_id for text, token_id in special.items() if text}, tokenizer.eos_ids)

    async def prepare(
        self,
        adapter: Adapter | None,
        conversation: Conversation,
        tools: ToolFields,
        grammar: GrammarFields | None,
        caller: str,
    ) -> Prepared:
        """`grammar` is that of the request's content.

        Raises ToolError, ChatTemplateError, InternalError or a leaf of AdapterProblem.
        """
        chosen = await self._templates.choose(adapter, conversation, caller, with_tools=bool(tools.tools))
        form = self._format(chosen)
        if tools.tools:
            prepared = None
            if tools.prompt is None and form is not None and form.has_tools:
                prepared = await self._with_format(chosen, form, conversation, tools, grammar, caller)
            return prepared or await self._as_lorax(chosen, form, conversation, tools, grammar, caller)
        if "tool" not in chosen.source:  # earlier calls and results would be lost, or rejected
            conversation = replace(conversation, messages=plain_turns(conversation.messages))
        rendered = await self._render(chosen, conversation, caller)
        if form is None or not form.has_reasoning:
            return Prepared(rendered, grammar, PlainReader)
        output = await self._output(chosen, form, rendered, conversation)
        if grammar is not None:
            return self._with_grammar(output, rendered, grammar, lambda reader: reader)
        return self._parsed(output, rendered, NO_TOOLS, None)

    async def start(self) -> None:
        """Start the parser where the base model's outputs need it, so that the first one need not wait for it."""
        source, response = self._tokenizer.template_source, self._tokenizer.response_template
        if source is not None and (response is not None or format_of(source) is not None):
            await self.parser.warm()

    async def close(self) -> None:
        """Kill the processes."""
        await asyncio.gather(self.parser.close(), self.adapters_parser.close(), self.slow_parser.close())

    async def _with_format(
        self,
        chosen: ChosenTemplate,
        form: ResponseTemplate,
        conversation: Conversation,
        tools: ToolFields,
        grammar: GrammarFields | None,
        caller: str,
    ) -> Prepared | None:
        """None where the chat template does not show tools."""
        rendered = await self._render(chosen, conversation, caller, tools)
        if "tools" in rendered.unread:
            return None
        syntax = syntax_of(form)
        wants_grammar = tools.is_required or grammar is not None or tools.is_strict or not tools.parallel
        if wants_grammar and syntax is None:
            raise ToolError(
                "the tool format of this model cannot be enforced: use `tool_choice` auto without strict functions, "
                "`parallel_tool_calls` false or `response_format`, or use `tool_prompt`",
                "tools",
            )
        output = await self._output(chosen, form, rendered, conversation)
        if not wants_grammar or syntax is None:
            return self._parsed(output, rendered, tools, None)

        def made(is_loose: bool) -> Prepared:
            parameters = EnforcedParameters(tools, is_loose)
            builder = ToolGrammar(form, syntax, tools, self._tokens, output.reasoning, parameters)
            built = builder.required() if tools.is_required else builder.optional(grammar)
            return replace(self._parsed(output, rendered, tools, built), left_out=tuple(parameters.left_out))

        return _with_looser(made, tools)

    def _with_grammar(
        self, output: "_Output", rendered: Rendered, grammar: GrammarFields, around: Callable[[Reader], Reader]
    ) -> Prepared:
        """An answer that follows `grammar`, after reasoning; read by a reader around the one that finds it."""
        form, reasoning = output.form, output.reasoning
        if reasoning is None:
            return Prepared(rendered, grammar, lambda: around(PlainReader()))
        reasoning = replace(reasoning, is_once=True)
        built = OutputGrammar(self._tokens, reasoning, form.next_part).text(grammar, text_opening(form))
        shown_ids = form.shown(self._tokens.ids)
        return Prepared(rendered, built, lambda: around(AnswerReader(reasoning)), shown_ids, reasoning)

    async def _as_lorax(
        self,
        chosen: ChosenTemplate,
        form: ResponseTemplate | None,
        conversation: Conversation,
        tools: ToolFields,
        grammar: GrammarFields | None,
        caller: str,
    ) -> Prepared:
        if grammar is not None:
            raise ToolError(
                "Response format and tools are mutually exclusive in the tool format of this model", "tools"
            )
        rendered = None
        if re.search(r"\btools\b", chosen.source):
            messages = with_tools(conversation.messages, tools, in_template=True)
            rendered = await self._render(chosen, replace(conversation, messages=messages), caller, tools)
        if rendered is None or "tools" in rendered.unread:
            messages = with_tools(conversation.messages, tools, in_template=False)
            rendered = await self._render(chosen, replace(conversation, messages=messages), caller)
        output = None
        if form is not None and form.has_reasoning:
            output = await self._output(chosen, form, rendered, conversation)

        def made(is_loose: bool) -> Prepared:
            parameters = EnforcedParameters(tools, is_loose)
            schema = schema_of(tools, parameters)
            if output is None:
                prepared = Prepared(rendered, schema, lambda: LoraxReader(PlainReader()))
            else:
                prepared = self._with_grammar(output, rendered, schema, LoraxReader)
            return replace(prepared, left_out=tuple(parameters.left_out))

        return _with_looser(made, tools)

    def _parsed(
        self, output: "_Output", rendered: Rendered, tools: ToolFields, grammar: GrammarFields | None
    ) -> Prepared:
        functions = _functions(tools)

        def reader() -> Reader:
            process = output.process
            return ParsedReader(process, process.open(output.form.template, output.prefix, functions, output.owner))

        return Prepared(rendered, grammar, reader, output.form.shown(self._tokens.ids), output.reasoning)

    async def _output(
        self, chosen: ChosenTemplate, form: ResponseTemplate, rendered: Rendered, conversation: Conversation
    ) -> "_Output":
        """How an output is parsed. Raises ChatTemplateError for a response template that cannot be used."""
        process = self._process(chosen, form)
        continued = conversation.messages[-1]["content"] if conversation.options.continue_final_message else ""
        prefix = form.prefix(rendered.text, continued)
        try:
            parse = process.open(form.template, prefix, [], chosen.response_who)
            if form.is_own or prefix:
                await process.parse(parse, "")
        except ParserUnavailable as error:
            raise InternalError(str(error)) from None
        except ParserFailed as error:
            raise ChatTemplateError(f"the response template cannot be used: {error}") from None
        process.drop(parse)
        return _Output(form, process, prefix, chosen.response_who, reasoning_of(form, rendered.text, parse.field))

    async def _render(
        self, chosen: ChosenTemplate, conversation: Conversation, caller: str, tools: ToolFields | None = None
    ) -> Rendered:
        options = conversation.options
        if tools is not None:
            options = replace(options, variables={**options.variables, "tools": list(tools.tools)})
        return await self._templates.render(chosen, conversation.messages, options, caller)

    def _process(self, chosen: ChosenTemplate, form: ResponseTemplate) -> ParserProcess:
        if not form.is_own or not chosen.response_who:
            return self.parser
        since = self._slow.get(chosen.response_who)
        is_slow = since is not None and time.monotonic() - since < SLOW_OWNER_S
        return self.slow_parser if is_slow else self.adapters_parser

    def _note_slow(self, owner: str) -> None:
        if owner not in self._slow:
            log.warning("response_template_slow", source=owner.partition("|")[2])
        self._slow[owner] = time.monotonic()
        self._slow.move_to_end(owner)
        while len(self._slow) > _MAX_OWNERS:
            self._slow.popitem(last=False)

    def _format(self, chosen: ChosenTemplate) -> ResponseTemplate | None:
        if chosen.response is None:
            return format_of(chosen.source)
        if not isinstance(chosen.response, dict):
            raise ChatTemplateError("the response template cannot be used: it must be an object")
        return ResponseTemplate(chosen.response)


def _with_looser(made: Callable[[bool], Prepared], tools: ToolFields) -> Prepared:
    """What `made` makes, and where a function is not strict what it makes loosely."""
    prepared = made(False)
    if all(function.is_strict for function in tools.allowed):
        return prepared
    return replace(prepared, looser=lambda: made(True))


def _functions(tools: ToolFields) -> list[dict[str, Any]]:
    """What the parser needs of the functions that may be called."""
    return [
        {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}} for tool in tools.allowed
    ]
