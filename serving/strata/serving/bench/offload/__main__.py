"""`python -m strata.serving.bench.offload`, for machines where Strata is not installed."""

import typer

from strata.serving.bench.offload.command import bench_offload

typer.run(bench_offload)
