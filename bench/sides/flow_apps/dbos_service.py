"""DBOS's side of `bench.flow_peers`: workflows behind FastAPI and uvicorn.

python dbos_service.py PORT DATABASE-URL
"""

from __future__ import annotations

import sys

import sqlalchemy as sa
import uvicorn
from dbos import DBOS, DBOSConfig, SQLAlchemyDatasource
from fastapi import Body, FastAPI

STEPS = 5
URL = sys.argv[2]

app = FastAPI()
DBOS(config=DBOSConfig(name="bench", system_database_url=URL, log_level="ERROR"))
source = SQLAlchemyDatasource.create(URL)


@DBOS.step()
def step(number: int) -> int:
    """Do what a step does: nothing, but its result is kept."""
    return number + 1


@DBOS.workflow()
def nothing(number: int) -> int:
    """Do nothing."""
    return number


@DBOS.workflow()
def five_steps(number: int) -> int:
    """Run the steps one after the other."""
    for _ in range(STEPS):
        number = step(number)
    return number


@source.transaction()
def added(name: str, number: int) -> int:
    """Add to a counter; return what it was before."""
    upsert = sa.text(
        "INSERT INTO counters (name, value) VALUES (:name, :number) "
        "ON CONFLICT (name) DO UPDATE SET value = counters.value + :number RETURNING value"
    )
    session = source.sql_session()
    return int(session.execute(upsert, {"name": name, "number": number}).scalar_one()) - number


@DBOS.workflow()
def counted(name: str, number: int) -> int:
    """Add to a counter in a transaction that is a step."""
    return added(name, number)


@app.post("/noop")
def post_noop(number: int = Body()) -> int:
    """Run a durable function that does nothing."""
    return nothing(number)


@app.post("/workflow")
def post_workflow(number: int = Body()) -> int:
    """Run the workflow."""
    return five_steps(number)


@app.post("/counter/{name}")
def post_counter(name: str, number: int = Body()) -> int:
    """Add to the counter of that name."""
    return counted(name, number)


@app.post("/queue")
def post_queue(number: int = Body()) -> int:
    """Put a call into the queue, and wait for its result."""
    return int(app.state.queue.enqueue(nothing, number).get_result())


if __name__ == "__main__":
    with source.engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE counters (name TEXT PRIMARY KEY, value BIGINT)"))
    DBOS.launch()
    app.state.queue = DBOS.register_queue("mail")
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error", access_log=False)
    DBOS.destroy()
