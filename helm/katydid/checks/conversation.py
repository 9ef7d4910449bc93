"""What `helm test` runs: a conversation through the gateway, whole and streamed, with nothing but the standard library.

Reads GATEWAY_URL, and where they are set API_KEY and TLS_FOLDER (ca.crt, tls.crt, tls.key). Exits 1 with a line that
says what went wrong.
"""

import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

URL = os.environ["GATEWAY_URL"]
TIMEOUT_S = 120
ASKED = "Say hello."


def tls() -> ssl.SSLContext | None:
    """Trusts the release's authority and shows the gateway's own certificate, which is good for clients too."""
    folder = os.environ.get("TLS_FOLDER")
    if not folder:
        return None
    context = ssl.create_default_context(cafile=str(Path(folder, "ca.crt")))
    context.load_cert_chain(Path(folder, "tls.crt"), Path(folder, "tls.key"))
    return context


def ask(path: str, body: dict[str, object] | None = None) -> str:
    """The answer's text. Exits when there is none."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=tls()) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        sys.exit(f"{path}: {error.code} {error.read().decode(errors='replace')}")
    except OSError as error:
        sys.exit(f"{URL}{path}: {error}")


def main() -> None:
    model = json.loads(ask("/v1/models"))["data"][0]["id"]
    print(f"model {model}")
    body = {"model": model, "messages": [{"role": "user", "content": ASKED}], "max_tokens": 16, "temperature": 0}
    whole = json.loads(ask("/v1/chat/completions", body))
    print(f"whole: {whole['choices'][0]['message']['content']!r}, usage {whole['usage']}")
    events = ask("/v1/chat/completions", body | {"stream": True}).split("\n\n")
    last = [event for event in events if event.startswith("data: ")][-1:]
    if last != ["data: [DONE]"]:
        sys.exit(f"the stream ends with {last}")
    print(f"streamed: {len(events)} events")


if __name__ == "__main__":
    main()
