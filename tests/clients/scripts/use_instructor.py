"""Instructor over OpenAI's client: objects by tools and by JSON schema."""

import os
from typing import Literal

import instructor
import openai
from pydantic import BaseModel


class Answer(BaseModel):
    city: Literal["Rome", "Paris"]
    is_capital: bool


client = openai.OpenAI(base_url=os.environ["URL"] + "/v1", api_key=os.environ["KEY"], max_retries=0)
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    found = instructor.from_openai(client, mode=mode).chat.completions.create(
        model=os.environ["MODEL"],
        messages=[{"role": "user", "content": "The capital of Italy"}],
        response_model=Answer,
        max_tokens=200,
        max_retries=0,
    )
    assert isinstance(found, Answer)
print("instructor")
