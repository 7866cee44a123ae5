"""Parameter counts of a model's shape, by worked numbers. No two sizes are equal, and none is one."""

from dataclasses import replace

import pytest

from strata.planner.catalogue.shape import Experts, Latent, Shape

# 6 query heads of 5 are 30 numbers wide, 2 key heads 10.
LLAMA = Shape("small", layers=3, hidden=28, heads=6, kv_heads=2, head_dim=5, ffn=70, vocab=110, context=9)
GPT = replace(LLAMA, gated=False, biases=True, positions=True, tied=True)
QWEN = replace(LLAMA, query_biases=True)
SPARSE = replace(LLAMA, experts=Experts(count=8, top_k=3, ffn=11, shared_ffn=13, dense_layers=1))
LATENT = replace(LLAMA, latent=Latent(query_rank=17, kv_rank=12, plain_dim=7, rotary_dim=4, value_dim=9))


def test_a_llama() -> None:
    attention = 28 * (30 + 10 + 10) + 30 * 28  # queries, keys, values; output
    assert LLAMA.attention_matrices() == attention == 2240
    assert LLAMA.norm_parameters() == 2 * 28
    assert LLAMA.attention_parameters() == 2240 + 56
    assert LLAMA.dense_ffn_parameters() == 3 * 28 * 70 == 5880
    assert LLAMA.layers_parameters(2, 0) == 2 * (2296 + 5880)
    assert LLAMA.embedding_parameters() == LLAMA.table_parameters() == 110 * 28 == 3080
    assert LLAMA.head_parameters() == 3080 + 28
    assert LLAMA.parameters() == 3 * 8176 + 3080 + 3108 == 30716
    assert LLAMA.active_parameters() == 30716
    assert LLAMA.matrix_parameters() == 3 * (2240 + 5880) + 3080
    assert (LLAMA.dense_layers, LLAMA.sparse_layers) == (3, 0)


def test_a_model_without_experts_has_none_of_their_parameters() -> None:
    assert (LLAMA.router_parameters(), LLAMA.expert_parameters(), LLAMA.shared_parameters(), LLAMA.routed_parameters(2)) == (
        0,
        0,
        0,
        0,
    )
    assert LLAMA.narrow_parameters() == 0


def test_a_gpt_has_biases_positions_and_two_matrices() -> None:
    assert GPT.norm_parameters() == 2 * 2 * 28  # a weight and a bias each
    assert GPT.last_norm_parameters() == 2 * 28
    assert GPT.attention_parameters() == 2240 + (30 + 10 + 10 + 28) + 112
    assert GPT.dense_ffn_parameters() == 2 * 28 * 70 + (28 + 70)
    assert GPT.embedding_parameters() == 3080 + 9 * 28
    assert GPT.head_parameters() == 56  # tied: the norm alone
    assert GPT.parameters() == 3 * (2430 + 4018) + 3332 + 56
    assert GPT.matrix_parameters() == 3 * (2240 + 3920) + 3080  # a tied head is a product all the same


def test_query_biases_leave_out_the_output_and_the_feed_forward_block() -> None:
    assert QWEN.attention_parameters() - LLAMA.attention_parameters() == 30 + 10 + 10
    assert QWEN.dense_ffn_parameters() == LLAMA.dense_ffn_parameters()
    assert QWEN.norm_parameters() == LLAMA.norm_parameters()


def test_a_mixture_of_experts() -> None:
    assert (SPARSE.dense_layers, SPARSE.sparse_layers) == (1, 2)
    assert SPARSE.router_parameters() == 28 * 8
    assert SPARSE.expert_parameters() == 3 * 28 * 11 == 924
    assert SPARSE.shared_parameters() == 3 * 28 * 13 == 1092
    assert SPARSE.layers_parameters(1, 2) == 3 * 2296 + 5880 + 2 * (224 + 1092) == 15400
    assert SPARSE.routed_parameters(2) == 2 * 8 * 924 == 14784
    assert SPARSE.parameters() == 15400 + 14784 + 3080 + 3108 == 36372
    assert SPARSE.active_parameters() == 36372 - 2 * (8 - 3) * 924
    assert SPARSE.matrix_parameters() == 3 * 2240 + 5880 + 2 * (224 + 3 * 924 + 1092) + 3080


def test_a_gated_shared_expert_has_one_more_row_in_the_router() -> None:
    assert SPARSE.experts
    gated = replace(SPARSE, experts=replace(SPARSE.experts, shared_gate=True))
    assert gated.router_parameters() == 28 * 9


@pytest.mark.parametrize("biases", [False, True])
def test_no_shared_expert_has_no_parameters(biases: bool) -> None:
    bare = replace(SPARSE, biases=biases, experts=Experts(count=8, top_k=3, ffn=11))
    assert bare.shared_parameters() == 0
    assert replace(bare, gated=False).expert_parameters() == 2 * 28 * 11 + (28 + 11) * biases


def test_latent_attention() -> None:
    down = 28 * 17 + 28 * (12 + 4)
    up = 17 * 6 * (7 + 4) + 12 * 6 * (7 + 9)
    assert LATENT.narrow_parameters() == down == 924
    assert LATENT.attention_matrices() == down + up + 6 * 9 * 28 == 924 + 1122 + 1152 + 1512
    assert LATENT.norm_parameters() == 2 * 28 + 17 + 12
    assert LATENT.attention_parameters() == 4710 + 85
    assert replace(LATENT, query_biases=True).attention_parameters() == 4710 + 85


def test_latent_attention_without_a_query_rank_projects_from_the_hidden_size() -> None:
    assert LATENT.latent
    lite = replace(LATENT, latent=replace(LATENT.latent, query_rank=0))
    assert lite.narrow_parameters() == 28 * (12 + 4)
    assert lite.attention_matrices() == 28 * 16 + 28 * 66 + 1152 + 1512
    assert lite.norm_parameters() == 2 * 28 + 12
