"""
Make a break-even file of measured samples.

    python tools/emit_break_even.py samples.jsonl break-even.json [--kv-dtype bfloat16] [--margin-tokens 256]

The curves go through the medians, made monotone; their floor is the shortest recomputed prompt, or where the first two
would meet 0 tokens if that is less. The thresholds are the lengths from which on loading is never slower.

Does not cover: measuring (`pareto_measure.py`), drawing (`plot_break_even.py`).
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvpool.core.curves import BreakEven, Curve, Curves, break_even_tokens, emit_break_even
from tools.pareto_samples import Samples, pooled, spread


def curve_of(samples: Samples, medium: str, floor: float | None = None) -> Curve:
    """
    Return the curve through one medium's medians.

    Raises:
        ValueError: There are no samples of it.
    """
    medians = [
        (tokens, statistics.median(samples.seconds(medium, tokens))) for tokens in samples.lengths(medium) if tokens > 0
    ]
    if not medians:
        raise ValueError(f"{samples.path} has no samples of {medium}: measure it too")
    knots = pooled(medians)
    first_tokens, first_s = knots[0]
    if floor is None:
        floor = first_s
        if len(knots) > 1:
            slope = (knots[1][1] - first_s) / (knots[1][0] - first_tokens)
            floor = max(0.0, first_s - slope * first_tokens)
    return Curve(min(floor, first_s), knots, name=medium)


def break_even_of(samples: Samples, *, kv_dtype: str, margin_tokens: int, kv_bytes_per_token: float) -> BreakEven:
    """Return what goes into the file. Raises ValueError where a medium was not measured."""
    f = curve_of(samples, "recompute")
    g_ssd, g_mem = (curve_of(samples, medium, f.floor) for medium in ("disk", "staging"))
    about = samples.about
    counts = {
        medium: {
            str(tokens): {
                "samples": len(samples.seconds(medium, tokens)),
                "spread": round(min(spread(samples.seconds(medium, tokens)), 99.0), 4),
            }
            for tokens in samples.lengths(medium)
        }
        for medium in ("recompute", "disk", "staging")
    }
    date = samples.path.with_suffix(".date")
    return BreakEven(
        model_name=about["model"],
        kv_dtype=kv_dtype,
        ssd_tokens=break_even_tokens(f, g_ssd),
        mem_tokens=break_even_tokens(f, g_mem),
        margin_tokens=margin_tokens,
        curves=Curves(f, g_ssd, g_mem),
        gpu_model=about["gpu"],
        ssd_model=about["drive"],
        kv_bytes_per_token=kv_bytes_per_token,
        provenance={
            "versions": about["versions"],
            "date": date.read_text(encoding="utf-8") if date.exists() else "",
            "engine": about["engine"],
            "counts": counts,
        },
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kv-dtype", default="")
    parser.add_argument("--margin-tokens", type=int, default=0)
    parser.add_argument("--kv-bytes-per-token", type=float, default=0.0)
    args = parser.parse_args(arguments)
    found = break_even_of(
        Samples.read(args.samples),
        kv_dtype=args.kv_dtype,
        margin_tokens=args.margin_tokens,
        kv_bytes_per_token=args.kv_bytes_per_token,
    )
    args.out.write_text(emit_break_even(found), encoding="utf-8")
    print(f"loading pays off from {found.ssd_tokens} tokens (disk), {found.mem_tokens} (staging) on")


if __name__ == "__main__":
    main()
