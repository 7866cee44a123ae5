"""Runs `vllm bench serve` with any build of vLLM.

vLLM's own command line reads the metadata of a package named `vllm`, which the CPU build does not have.
"""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())
