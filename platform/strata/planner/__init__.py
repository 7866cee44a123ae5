"""Cost model of parallel layouts: memory, communication, time and dollars, from the model's shape and hardware figures. Needs
neither torch nor a GPU.

`catalogue/` holds models, GPUs and fabrics; `layout.py` defines how a run is divided over GPUs. `memory/`, `collectives/`,
`pipeline/` and `step/` are the cost models, which `plan.py` combines for one layout and `search/` for many. `reliability/` and
`serving/` plan failures and endpoints, `validation/` compares all of it with published figures, `cli/` has the commands. Every
figure is a line of a `worksheet.py`.

Public API: `plan_training` for one `Layout`, `search_layouts` for the best of many. They load on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata.planner.layout import Layout
    from strata.planner.plan import plan_training
    from strata.planner.search.search import search as search_layouts

__all__ = ["Layout", "plan_training", "search_layouts"]


def __getattr__(name: str) -> Any:
    if name == "Layout":
        from strata.planner import layout

        return layout.Layout
    if name == "plan_training":
        from strata.planner import plan

        return plan.plan_training
    if name == "search_layouts":
        from strata.planner.search import search

        return search.search
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
