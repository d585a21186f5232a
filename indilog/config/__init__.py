"""Configuration of a platform (docs/CONFIGURATION.md).

`ClusterConfig` has the settings that must be equal on all nodes. `NodeConfig` has the settings of
one node, in groups: `config.node.journal.segment_bytes`. `config_from` builds a `Config` from a
TOML file, the environment and the command line. Every limit of the platform is a setting; its name
ends with its unit. `indilog.cli` and `indilog.runtime.cluster` build configurations, and pass
the groups to the parts of the platform.
"""

from indilog.config.cluster import ClusterConfig
from indilog.config.group import KIB, MIB
from indilog.config.node import NodeConfig, node_config
from indilog.config.sources import Config, config_from

__all__ = ["KIB", "MIB", "ClusterConfig", "Config", "NodeConfig", "config_from", "node_config"]
