"""The tasks: their halves are disjoint, every answer is checked independently, and runs are repeatable."""

import importlib
import json
import random
import re
import sqlite3
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lorikeet.demo.data.tasks import tool_requests
from lorikeet.demo.data.tasks.example import Example, Half, held_out_examples, training_examples
from lorikeet.demo.data.tasks.tool_requests import UNITS
from lorikeet.demo.evaluation.score import answer_lens
from lorikeet.demo.training.lora import RECIPES
from lorikeet.demo.training.model import BASE_FOLDER

TASKS = sorted({recipe.task for recipe in RECIPES.values()})
NUM_TRAINING_GROUPS = 500
NUM_HELD_OUT = 500


def task_of(name: str) -> Any:
    return importlib.import_module(f"lorikeet.demo.data.tasks.{name}")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(BASE_FOLDER)


@pytest.fixture(scope="module", params=TASKS)
def task(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def held_out(task: str) -> list[Example]:
    return held_out_examples(task_of(task), NUM_HELD_OUT)


def test_training_and_held_out_examples_share_no_name_value_or_template(task: str, held_out: list[Example]) -> None:
    seen: set[str] = set()
    prompts: set[str] = set()
    for step in range(NUM_TRAINING_GROUPS):
        for example in training_examples(task_of(task), 0, step):
            seen |= example.parts
            prompts.add(example.prompt)
    unseen = frozenset[str]().union(*(example.parts for example in held_out))
    assert len(seen) > 700
    assert len(unseen) > 300
    assert not seen & unseen
    assert not prompts & {example.prompt for example in held_out}


def test_the_parts_of_an_example_occur_in_it(held_out: list[Example]) -> None:
    """A part that is no template stands in the text as it is, so the test above looks at what the model reads."""
    for example in held_out[:100]:
        plain = [part for part in example.parts if "{" not in part]
        assert plain
        missing = [part for part in plain if part not in example.prompt]
        assert not missing


def test_held_out_prompts_differ_and_end_a_line_or_with_a_special_token(held_out: list[Example]) -> None:
    assert len({example.prompt for example in held_out}) == NUM_HELD_OUT
    assert all(example.prompt.endswith(("\n", "<|assistant|>")) for example in held_out)
    assert all(example.answer and example.answer == example.answer.strip() for example in held_out)


def test_the_same_seed_and_step_give_the_same_examples(task: str, held_out: list[Example]) -> None:
    module = task_of(task)
    assert training_examples(module, 3, 7) == training_examples(module, 3, 7) != training_examples(module, 3, 8)
    assert training_examples(module, 3, 7) != training_examples(module, 4, 7)
    assert held_out_examples(module, 20) == held_out[:20]


def test_answers_are_as_long_as_promised(
    task: str, held_out: list[Example], tokenizer: PreTrainedTokenizerFast
) -> None:
    lens = answer_lens(tokenizer, held_out)
    if task == "citation":
        assert min(lens) >= 48
    elif task not in ("question", "grounded"):
        assert sum(lens) / len(lens) >= 16


def test_prompts_leave_room_in_the_context(held_out: list[Example], tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = tokenizer([example.prompt for example in held_out])["input_ids"]
    assert max(map(len, prompts)) + max(answer_lens(tokenizer, held_out)) < 1024


def both_halves(name: str) -> list[Example]:
    groups = [training_examples(task_of(name), 0, step) for step in range(60)]
    return [*held_out_examples(task_of(name), 200), *(example for group in groups for example in group)]


def test_a_citation_is_one_whole_line_of_the_context() -> None:
    for example in both_halves("citation"):
        assert example.prompt.split("\n").count(example.answer) == 1


def test_a_citation_is_the_line_under_the_title_that_was_asked_for() -> None:
    for example in both_halves("citation"):
        lines = example.prompt.split("\n")
        title, request = lines[lines.index(example.answer) - 1], lines[-2]
        words = [stripped for word in title.split() if (stripped := word.strip("[](){}<>*#=-.:'\""))]
        assert any(word in request and request.count(word) == 1 for word in words if word[0].isupper())


def test_a_record_comes_back_from_its_json_with_its_values_in_order() -> None:
    for example in both_halves("record"):
        record = json.loads(example.answer)
        assert json.dumps(record) == example.answer
        places = [example.prompt.index(str(key)) for key in record]
        assert len(places) >= 3
        assert all(str(value) in example.prompt for value in record.values())
        assert set(map(type, record.values())) <= {int, str}


def test_a_query_runs_on_the_table_of_its_prompt() -> None:
    for example in both_halves("query"):
        words = [word.strip("().,:;?'") for word in example.prompt.replace("(", " ").split()]
        names = {word.casefold() for word in words if word.isidentifier()}
        verb = {"SELECT": " FROM ", "DELETE": " FROM ", "UPDATE": "UPDATE "}[example.answer.split()[0]]
        table = example.answer.split(verb)[1].split()[0].rstrip(";")
        assert table.casefold() in names
        database = sqlite3.connect(":memory:")
        database.execute(f"CREATE TABLE {table} ({', '.join(f'[{name}]' for name in names)})")
        database.execute(example.answer)
        database.close()


def test_a_question_asks_for_the_person_of_the_last_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    for example in both_halves("question"):
        user, answer, _ = example.prompt.split("<|end|>", 2)
        facts, sentence = user.removeprefix("<|user|>"), answer.removeprefix("<|assistant|>")
        person, rest = sentence.removesuffix(".").split(" ", 1)
        assert sentence in facts
        assert example.answer == f"Who {rest}?"
        assert person in facts.split("\n")[1]
        roles = [("user", facts), ("assistant", sentence), ("system", "question")]
        messages = [{"role": role, "content": content} for role, content in roles]
        chat: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert chat == f"<|bos|>{example.prompt}"


def test_a_result_says_whether_the_answer_stands_in_the_text() -> None:
    for half in (held_out_examples(task_of("grounded"), 200), both_halves("grounded")):
        for example in half:
            user, answer, invocation = example.prompt.split("<|end|>", 2)
            facts, sentence = user.removeprefix("<|user|>").split("\n")[0], answer.removeprefix("<|assistant|>")
            assert example.answer == ("yes" if sentence in facts else "no")
            assert invocation == "<|system|>grounded<|end|><|assistant|>"
        assert 0.4 < sum(example.answer == "yes" for example in half) / len(half) < 0.6


def tool_calls(example: Example) -> list[dict[str, Any]]:
    return [json.loads(line) for line in example.answer.split("\n") if line.startswith("{")]


def test_a_call_names_an_offered_function_and_has_all_its_arguments_in_order() -> None:
    for example in both_halves("tools"):
        signatures = dict(re.findall(r"^(\w+)\((.*?)\)", example.prompt.split("</tools>")[0], re.MULTILINE))
        for call in tool_calls(example):
            assert list(call["arguments"]) == re.findall(r"(\w+): ", signatures[call["name"]])


def test_the_arguments_of_a_call_are_what_was_asked_for() -> None:
    seen = set()
    for example in both_halves("tools"):
        asked = example.prompt.split("<|user|>")[-1].removesuffix("<|end|><|assistant|>")
        for call in tool_calls(example):
            arguments = call["arguments"]
            seen.add(call["name"])
            if call["name"] == "get_weather":
                assert arguments["city"] in asked
                assert arguments["unit"] == "celsius" or "fahrenheit" in asked
                if "fahrenheit" in asked and "\n<tool_call>" not in example.answer:
                    assert arguments["unit"] == "fahrenheit"
            elif call["name"] == "convert":
                assert re.search(rf"\b{re.escape(str(arguments['amount']))} {arguments['from']}\b", asked)
                assert re.search(rf"\b{arguments['to']}\b", asked)
            else:
                assert arguments["text"] in asked
                assert re.search(rf"( at |[,:]? |^){arguments['time']}\b", asked.replace(arguments["text"], ""))
    assert seen == {"get_weather", "convert", "add_reminder"}


def test_a_pair_of_units_belongs_to_one_half() -> None:
    pairs = {}
    for half in Half:
        choice = random.Random(0)
        wanted = [tool_requests.request("convert", half, choice).arguments for _ in range(2000)]
        pairs[half] = {(each["from"], each["to"]) for each in wanted}
    assert not pairs[Half.TRAINING] & pairs[Half.HELD_OUT]
    assert {unit for pair in pairs[Half.TRAINING] for unit in pair} == {unit for kind in UNITS for unit in kind}
    assert all(any({*pair} <= {*kind} for kind in UNITS) for half in Half for pair in pairs[half])


def test_a_request_that_no_offered_function_fits_gets_no_call() -> None:
    examples = [example for example in both_halves("tools") if example.answer == "I have no tool for that."]
    assert len(examples) > 20
    for example in examples:
        signatures, asked = example.prompt.split("</tools>")[0], example.prompt.split("<|user|>")[-1]
        if re.search(r"\b(weather|forecast)\b", asked):
            assert "get_weather(" not in signatures
        if "remind" in asked.lower():
            assert "add_reminder(" not in signatures


def test_words_of_one_half_stay_there() -> None:
    words = importlib.import_module("lorikeet.demo.data.tasks.words")
    choice = random.Random(0)
    for draw in (words.name, words.noun, words.field, words.number):
        drawn = {half: {str(draw(half, choice)) for _ in range(2000)} for half in Half}
        assert not drawn[Half.TRAINING] & drawn[Half.HELD_OUT]
