"""Claims about what deployed code sees of the environment."""

from __future__ import annotations

from indilog.config import node_config
from indilog_compute.workers.starting.environment import environment_of_worker


def test_a_worker_gets_needed_and_configured_variables_only() -> None:
    given = {
        "PATH": "/bin",
        "LC_ALL": "C",
        "INDILOG_TOKEN": "secret",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "STRIPE_KEY": "sk",
        "STRIPE_KEY_2": "secret",
    }
    passed = node_config(worker_environment=" STRIPE_KEY ,, ABSENT").functions.environment_passed
    assert passed == ("STRIPE_KEY", "ABSENT")
    found = environment_of_worker(passed, given)
    python = {"PYTHONPATH", "PYTHONUNBUFFERED"}
    assert found.keys() - python == {"PATH", "LC_ALL", "STRIPE_KEY"}
    assert "secret" not in found.values()
