"""When applications that did not load are imported again: turns at growing distances."""

from __future__ import annotations

from indilog_compute.deployments import Deployment
from indilog_compute.workers.call import DeployedApp
from indilog_compute.workers.retries import Retries


def deployed(number: int) -> DeployedApp:
    record = Deployment(name=f"app{number}", version=1, owner="me", sources={}, functions=())
    return DeployedApp(number, record, 0)


def test_pauses_double_up_to_the_longest() -> None:
    retries, app, now = Retries(pause_s_min=1.0, pause_s_max=5.0), deployed(1), 100.0
    pauses = []
    for _ in range(5):
        retries.schedule(app, now)
        at = retries.next_at
        assert at is not None
        assert retries.pop_due(at - 0.1) is None
        assert retries.pop_due(at) is app
        pauses.append(at - now)
        now = at
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_failure_before_its_due_time_changes_nothing() -> None:
    """Two workers that fail at once are one failure."""
    retries, app = Retries(pause_s_min=1.0, pause_s_max=5.0), deployed(1)
    retries.schedule(app, 0.0)
    retries.schedule(app, 0.9)
    assert retries.next_at == 1.0
    assert retries.pop_due(1.0) is app
    assert retries.next_at is None


def test_the_application_due_first_is_retried_first() -> None:
    retries, apps = Retries(pause_s_min=1.0, pause_s_max=5.0), [deployed(n) for n in range(2)]
    retries.schedule(apps[1], 0.0)
    retries.schedule(apps[0], 0.5)
    assert [retries.pop_due(9.0) for _ in range(3)] == [apps[1], apps[0], None]


def test_an_application_that_loads_is_not_retried_and_its_pause_is_reset() -> None:
    retries, app = Retries(pause_s_min=1.0, pause_s_max=5.0), deployed(1)
    for now in (0.0, 10.0):
        retries.schedule(app, now)
        retries.pop_due(now + 5.0)
    retries.schedule(app, 20.0)
    retries.withdraw(app)
    assert (retries.next_at, retries.pop_due(99.0)) == (None, None)
    retries.schedule(app, 100.0)
    assert retries.next_at == 101.0
