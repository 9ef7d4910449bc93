"""What a program does with `langchain-openai`, in an environment of its own: prints one JSON object of what it saw."""

import asyncio
import json
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import BadRequestError, NotFoundError

base_url, model = sys.argv[1:]
QUESTION = "What is the capital of France?"


@tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"sunny in {city}, 21 degrees"


def chat(**options):
    fixed = {"base_url": base_url, "api_key": "none", "model": model, "temperature": 0, "max_tokens": 60}
    return ChatOpenAI(**(fixed | {"max_retries": 0} | options))


def failure(kind, **options):
    try:
        chat(**options).invoke(QUESTION)
    except kind as error:
        return {"type": type(error).__name__, "code": error.code, "param": error.param}
    return None


async def streamed_together():
    """Three streams at a time."""

    async def one():
        return "".join([chunk.content async for chunk in chat().astream(QUESTION)])

    return await asyncio.gather(one(), one(), one())


seen = {}
whole = chat().invoke([("system", "You are helpful."), ("human", QUESTION)])
seen["whole"] = {
    "text": whole.content,
    "finish": whole.response_metadata["finish_reason"],
    "usage": whole.usage_metadata,
}
total = None
chunks = 0
for chunk in chat(stream_usage=True).stream(QUESTION):
    chunks += 1
    total = chunk if total is None else total + chunk
seen["streamed"] = {"text": total.content, "chunks": chunks, "usage": total.usage_metadata}
seen["together"] = asyncio.run(streamed_together())

asked = HumanMessage("What is the weather in Paris?")
bound = chat().bind_tools([get_weather])
call = bound.invoke([asked])
seen["tool"] = {"name": call.tool_calls[0]["name"], "args": call.tool_calls[0]["args"]}
result = get_weather.invoke(call.tool_calls[0]["args"])
after = bound.invoke([asked, call, ToolMessage(result, tool_call_id=call.tool_calls[0]["id"])])
seen["after_tool"] = after.content
parts = None
for chunk in bound.stream([asked]):
    parts = chunk if parts is None else parts + chunk
seen["streamed_tool"] = {"name": parts.tool_calls[0]["name"], "args": parts.tool_calls[0]["args"]}

scored = chat(logprobs=True, top_logprobs=2).invoke(QUESTION)
seen["logprobs"] = [len(entry["top_logprobs"]) for entry in scored.response_metadata["logprobs"]["content"]]
seen["errors"] = {
    "model": failure(NotFoundError, model="gpt-9"),
    "temperature": failure(BadRequestError, temperature=9),
}
print(json.dumps(seen))
