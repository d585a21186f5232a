"""The configuration (`indilog.config`)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from indilog.base.errors import ConfigError
from indilog.config import ClusterConfig, Config, NodeConfig, config_from, node_config
from indilog.config.node import GROUP_OF, flat_settings


def test_the_defaults_are_consistent() -> None:
    assert config_from() == Config()


def test_later_sources_override_earlier_ones(tmp_path: Path) -> None:
    file = tmp_path / "indilog.toml"
    file.write_text(
        "[node.gateway]\nport = 1\nhost = '127.0.0.2'\n"
        "[node.functions]\nworkers = 7\n[cluster]\nindex_shards = 4\n"
    )
    config = config_from(
        file,
        {"INDILOG_NODE_PORT": "2", "INDILOG_NODE_HOST": "127.0.0.3", "PATH": "/bin"},
        {"node": {"port": 3, "host": None}},
    )
    assert (config.node.gateway.port, config.node.gateway.host, config.node.functions.workers) == (
        3,
        "127.0.0.3",
        7,
    )
    assert config.cluster.index_shards == 4


def test_text_from_the_environment_becomes_the_fields_type() -> None:
    config = config_from(
        environment={
            "INDILOG_NODE_DATA_DIR": "/data",
            "INDILOG_NODE_RESEND_S": "0.5",
            "INDILOG_CLUSTER_DURABILITY": "memory",
        }
    )
    assert config.node.data_dir == Path("/data")
    assert config.node.messages.resend_s == 0.5
    assert config.cluster.durability == "memory"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"node": {"prot": 1}}, "Unknown setting 'prot'"),
        ({"nodes": {}}, r"Unknown table \[nodes\]"),
        ({"node": 3}, "must be a table"),
        ({"bogus": 1}, "The setting 'bogus' is outside the tables"),
        ({"cluster": {"replica": 1}}, "Unknown setting 'replica' in .*; did you mean replicas"),
        ({"node": {"port": "abc"}}, r"\[node\] does not fit.*port"),
        ({"node": {"port": 65536}}, "port is 0"),
        ({"node": {"resend_s": 0}}, "resend_s must be greater than 0"),
        ({"node": {"frames_in_flight_max": -1}}, "frames_in_flight_max must be greater"),
        ({"cluster": {"ack_quorum": -1}}, "^ack_quorum must be at least 0, not -1.$"),
        ({"node": {"segment_bytes": 1000}}, "segment_bytes must be at least"),
        (
            {"node": {"tag_cache_seqnums_max": 5}},
            r"^tag_cache_seqnums_per_tag_max \(10,000\) must not exceed .*_seqnums_max \(5\).$",
        ),
        ({"node": {"resend_s": 31, "resend_s_max": 40}}, "resend_s .* exceed append_timeout_s"),
        ({"node": {"hedge_delay_s_min": 1.5}}, "hedge_delay_s_min .* exceed lookup_timeout_s"),
        ({"node": {"lookup_timeout_s": 11}}, "lookup_timeout_s .* exceed read_timeout_s"),
        ({"node": {"worker_silent_s": 6}}, "worker_silent_s .* exceed worker_stop_s"),
        (
            {"node": {"invocation_retry_s_min": 61}},
            "invocation_retry_s_min .* exceed invocation_retry_s_max",
        ),
        ({"node": {"import_retry_s_min": 61}}, "import_retry_s_min .* exceed import_retry_s_max"),
        ({"node": {"restart_s_min": 6}}, "restart_s_min .* exceed restart_s_max"),
        ({"node": {"send_queue_bytes_max": 1 << 20}}, "must have room for a message"),
        ({"node": {"refill_seqnums_max": 1}}, "refill_seqnums_max must be between 2 and"),
        ({"node": {"local_index": "some"}}, "local_index"),
        ({"cluster": {"replicas": 2}}, "replicas is 2 but storage_nodes is 1"),
        ({"cluster": {"record_tags_max": 255}}, "record_tags_max is at most 254"),
        ({"cluster": {"record_bytes_max": 8 << 20}}, "must leave 64 KiB"),
        ({"cluster": {"message_bytes_max": 5 << 20}}, "at least twice"),
        (
            {"node": {"page_bytes_max": 16 << 20}},
            r"^message_bytes_max \(16,777,216\) must be at least 21,\d*,\d*, to carry a page of .*",
        ),
        (
            {"node": {"page_bytes_max": 16 << 20}},
            r"page_bytes_max \(16,777,216\) and the rec.*it.$",
        ),
        ({"node": {"result_bytes_max": 16 << 20}}, "at least .* a result of result_bytes_max"),
        ({"cluster": {"aux_bytes_max": 15 << 20}}, "at least .* with aux data of aux_bytes_max"),
        ({"cluster": {"durability": "maybe"}}, "durability"),
        ({"node": {"segment_bytes": 1 << 20}}, "must be larger than batch_bytes_max"),
    ],
)
def test_a_contradiction_is_one_sentence_that_names_the_field(
    overrides: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config_from(overrides=overrides)


def test_a_page_limit_leaves_room_for_the_batch_that_exceeds_it() -> None:
    room = (16 << 20) - (4 << 20) - 128 * 1024
    assert (
        config_from(overrides={"node": {"page_bytes_max": room}}).node.messages.page_bytes_max
        == room
    )
    with pytest.raises(ConfigError, match="page_bytes_max"):
        config_from(overrides={"node": {"page_bytes_max": room + 1}})


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("INDILOG_NODE_BOGUS", "CONFIGURATION.md lists them"),
        ("INDILOG_NODE_PROT", "did you mean INDILOG_NODE_PORT?"),
    ],
)
def test_an_unknown_setting_from_the_environment_is_named_by_its_variable(
    variable: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=rf"variable {variable} does not name a .*{words}"):
        config_from(environment={variable: "1"})


@pytest.mark.parametrize("variable", ["INDILOG_NODE_WORKERS", "INDILOG_CLUSTER_REPLICAS"])
def test_a_wrong_value_from_the_environment_is_named_by_its_variable(variable: str) -> None:
    with pytest.raises(ConfigError, match=rf"variable {variable} has the value 'two', .*`int`"):
        config_from(environment={variable: "two"})
    with pytest.raises(ConfigError, match=r"^\[node\] does not fit: .*workers"):
        config_from(environment={"INDILOG_NODE_WORKERS": "2"}, overrides={"node": {"workers": "x"}})


def test_a_path_setting_accepts_a_path_object() -> None:
    config = config_from(overrides={"node": {"data_dir": Path("here")}})
    assert config.node.data_dir == Path("here")


def test_a_cache_can_be_disabled() -> None:
    config = config_from(
        overrides={
            "node": {
                "suffix_cuts_max": 0,
                "popularity_entries_max": 0,
                "tag_cache_seqnums_max": 0,
                "tag_cache_seqnums_per_tag_max": 0,
                "record_cache_bytes_max": 0,
            }
        }
    )
    assert config.node.caches.suffix_cuts_max == 0


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration file .*absent\.toml"):
        config_from(tmp_path / "absent.toml")


@pytest.mark.parametrize("content", [b"[node\n", b"\xff\xfe"])
def test_a_malformed_toml_file_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.toml cannot be read"):
        config_from(file)


def test_the_configuration_is_immutable() -> None:
    node = NodeConfig()
    for part in (ClusterConfig(), node, node.journal, Config()):
        (name, *_) = (field.name for field in dataclasses.fields(part))
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, name, 1)


def test_a_file_has_one_table_per_group(tmp_path: Path) -> None:
    file = tmp_path / "indilog.toml"
    file.write_text(
        "[node]\ndata_dir = 'here'\n[node.journal]\nsegment_bytes = 67108864\n"
        "[node.messages]\ntransport = 'zmq'\n"
    )
    node = config_from(file).node
    assert node == node_config(data_dir=Path("here"), segment_bytes=64 << 20, transport="zmq")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            "[node]\nsegment_bytes = 1",
            r"^The setting 'segment_bytes' belongs .* \[node.journal\], not in \[node\]; move it",
        ),
        ("[node.reads]\nport = 1", r"'port' belongs in the table \[node.gateway\], not in "),
        ("[node.journal]\ndata_dir = 'x'", r"'data_dir' belongs in the table \[node\], not in "),
        ("[node.jurnal]\nx = 1", r"Unknown table \[node.jurnal\]; did you mean journal\?"),
        ("[node.journal.deep]\nx = 1", r"Unknown table \[node.journal.deep\]; docs"),
        ("[node.journal]\nsegment_byte = 1", r"'segment_byte' in \[node.journal\]; did you mean"),
        ("[node]\njournal = 1", r"\[node.journal\] must be a table of settings"),
        ("[node.journal]\nsegment_bytes = 'x'", r"\[node\] does not fit: .*journal.segment_bytes"),
        ("node = 1", r"\[node\] must be a table of settings"),
    ],
)
def test_a_file_with_a_setting_in_the_wrong_table_is_refused(
    tmp_path: Path, content: str, sentence: str
) -> None:
    file = tmp_path / "indilog.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        config_from(file)


def test_every_setting_of_a_node_may_be_given_without_its_group() -> None:
    """The environment, the command line and the run record in the metadata store use this form."""
    settings = flat_settings(NodeConfig())
    assert settings.keys() == GROUP_OF.keys()
    assert node_config(**settings) == NodeConfig()
    base = node_config(port=1, workers=3)
    assert node_config(base, port=2) == node_config(port=2, workers=3)
    with pytest.raises(ConfigError, match="There is no setting 'prot'"):
        node_config(prot=1)


def test_the_most_workers_are_those_of_workers_unless_there_is_a_greater_limit() -> None:
    assert node_config(workers=3).functions.most_workers == 3
    assert node_config(workers=0).functions.most_workers == 0
    assert node_config(workers=1, workers_max=4).functions.most_workers == 4
    for workers in (0, 5):
        with pytest.raises(ConfigError, match=f"workers is 1 to workers_max .4., not {workers}"):
            node_config(workers=workers, workers_max=4)


def test_a_limit_of_memory_leaves_room_for_the_worker_itself() -> None:
    assert node_config().functions.worker_memory_bytes_max == 0
    with pytest.raises(ConfigError, match="worker_memory_bytes_max is 0, or at least 134,217,728"):
        node_config(worker_memory_bytes_max=(128 << 20) - 1)
    limit = node_config(worker_memory_bytes_max=128 << 20).functions.worker_memory_bytes_max
    assert limit == 128 << 20


def test_a_cut_interval_is_shorter_than_the_timeout_of_appends() -> None:
    with pytest.raises(ConfigError, match=r"cut_interval_s \(40.0\) must not exceed append"):
        config_from(overrides={"cluster": {"cut_interval_s": 40}})
    config = config_from(overrides={"cluster": {"cut_interval_s": 0.01}})
    assert config.cluster.cut_interval_s == pytest.approx(0.01)
