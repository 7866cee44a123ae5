"""`vllm bench serve` under a name that works with every build of vLLM: its own command line asks for metadata of a package
named `vllm`, which the CPU build has not."""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())
