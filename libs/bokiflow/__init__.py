"""BokiFlow: workflows whose steps are decided once, and fenced locks, on a shared log (thesis
2.3.3).

The library awaits nothing but the public `indilog.log.Log` interface.
"""
