"""
What an engine's connector configuration says about deciding by cost.

These settings belong to one engine, not to the pool: another engine of the same pool may serve another model on another
GPU. So they stand in `kv_connector_extra_config` also where `kvpool_config` names a TOML file for everything else.

Does not cover: reading the break-even file (`client/break_even.py`), deciding (`core/planner.py`, `core/gate.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpool.config import wrong

#: What errors call the place of these keys.
SOURCE = "kv_connector_extra_config"
MODES = ("auto", "on", "off")
KEYS = (
    "prefix_cache_break_even_path",
    "load_planner",
    "load_planner_defer_tolerance",
    "load_planner_defer_deadline_max_s",
)
TOLERANCE_MAX = 100.0
DEADLINE_S_MIN, DEADLINE_S_MAX = 0.05, 600.0


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """
    How one engine decides.

    Attributes:
        mode: `on` plans from the curves of the break-even file, or from measurements as soon as there are enough;
            `auto` the same; `off` loads whatever is stored and not declined by the gate.
        break_even_path: The break-even file; empty: none.
        tolerance: Deadline of a deferral as a multiple of the predicted wait.
        deadline_max_s: And its upper bound.
    """

    mode: str = "auto"
    break_even_path: str = ""
    tolerance: float = 2.0
    deadline_max_s: float = 2.0


def planner_settings(extra: Mapping[str, Any]) -> PlannerSettings:
    """
    Return the settings in an engine's connector configuration.

    Raises:
        ConfigError: names the key, its value, and what is allowed.
    """
    mode = extra.get("load_planner", "auto")
    if mode not in MODES:
        raise wrong(SOURCE, "load_planner", mode, ", ".join(f'"{known}"' for known in MODES))
    path = extra.get("prefix_cache_break_even_path")
    if path is not None and not (isinstance(path, str) and path.startswith("/")):
        raise wrong(SOURCE, "prefix_cache_break_even_path", path, "an absolute path of a break-even file, or nothing")
    return PlannerSettings(
        mode,
        path or "",
        _number(extra, "load_planner_defer_tolerance", 2.0, 0.0, TOLERANCE_MAX),
        _number(extra, "load_planner_defer_deadline_max_s", 2.0, DEADLINE_S_MIN, DEADLINE_S_MAX),
    )


def _number(extra: Mapping[str, Any], key: str, default: float, low: float, high: float) -> float:
    value = extra.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise wrong(SOURCE, key, value, f"a number from {low:g} to {high:g}")
    return float(value)
