"""Serves a run, or a Hugging Face folder, and streams a completion from it with the `openai` client.

python examples/serve_and_call.py --model laptop-1
python examples/serve_and_call.py --model ~/models/Llama-3.2-1B
"""

import argparse

import strata.serving

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("overrides", nargs="*", help="changes to the recipe, such as serve.port=8001")
parser.add_argument("--model", help="a run's name, or a folder; default: the newest run with an export")
parser.add_argument("--prompt", default="import os\nimport ")
parser.add_argument("--max-tokens", type=int, default=32)
arguments = parser.parse_args()

# The block begins when `GET /ready` answers 200, and its end stops all processes.
with strata.serving.serve(arguments.model, arguments.overrides, report=print) as endpoint:
    print(f"{endpoint.model} is ready at {endpoint.url} after {sum(endpoint.phases.values()):.0f} s")
    client = endpoint.client()  # an openai.OpenAI
    stream = client.completions.create(
        model=endpoint.model, prompt=arguments.prompt, max_tokens=arguments.max_tokens, temperature=0, stream=True
    )
    print(arguments.prompt, end="", flush=True)
    for event in stream:
        if event.choices:
            print(event.choices[0].text, end="", flush=True)
    print()
