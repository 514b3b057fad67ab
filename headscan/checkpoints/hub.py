"""Whether the hub answers, asked once and within seconds, so that no request to it is retried in vain."""

from __future__ import annotations

import logging
import ssl
from functools import lru_cache
from http.client import HTTPException
from threading import Thread
from time import monotonic
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from huggingface_hub import constants, is_offline_mode

_log = logging.getLogger("headscan")

#: Seconds without an answer after which the user is told what is waited for.
_PATIENCE = 3.0
#: Seconds for which an answer is taken to hold.
_REMEMBERED = 300.0
#: Status codes of gateways that cannot reach what is behind them.
_NO_ANSWER = (502, 503, 504)


def hub_options(revision: str | None = None) -> dict[str, Any]:
    """The arguments with which transformers looks a hub name up: its revision, and whether in the cache alone.

    Without a network the hub's client retries every request for half a minute, and waits as long for a hub that accepts
    the connection and sends nothing. From the cache alone, a model is found or missing at once.
    """
    return ({"revision": revision} if revision else {}) | ({} if hub_answers() else {"local_files_only": True})


def hub_answers() -> bool:
    """Whether the hub can be asked: it answers, whatever it answers, and the client is not in its offline mode.

    The question takes at most ``HF_HUB_ETAG_TIMEOUT`` seconds (10 unless set), and a line in the log says after 3 that
    that the hub is waited for.
    """
    return not is_offline_mode() and _answers(constants.ENDPOINT, int(monotonic() / _REMEMBERED))


def hub_problem() -> str:
    """Why the hub is not asked, for errors."""
    if is_offline_mode():
        return "HF_HUB_OFFLINE keeps the hub from being asked"
    return f"the hub ({constants.ENDPOINT}) does not answer"


@lru_cache(maxsize=1)
def _answers(endpoint: str, period: int) -> bool:
    """Whether a hub answers in this period of time."""
    limit = float(constants.HF_HUB_ETAG_TIMEOUT)
    answers: list[bool] = []
    # In a thread, since looking up the host's name has no limit of time, and the limit of a socket is for each address.
    asking = Thread(target=lambda: answers.append(_ask(endpoint, limit)), daemon=True)
    asking.start()
    asking.join(min(_PATIENCE, limit))
    if asking.is_alive():
        _log.warning("waiting for the hub (%s) to answer, for at most %g s", endpoint, limit)
        asking.join(limit - min(_PATIENCE, limit))
    return any(answers)


def _ask(endpoint: str, timeout: float) -> bool:
    try:
        with urlopen(Request(endpoint, method="HEAD"), timeout=timeout):
            return True
    except HTTPError as error:
        return error.code not in _NO_ANSWER
    except URLError as error:
        # The hub's client may have certificates of its own.
        return isinstance(error.reason, ssl.SSLError)
    except (OSError, HTTPException):
        return False
