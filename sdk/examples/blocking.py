"""Two turns without an event loop: `python blocking.py [ADDRESS]`."""

from __future__ import annotations

import sys

from katydid_client import Katydid, Message


def main(address: str) -> None:
    conversation = [Message("user", "What is the capital of France?")]
    with Katydid(address) as client:
        for question in ("And of Italy?", None):
            completion = client.chat(conversation, max_tokens=40, temperature=0)
            print(completion.text)
            conversation.append(completion.message())
            if question:
                conversation.append(Message("user", question))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001")
