"""Finds the one sentence that explains an error of Spark, in a text with the stack traces of Java
and Python. Programs that run Spark jobs show this sentence to the user.
"""

from __future__ import annotations

import re
from typing import Final

_OWN: Final = re.compile(r"^(?:indilog|boki)[\w.]*\.\w+Error: (.*)$", re.MULTILINE)
_PYTHON: Final = re.compile(
    r"^(?!java|scala|org\.apache)[\w.]+(?:Error|Exception): (.*)$", re.MULTILINE
)
_JAVA: Final = re.compile(r"^: [\w.$]+: (.*)$", re.MULTILINE)


def sentence_in(text: str) -> str | None:
    """Return the message of the exception that a Python process of Spark raised; None: the text has
    no such exception.

    An `IndilogError` takes precedence over other exceptions, because Spark's own process may fail
    afterwards.
    """
    found = _OWN.findall(text) or _PYTHON.findall(text)
    return found[-1] if found else None


def sentence_of(error: BaseException) -> str:
    """Return the message of the Python exception in an error of Spark. Without a Python exception,
    return the message of the Java exception; without both, the first line of the error.
    """
    text = str(error).strip()
    return sentence_in(text) or next(iter(_JAVA.findall(text)), text.partition("\n")[0])
