"""Logs over write-once cells, such as objects of an object store (decisions 0076 and 0077).

A *cell* is a place that can be written once. The cells of a log are numbered from 0, and their
order is the order of the log.

| module | task |
|---|---|
| `content`, `index`, `state` | what is in a cell, and what follows from all cells in order |
| `core`, `core_events` | appends to cells, and catches up with other writers, without I/O |
| `sequencer` | gives the numbers of cells |
| `driver` | runs a core: requests, timers, caches |
| `log`, `lookups` | the `Log` interface over a driver |
| `cells` | the interface of the cells' storage |
| `object_cells`, `object_store` | cells of a log of kind `object-store` |
| `chain_cells` | cells of a log of kind `order-first`, on storage nodes |
| `owned_cells` | cells of a log of kind `owned`, on storage nodes |
| `layout_changes`, `chain_upkeep`, `owned_upkeep` | replace lost storage nodes of a log |
| `opening` | puts these together with the settings of a platform |
"""
