"""Interface of vLLM through which the engine starts in the preforked process. The process itself: tests/serving/fork_server."""

import inspect

from vllm.v1.engine import utils

from strata.serving.vllm_patches import preforked_engine


def test_without_a_preforked_process_vllm_is_unchanged() -> None:
    before = utils.get_mp_context
    preforked_engine.install()
    assert utils.get_mp_context is before


def test_vllm_starts_its_engine_through_the_replaced_function() -> None:
    source = inspect.getsource(utils.CoreEngineProcManager.__init__)
    assert "context = get_mp_context()" in source and "context.Process(" in source, (
        "vLLM starts its engine process in another way: preforked_engine.py has no effect. Review it."
    )
