"""Generated traces, and traces in the formats of Helios, Alibaba and Philly."""

import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from strata.planner.cluster.jobs import LONGEST_S, MEDIAN_S, SHORTEST_S, SIZES, URGENT, Job, generate
from strata.planner.cluster.trace_files import read
from strata.platform.errors import UserError

HELIOS = """job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue
11,u1,vcA,1,1,1,COMPLETED,2020-06-09 18:41:01,2020-06-09 18:41:01,2020-06-10 04:55:09,36848,0
12,u2,vcB,16,64,2,FAILED,2020-06-09 18:42:01,2020-06-09 18:43:01,2020-06-09 18:45:36,249,60
13,u2,vcB,0,64,1,COMPLETED,2020-06-09 18:40:00,2020-06-09 18:43:01,2020-06-09 18:45:36,249,60
14,u3,vcA,4,8,1,CANCELLED,2020-06-09 18:41:01,None,None,0,0
"""
ALIBABA = """job_name,organization,gpu_model,cpu_request,gpu_request,worker_num,submit_time,duration,job_type
239255,13,A10,20,1,1,0,2764799,HP
437260,57,A100-SXM4-80GB,15,1,16,9589663,41060,Spot
437261,57,A100-SXM4-80GB,15,0.5,4,9589664,100,Spot
"""


def attempt(start: str | None, end: str | None, *nodes: int) -> dict[str, Any]:
    detail = [{"ip": f"m{number}", "gpus": [f"gpu{each}" for each in range(gpus)]} for number, gpus in enumerate(nodes)]
    return {"start_time": start, "end_time": end, "detail": detail}


PHILLY = [
    {
        "status": "Pass",
        "vc": "ee9e8c",
        "jobid": "application_1",
        "attempts": [
            attempt("2017-10-07 01:12:09", "2017-10-07 01:13:23", 8),
            attempt("2017-10-07 01:13:30", "2017-10-07 02:13:30", 8, 8),
            attempt("2017-10-07 03:13:30", None, 8),
        ],
        "submitted_time": "2017-10-07 01:11:39",
        "user": "ce2f4c",
    },
    {"status": "Killed", "vc": "ee9e8c", "jobid": "none", "attempts": [], "submitted_time": "2017-10-07 01:00:00", "user": "u"},
    {
        "status": "Pass",
        "vc": "b",
        "jobid": "application_2",
        "attempts": [attempt("2017-10-08 00:00:00", "2017-10-08 00:00:10", 1)],
        "submitted_time": "2017-10-07 01:11:49",
        "user": "u",
    },
]


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_helios(tmp_path: Path) -> None:
    """Jobs without GPUs or run time are left out, and the first submission is at 0."""
    assert read(write(tmp_path, HELIOS)) == [Job("11", "vcA", 1, 0.0, 36848.0), Job("12", "vcB", 16, 60.0, 249.0)]


def test_alibaba(tmp_path: Path) -> None:
    assert read(write(tmp_path, ALIBABA)) == [
        Job("239255", "13", 1, 0.0, 2764799.0, 1),
        Job("437260", "57", 16, 9589663.0, 41060.0, 0),
        Job("437261", "57", 4, 9589664.0, 100.0, 0),
    ]


def test_philly(tmp_path: Path) -> None:
    assert read(write(tmp_path, json.dumps(PHILLY))) == [
        Job("application_1", "ee9e8c", 16, 0.0, 74.0 + 3600.0),
        Job("application_2", "b", 1, 10.0, 10.0),
    ]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "known formats"),
        ("a,b,c\n1,2,3\n", "first line is 'a,b,c'"),
        (HELIOS.replace("16", "many"), "job 2 cannot be read"),
        (HELIOS.replace("2020-06-09 18:42:01", "yesterday"), "job 2 cannot be read"),
        ("\n".join(HELIOS.splitlines()[:1]) + "\n", "no job with GPUs"),
        ("\n".join([HELIOS.splitlines()[0], "1,u"]) + "\n", "job 1 cannot be read"),
        ("{}", "not a list of jobs"),
        ("[1]", "job 1 cannot be read"),
        ("[{", "not JSON"),
        ('[{"jobid": "1", "attempts": [{"start_time": 1, "end_time": 2, "detail": [{}]}]}]', "job 1 cannot be read"),
    ],
)
def test_traces_that_cannot_be_read(text: str, cause: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        read(write(tmp_path, text))
    assert cause in error.value.cause and error.value.fix


def test_a_missing_and_a_binary_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path / "none.csv")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not text"):
        read(tmp_path / "binary")


def test_a_generated_trace_follows_its_distributions() -> None:
    jobs = generate(2048, 10_000, 0.8, {"a": 3, "b": 1}, 7)
    assert jobs == generate(2048, 10_000, 0.8, {"a": 3, "b": 1}, 7) != generate(2048, 10_000, 0.8, {"a": 3, "b": 1}, 8)
    sizes = Counter(job.gpus for job in jobs)
    for size, share in SIZES.items():
        assert sizes[size] / len(jobs) == pytest.approx(share, abs=0.015)
    assert statistics.median(job.duration_s for job in jobs) == pytest.approx(MEDIAN_S, rel=0.05)
    assert all(SHORTEST_S <= job.duration_s <= LONGEST_S for job in jobs)
    assert sum(job.team == "a" for job in jobs) / len(jobs) == pytest.approx(0.75, abs=0.02)
    assert sum(job.priority for job in jobs) / len(jobs) == pytest.approx(URGENT, abs=0.01)
    offered = sum(job.gpus * job.duration_s for job in jobs) / (jobs[-1].submit_s * 2048)
    assert offered == pytest.approx(0.8, rel=0.04)


@pytest.mark.parametrize(("gpus", "largest"), [(1, 1), (8, 2), (64, 16), (1024, 256), (100_000, 256)])
def test_generated_jobs_have_at_most_a_quarter_of_the_cluster(gpus: int, largest: int) -> None:
    assert max(job.gpus for job in generate(gpus, 2000, 1.0, {"a": 1}, 1)) == largest
