"""Test whether the hub answers, so that no request is retried offline."""

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

#: Seconds without an answer after which a warning is logged.
_PATIENCE = 3.0
#: Seconds for which the result is cached.
_REMEMBERED = 300.0
#: Status codes of gateways that cannot reach the hub.
_NO_ANSWER = (502, 503, 504)


def hub_options(revision: str | None = None) -> dict[str, Any]:
    """Return the arguments for looking up a hub name.

    Without a network the hub's client retries every request for half a minute, and it waits as long for a hub that
    accepts the connection and sends nothing. A lookup in the cache returns at once.
    """
    return ({"revision": revision} if revision else {}) | ({} if hub_answers() else {"local_files_only": True})


def hub_answers() -> bool:
    """Return True if the hub answers and the client is online.

    Any status except a gateway error counts as an answer.

    The request takes at most ``HF_HUB_ETAG_TIMEOUT`` seconds (default 10); a warning is logged after 3 seconds.
    """
    return not is_offline_mode() and _answers(constants.ENDPOINT, int(monotonic() / _REMEMBERED))


def hub_problem() -> str:
    """Return why the hub is not used, for error messages."""
    if is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    return f"the hub ({constants.ENDPOINT}) does not answer"


@lru_cache(maxsize=1)
def _answers(endpoint: str, period: int) -> bool:
    """Return whether a hub answers, cached for a period of time."""
    limit = float(constants.HF_HUB_ETAG_TIMEOUT)
    answers: list[bool] = []
    # A thread bounds the time: looking up the host's name has no timeout, and a socket's timeout is per address.
    asking = Thread(target=lambda: answers.append(_ask(endpoint, limit)), daemon=True)
    asking.start()
    asking.join(min(_PATIENCE, limit))
    if asking.is_alive():
        _log.warning("waiting up to %g s for the hub (%s) to answer", limit, endpoint)
        asking.join(limit - min(_PATIENCE, limit))
    return any(answers)


def _ask(endpoint: str, timeout: float) -> bool:
    try:
        with urlopen(Request(endpoint, method="HEAD"), timeout=timeout):
            return True
    except HTTPError as error:
        return error.code not in _NO_ANSWER
    except URLError as error:
        # The hub's client may use other certificates.
        return isinstance(error.reason, ssl.SSLError)
    except (OSError, HTTPException):
        return False
