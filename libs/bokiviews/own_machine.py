"""Objects of a program's own state machines.

`Views.machine` returns a `Machine`, whose state is the program's `StateMachine`.
"""

from __future__ import annotations

from typing import Generic

from bokiviews.errors import ViewsError
from bokiviews.objects import Joined, MachineT, Part, ViewObject


class MachinePart(Part[MachineT], Generic[MachineT]):
    """A state machine within a transaction. The transaction's commands take effect at the commit,
    so read the state before you submit a command.
    """

    def __init__(self, obj: ViewObject[MachineT, object, object], txn: Joined) -> None:
        super().__init__(obj, txn)
        self._is_written = False

    @property
    def state(self) -> MachineT:
        """The state of this process itself, not a copy. After this read, the end of the block
        conflicts with every concurrent command of the machine, also if the transaction has no
        commands.

        Raises:
            ViewsError: the transaction has submitted a command, which the state would not show.
        """
        if self._is_written:
            raise ViewsError(
                f"The transaction has changed {self._object.name!r}, and its state does not show "
                "that yet; read it before the first submit()."
            )
        self._txn.note_live_state()
        return self._read_all()

    def submit(self, command: object) -> None:
        """Add a command to the transaction."""
        self._write(command)
        self._is_written = True


class Machine(ViewObject[MachineT, MachineT, MachinePart[MachineT]]):
    """A replicated state machine.

    `view` is the state of this process itself, not a copy: read it, do not change it.
    """

    @property
    def view(self) -> MachineT:
        """See `ViewObject.view`."""
        return self.current()

    def join(self, txn: Joined) -> MachinePart[MachineT]:
        """See `ViewObject.join`."""
        return MachinePart(self, txn)

    async def submit(self, command: object) -> object:
        """Append a command; return the result of `StateMachine.apply`.

        Raises:
            InvalidValueError: it is no command of the machine; nothing was appended.
            AppendOutcomeUnknownError: the command may or may not take effect.
        """
        result: object = await self._submit(command)
        return result
