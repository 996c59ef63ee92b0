"""What langchain-openai makes of the server's answers, in an environment of its own: imports nothing of ours."""

import json
import sys
from typing import Any


def results(base_url: str) -> dict[str, Any]:
    """`bind_tools`, whole and streamed, a second turn, and `with_structured_output` in all of its methods."""
    from langchain_core.messages import HumanMessage, ToolMessage  # type: ignore[import-not-found]
    from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]
    from pydantic import BaseModel

    class Weather(BaseModel):
        """The weather of a city."""

        city: str

    chat = ChatOpenAI(model="test/model", base_url=base_url, api_key="none", max_tokens=200, max_retries=0)
    bound = chat.bind_tools([Weather], tool_choice="any")
    results: dict[str, Any] = {}
    question = HumanMessage("Paris?")
    answer = bound.invoke([question])
    results["call"] = [(call["name"], call["args"]) for call in answer.tool_calls]
    whole: Any = None
    for chunk in bound.stream([question]):
        whole = chunk if whole is None else whole + chunk
    results["streamed"] = [(call["name"], call["args"]) for call in whole.tool_calls]
    turns = [question, answer, ToolMessage("rain", tool_call_id=answer.tool_calls[0]["id"])]
    results["second"] = [call["name"] for call in chat.bind_tools([Weather]).invoke(turns).tool_calls]
    for method in ("function_calling", "json_schema", "json_mode"):
        results[method] = chat.with_structured_output(Weather, method=method).invoke([question]).model_dump()
    return results


if __name__ == "__main__":
    print(json.dumps(results(sys.argv[1])))
