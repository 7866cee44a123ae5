"""`/v1/responses` and `/v1/messages` through the official clients, on the session's endpoint."""

import anthropic
import httpx
import openai
import pytest
from support import Served, prefill_header

LONG = "def close(self):\n    for name, value in self.items():\n        self.file.write(value)\n" * 3


@pytest.fixture(scope="module")
def client(endpoint: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(endpoint: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=endpoint.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def expected(client: openai.OpenAI, endpoint: Served) -> str:
    """Greedy text of the same conversation by the chat API."""
    messages = [{"role": "system", "content": "You are Python."}, {"role": "user", "content": LONG}]
    answer = client.chat.completions.create(model=endpoint.model, messages=messages, max_tokens=12, temperature=0)
    return str(answer.choices[0].message.content)


def test_response_equals_chat(client: openai.OpenAI, endpoint: Served, expected: str) -> None:
    asked = {"model": endpoint.model, "instructions": "You are Python.", "input": LONG, "temperature": 0, "max_output_tokens": 12}
    whole = client.responses.create(**asked)
    assert whole.output_text == expected
    assert (whole.usage.output_tokens, whole.status) == (12, "incomplete")
    events = list(client.responses.create(**asked, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == expected
    assert events[-1].response.usage.output_tokens == 12
    raw = httpx.post(f"{endpoint.url}/v1/responses", json=asked, timeout=60)
    assert prefill_header(raw).startswith("remote; engine=")


def test_message_equals_chat(claude: anthropic.Anthropic, endpoint: Served, expected: str) -> None:
    asked = {
        "model": endpoint.model,
        "system": "You are Python.",
        "messages": [{"role": "user", "content": LONG}],
        "max_tokens": 12,
        "extra_body": {"temperature": 0},
    }
    whole = claude.messages.create(**asked)
    assert whole.content[0].text == expected and whole.stop_reason == "max_tokens"
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == expected
        last = stream.get_final_message()
    assert last.usage.output_tokens == whole.usage.output_tokens == 12
    counted = claude.messages.count_tokens(**{key: asked[key] for key in ("model", "system", "messages")})
    assert counted.input_tokens == whole.usage.input_tokens


def test_refusals_reach_the_clients(client: openai.OpenAI, claude: anthropic.Anthropic, endpoint: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="nothing is stored"):
        client.responses.create(model=endpoint.model, input="x", previous_response_id="resp_1")
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        claude.messages.create(model="other", max_tokens=1, messages=[{"role": "user", "content": "x"}])
    picture = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/x.png"}}
    with pytest.raises(anthropic.BadRequestError, match="only text"):
        claude.messages.create(model=endpoint.model, max_tokens=1, messages=[{"role": "user", "content": [picture]}])
    with pytest.raises(anthropic.BadRequestError, match="set by the server"):
        claude.messages.create(
            model=endpoint.model,
            max_tokens=1,
            messages=[{"role": "user", "content": "x"}],
            extra_body={"kv_transfer_params": {"remote_host": "x"}},
        )
