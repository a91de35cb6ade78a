from __future__ import annotations

from saltern.bench import scale
from saltern.bench.scale import SCALES, Scale, ScaleReport


def test_a_node_of_a_scale_is_filled_and_measured_with_and_without_room() -> None:
    """What is measured is required to succeed: nothing is refused, and no get misses."""
    with scale._rig(Scale("small", 3 * scale.TURN_KEYS, 3)) as rig:
        assert len(rig.present) == scale.TURN_KEYS
        scale._room_turn(rig, keep=False)
        assert rig.rates == {}
        scale._room_turn(rig, keep=True)
        scale._put(rig.client, scale.new_keys(scale.SPARE_ENTRIES))
        scale._full_turn(rig, keep=True)
    assert set(rig.rates) == {"put", "exists", "get", "delete", "put, pool full"}
    assert rig.uses["put"].moved_bytes == scale.TURN_KEYS  # entries, not bytes: of those the CPU is told for each


def test_ratios_are_taken_within_turns() -> None:
    base, other = SCALES[0].name, SCALES[1].name
    report = ScaleReport(
        3, {base: {"get": [10, 20, 30]}, other: {"get": [9, 10, 30]}}, {base: {"get": 1}, other: {"get": 2}}
    )
    assert report.ratio(other, "get") == 0.9
    [(headings, rows)] = report.tables()
    assert len(headings) == len(rows[0])
    assert [row[4] for row in rows] == ["", "met"]
    assert report.as_json()["scales"][1]["node_cpu_us_per_entry"] == 2
