"""The settings of one node: their groups, and the group of each setting.

A setting's name is unique over all groups. So the environment, the command line and error messages
name a setting without its group. Only files and code name the group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from indilog.base.errors import ConfigError
from indilog.config.function_groups import (
    FunctionsConfig,
    GatewayConfig,
    InvocationsConfig,
    MetadataConfig,
    ProcessesConfig,
)
from indilog.config.group import SettingsGroup, check_order, names_listed
from indilog.config.log_groups import (
    AppendsConfig,
    CachesConfig,
    CellsConfig,
    ColdConfig,
    IndexTierConfig,
    JournalConfig,
    MessagesConfig,
    ObjectLogsConfig,
    OrderingConfig,
    ReadsConfig,
    RefillsConfig,
    StorageConfig,
    TrimsConfig,
)
from indilog.kernel.zones import ZONE_BYTES_MAX, is_label


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """The settings of one node, in a group for each part."""

    data_dir: Path = Path(".indilog")
    """Directory of the journal, snapshots, the metadata store and the token."""
    zone: str = ""
    """What may fail together with this machine, such as its rack or data centre. The replicas of a
    shard are placed in different zones where possible. With `indilog up --nodes`: zones, separated
    by commas, which the processes get in turn. Empty: no zone.
    """
    gateway: GatewayConfig = dataclasses.field(default_factory=GatewayConfig)
    functions: FunctionsConfig = dataclasses.field(default_factory=FunctionsConfig)
    invocations: InvocationsConfig = dataclasses.field(default_factory=InvocationsConfig)
    appends: AppendsConfig = dataclasses.field(default_factory=AppendsConfig)
    reads: ReadsConfig = dataclasses.field(default_factory=ReadsConfig)
    caches: CachesConfig = dataclasses.field(default_factory=CachesConfig)
    refills: RefillsConfig = dataclasses.field(default_factory=RefillsConfig)
    ordering: OrderingConfig = dataclasses.field(default_factory=OrderingConfig)
    storage: StorageConfig = dataclasses.field(default_factory=StorageConfig)
    cold: ColdConfig = dataclasses.field(default_factory=ColdConfig)
    object_logs: ObjectLogsConfig = dataclasses.field(default_factory=ObjectLogsConfig)
    cells: CellsConfig = dataclasses.field(default_factory=CellsConfig)
    trims: TrimsConfig = dataclasses.field(default_factory=TrimsConfig)
    index_tier: IndexTierConfig = dataclasses.field(default_factory=IndexTierConfig)
    journal: JournalConfig = dataclasses.field(default_factory=JournalConfig)
    messages: MessagesConfig = dataclasses.field(default_factory=MessagesConfig)
    metadata: MetadataConfig = dataclasses.field(default_factory=MetadataConfig)
    processes: ProcessesConfig = dataclasses.field(default_factory=ProcessesConfig)

    def __post_init__(self) -> None:
        """Check the groups against each other."""
        resend_s, timeout_s = self.messages.resend_s, self.appends.append_timeout_s
        # Otherwise an append fails before it is resent.
        check_order("resend_s", resend_s, "append_timeout_s", timeout_s)
        # Otherwise a read fails before it is known that cold storage does not answer.
        cold_s, read_s = self.cold.cold_timeout_s, self.reads.read_timeout_s
        if self.cold.cold_place:
            check_order("cold_timeout_s", cold_s, "read_timeout_s", read_s)
        for zone in self.zones:
            if not is_label(zone):
                raise ConfigError(f"A zone is 1 to {ZONE_BYTES_MAX} bytes of text, not {zone!r}.")

    @property
    def zones(self) -> tuple[str, ...]:
        """The zones that `zone` lists."""
        return names_listed(self.zone)


GROUPS: Final[Mapping[str, type[SettingsGroup]]] = {
    field.name: type(field.default_factory())
    for field in dataclasses.fields(NodeConfig)
    if field.default_factory is not dataclasses.MISSING
}
"""The class of each group, by the name of its table."""


def _group_of_each_setting() -> dict[str, str | None]:
    found: dict[str, str | None] = {"data_dir": None, "zone": None}
    for group, kind in GROUPS.items():
        for field in dataclasses.fields(kind):
            assert field.name not in found, "the name of a setting is unique over all groups"
            found[field.name] = group
    return found


GROUP_OF: Final[Mapping[str, str | None]] = _group_of_each_setting()
"""The group of each setting of a node; None if it has no group."""


def grouped(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a node, given without their groups, as a tree of groups.

    Args:
        settings: values by name; `GROUP_OF` has the names.
    """
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        group = GROUP_OF[name]
        (tree if group is None else tree.setdefault(group, {}))[name] = value
    return tree


def flat_settings(node: NodeConfig) -> dict[str, Any]:
    """Return all settings of a node by name, without their groups: the reverse of `grouped`."""
    return {
        name: getattr(node if group is None else getattr(node, group), name)
        for name, group in GROUP_OF.items()
    }


def node_config(base: NodeConfig | None = None, /, **settings: Any) -> NodeConfig:  # noqa: ANN401 each setting has its own type
    """Return `base` (the defaults if None) with some settings changed. Settings are named without
    their groups.

    Raises:
        ConfigError: there is no such setting, or a value is out of its range.
    """
    base = base or NodeConfig()
    if unknown := settings.keys() - GROUP_OF.keys():
        raise ConfigError(f"There is no setting {min(unknown)!r}; docs/CONFIGURATION.md lists all.")
    changes = {
        name: dataclasses.replace(getattr(base, name), **values) if name in GROUPS else values
        for name, values in grouped(settings).items()
    }
    return dataclasses.replace(base, **changes)
