"""Runs the nemesis: `python -m tests.cluster --minutes 10 --seed 1` (`tests/nemesis`)."""

from __future__ import annotations

import sys

from tests.nemesis.command import main

sys.exit(main())
