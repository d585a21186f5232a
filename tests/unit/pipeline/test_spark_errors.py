"""Errors of Spark become one sentence."""

from __future__ import annotations

from indilog_pipeline.spark_errors import sentence_in, sentence_of

PLANNED = """\
[PYTHON_DATA_SOURCE_ERROR] Failed to initialize Python data source reader: Traceback (most recent \
call last):
  File "source.py", line 50, in reader
    return LogReader(read_options(self.options), schema)
{error}
 SQLSTATE: 38000
"""
AFTER = """

During handling of the above exception, another exception occurred:

UnboundLocalError: cannot access local variable 'reader'"""
JAVA = """\
An error occurred while calling None.org.apache.spark.sql.classic.SparkSession.
: java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext.
This stopped SparkContext was created at:"""


def test_a_python_exception_is_its_message() -> None:
    refused = PLANNED.format(
        error="ValueError: A platform's URL has the form http://127.0.0.1:8080."
    )
    assert sentence_in(refused) == "A platform's URL has the form http://127.0.0.1:8080."
    own = "indilog.base.errors.ConfigError: A stream has records only."
    assert sentence_in(PLANNED.format(error=own + AFTER)) == "A stream has records only."


def test_a_java_exception_is_its_message_and_anything_else_its_first_line() -> None:
    assert sentence_in("java.lang.OutOfMemoryError: Java heap space") is None
    said = sentence_of(RuntimeError(JAVA))
    assert said == "Cannot call methods on a stopped SparkContext."
    assert sentence_of(RuntimeError("[CODE] One line.\nat java.base")) == "[CODE] One line."
