"""Stream an answer, then say what it cost: `python stream.py [ADDRESS]`."""

from __future__ import annotations

import asyncio
import sys

from katydid_client import AsyncKatydid, KatydidError


async def main(address: str) -> None:
    async with AsyncKatydid(address) as client:
        messages = [{"role": "user", "content": "Name three colours."}]
        try:
            async with client.chat_stream(messages, max_tokens=40, temperature=0) as stream:
                async for event in stream:
                    print(event.text, end="", flush=True)
                completion = await stream.get_final()
        except KatydidError as error:
            raise SystemExit(f"{error.reason}: {error}") from None
    usage, timing = completion.usage, completion.timing
    print(f"\n{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached, TTFT {timing.ttft_s * 1e3:.0f} ms")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001"))
