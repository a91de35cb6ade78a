from __future__ import annotations

from dataplane.gate_cost import gate_cost


def test_the_gate_is_measured_with_a_token_that_it_admits() -> None:
    cost = gate_cost()
    assert set(cost) == {"token_verify_us", "gate_check_ns"}
    assert all(figure > 0 for figure in cost.values())
