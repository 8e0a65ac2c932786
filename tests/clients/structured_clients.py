"""Structured outputs by other people's clients: LangChain, and each mode of instructor.

Not a test of the suite: these clients bring dozens of packages. Install `openai`, `instructor` and
`langchain-openai` somewhere, start a server whose model has a chat template, and say where it is:

    python tests/clients/structured_clients.py http://127.0.0.1:8000/v1

It prints a line for each client, mode and schema, and ends with 1 if the server is told the bounded
schema and the answer does not follow it. A schema with strings of any length can be cut by
max_tokens. In JSON mode the server is told that the answer is an object and nothing of its schema;
in MD_JSON mode it is told nothing: there the model alone decides.
"""

import argparse
import logging
from collections.abc import Callable
from typing import Annotated, Any, Literal

import instructor
import openai
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

MAX_TOKENS = 300
ASKED = "def add(a, b):"
Digit = Annotated[int, Field(ge=0, le=9)]


class Bounded(BaseModel):
    """A review of some code."""

    title: Annotated[str, Field(max_length=12)]
    verdict: Literal["good", "bad"]
    scores: Annotated[list[Digit], Field(max_length=3)]


class Unbounded(BaseModel):
    """A person."""

    name: str
    age: int


def instructor_call(mode: instructor.Mode, url: str) -> Callable[..., Any]:
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=mode)

    def call(schema: type[BaseModel], model: str, temperature: float) -> Any:
        return client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": ASKED}],  # it adds to the list
            response_model=schema,
            max_tokens=MAX_TOKENS,
            temperature=temperature,
            max_retries=0,
        )

    return call


def langchain_call(method: Any, url: str) -> Callable[..., Any]:
    def call(schema: type[BaseModel], model: str, temperature: float) -> Any:
        chat = ChatOpenAI(
            base_url=url,
            api_key="none",
            model=model,
            temperature=temperature,
            max_completion_tokens=MAX_TOKENS,
            max_retries=0,
        )
        return chat.with_structured_output(schema, method=method).invoke(ASKED)

    return call


def calls(url: str) -> dict[str, Callable[..., Any]]:
    modes = ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "MD_JSON")
    found = {
        f"instructor {name}": instructor_call(getattr(instructor.Mode, name), url)
        for name in modes
        if hasattr(instructor.Mode, name)
    }
    for method in ("json_schema", "function_calling", "json_mode"):
        found[f"langchain {method}"] = langchain_call(method, url)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    model = openai.OpenAI(base_url=options.url, api_key="none").models.list().data[0].id
    num_failed = 0
    for name, call in calls(options.url).items():
        for schema in (Bounded, Unbounded):
            for temperature in (0.0, 0.7, 1.0):
                try:
                    answer = call(schema, model, temperature)
                    is_valid, told = isinstance(answer, schema), repr(answer)
                except Exception as error:  # each client has its own
                    is_valid, told = False, f"{type(error).__name__}: {error}"
                is_told = not name.endswith((" JSON", "MD_JSON", "json_mode"))
                num_failed += is_told and schema is Bounded and not is_valid
                word = "valid" if is_valid else "NOT VALID"
                print(f"{name}, {schema.__name__}, temperature {temperature}: {word}: {told:.120}")
    return int(num_failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
