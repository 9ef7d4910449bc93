"""Entry point of `katydid`: turns errors into one line and an exit code.

0 done; 1 it did not work; 2 it was asked for wrongly (a bad option, setting, model or address); 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from katydid_runtime.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    KatydidError,
    NotFoundError,
    SettingsError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)
from typer.exceptions import Abort, TyperException

__all__ = ["main", "run"]

_ASKED_WRONGLY = (SettingsError, InvalidRequestError, NotFoundError)


def main() -> None:
    """Run the command line of this process and exit."""
    raise SystemExit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run `katydid` with the given words; returns the exit code."""
    # gRPC's own remarks about lost connections would otherwise stand between the lines of this command.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

    from katydid_cli.app import app

    try:
        code = app(list(argv) or ["--help"], prog_name="katydid", standalone_mode=False)
    except TyperException as error:
        return _fail(error.format_message().replace(": Value error, ", ": "), error.exit_code)
    except UnauthenticatedError as error:
        return _fail(f"{error}; {_how_to_show_a_key(argv)}", 1)
    except UnavailableError as error:
        # Whatever else is not available says itself what to do about it.
        hint = f"; {_where_to_look(argv)}" if str(error).startswith("the connection to ") else ""
        return _fail(f"{error}{hint}", 1)
    except DeadlineExceededError as error:
        return _fail(f"{error}{_how_to_wait(argv)}", 1)
    except UnsupportedError as error:
        # gRPC's own words where the address is another service's.
        unknown = str(error) == "Method not found!"
        return _fail(_whose_address(argv), 2) if unknown else _fail(str(error), 1)
    except KatydidError as error:
        return _fail(_with_allowed(error), 2 if isinstance(error, _ASKED_WRONGLY) else 1)
    except (Abort, KeyboardInterrupt):
        return 130
    return code if isinstance(code, int) else 0


def _with_allowed(error: KatydidError) -> str:
    """What is wrong, and what would have been right, where the sentence does not say it already."""
    message = str(error)
    if not error.allowed or error.allowed in message:
        return message
    return f"{message}; allowed: {error.allowed}"


def _how_to_show_a_key(argv: Sequence[str]) -> str:
    if argv[0] == "cache":
        return "--token or KATYDID_CACHE_TOKEN shows the service a token"
    return "--api-key or KATYDID_API_KEY shows the gateway a key"


def _where_to_look(argv: Sequence[str]) -> str:
    if argv[0] == "cache":
        return "is a service running there (katydid serve-kvcache)? --address names another"
    if argv[0] == "gateway":
        return "has the gateway an admin_listen (katydid up --gateway-option=--admin-listen=127.0.0.1:8002)?"
    return "is a fleet running there (katydid up)? --address names another"


def _how_to_wait(argv: Sequence[str]) -> str:
    return "; --timeout-s waits longer" if argv[:2] in (["cache", "flush"], ["cache", "verify"]) else ""


def _whose_address(argv: Sequence[str]) -> str:
    if argv[0] == "cache":
        meant = "what listens there is no cache service, or has its AdminService elsewhere (admin_listen)"
    elif argv[0] == "gateway":
        meant = "what listens there is no gateway's AdminService (admin_listen)"
    else:
        meant = "what listens there is no gateway"
    return f"{meant}; --address names another"


def _fail(message: str, code: int) -> int:
    if message:
        print("katydid: " + " ".join(message.split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
