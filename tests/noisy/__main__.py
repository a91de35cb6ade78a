"""``python -m tests.noisy``: what a flooding neighbour does to a tenant's hit rate and latency, with real bytes."""

from __future__ import annotations

import argparse
import sys

import msgspec

from tests.noisy.run import ALONE, KINDS, Report, measure
from tests.noisy.setting import Pins, choose_pins

#: Targets: hit rate beside the flood of the one alone at entitlement, and p99.
HIT_RATE_RATIO_MIN, P99_RATIO_MAX = 0.99, 1.5


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.noisy", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="of each kind (default 6)")
    parser.add_argument("--round-s", type=float, default=5.0, help="seconds of each round (default 5)")
    parser.add_argument("--transport", choices=("tcp", "shm"), default="tcp")
    parser.add_argument("--flat-out", action="store_true", help="the flooder goes as fast as it can, not at 4x")
    parser.add_argument("--no-pins", action="store_true", help="let the kernel place all processes")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, progress on standard error")
    arguments = parser.parse_args()
    report = measure(
        rounds=arguments.rounds,
        round_s=arguments.round_s,
        transport=arguments.transport,
        pins=Pins([], [], []) if arguments.no_pins else choose_pins(),
        flat_out=arguments.flat_out,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(msgspec.json.format(msgspec.json.encode(report)).decode() if arguments.json else table(report))
    return 0


def table(report: Report) -> str:
    """The report for people."""
    pins = report.pins
    told = [
        f"{report.transport}, {report.rounds} rounds of {report.round_s:g} s of each kind; "
        f"CPUs: node {pins.node or 'any'}, victim {pins.victim or 'any'}, flooder {pins.flooder or 'any'}",
        f"the flood: {report.flood_bytes_per_s / 1e6:.0f} MB/s, {report.flood_times_the_rate:.1f}x the victim's rate, "
        f"{report.flood_stored} blocks stored, {report.flood_refused} not; its client took {report.flood_cpu:.2f} CPUs",
        "",
        f"{'':<18}{'hit rate':>9}{'lookup p50':>12}{'p99':>8}{'get p50':>10}{'p99 ms':>8}{'late':>6}{'node CPU':>10}",
    ]
    for kind in KINDS:
        figures = report.kinds[kind]
        told.append(
            f"{kind:<18}{figures.hit_rate:>9.4f}{figures.lookup_p50_ms:>12.2f}{figures.lookup_p99_ms:>8.2f}"
            f"{figures.get_p50_ms:>10.2f}{figures.get_p99_ms:>8.2f}{figures.late:>6}{figures.node_cpu:>10.2f}"
        )
    for name, ratios in report.ratios.items():
        told.append(f"{name:<36}" + "  ".join(f"{what} {ratio:.2f}x" for what, ratio in ratios.items()))
    wrong = sum(figures.wrong for figures in report.kinds.values())
    held = report.hit_rate_ratio >= HIT_RATE_RATIO_MIN
    beside = report.ratios[f"{KINDS[1]} / {ALONE}"]
    fast = max(beside["get p99"], beside["lookup p99"]) <= P99_RATIO_MAX
    told += [
        "",
        f"hit rate beside / alone {report.hit_rate_ratio:.4f} (target {HIT_RATE_RATIO_MIN}): {_verdict(held)}; "
        f"p99 beside / alone (target {P99_RATIO_MAX}): {_verdict(fast)}; wrong bytes: {wrong}",
    ]
    return "\n".join(told)


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "NOT met"


if __name__ == "__main__":
    sys.exit(main())
