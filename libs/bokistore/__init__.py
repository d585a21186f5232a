"""BokiStore: named JSON objects and serializable transactions on a shared log (thesis 2.3.3).

Start with `Store`; `docs/libs/bokistore.md` is the guide. The library awaits only the public
`indilog.Log` interface. Applications use it, BokiFlow for transactions of workflows, and
`indilog_pipeline.analytics` to replay objects.
"""

from bokistore.automatic import collect_automatically
from bokistore.cache import ViewCache
from bokistore.collection import CollectionStatus
from bokistore.errors import (
    AlreadyCommittedError,
    InvalidObjectError,
    MismatchError,
    ObjectTooLargeError,
    ObjectTypeError,
    StoreError,
    StoreVersionError,
)
from bokistore.objects import Obj, TxnObject
from bokistore.replica import Replica
from bokistore.snapshot import Snapshot, Version
from bokistore.store import Store
from bokistore.transaction import Transaction
from indilog import ConflictError

__all__ = [
    "AlreadyCommittedError",
    "CollectionStatus",
    "ConflictError",
    "InvalidObjectError",
    "MismatchError",
    "Obj",
    "ObjectTooLargeError",
    "ObjectTypeError",
    "Replica",
    "Snapshot",
    "Store",
    "StoreError",
    "StoreVersionError",
    "Transaction",
    "TxnObject",
    "Version",
    "ViewCache",
    "collect_automatically",
]
