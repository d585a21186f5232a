"""The commands `indilog log`: create, switch, list, append, read, range, tail, trim, retention.

They send requests below `/logs` to a `Gateway`. `indilog.cli.follow` prints records as they arrive.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from indilog.base.ids import MAX_SEQNUM
from indilog.cli import show
from indilog.cli.follow import follow as follow_stream
from indilog.cli.gateway import DEFAULT, Gateway, Url, explain_mistakes, stop
from indilog.cli.quantities import age_s_of, duration_text, size_bytes_of
from indilog.cli.since import seconds_of

logs = typer.Typer(help="Append to logs, read and trim them.", no_args_is_help=True)

LogName = Annotated[str, typer.Argument(help="The log's name.", metavar="LOG")]
TagOption = Annotated[str | None, typer.Option("--tag", help="Only records with this text tag.")]
TagIntOption = Annotated[
    int | None, typer.Option("--tag-int", help="Only records with this integer tag.")
]
BoundOption = Annotated[
    int | None,
    typer.Option(min=0, max=MAX_SEQNUM, help="First seqnum; default: the first record left."),
]
FollowOption = Annotated[
    bool, typer.Option("--follow", "-f", help="Then print new records as they arrive.")
]
LimitOption = Annotated[
    int, typer.Option(min=1, max=10_000, help="Print at most this many records.")
]
SinceOption = Annotated[
    str | None,
    typer.Option("--since", help="Only records ordered since then: an age (10m, 2d) or a time."),
]
Stripes = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Spread new records over so many chains (order-first) or folders (object-store).",
    ),
]
OrderedOption = Annotated[
    bool,
    typer.Option("--ordered", help="Show the time of the log instead of the writer's."),
]
FreshOption = Annotated[
    bool, typer.Option("--fresh", help="Read all records that any client appended before.")
]


def _path(log: str, rest: str) -> str:
    from indilog.base.log import check_log_name

    with explain_mistakes():
        check_log_name(log)
    name = quote(log, safe="").replace(".", "%2E")  # otherwise "." and ".." are path segments
    return f"/logs/{name}/{rest}"


@logs.command()
def create(
    log: LogName,
    *,
    kind: Annotated[
        str, typer.Option(help="shared, object-store, order-first or owned.")
    ] = "shared",
    stripes: Stripes = None,
    url: Url = DEFAULT,
) -> None:
    """Create a log of a kind. A log that was not created is of kind shared."""
    from indilog.base.log import check_log_name
    from indilog.base.log_kinds import kind_and_stripes

    with explain_mistakes():
        body = {"log": check_log_name(log), **kind_and_stripes(kind, stripes)}
    _show_kind(Gateway(url).post("/logs", json=body))


@logs.command()
def switch(
    log: LogName,
    *,
    kind: Annotated[str, typer.Option(help="shared, object-store, order-first or owned.")],
    stripes: Stripes = None,
    url: Url = DEFAULT,
) -> None:
    """Continue a log as one of another kind, or with other stripes, while it is used."""
    from indilog.base.log_kinds import kind_and_stripes

    with explain_mistakes():
        body = kind_and_stripes(kind, stripes)
    gateway = Gateway(url)
    created = {info["log"] for info in gateway.get("/logs")["logs"]}
    if log not in created and not gateway.had_records(_path(log, "records")):
        stop(
            f"There is no log {log}: it has no records. To create it, run "
            f"`indilog log create {shlex.quote(log)} --kind {kind}`."
        )
    _show_kind(gateway.post(_path(log, "switch"), json=body))


def _show_kind(info: Mapping[str, Any]) -> None:
    count = info.get("stripes")  # a platform of an earlier version does not say
    stripes = f", with {count} stripes" if count else ""
    show.line(f"The log {info['log']} is of kind {info['kind']}{stripes}.")


@logs.command("list")
def list_(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    url: Url = DEFAULT,
) -> None:
    """Print the created logs and their kinds."""
    for info in Gateway(url).get("/logs")["logs"]:
        if as_json:
            show.line(json.dumps(info))
        else:
            created = datetime.fromtimestamp(info["created_at"], tz=UTC)
            show.line(f"{info['log']}  {info['kind']}  {created:%Y-%m-%d %H:%M:%S}Z")


@logs.command()
def append(
    log: LogName,
    data: Annotated[str | None, typer.Argument(help="Text; - reads standard input.")] = None,
    *,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="A tag; may be repeated.")] = None,
    file: Annotated[Path | None, typer.Option(help="Append the content of a file.")] = None,
    url: Url = DEFAULT,
) -> None:
    """Append a record, and print its seqnum when it is durable."""
    if (data is None) == (file is None):
        stop("Give either the record's data or --file.")
    content = _content(data, file)
    headers = {"content-type": "application/octet-stream"}
    query = "?" + "&".join(f"tag={quote(t, safe='')}" for t in tag) if tag else ""
    answer = Gateway(url).post(_path(log, "records") + query, content=content, headers=headers)
    show.line(str(answer["seqnum"]))


def _content(data: str | None, file: Path | None) -> bytes:
    if file is not None:
        try:
            return file.read_bytes()
        except OSError as error:
            stop(f"{file} cannot be read: {error.strerror}.")
    return sys.stdin.buffer.read() if data == "-" else (data or "").encode()


@logs.command()
def read(
    log: LogName,
    *,
    tag: TagOption = None,
    tag_int: TagIntOption = None,
    bound: BoundOption = None,
    since: SinceOption = None,
    limit: LimitOption = 10,
    last: Annotated[
        bool,
        typer.Option(
            "--last", help="The last records up to --bound, newest first (with --follow: oldest)."
        ),
    ] = False,
    follow: FollowOption = False,
    fresh: FreshOption = False,
    ordered: OrderedOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    url: Url = DEFAULT,
) -> None:
    """Print the first records from --bound on (or the last ones)."""
    gateway = Gateway(url)
    if since is not None and last:
        stop("Give --since or --last, not both.")
    at = _time(gateway, log, since) if since is not None else None
    if follow and not last:
        _follow(gateway, log, tag, tag_int, bound, since=at, as_json=as_json, time=_shown(ordered))
        return
    # A read backwards does not skip lost records; its error says how to continue.
    ask = gateway.get if last else gateway.get_records
    answer = ask(
        _path(log, "records"),
        tag=tag,
        tag_int=tag_int,
        bound=bound,
        since=at,
        limit=limit,
        direction="prev" if last else "next",
        fresh=fresh,
    )
    if answer.get("more") and len(answer["records"]) < limit:
        sys.stderr.write(
            f"warning: the page ended early because records are large; continue with "
            f"--bound {answer['next_bound']}.\n"
        )
    if not follow:
        show.records(answer["records"], as_json=as_json, time=_shown(ordered))
        if not answer["records"]:
            _say_empty(log, tag, tag_int, is_restricted=bound is not None or at is not None)
        return
    records = answer["records"][::-1]
    show.records(records, as_json=as_json, time=_shown(ordered))
    # If no record was read, all later ones come after the start, so none is missed.
    behind = records[-1]["seqnum"] + 1 if records else None
    _follow(gateway, log, tag, tag_int, behind, as_json=as_json, time=_shown(ordered))


@logs.command("range")
def range_(
    log: LogName,
    *,
    tag: TagOption = None,
    tag_int: TagIntOption = None,
    bound: BoundOption = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Print at most this many records.")
    ] = None,
    ordered: OrderedOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    url: Url = DEFAULT,
) -> None:
    """Print every record from --bound on, page by page."""
    gateway = Gateway(url)
    start, left = bound, limit
    while left is None or left > 0:
        page = gateway.get_records(
            _path(log, "records"),
            tag=tag,
            tag_int=tag_int,
            bound=start,
            limit=1000 if left is None else min(left, 1000),
        )
        if not page["records"]:
            if start == bound:
                _say_empty(log, tag, tag_int, is_restricted=bound is not None)
            return
        show.records(page["records"], as_json=as_json, time=_shown(ordered))
        start = page["next_bound"]
        left = None if left is None else left - len(page["records"])


@logs.command()
def tail(
    log: LogName,
    *,
    tag: TagOption = None,
    tag_int: TagIntOption = None,
    follow: FollowOption = False,
    ordered: OrderedOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    url: Url = DEFAULT,
) -> None:
    """Print the first seqnum not yet written; with --follow, records from there on."""
    gateway = Gateway(url)
    seqnum = gateway.get_with("tail", _path(log, "tail"))["tail"]
    if follow:
        _follow(gateway, log, tag, tag_int, seqnum, as_json=as_json, time=_shown(ordered))
    else:
        show.line(str(seqnum))


def _say_empty(log: str, tag: str | None, tag_int: int | None, *, is_restricted: bool) -> None:
    """Say on standard error that nothing was found: the name may be misspelt, because every log
    exists.
    """
    named = tag if tag_int is None else tag_int
    tagged = "" if named is None else f" with tag {named!r}"
    there = " there" if is_restricted else ""
    sys.stderr.write(f"Log {log!r} has no records{tagged}{there}.\n")


def _shown(ordered: bool) -> str:  # noqa: FBT001 - as the command line gives it
    """Return the name of the time of records to print."""
    return "ordered_at" if ordered else "time"


def _time(gateway: Gateway, log: str, since: str) -> str:
    """Return the time of `--since` in the gateway's form.

    A duration is counted back from the log's own time, because `--since` compares with
    `ordered_at`.
    """
    with explain_mistakes():
        seconds = seconds_of(since, lambda: float(gateway.get(_path(log, "now"))["time"]))
    return datetime.fromtimestamp(seconds, tz=UTC).isoformat()


@logs.command()
def trim(
    log: LogName,
    *,
    until: Annotated[int, typer.Option(min=0, max=MAX_SEQNUM, help="The first seqnum that stays.")],
    tag: Annotated[
        str | None, typer.Option("--tag", help="Trim only this text tag's sub-stream.")
    ] = None,
    tag_int: Annotated[
        int | None, typer.Option("--tag-int", help="Trim only this integer tag's sub-stream.")
    ] = None,
    url: Url = DEFAULT,
) -> None:
    """Delete the records below --until permanently, of the whole log or of one tag."""
    body = {"until": until, "tag": tag, "tag_int": tag_int}
    reply = Gateway(url).post(_path(log, "trim"), json=body)
    show.line(f"{log} is trimmed below seqnum {reply['until']}.")


@logs.command()
def retention(
    log: LogName,
    *,
    age: Annotated[
        str | None, typer.Option(help="Keep records ordered within this time: 7d, 1d12h.")
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="Keep the newest records of this size: 10GiB, 500MB.")
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="Keep everything.")] = False,
    url: Url = DEFAULT,
) -> None:
    """Print or set a log's retention policy; --age and --size together replace it."""
    given = age is not None or size is not None
    if given and off:
        stop("Give --off, or --age and --size, not both.")
    with explain_mistakes():
        policy = {
            "age_s": age_s_of(age) if age is not None else None,
            "size_bytes": size_bytes_of(size) if size is not None else None,
        }
    path = _path(log, "retention")
    gateway = Gateway(url)
    reply = gateway.put(path, json=policy) if given or off else gateway.get(path)
    kept = []
    if reply["age_s"] is not None:
        kept.append(f"records of the last {duration_text(reply['age_s'])}")
    if reply["size_bytes"] is not None:
        kept.append(f"{'at most ' if kept else ''}the newest {reply['size_bytes']:,} bytes")
    show.line(f"The log {log} keeps {', '.join(kept) if kept else 'all records'}.")


def _follow(
    gateway: Gateway,
    log: str,
    tag: str | None,
    tag_int: int | None,
    bound: int | None,
    *,
    as_json: bool,
    time: str,
    since: str | None = None,
) -> None:
    def shown(record: dict[str, Any]) -> None:
        show.records([record], as_json=as_json, time=time)

    path = _path(log, "stream")
    follow_stream(gateway, path, bound, shown, tag=tag, tag_int=tag_int, since=since)
