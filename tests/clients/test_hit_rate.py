from __future__ import annotations

import pytest

from saltern.hit_rate import wanted_blocks


@pytest.mark.parametrize(
    ("hits", "misses", "stored", "refused", "wanted"),
    [
        (0, 0, 0, 0, 0),
        (60, 40, 0, 0, 100),  # reads only
        (60, 40, 40, 0, 100),  # reads, and stores what was missing: the same blocks
        (60, 40, 30, 10, 100),  # ... some of it refused
        (60, 0, 40, 0, 100),  # looks first, reads what is there, stores the rest: vLLM's connector
        (60, 0, 0, 40, 100),  # ... at its quota
        (0.5, 0.0, 0.25, 0.25, 1.0),  # rates of each
    ],
)
def test_a_block_is_wanted_once_however_its_absence_is_seen(
    hits: float, misses: float, stored: float, refused: float, wanted: float
) -> None:
    assert wanted_blocks(hits=hits, misses=misses, stored=stored, refused=refused) == wanted
