"""Arguments of functions and queries on the command line.

`indilog invoke` and `indilog runs` call `arguments_in`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

ARGUMENTS_HELP: Final = "name=value for text and numbers, name:=JSON for other values."


def arguments_in(pairs: Sequence[str], json_text: str | None = None) -> dict[str, Any]:
    """Return the arguments of a function or a query.

    Args:
        pairs: `name=value` for text, `name:=JSON` for other values.
        json_text: further arguments as a JSON object.

    Raises:
        ValueError: one of them is malformed, or given twice.
    """
    given = _json_object(json_text) if json_text is not None else {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.removesuffix(":"):
            raise ValueError(f"An argument is written name=value, not {pair!r}.")
        field = name.removesuffix(":")
        if field in given:
            raise ValueError(f"The argument {field!r} is given twice; give it once.")
        given[field] = _json(text, pair) if name.endswith(":") else text
    return given


def _json_object(text: str) -> dict[str, Any]:
    value = _json(text, "--json")
    if not isinstance(value, dict):
        raise ValueError("--json is an object with the arguments' names, such as '{\"n\": 1}'.")  # noqa: TRY004
    return value


def _json(text: str, where: str) -> Any:  # noqa: ANN401 - any JSON value
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}.") from None
