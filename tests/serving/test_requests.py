from strata.serving.requests import forbidden_key


def test_forbidden_keys_are_found_at_any_depth() -> None:
    assert forbidden_key({"prompt": "kv_transfer_params", "stop": ["kv_transfer_params"]}) is None
    assert forbidden_key({"kv_transfer_params": None}) == "kv_transfer_params"
    assert forbidden_key({"vllm_xargs": {"ec_transfer_params": 1}}) == "ec_transfer_params"
    deep: object = {"kv_transfer_params": {}}
    for _ in range(100_000):
        deep = [deep]
    assert forbidden_key({"tools": deep}) == "kv_transfer_params"
