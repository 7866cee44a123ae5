"""`python -m strata.serving.bench.quantized`, for machines where Strata is not installed but on the path."""

import typer

from strata.serving.bench.quantized.command import bench_quantized

if __name__ == "__main__":
    typer.run(bench_quantized)
