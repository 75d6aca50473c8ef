"""
Draw a break-even file: the three curves with their crossings, and what reuse is worth, as PNG and SVG.

    python tools/plot_break_even.py break-even.json pictures/break-even

Left: seconds over prompt tokens. Right: how many times sooner the first token comes when a fraction of a document is
loaded from disk, by its length. Needs matplotlib (`pip install kvpool[plot]`).

Does not cover: measuring, the file itself.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from kvpool.core.curves import BreakEven, Curves, parse_break_even, speed_up

#: Cells of the map in each direction.
_CELLS = 40


def draw(found: BreakEven, out: Path) -> list[Path]:
    """
    Draw, and return the files.

    Raises:
        ValueError: The file has no curves (version 1).
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    if found.curves is None:
        raise ValueError("a break-even file of version 1 has no curves to draw")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    _curves(left, found, found.curves)
    _map(figure, right, found.curves)
    figure.suptitle(f"{found.model_name} on {found.gpu_model or 'unknown GPU'}, {found.ssd_model or 'unknown drive'}")
    files = [out.with_suffix(f".{kind}") for kind in ("png", "svg")]
    out.parent.mkdir(parents=True, exist_ok=True)
    for file in files:
        figure.savefig(file, dpi=90)
    pyplot.close(figure)
    return files


def _curves(axes: Any, found: BreakEven, curves: Curves) -> None:
    longest = curves.f.knots[-1][0]
    tokens = np.geomspace(min(64, longest / 2), longest, 200)
    for name, curve in (("recompute", curves.f), ("load from disk", curves.g_ssd), ("load from staging", curves.g_mem)):
        (line,) = axes.plot(tokens, curve.many(tokens), label=name)
        axes.plot(*zip(*curve.knots, strict=True), ".", color=line.get_color())
    for name, at in (("disk", found.ssd_tokens), ("staging", found.mem_tokens)):
        if 0 < at <= longest:
            axes.axvline(at, color="grey", linewidth=0.7, linestyle="--")
            axes.annotate(f"{name} {at}", (at, curves.f.at(at)), fontsize=7)
    axes.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="time to first token, s")
    axes.legend(fontsize=8, frameon=False)


def _map(figure: Any, axes: Any, curves: Curves) -> None:
    longest = curves.f.knots[-1][0]
    lengths = np.geomspace(max(256, longest / 100), longest, _CELLS)
    fractions = np.linspace(0.0, 1.0, _CELLS)
    times = np.array([[speed_up(curves, curves.g_ssd, int(n), float(r)) for n in lengths] for r in fractions])
    mesh = axes.pcolormesh(lengths, fractions, times, shading="nearest")
    if times.min() < 1 < times.max():
        axes.contour(lengths, fractions, times, levels=[1.0], colors="white", linewidths=1)
    axes.set(xscale="log", xlabel="document tokens", ylabel="fraction reused")
    figure.colorbar(mesh, ax=axes, label="times sooner (disk)")


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("break_even", type=Path)
    parser.add_argument("out", type=Path, help="without suffix")
    args = parser.parse_args(arguments)
    for file in draw(parse_break_even(args.break_even.read_text(encoding="utf-8")), args.out):
        print(file)


if __name__ == "__main__":
    main()
