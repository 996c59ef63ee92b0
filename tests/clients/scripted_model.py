"""A model that answers the questions of LangChain's standard tests, in place of one that is large enough to.

Its answers take the same way as a model's: the grammar of the request must accept their tokens, and the router reads
the calls from the text.
"""

import json
import re
from dataclasses import dataclass

from llguidance import LLMatcher, LLTokenizer

from lorikeet.proto import shard_pb2
from tests.router.scripted_shard import Script
from tests.router.serving import EOS, Serving

TEMPLATE = (
    "{% for tool in tools or [] %}[tool {{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}[assistant]"
)
_TOOL = re.compile(r"\[tool (\w+)\]")
_JOKE = {"setup": "Why did the cat sit on the keyboard?", "punchline": "To keep an eye on the mouse."}
CALLS: dict[str, dict[str, object]] = {
    "magic_function(3)": {"input": 3},
    "magic_function_no_args()": {},
    "Hello!": {"input": 3},
    "Pirate greeting": {"answer_style": "Pirate"},
    "San Francisco": {"location": "San Francisco, CA"},
    "What is 3 + 4": {"a": 3, "b": 4},
    "你好啊集团": {"customer_name": "你好啊集团", "description": "a Chinese technology company"},
    "こんにちは株式会社": {"customer_name": "こんにちは株式会社", "description": "a Japanese company"},
    "joke about cats": _JOKE,
}
"""By what a question contains: the arguments of the call to the first tool, or the object that is asked for."""


@dataclass(frozen=True)
class ScriptedModel:
    """`Serving.shard.answer` of a server whose chat template is `TEMPLATE`."""

    server: Serving
    tokenizer: LLTokenizer

    def __call__(self, submit: shard_pb2.Submit) -> Script:
        """The answer, or the end of the request with an error that says why there is none."""
        prompt = self.server.backend.decode(list(submit.prompt_ids), skip_special_tokens=False)
        question = prompt.rpartition("[user]")[2]
        arguments = next((found for words, found in CALLS.items() if words in question), None)
        if arguments is None:
            return Script([], error=f"no answer to {question!r}")
        tools = _TOOL.findall(prompt)
        has_result = "[tool]" in question
        text = "It's sunny." if has_result else self._call(tools[0], arguments) if tools else json.dumps(arguments)
        ids = self.server.ids(text)
        return Script([*ids, EOS], error=self._reason(submit.grammar.text, ids))

    def _call(self, name: str, arguments: dict[str, object]) -> str:
        call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>\n{call}\n</tool_call>"

    def _reason(self, grammar: str, ids: list[int]) -> str:
        """Why the grammar, if there is one, does not accept the answer; "" where it does."""
        if not grammar:
            return ""
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0)
        if matcher.consume_tokens(ids) and matcher.is_accepting():
            return ""
        return f"the grammar rejects the answer: {matcher.get_error()[:500]}"
