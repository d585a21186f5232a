"""Signs a browser in. `indilog open` authenticates with the token, gets a code, and prints the link
`/login#CODE`. The page `/login` posts the code and gets the cookie of a session.

Browsers send the part after `#` neither to a server nor in `Referer`, so the code does not leak.
Only the POST uses the code up, and not the GET of the page. `Credentials` issues and checks codes.
"""

from __future__ import annotations

from typing import Annotated, Final

import pydantic
from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.types import Scope

from indilog.base.errors import UnauthorizedError
from indilog_compute.gateway.credentials import Credentials
from indilog_compute.gateway.page import page_headers
from indilog_compute.gateway.requests import body_of, parse_json

LOGIN_PATH: Final = "/login"
SESSION_PATH: Final = "/session"
CODES_PATH: Final = "/session/codes"
_BODY_BYTES_MAX: Final = 4096


class CodeIn(pydantic.BaseModel):
    """The code of a link that `indilog open` printed."""

    model_config = pydantic.ConfigDict(extra="forbid")

    code: Annotated[str, pydantic.Field(max_length=128)]


def cookie_name(scope: Scope) -> str:
    """Return the name of the session's cookie.

    Browsers send the cookies of a host to all its ports, so the name contains the port. Under TLS
    the name has the prefix `__Host-`, with which browsers accept the cookie from this host only.
    """
    server = scope.get("server")
    port = server[1] if server is not None else None
    prefix = "__Host-" if scope["scheme"] in ("https", "wss") else ""
    return f"{prefix}indilog-{port}"


def login_router(credentials: Credentials) -> APIRouter:
    """Return the routes `/login` and `/session`."""
    router = APIRouter(include_in_schema=False)

    @router.get(LOGIN_PATH)
    async def login() -> Response:
        page = HTMLResponse(LOGIN_PAGE)
        page.raw_headers.extend(page_headers(LOGIN_PAGE))
        return page

    @router.post(CODES_PATH)
    async def new_code() -> Response:
        code = credentials.new_code()
        answer = {"path": f"{LOGIN_PATH}#{code}", "valid_s": credentials.code_s}
        return JSONResponse(answer, 201, headers={"cache-control": "no-store"})

    @router.post(SESSION_PATH)
    async def begin(request: Request) -> Response:
        body = await body_of(request, _BODY_BYTES_MAX)
        given = parse_json(CodeIn, body, not_done="The browser was not signed in")
        secret = credentials.begin_session(given.code)
        if secret is None:
            raise UnauthorizedError(
                "This link was already used or has expired; `indilog open` prints a new one."
            )
        response = Response(status_code=204)
        response.set_cookie(
            cookie_name(request.scope),
            secret,
            max_age=int(credentials.session_s_max),
            path="/",
            secure=request.scope["scheme"] == "https",
            httponly=True,
            samesite="strict",
        )
        return response

    @router.delete(SESSION_PATH)
    async def end(request: Request) -> Response:
        name = cookie_name(request.scope)
        credentials.end_session(request.cookies.get(name, "").encode())
        response = Response(status_code=204)
        response.delete_cookie(name, path="/", secure=request.scope["scheme"] == "https")
        return response

    return router


LOGIN_PAGE: Final = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>IndiLog</title>
<style>
  body { font: 15px/1.5 system-ui, sans-serif; margin: 4rem auto; max-width: 34rem; padding: 0 1rem;
    color: #1c2430; background: #fff }
  @media (prefers-color-scheme: dark) { body { color: #dfe5ee; background: #14181f } }
</style>
<h1>IndiLog</h1>
<p id="message">To look at this platform in a browser, run <code>indilog open</code> in a
terminal, as the user that runs the platform. It prints a link that signs this browser in, once.</p>
<script>
"use strict";
const message = document.getElementById("message");
const code = location.pathname === "/login" ? location.hash.slice(1) : "";
if (code) {
  history.replaceState(null, "", "/login");
  message.textContent = "Signing in.";
  fetch("/session", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ code }),
  }).then(async (response) => {
    if (response.ok) location.replace("/docs");
    else message.textContent = (await response.json()).detail;
  }).catch((error) => { message.textContent = String(error); });
}
</script>
</html>
"""
