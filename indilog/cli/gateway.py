"""Sends requests of commands to a gateway, and reports its errors in one sentence.

Every command that calls a gateway uses a `Gateway`. `indilog.link.access` finds the gateway's
address and token.
"""

from __future__ import annotations

import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from indilog.base.errors import IndilogError
from indilog.base.slim_imports import import_httpx
from indilog.link.access import DEFAULT_URL, URL_VARIABLE, reach

if TYPE_CHECKING:  # only commands that call a gateway import this module; `up` does not
    import httpx

MISTAKE = 2
"""Exit code: the command, or a name in it, is wrong."""
FAILURE = 1
"""Exit code: a correct command failed."""

Url = Annotated[
    str, typer.Option(envvar=URL_VARIABLE, help="URL of the platform's gateway.", show_default=True)
]
DEFAULT = DEFAULT_URL
_TIMEOUT_S = 310.0
_TRIED_S = 10.0
"""Seconds to wait for an answer that a command can do without."""
_STREAM_SILENCE_S_MAX = 60.0
"""Seconds without received bytes after which a stream counts as broken; a stream sends a heartbeat
every 15 s.
"""


def stop(sentence: str, code: int = MISTAKE) -> NoReturn:
    """Print `sentence` on standard error and end with `code`."""
    sys.stderr.write(f"{sentence}\n")
    raise typer.Exit(code)


@contextmanager
def explain_mistakes() -> Iterator[None]:
    """End the command with one sentence if the platform refuses a request in this block."""
    try:
        yield
    except IndilogError as error:
        stop(str(error), FAILURE if error.retryable else MISTAKE)
    except ValueError as error:
        stop(str(error))


_GONE: Final = ("TrimmedError", "DataLossError")
"""Titles of errors about records that existed."""


class Gateway:
    """Sends the requests of one command to a gateway.

    Attributes:
        explain: completes the sentence of a refused request with facts that only the command knows.
    """

    def __init__(self, url: str) -> None:
        import_httpx()
        import httpx

        with explain_mistakes():
            endpoint = reach(url)
        self.url = endpoint.url
        self.explain: Callable[[str], str] = str
        self._client = httpx.Client(**endpoint.for_httpx, timeout=_TIMEOUT_S)

    def get(self, path: str, **query: object) -> Any:  # noqa: ANN401 - any JSON value
        """Return the JSON value at `path`; a query value None is left out."""
        return self._value("GET", path, query=query)

    def get_with(self, field: str, path: str) -> dict[str, Any]:
        """Return the JSON object at `path`. Stop if it lacks `field`: another program answers."""
        answer = self.get(path)
        if not (isinstance(answer, dict) and field in answer):
            self._is_another_server()
        return answer

    def get_records(self, path: str, *, bound: int | None, **query: object) -> Any:  # noqa: ANN401 - any JSON value
        """Return a page of records from `bound` on; lost records are skipped with a warning."""
        while True:
            response = self._response("GET", path, query=query | {"bound": bound})
            behind = _next_seqnum(response, "DataLossError")
            if behind is None or behind <= (bound or 0):
                return self._json(response)
            sys.stderr.write(f"warning: {_sentence(response)}\n")
            bound = behind

    def had_records(self, path: str) -> bool:
        """Whether the records at `path` exist, or were trimmed or lost."""
        response = self._response("GET", path, query={"bound": 0, "limit": 1})
        if any(_next_seqnum(response, gone) is not None for gone in _GONE):
            return True
        return bool(self._json(response)["records"])

    def post(
        self,
        path: str,
        *,
        json: object = None,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
        query: dict[str, object] | None = None,
    ) -> Any:  # noqa: ANN401 - any JSON value
        """POST JSON or bytes to `path` and return the JSON answer."""
        return self._value(
            "POST", path, json=json, content=content, headers=headers, query=query or {}
        )

    def try_post(self, path: str, *, json: object) -> Any:  # noqa: ANN401 - any JSON value
        """POST JSON to `path` and return the JSON answer; None: there was none, or an error."""
        import httpx

        try:
            response = self._client.post(path, json=json, timeout=_TRIED_S)
            return response.json() if response.is_success else None
        except (httpx.HTTPError, ValueError):
            return None

    def put(self, path: str, *, json: object, headers: dict[str, str] | None = None) -> Any:  # noqa: ANN401 - any JSON value
        """PUT JSON to `path` and return the JSON answer."""
        return self._value("PUT", path, json=json, headers=headers, query={})

    def delete(self, path: str, *, headers: dict[str, str] | None = None, **query: object) -> Any:  # noqa: ANN401 - any JSON value
        """DELETE `path` and return the JSON answer."""
        return self._value("DELETE", path, headers=headers, query=query)

    @contextmanager
    def lines(self, path: str, **query: object) -> Iterator[Iterator[str]]:
        """Yield the lines of a streamed answer.

        Raises:
            httpx.HTTPError: the platform is unreachable or not ready, or the stream broke.
        """
        import httpx

        given, timeout = _given(query), httpx.Timeout(10.0, read=_STREAM_SILENCE_S_MAX)
        with self._client.stream("GET", path, params=given, timeout=timeout) as response:
            if response.is_client_error:
                response.read()
                self._refused(response)
            response.raise_for_status()
            yield response.iter_lines()

    def _value(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, object],
        json: object = None,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Any:  # noqa: ANN401 - any JSON value
        return self._json(self._response(method, path, query, json, content, headers))

    def _response(
        self,
        method: str,
        path: str,
        query: dict[str, object],
        json: object = None,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        import httpx

        if headers and any(not value.isascii() for value in headers.values()):
            stop("An owner's name is ASCII text.")
        try:
            return self._client.request(
                method,
                path,
                params=_given(query) or None,
                json=json,
                content=content,
                headers=headers,
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if method != "GET" and not _is_before_sending(error):
                stop(
                    f"The connection to {self.url} broke, or was silent for too long, before the "
                    "answer came. The request may have been done: check before you repeat it.",
                    FAILURE,
                )
            self.unreachable(error)

    def _json(self, response: httpx.Response) -> Any:  # noqa: ANN401 - any JSON value
        if response.is_error:
            self._refused(response)
        try:
            return response.json()
        except ValueError:
            self._is_another_server()

    def _is_another_server(self) -> NoReturn:
        stop(f"{self.url} does not answer like IndiLog does; is it another server?")

    def _refused(self, response: httpx.Response) -> NoReturn:
        sentence = _sentence(response)
        if sentence is None:
            sentence = f"{self.url} answered {response.status_code} without a reason."
        floor = _next_seqnum(response, "TrimmedError")
        if floor is not None:
            sentence = (
                f"Records below seqnum {floor} were trimmed; read from there: --bound {floor}."
            )
        stop(self.explain(sentence), MISTAKE if response.is_client_error else FAILURE)

    def unreachable(self, error: Exception) -> NoReturn:
        """End the command with a sentence that says why no answer came; `error` is the cause."""
        import httpx

        if isinstance(error, httpx.HTTPStatusError):
            error.response.read()
            self._refused(error.response)
        if (untrusted := _untrusted(error)) is not None:
            stop(
                f"The certificate of {self.url} is not trusted here ({untrusted}); set INDILOG_CA "
                "to the file with its issuer's certificate."
            )
        if isinstance(error, httpx.TimeoutException):
            stop(f"{self.url} did not answer in time; is the platform overloaded?", FAILURE)
        stop(
            f"No platform answers at {self.url}; start one with `indilog up`, or give --url.",
            MISTAKE,
        )


def _is_before_sending(error: Exception) -> bool:
    """Return whether `error` occurred before a request was sent. After any other error, the request
    may have taken effect.
    """
    import httpx

    return isinstance(
        error,
        httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol | httpx.InvalidURL,
    )


def _untrusted(error: BaseException | None) -> str | None:
    """Return why a certificate was refused, if that is the cause of `error`."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error.verify_message
        error = error.__cause__ or error.__context__
    return None


def _sentence(response: httpx.Response) -> str | None:
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return None


def _next_seqnum(response: httpx.Response, title: str) -> int | None:
    """Return the seqnum to continue from if the answer is the error `title`, else None."""
    try:
        problem = response.json()
        return int(problem["next_seqnum"]) if problem["title"] == title else None
    except (ValueError, KeyError, TypeError):
        return None


def _given(query: dict[str, object]) -> dict[str, str]:
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in query.items()
        if value is not None
    }
