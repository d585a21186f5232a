"""Scenario files: commands to a small cluster of roles, and beside each what the roles did.

A file has comments (`#`) and blocks. A block is a command line, a line `----`, what the command
prints, and an empty line. The methods of `Scenario` are the commands, `COMMANDS` has their forms.
Messages wait in one queue, in the order in which they were sent, until a command delivers or drops
them. Time passes in `wait` only.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from indilog.base.errors import ConfigError
from indilog.base.ids import NodeId, TagHash, log_tag, tag_columns, tag_hash
from indilog.config import Config, NodeConfig
from indilog.kernel.metalog import Floor
from indilog.kernel.view import view_of
from indilog.roles.role import FrameKind, ReportsStatus
from indilog.wire.messages import Direction
from indilog_compute.engine import Engine
from indilog_compute.reads.operation import PENDING
from tests.scenarios.printed_cluster import Letter, Node, PrintedCluster

_SEPARATOR: Final = "----"
_LAYOUT: Final = frozenset(
    {"sequencers", "storage_nodes", "replicas", "index_shards", "index_replicas", "engines"}
)
_DETAILS: Final = ("  →", "  persists", "  reads", "  discards", "  reclaimable")
"""How lines begin that `settle quiet` leaves out, beside deliveries."""


class ScenarioError(Exception):
    """A file that cannot be run: where in it, and why."""


class Command(NamedTuple):
    """A command line."""

    name: str
    words: list[str]
    options: dict[str, str]

    def option(self, key: str, default: str = "") -> str:
        """Take out the value of an option."""
        return self.options.pop(key, default)


class Scenario:
    """Runs one file.

    Args:
        name: of the file, for errors.
        text: of the file.
    """

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._started: PrintedCluster | None = None
        self._waiters: dict[str, int] = {}

    # --- the file

    def run(self) -> str:
        """Return the text of the file with what its commands print now.

        Raises:
            ScenarioError: a command cannot be followed.
        """
        return "\n".join(self._rewrite()).rstrip("\n") + "\n"

    def _rewrite(self) -> Iterator[str]:
        lines = iter(enumerate(self._text.splitlines(), 1))
        for number, line in lines:
            yield line
            if not line or line.startswith("#"):
                continue
            if next(lines, (0, ""))[1] != _SEPARATOR:
                raise ScenarioError(f"{self._name}:{number + 1}: {_SEPARATOR} follows a command")
            yield _SEPARATOR
            yield from self._follow(number, line)
            yield ""
            while next(lines, (0, ""))[1]:
                pass  # what it printed before

    def _follow(self, number: int, line: str) -> list[str]:
        """Return what a command prints."""
        try:
            self._obey(_parse(line))
        except (ValueError, TypeError, ConfigError) as error:
            raise ScenarioError(f"{self._name}:{number}: {error}") from error
        printed, self._cluster.lines = self._cluster.lines, []
        return printed or ["nothing happens"]

    def _obey(self, command: Command) -> None:
        name, words = command.name, len(command.words)
        if (form := COMMANDS.get(name)) is None:
            raise ValueError(f"no command {name}; there are {', '.join(COMMANDS)}")
        if not form.words_min <= words <= form.words_max:
            raise ValueError(f"the form is: {name} {form.form}")
        form.run(self, command)
        if command.options:
            raise ValueError(f"no option {min(command.options)}; the form is: {name} {form.form}")

    # --- commands

    def cluster(self, command: Command) -> None:
        """Start the roles of a view, with other settings than the default ones."""
        down = command.option("down").split(",")
        counts = {key: int(command.option(key)) for key in sorted(_LAYOUT & {*command.options})}
        settings = {key: _parse_value(command.option(key)) for key in list(command.options)}
        view = view_of(**counts)  # type: ignore[arg-type]
        self._started = cluster = PrintedCluster(
            view,
            Config(node=NodeConfig(**settings)),  # type: ignore[arg-type]
        )
        up = [node for name, node in cluster.nodes.items() if name not in down]
        for node in up:
            cluster.start(node)
        delivered = cluster.deliver_all()
        cluster.lines = [f"started {', '.join(node.name for node in up)}"]
        cluster.lines.append(f"{delivered} messages delivered")

    def append(self, command: Command) -> None:
        """Append a record."""
        name, log, *tags, data = command.words
        node, engine = self._engine(name)
        self._name_tags(log, tags)
        columns = tag_columns(log, tuple(tags))
        waiter = self._number_waiter("append")
        self._cluster.call(node, waiter, lambda: engine.append(data.encode(), columns, waiter))

    def read(self, command: Command) -> None:
        """Read the next record with a tag from a seqnum on; `*`: with any tag."""
        self._read(command, Direction.NEXT)

    def read_prev(self, command: Command) -> None:
        """Read the previous record with a tag; `*`: with any tag."""
        self._read(command, Direction.PREV)

    def trim(self, command: Command) -> None:
        """Trim the records with a tag below a seqnum; `*`: all of the log."""
        name, log, tag, until = command.words
        node, engine = self._engine(name)
        (hashed,) = self._name_tags(log, [tag])
        floor = Floor(hashed, int(until), tag == "*", log_tag(log))
        waiter = self._number_waiter("trim")
        self._cluster.call(node, waiter, lambda: engine.trims.start(floor, waiter))

    def deliver(self, command: Command) -> None:
        """Deliver queued messages; `together`: all for one receiver in one turn."""
        letters = self._take(command)
        if _has_flag(command.words, "together"):
            for receiver in dict.fromkeys(letter.to for letter in letters):
                self._cluster.deliver([letter for letter in letters if letter.to == receiver])
            return
        for letter in letters:
            self._cluster.deliver([letter])

    def drop(self, command: Command) -> None:
        """Lose queued messages."""
        for letter in self._take(command):
            self._cluster.lines.append(f"lost: {self._cluster.line_of(letter)}")

    def duplicate(self, command: Command) -> None:
        """Queue messages once more."""
        queue = [*self._cluster.queue]
        copies = self._take(command)
        self._cluster.queue = queue + copies
        for letter in copies:
            self._cluster.lines.append(f"sent twice: {self._cluster.line_of(letter)}")

    def settle(self, command: Command) -> None:
        """Deliver until no message is queued; `quiet`: print outcomes only."""
        cluster = self._cluster
        delivered = cluster.deliver_all()
        if _has_flag(command.words, "quiet"):
            indented = [line for line in cluster.lines if line.startswith("  ")]
            cluster.lines = [line for line in indented if not line.startswith(_DETAILS)]
            cluster.lines.append(f"{delivered} messages delivered")

    def wait(self, command: Command) -> None:
        """Let time pass; messages that are sent meanwhile stay queued."""
        self._cluster.wait(float(command.words[0]))

    def hold(self, command: Command) -> None:
        """From now on only `sync` syncs what a node writes."""
        node = self._node(command)
        node.holding = True
        self._cluster.lines.append(f"{node.name} syncs on demand")

    def sync(self, command: Command) -> None:
        """Sync what a held node has written; messages that waited for it leave."""
        self._cluster.sync(self._node(command))

    def crash(self, command: Command) -> None:
        """End a process; `unsynced=lost`: its machine loses power, too."""
        node = self._node(command)
        if command.option("unsynced", "kept") == "lost":
            self._cluster.lose(node, node.unsynced)
        self._cluster.stop(node)

    def start(self, command: Command) -> None:
        """Start a node that is down from what is on its disk."""
        node = self._node(command)
        if node.role is not None:
            raise ValueError(f"{node.name} is up already")
        self._cluster.start(node)

    def elect(self, command: Command) -> None:
        """Begin a new term with a sequencer as its primary, and notify the nodes that are up, but
        those of `without`.
        """
        self._cluster.elect(self._node(command), command.option("without", "").split(","))

    def wipe(self, command: Command) -> None:
        """End a process and empty its disk."""
        node = self._node(command)
        self._cluster.lines.append(f"frames lost: {len(node.frames)}")
        node.frames, node.wiped = [], True
        self._cluster.stop(node)

    def tear(self, command: Command) -> None:
        """End a process; its last frame is lost, as one whose write was torn."""
        node = self._node(command)
        self._cluster.lose(node, node.frames[-1:])
        self._cluster.stop(node)

    def damage(self, command: Command) -> None:
        """Flip a bit in the newest frame of a kind: its last bit, or one of a tag."""
        kinds = {kind.name: kind for kind in FrameKind}
        if (kind := kinds.get(command.words[1])) is None:
            raise ValueError(f"no frame kind {command.words[1]}; there are {', '.join(kinds)}")
        tags = _has_flag(command.words[2:], "tags")
        self._cluster.damage(self._node(command), kind, tags=tags)

    def show(self, command: Command) -> None:
        """Print figures of a node's status: those named, or all that are not 0."""
        node = self._node(command)
        role: object = node.role
        if not isinstance(role, ReportsStatus):
            raise TypeError(f"{node.name} is down, or reports no status")
        figures = dict(_flatten(role.status()))
        names = command.words[1:] or [name for name, value in figures.items() if value]
        if unknown := [name for name in names if name not in figures]:
            raise ValueError(f"no figure {unknown[0]}; there are {', '.join(figures)}")
        self._cluster.lines.append(", ".join(f"{name} {figures[name]}" for name in names))

    # --- parts of commands

    @property
    def _cluster(self) -> PrintedCluster:
        if self._started is None:
            raise ValueError("the first command is cluster")
        return self._started

    def _read(self, command: Command, direction: Direction) -> None:
        name, log, tag, bound = command.words
        node, engine = self._engine(name)
        (hashed,) = self._name_tags(log, [tag])
        waiter = self._number_waiter("read")

        def call() -> None:
            of_log = log_tag(log)
            answer = engine.read(direction, hashed, int(bound), 0, waiter, log=of_log)
            if answer is not PENDING:
                self._cluster.lines.append(f"  {waiter} {self._cluster.outcome(answer)}")

        self._cluster.call(node, waiter, call)

    def _node(self, command: Command) -> Node:
        nodes = self._cluster.nodes
        if (node := nodes.get(NodeId(command.words[0]))) is None:
            raise ValueError(f"no node {command.words[0]}; there are {', '.join(nodes)}")
        return node

    def _engine(self, name: str) -> tuple[Node, Engine]:
        node = self._cluster.nodes.get(NodeId(name))
        if node is None or not isinstance(node.role, Engine):
            raise ValueError(f"{name} is no engine that is up")
        return node, node.role

    def _name_tags(self, log: str, tags: Sequence[str]) -> list[TagHash]:
        """Return what stands for tags in messages, and have messages show their names."""
        shown = self._cluster.shown.tags
        shown[log_tag(log)] = log
        hashes = [log_tag(log) if tag == "*" else tag_hash(log, tag) for tag in tags]
        for tag, hashed in zip(tags, hashes, strict=True):
            shown.setdefault(hashed, f"{log}:{tag}")
        return hashes

    def _number_waiter(self, operation: str) -> str:
        """Return the name under which the caller of an operation is answered."""
        self._waiters[operation] = self._waiters.get(operation, 0) + 1
        return f"{operation} {self._waiters[operation]}"

    def _take(self, command: Command) -> list[Letter]:
        """Take the messages out of the queue that the options choose."""
        wanted = {key: value for key in ("from", "to", "kind") if (value := command.option(key))}

        def matches(letter: Letter) -> bool:
            kind = type(letter.message).__name__
            found = {"from": letter.sender, "to": letter.to, "kind": kind}
            return all(found[key] == value for key, value in wanted.items())

        queue = self._cluster.queue
        self._cluster.queue = [letter for letter in queue if not matches(letter)]
        taken = [letter for letter in queue if matches(letter)]
        if not taken:
            self._cluster.lines.append("no queued message matches")
        return taken


class _Form(NamedTuple):
    """A command's method, its form, and how many words it takes, at least and at most."""

    run: Callable[[Scenario, Command], None]
    form: str
    words_min: int
    words_max: int


_CHOICE: Final = "[from=NODE] [to=NODE] [kind=MESSAGE]"

COMMANDS: Final[Mapping[str, _Form]] = {
    "cluster": _Form(
        Scenario.cluster, "[sequencers=3 ...] [SETTING=VALUE ...] [down=NODE,...]", 0, 0
    ),
    "append": _Form(Scenario.append, "ENGINE LOG [TAG ...] DATA", 3, 20),
    "read": _Form(Scenario.read, "ENGINE LOG TAG BOUND", 4, 4),
    "read_prev": _Form(Scenario.read_prev, "ENGINE LOG TAG BOUND", 4, 4),
    "trim": _Form(Scenario.trim, "ENGINE LOG TAG UNTIL", 4, 4),
    "deliver": _Form(Scenario.deliver, _CHOICE + " [together]", 0, 1),
    "drop": _Form(Scenario.drop, _CHOICE, 0, 0),
    "duplicate": _Form(Scenario.duplicate, _CHOICE, 0, 0),
    "settle": _Form(Scenario.settle, "[quiet]", 0, 1),
    "wait": _Form(Scenario.wait, "SECONDS", 1, 1),
    "hold": _Form(Scenario.hold, "NODE", 1, 1),
    "sync": _Form(Scenario.sync, "NODE", 1, 1),
    "crash": _Form(Scenario.crash, "NODE [unsynced=lost]", 1, 1),
    "start": _Form(Scenario.start, "NODE", 1, 1),
    "elect": _Form(Scenario.elect, "NODE [without=NODE,...]", 1, 1),
    "wipe": _Form(Scenario.wipe, "NODE", 1, 1),
    "tear": _Form(Scenario.tear, "NODE", 1, 1),
    "damage": _Form(Scenario.damage, "NODE KIND [tags]", 2, 3),
    "show": _Form(Scenario.show, "NODE [FIGURE ...]", 1, 20),
}


def _parse(line: str) -> Command:
    name, *parts = shlex.split(line)
    pairs = [part.partition("=") for part in parts if "=" in part]
    words = [part for part in parts if "=" not in part]
    return Command(name, words, {key: value for key, _, value in pairs})


def _has_flag(words: Sequence[str], flag: str) -> bool:
    """Tell whether an optional word is there.

    Raises:
        ValueError: another word is.
    """
    if unknown := [word for word in words if word != flag]:
        raise ValueError(f"no word {unknown[0]} here; there is {flag}")
    return bool(words)


def _parse_value(text: str) -> int | float | str:
    """Return a setting's value: a number if it is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _flatten(figures: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield figures with dotted names."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
