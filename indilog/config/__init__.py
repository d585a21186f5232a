"""Configuration of a platform (docs/CONFIGURATION.md).

`ClusterConfig` is what all nodes must agree on. `NodeConfig` is what each node has of its own, in
groups of settings that belong together: `config.node.journal.segment_bytes`. `config_from` puts a
`Config` together from a TOML file, the environment and the command line. Every limit of the
platform is here, with its unit last in its name.
"""

from indilog.config.cluster import ClusterConfig
from indilog.config.group import KIB, MIB
from indilog.config.node import NodeConfig, node_config
from indilog.config.sources import Config, config_from

__all__ = ["KIB", "MIB", "ClusterConfig", "Config", "NodeConfig", "config_from", "node_config"]
