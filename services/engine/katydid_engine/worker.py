"""The process of one rank: prepares it before torch is loaded, and tells the face when it fails.

    python -m katydid_engine.worker --channel 5

Started by the face, which passes an end of a socket pair as descriptor 5 and ``WorkerConfig`` as the first message. The
worker path imports torch, triton, numpy, safetensors and the standard library alone.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys

from katydid_runtime import log
from katydid_runtime.errors import KatydidError

from katydid_engine.channel import BlockingChannel, ChannelClosed
from katydid_engine.messages import Failed
from katydid_engine.worker_config import WorkerConfig

__all__ = ["main"]

_CONFIG_TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)


def main() -> None:
    # Ctrl-C reaches the whole terminal group; the face alone decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Idle OpenMP threads spin for microseconds, then sleep. Without a bound, on a host whose cores are busy, a spinning
    # thread waits for one that is not scheduled (a step of 2 ms took 50 to 200); with no spinning at all every parallel
    # region pays a wake-up (TPOT of a 135 M model 105 ms instead of 76 on two cores). Read when torch is loaded.
    os.putenv("GOMP_SPINCOUNT", "2000")
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", type=int, required=True)
    channel = BlockingChannel(parser.parse_args().channel)
    try:
        messages = channel.receive(_CONFIG_TIMEOUT_S)
        if not messages:
            sys.exit("the face has sent no configuration")
        config: WorkerConfig = messages[0]
        log.configure(f"engine-worker-{config.dp_rank}.{config.member}", config.log_level)

        from katydid_engine.rank import work

        work(config, channel)
    except ChannelClosed:
        sys.exit(1)
    except KatydidError as error:
        channel.send(Failed(error.reason, error.message))
        sys.exit(1)
    except Exception as error:
        logger.exception("the worker failed")
        channel.send(Failed("INTERNAL", f"{type(error).__name__}: {error}"))
        sys.exit(1)


if __name__ == "__main__":
    main()
