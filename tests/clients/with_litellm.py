"""What a program does with `litellm`, in an environment of its own: prints one JSON object of what it saw."""

import asyncio
import json
import sys

import litellm

base_url, model = sys.argv[1:]
litellm.suppress_debug_info = True
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def arguments(**options):
    fixed = {"model": f"openai/{model}", "api_base": base_url, "api_key": "none", "max_tokens": 60, "num_retries": 0}
    return fixed | {"temperature": 0, "messages": QUESTION} | options


def usage(given):
    return {name: getattr(given, name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def failure(kind, **options):
    try:
        litellm.completion(**arguments(**options))
    except kind as error:
        return {"type": type(error).__name__, "status": error.status_code}
    return None


async def streamed():
    text, last = "", None
    stream = await litellm.acompletion(**arguments(stream=True, stream_options={"include_usage": True}))
    async for chunk in stream:
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        last = getattr(chunk, "usage", None) or last
    return {"text": text, "usage": usage(last)}


seen = {}
whole = litellm.completion(**arguments())
seen["whole"] = {
    "text": whole.choices[0].message.content,
    "finish": whole.choices[0].finish_reason,
    "usage": usage(whole.usage),
}
seen["streamed"] = asyncio.run(streamed())
called = litellm.completion(**arguments(messages=WEATHER, tools=TOOLS))
function = called.choices[0].message.tool_calls[0].function
seen["tool"] = {"name": function.name, "args": json.loads(function.arguments)}
seen["tool_finish"] = called.choices[0].finish_reason
chunks = list(litellm.completion(**arguments(messages=WEATHER, tools=TOOLS, stream=True)))
built = litellm.stream_chunk_builder(chunks, messages=WEATHER).choices[0].message.tool_calls[0].function
seen["streamed_tool"] = {"name": built.name, "args": json.loads(built.arguments)}
seen["errors"] = {
    "model": failure(litellm.NotFoundError, model="openai/gpt-9"),
    "temperature": failure(litellm.BadRequestError, temperature=9),
    "context": failure(litellm.ContextWindowExceededError, messages=[{"role": "user", "content": "x " * 20_000}]),
}
print(json.dumps(seen))
