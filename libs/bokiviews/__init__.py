"""BokiViews: objects over a log with views in memory (Tango; CORFU section 4.4).

Start with `Views`; `docs/libs/bokiviews.md` is the guide. The library awaits only the public
`indilog.Log` interface. Applications use it; no other library does.
"""

from bokiviews.counters import Counter
from bokiviews.errors import (
    InvalidValueError,
    MachineFailedError,
    NotHostedError,
    ValueTypeError,
    ViewKindError,
    ViewsError,
    ViewsVersionError,
)
from bokiviews.lists import List
from bokiviews.machine import At, StateMachine
from bokiviews.maps import Map
from bokiviews.own_machine import Machine
from bokiviews.sets import Set
from bokiviews.transaction import Transaction
from bokiviews.views import Views
from indilog import ConflictError

__all__ = [
    "At",
    "ConflictError",
    "Counter",
    "InvalidValueError",
    "List",
    "Machine",
    "MachineFailedError",
    "Map",
    "NotHostedError",
    "Set",
    "StateMachine",
    "Transaction",
    "ValueTypeError",
    "ViewKindError",
    "Views",
    "ViewsError",
    "ViewsVersionError",
]
