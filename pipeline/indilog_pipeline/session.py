"""A Spark session that can read and write logs (`start`), or why it cannot start (`why_not`).

PySpark is an extra (`indilog[spark]`), and it needs Java 17 or newer. This module imports PySpark
only in `start`, so every command can call `why_not()`. The commands `analyse`, `rebuild-index` and
`./start` use it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from indilog.base.errors import IndilogError
from indilog_pipeline.spark_errors import sentence_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_MIN: Final = 17
NO_JAVA: Final = "Spark needs Java 17: install openjdk-17-jre-headless or set JAVA_HOME."
NO_PYSPARK: Final = (
    "PySpark is not installed: run `pip install 'indilog[spark]'`, or `./start --spark "
    "--setup-only` in a checkout (456 MB)."
)
MEMORY: Final = "1g"
"""Heap of a local session by default. Python workers use memory beside it."""
_JAVA_S_MAX: Final = 30.0
_ALWAYS: Final = {
    "spark.sql.python.filterPushdown.enabled": "true",
    # A query that was killed while it wrote its first offset leaves a temporary file. By default,
    # Spark 4.1 refuses such a checkpoint forever, because the folder of offsets is not empty.
    "spark.sql.streaming.verifyCheckpointDirectoryEmptyOnStart": "false",
    "spark.log.level": "ERROR",
}
_LOOPBACK: Final = "127.0.0.1"
_LOCAL: Final = {
    "spark.driver.bindAddress": _LOOPBACK,
    "spark.driver.host": _LOOPBACK,
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "8",
}
"""Settings of a session with all executors on this machine (`local...`, `local-cluster...`)."""
_SHORT: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"
"""`spark-submit` sets this variable for the program that it runs."""


class NoSparkError(IndilogError):
    """Spark cannot be started here; the message says what to install."""


def why_not(environment: Mapping[str, str] = os.environ) -> str:
    """Return one sentence that says why Spark cannot start here; empty: it can start.

    Runs `java -version`, unless `spark-submit` started this program.
    """
    if importlib.util.find_spec("pyspark") is None:
        return NO_PYSPARK
    if _SUBMITTED in environment or _java_version(environment) >= JAVA_MIN:
        return ""
    return NO_JAVA


def start(
    name: str = "indilog",
    *,
    master: str = "local[*]",
    memory: str = MEMORY,
    short: bool = False,
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return the Spark session of this process, started if there is none.

    A program that `spark-submit` runs gets the session that was submitted: `master`, `memory` and
    `short` are then ignored. A local session listens on the loopback address only.

    Args:
        name: name of the application, as Spark shows it.
        master: where Spark runs, e.g. `local[2]`: two threads of this machine.
        memory: heap of the JVM, e.g. `512m` or `4g`.
        short: start faster and compute slower, for a session that lives for seconds.
        settings: further settings of Spark; they override those of this function.

    Raises:
        NoSparkError: PySpark or Java is missing, or Spark does not start, for example because no
            master answers.
    """
    if reason := why_not():
        raise NoSparkError(reason)
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    wanted = dict(_ALWAYS)
    if _SUBMITTED not in os.environ:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        wanted |= {"spark.master": master, "spark.driver.memory": memory}
        if master.startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
            wanted |= _LOCAL
        if short:
            wanted["spark.driver.extraJavaOptions"] = _SHORT
    builder = SparkSession.builder.appName(name)
    for key, value in (wanted | dict(settings or {})).items():
        builder = builder.config(key, value)
    try:
        return builder.getOrCreate()
    except (Py4JError, PySparkException) as error:
        raise NoSparkError(
            f"Spark does not start with master {master!r}: {sentence_of(error)} Lines of Spark "
            "above may say more."
        ) from error


def _java_version(environment: Mapping[str, str]) -> int:
    """Return the major version of the Java that Spark would run; 0: no Java is found."""
    home = environment.get("JAVA_HOME", "")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java", path=_path(environment))
    if java is None:
        return 0
    try:
        said = subprocess.run(  # noqa: S603 - the user's own Java
            [java, "-version"], capture_output=True, text=True, timeout=_JAVA_S_MAX, check=False
        ).stderr
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(\d+)', said)
    return int(found.group(1)) if found else 0


def _path(environment: Mapping[str, str]) -> str:
    return environment.get("PATH", os.defpath)
