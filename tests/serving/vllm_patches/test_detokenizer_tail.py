"""Detokenization after the last tokens of a prompt equals that after the whole prompt."""

import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import tokenizers.decoders
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from strata.serving.vllm_patches import detokenizer_tail

TEXT = "Strata lays engines out in rows ; naïve cafés, 𝄞 and ☃ in 東京, def f(x): return x ** 2\n\n\tno  spaces   alike. " * 40


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    """Tokenizer like Llama 2's: spaces are markers on words, the first word has none, and unknown characters are bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *fallback], limit_alphabet=40, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> type:
    known = tokenizers.decoders.DecodeStream
    monkeypatch.setattr(tokenizers.decoders, "DecodeStream", known)  # to be put back
    detokenizer_tail.install()
    return known


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_detokenized_answer_is_unchanged(make: Callable[[], Tokenizer], native: type) -> None:
    tokenizer = make()
    ids = tokenizer.encode(TEXT).ids
    assert len(ids) > 3 * detokenizer_tail.TAIL
    for cut in random.Random(0).sample(range(1, len(ids) - 60), 60):
        prompt, answer = ids[:cut], ids[cut : cut + 60]
        if tokenizer.decode(prompt).endswith("�"):  # within a character: there the library repeats the whole prompt
            continue
        whole, tail = native(ids=prompt), tokenizers.decoders.DecodeStream(ids=prompt, skip_special_tokens=False)
        assert [tail.step(tokenizer, token) for token in answer] == [whole.step(tokenizer, token) for token in answer]


def test_vllm_uses_it(native: type) -> None:
    pytest.importorskip("vllm")
    from transformers import PreTrainedTokenizerFast
    from vllm import SamplingParams
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    seen = []

    def watched(ids: list[int], skip_special_tokens: bool) -> object:
        seen.append(len(ids))
        return native(ids=ids, skip_special_tokens=skip_special_tokens)

    tokenizer = byte_level()
    ids = tokenizer.encode(TEXT).ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detokenizer_tail, "DecodeStream", watched)
        request = SimpleNamespace(request_id="r", prompt_token_ids=ids[:2000], sampling_params=SamplingParams())
        made = FastIncrementalDetokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer), request)
    assert seen == [detokenizer_tail.TAIL]
    made.update(ids[2000:2040], stop_terminated=False)
    assert TEXT.startswith(tokenizer.decode(ids[:2000]) + made.output_text)


def test_vllm_still_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from transformers import PreTrainedTokenizerFast
    from vllm import SamplingParams
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    passed: list[int] = []

    def recorded(ids: list[int], skip_special_tokens: bool) -> None:
        passed.extend(ids)

    monkeypatch.setattr(tokenizers.decoders, "DecodeStream", recorded)
    request = SimpleNamespace(request_id="r", prompt_token_ids=[1] * 2000, sampling_params=SamplingParams())
    FastIncrementalDetokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_level()), request)
    assert len(passed) == 2000, (
        f"vLLM now passes {len(passed)} of 2,000 prompt tokens to DecodeStream. If that is the end of the prompt, remove "
        "detokenizer_tail.py."
    )
