"""Makes the metadata of a new platform whose journals another program writes (decision 0045)."""

from __future__ import annotations

import uvloop

from indilog.base.ids import Epoch
from indilog.config import Config
from indilog.kernel.view import View
from indilog.runtime.cluster.cluster_state import EPOCH_KEY, Arrangement, claim_arrangement
from indilog.runtime.cluster.layout import view_in
from indilog.runtime.cluster.metadata_opening import opened_metadata


def make_metadata(config: Config, arrangement: Arrangement, epoch: Epoch) -> View:
    """Write the metadata file of a new data directory; return the view of its platform.

    Every epoch that the platform takes is greater than `epoch`.

    Raises:
        DataDirectoryError: the directory cannot be used.
    """

    async def made() -> View:
        async with opened_metadata(config.node) as metadata:
            await claim_arrangement(metadata.store, arrangement)
            metadata.file.raise_sequence(EPOCH_KEY, epoch)
            return await view_in(metadata.store, config, arrangement)

    return uvloop.run(made())
