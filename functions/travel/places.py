"""Distances on the earth, and the hotels nearest to a place."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from typing import Final, TypeAlias

Place: TypeAlias = tuple[float, float]
"""Latitude and longitude, in degrees."""

NEAREST_MAX: Final = 5
NEAR_KM: Final = 10.0
_EARTH_KM: Final = 6371.0


def distance_km(one: Place, other: Place) -> float:
    """Return the great-circle distance between two places (the haversine formula)."""
    lat, other_lat = math.radians(one[0]), math.radians(other[0])
    half_lat = (other_lat - lat) / 2
    half_lon = math.radians(other[1] - one[1]) / 2
    chord = math.sin(half_lat) ** 2 + math.cos(lat) * math.cos(other_lat) * math.sin(half_lon) ** 2
    return 2 * _EARTH_KM * math.asin(math.sqrt(min(1.0, chord)))


def nearest(hotels: Mapping[str, Place], place: Place) -> list[str]:
    """Return at most five hotels within ten kilometres, nearest first."""
    away = ((distance_km(at, place), hotel) for hotel, at in hotels.items())
    near = ((km, hotel) for km, hotel in away if km <= NEAR_KM)
    return [hotel for _, hotel in heapq.nsmallest(NEAREST_MAX, near)]
