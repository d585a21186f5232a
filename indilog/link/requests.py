"""Sends HTTP requests to a gateway, for a client's operations that have no link message.

`indilog.remote_client` uses it in addition to its link, for example for the paths below `/runs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import httpx
import msgspec

from indilog.base.errors import CallOutcomeUnknownError, IndilogError, NotReadyError
from indilog.base.log import Session
from indilog.link.access import Endpoint
from indilog.link.link_messages import Failed, error_from

_POSITION: Final = "Indilog-Position"
_TIMEOUT_S: Final = 60.0
_NOT_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class GatewayRequests:
    """Sends requests within the session of a client, so that the client reads its own writes.

    Args:
        endpoint: returns the URL, token and TLS context of the gateway. Called for each request,
            because a restarted platform may have another token.
        session: each request carries the session's position. Each answer carries the position at
            which the platform answered, and the session moves up to it.
    """

    def __init__(self, endpoint: Callable[[], Endpoint], session: Session) -> None:
        self._endpoint = endpoint
        self._session = session

    async def send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, object] | None = None,
        body: object = None,
    ) -> bytes:
        """Return the JSON text of the answer.

        Raises:
            NotReadyError: no connection was made, or a GET got no answer. Nothing was changed.
            CallOutcomeUnknownError: a request with a method other than GET got no answer, so the
                platform may have done it.
            IndilogError: the platform refused the request.
        """
        endpoint = self._endpoint()
        position = self._session.position
        headers = {_POSITION: str(position)} if position else {}
        if body is not None:
            headers["content-type"] = "application/json"
        try:
            async with httpx.AsyncClient(**endpoint.for_httpx, timeout=_TIMEOUT_S) as client:
                answer = await client.request(
                    method,
                    path,
                    params={name: str(value) for name, value in (query or {}).items()},
                    content=None if body is None else msgspec.json.encode(body),
                    headers=headers,
                )
        except _NOT_SENT as error:
            raise NotReadyError(f"No platform answers at {endpoint.url}.") from error
        except AttributeError as error:
            # With uvloop, anyio raises this error if a connection is closed while it is opened.
            raise NotReadyError(f"{endpoint.url} closed the connection.") from error
        except httpx.HTTPError as error:
            if method == "GET":
                raise NotReadyError(f"{endpoint.url} did not answer: {error!r}.") from error
            raise CallOutcomeUnknownError(
                "The connection was lost before the answer came; the request may have been done."
            ) from error
        self._session.saw(int(answer.headers.get(_POSITION, "0")))
        if answer.is_error:
            raise _error_in(answer)
        return answer.content


def _error_in(answer: httpx.Response) -> Exception:
    try:
        problem: dict[str, Any] = answer.json()
        return error_from(Failed(problem["title"], problem["detail"], problem))
    except (ValueError, KeyError, TypeError):
        return IndilogError(f"The platform answered {answer.status_code} without a reason.")
