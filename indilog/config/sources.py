"""Reads a configuration from its sources (file, environment, command line), and checks it.

`config_from` returns a `Config`: a `ClusterConfig` and a `NodeConfig`.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from indilog.base.errors import ConfigError
from indilog.config.cluster import ClusterConfig
from indilog.config.group import KIB, check_order
from indilog.config.node import GROUP_OF, GROUPS, NodeConfig, grouped
from indilog.kernel.records import tags_bytes_max

_BESIDE_PAYLOAD_BYTES: Final = 128 * KIB
"""Largest size of a message without its payload, in bytes: envelope, seqnums, lengths."""
_CLUSTER_NAMES: Final = tuple(field.name for field in dataclasses.fields(ClusterConfig))
_NAMES: Final[Mapping[str, Collection[str]]] = {"cluster": _CLUSTER_NAMES, "node": tuple(GROUP_OF)}
"""The names of the settings of each part, without their groups."""

_PartT = TypeVar("_PartT", ClusterConfig, NodeConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A whole configuration: the settings of the cluster and of the node."""

    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)
    node: NodeConfig = dataclasses.field(default_factory=NodeConfig)

    def __post_init__(self) -> None:
        """Check the parts against each other."""
        # Otherwise an append fails before the next cut.
        cut_s, append_s = self.cluster.cut_interval_s, self.node.appends.append_timeout_s
        check_order("cut_interval_s", cut_s, "append_timeout_s", append_s)
        segment_bytes = self.node.journal.segment_bytes
        if segment_bytes < self.cluster.batch_bytes_max + KIB:
            raise ConfigError(
                f"segment_bytes ({segment_bytes:,}) must be larger than "
                f"batch_bytes_max ({self.cluster.batch_bytes_max:,}) by 1 KiB."
            )
        message = self.cluster.message_bytes_max
        queue_bytes = self.node.messages.send_queue_bytes_max
        if queue_bytes < message:
            raise ConfigError(
                f"send_queue_bytes_max ({queue_bytes:,}) must have room for a "
                f"message of message_bytes_max ({message:,})."
            )
        for payload_bytes, what in _payloads(self.cluster, self.node):
            if message < payload_bytes + _BESIDE_PAYLOAD_BYTES:
                raise ConfigError(
                    f"message_bytes_max ({message:,}) must be at least "
                    f"{payload_bytes + _BESIDE_PAYLOAD_BYTES:,}, to carry {what}."
                )


def _payloads(cluster: ClusterConfig, node: NodeConfig) -> tuple[tuple[int, str], ...]:
    """Return each kind of payload that one message must carry: its largest size, and its
    description.
    """
    record = cluster.record_bytes_max + tags_bytes_max(cluster.record_tags_max)
    record += cluster.aux_bytes_max
    page, result = node.messages.page_bytes_max, node.functions.result_bytes_max
    record_text = (
        f"a record of record_bytes_max ({cluster.record_bytes_max:,}) with aux data of "
        f"aux_bytes_max ({cluster.aux_bytes_max:,})"
    )
    page_text = f"a page of page_bytes_max ({page:,}) and the record or batch that exceeds it"
    return (
        (record, record_text),
        (page + max(record, cluster.batch_bytes_max), page_text),
        (result, f"a result of result_bytes_max ({result:,})"),
    )


def config_from(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Config:
    """Build a configuration. Later sources take precedence: `defaults`, `file`, `environment`,
    `overrides`.

    Args:
        file: a TOML file with the tables `[cluster]` and `[node]`, and in `[node]` a table for each
            group of settings, such as `[node.journal]`.
        environment: environment variables. `INDILOG_CLUSTER_*` and `INDILOG_NODE_*` are used; their
            names have no group: `INDILOG_NODE_SEGMENT_BYTES`.
        overrides: `{"cluster": {...}, "node": {...}}`, as from a command line, without groups.
            Values of None are ignored.
        defaults: values that replace the defaults of the settings, in the form of `overrides`.

    Raises:
        ConfigError: a name is unknown, a type is wrong, or settings contradict each other. The
            message names the setting.
    """
    merged: dict[str, dict[str, Any]] = {"cluster": {}, "node": {}}
    environment_values = _from_environment(environment or {})
    for source in (defaults or {}, _from_file(file), environment_values, overrides or {}):
        for part, values in source.items():
            _check_table(part, values)
            _check_names(part, values)
            merged[part].update({k: v for k, v in values.items() if v is not None})
    return Config(
        cluster=_converted(ClusterConfig, merged["cluster"], "cluster", environment_values),
        node=_converted(NodeConfig, grouped(merged["node"]), "node", environment_values),
    )


def _check_table(part: str, values: object) -> None:
    if part in _NAMES:
        if not isinstance(values, Mapping):
            raise ConfigError(f"[{part}] must be a table of settings.")
    elif isinstance(values, Mapping):
        raise ConfigError(f"Unknown table [{part}]; the tables are [cluster] and [node].")
    else:
        raise ConfigError(
            f"The setting {part!r} is outside the tables [cluster] and [node]; move it into one of "
            "them."
        )


def _check_names(part: str, values: Mapping[str, Any]) -> None:
    if unknown := sorted(set(values) - set(_NAMES[part])):
        raise ConfigError(
            f"Unknown setting {unknown[0]!r} in [{part}]{_did_you_mean(unknown[0], _NAMES[part])}"
        )


def _from_file(file: Path | None) -> dict[str, Any]:
    """Return the settings of a file without their groups."""
    if file is None:
        return {}
    try:
        tables = tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"There is no configuration file {file}.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"The configuration file {file} cannot be read: {error}.") from error
    if isinstance(node := tables.get("node"), dict):
        tables["node"] = _without_groups(node)
    return tables


def _without_groups(node: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a file's table `[node]` by name, without their groups.

    Raises:
        ConfigError: a setting is not in the table of its group, or a table is not a group.
    """
    settings: dict[str, Any] = {}
    for name, value in node.items():
        if name not in GROUPS:
            _check_place(name, None, isinstance(value, dict))
            settings[name] = value
            continue
        if not isinstance(value, dict):
            raise ConfigError(f"[node.{name}] must be a table of settings.")
        for setting, setting_value in value.items():
            _check_place(setting, name, isinstance(setting_value, dict))
            settings[setting] = setting_value
    return settings


def _check_place(name: str, group: str | None, is_table: bool) -> None:  # noqa: FBT001 a question
    """Raise for a setting outside the table of its group, and for a table that is not a group."""
    here = "node" if group is None else f"node.{group}"
    if is_table:
        raise ConfigError(
            f"Unknown table [{here}.{name}]{_did_you_mean(name, GROUPS if group is None else ())}"
        )
    if name not in GROUP_OF:
        raise ConfigError(f"Unknown setting {name!r} in [{here}]{_did_you_mean(name, GROUP_OF)}")
    if GROUP_OF[name] != group:
        place = "node" if GROUP_OF[name] is None else f"node.{GROUP_OF[name]}"
        raise ConfigError(
            f"The setting {name!r} belongs in the table [{place}], not in [{here}]; move it there."
        )


def _from_environment(environment: Mapping[str, str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {"cluster": {}, "node": {}}
    for part, names in _NAMES.items():
        prefix = f"INDILOG_{part.upper()}_"
        for variable, value in environment.items():
            if variable.startswith(prefix):
                name = variable.removeprefix(prefix).lower()
                if name not in names:
                    raise ConfigError(
                        f"The environment variable {variable} does not name a setting of [{part}]"
                        f"{_did_you_mean(name, names, prefix)}"
                    )
                found[part][name] = value
    return found


def _did_you_mean(name: str, names: Collection[str], prefix: str = "") -> str:
    near = get_close_matches(name, names, n=1)
    if not near:
        return "; docs/CONFIGURATION.md lists them."
    return f"; did you mean {prefix}{near[0].upper() if prefix else near[0]}?"


def _converted(
    kind: type[_PartT],
    values: dict[str, Any],
    part: str,
    environment: Mapping[str, Mapping[str, str]],
) -> _PartT:
    try:
        return msgspec.convert(values, kind, strict=False, dec_hook=_path_from)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`").rpartition(".")[2]
        given = environment[part].get(name)
        if given is not None and _value_of(name, values) == given:
            raise ConfigError(
                f"The environment variable INDILOG_{part.upper()}_{name.upper()} has the value "
                f"{given!r}, which does not fit: {problem}."
            ) from error
        raise ConfigError(f"[{part}] does not fit: {error}.") from error


def _value_of(name: str, values: Mapping[str, Any]) -> object:
    """Return a setting, which may be in the table of its group."""
    group = GROUP_OF.get(name)
    return values.get(name) if group is None else values.get(group, {}).get(name)


def _path_from(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    raise TypeError(f"Expected {kind.__name__}, got {type(value).__name__}")
