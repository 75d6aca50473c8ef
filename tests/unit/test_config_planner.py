"""How one engine decides, as its connector configuration says."""

from kvpool.config_connector import settings_from_connector
from kvpool.config_planner import PlannerSettings, planner_settings


def test_the_planner_is_on_once_enough_is_measured_unless_said_otherwise() -> None:
    assert PlannerSettings("auto", "", 2.0, 2.0) == planner_settings({})


def test_all_of_it_can_be_said() -> None:
    extra = {
        "load_planner": "on",
        "prefix_cache_break_even_path": "/etc/kvpool/break-even.json",
        "load_planner_defer_tolerance": 3,
        "load_planner_defer_deadline_max_s": 1.5,
    }
    assert PlannerSettings("on", "/etc/kvpool/break-even.json", 3.0, 1.5) == planner_settings(extra)


def test_engines_that_decide_differently_share_a_pool() -> None:
    places = {
        settings_from_connector({"shared_storage_path": "/mnt/x", "load_planner": mode}).pool.run_dir
        for mode in ("on", "off")
    }
    assert 1 == len(places)
