"""One function of an application: its body and its signature.

`App` creates a `Function` for each decorated function. Workers and `Context` find it with
`function_of`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

from indilog.apps.signature import Signature

MARK: Final = "__indilog_function__"
"""The attribute of a decorated function that holds its `Function`."""


class Function:
    """One function of an application: its body and its signature.

    Args:
        context: the class of contexts. A first parameter of this type takes the context.

    Attributes:
        app: the name of its application.
        name: unique in its application.
        is_async: whether the body is awaited; otherwise it runs in a thread.
        timeout_s: seconds after which the caller gets `CallOutcomeUnknownError`; None: the
            platform's setting.
        public: whether HTTP callers need no token.
    """

    def __init__(
        self,
        app: str,
        body: Callable[..., Any],
        *,
        name: str,
        context: type,
        timeout_s: float | None,
        public: bool = False,
    ) -> None:
        self.app = app
        self.name = name
        self.body = body
        self.is_async = inspect.iscoroutinefunction(body)
        self.timeout_s = timeout_s
        self.public = public
        self._context = context
        self._signature: Signature | None = None

    @property
    def qualified_name(self) -> str:
        """`app.function`, as callers write it."""
        return f"{self.app}.{self.name}"

    @property
    def doc(self) -> str:
        """The docstring, or an empty text."""
        return inspect.getdoc(self.body) or ""

    @property
    def signature(self) -> Signature:
        """Its signature; evaluated at first use, when every type that it names is defined.

        Raises:
            TypeError: its type hints cannot be used; one sentence.
        """
        if self._signature is None:
            self._signature = Signature(self.qualified_name, self.body, self._context)
        return self._signature

    def __repr__(self) -> str:
        return f"Function({self.qualified_name})"


def function_of(function: object) -> Function | None:
    """Return the `Function` of a decorated function, or None for any other object."""
    found = getattr(function, MARK, None)
    return found if isinstance(found, Function) else None
