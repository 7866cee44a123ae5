"""Job traces in public formats: Helios (SenseTime) and Alibaba's spot GPU trace as CSV, Philly (Microsoft) as JSON.

Formats: github.com/S-Lab-System-Group/HeliosData (`cluster_log.csv`), github.com/alibaba/clusterdata in the folder
cluster-trace-v2026-spot-gpu (`job_info_df.csv`), github.com/msr-fiddle/philly-traces (`cluster_job_log`). Jobs without GPUs or
without a run time are left out.
"""

import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from strata.planner import ranges
from strata.planner.cluster.jobs import Job
from strata.platform.errors import UserError, shown

Row = dict[str, Any]


def read(path: Path) -> list[Job]:
    """Jobs of a trace, with the first submission at 0."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"--trace {shown(path, 200)} cannot be read: {error.strerror}.", "Use another path.") from None
    except UnicodeDecodeError:
        raise UserError(f"--trace {shown(path, 200)} is not text.", "Unpack the trace first.") from None
    jobs = _philly(text, path) if text.lstrip().startswith(("[", "{")) else _table(text, path)
    if not jobs:
        raise UserError(f"--trace {shown(path, 200)} has no job with GPUs and a run time.", "Use another trace.")
    if len(jobs) not in ranges.JOBS:
        raise UserError(f"--trace {shown(path, 200)} has {len(jobs):,} jobs.", f"Cut it to at most {ranges.JOBS.most:,} jobs.")
    first = min(job.submit_s for job in jobs)
    return [Job(job.name, job.team, job.gpus, job.submit_s - first, job.duration_s, job.priority) for job in jobs]


def _table(text: str, path: Path) -> list[Job]:
    lines = csv.DictReader(text.splitlines(), skipinitialspace=True)
    columns = set(text.splitlines()[0].replace(" ", "").split(",")) if text else set()
    for needed, reader in READERS:
        if needed <= columns:
            try:
                return list(_jobs(lines, reader, path))
            except csv.Error as error:
                raise UserError(f"--trace {shown(path, 200)} is not CSV: {error}.", "Correct the file.") from None
    first = text.splitlines()[0] if text else ""
    raise UserError(
        f"--trace {shown(path, 200)} has none of the known formats: its first line is '{shown(first)}'.",
        "Use a trace of Helios (cluster_log.csv), Alibaba (job_info_df.csv) or Philly (cluster_job_log).",
    )


def _jobs(rows: "csv.DictReader[str] | Sequence[Row]", reader: Callable[[Row], Job | None], path: Path) -> Iterator[Job]:
    for number, row in enumerate(rows, 1):
        try:
            job = reader(row)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UserError(
                f"--trace {shown(path, 200)}: job {number} cannot be read: {shown(repr(error), 80)}.",
                "Correct or remove this job.",
            ) from None
        if job and job.gpus > 0 and 0 < job.duration_s < math.inf and math.isfinite(job.submit_s):
            yield job


def _helios(row: Row) -> Job:
    return Job(row["job_id"], row["vc"], int(float(row["gpu_num"])), _clock(row["submit_time"]), float(row["duration"]))


def _alibaba(row: Row) -> Job:
    """`job_type` HP has a priority over Spot. A worker with a part of a GPU has a whole one here."""
    gpus = math.ceil(float(row["gpu_request"])) * int(float(row["worker_num"]))
    urgent = int(row["job_type"] == "HP")
    return Job(row["job_name"], row["organization"], gpus, float(row["submit_time"]), float(row["duration"]), urgent)


def _philly(text: str, path: Path) -> list[Job]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"--trace {shown(path, 200)} is not JSON: {error}.", "Use the whole file cluster_job_log.") from None
    if not isinstance(rows, list):
        raise UserError(f"--trace {shown(path, 200)} is not a list of jobs.", "Use the file cluster_job_log of the Philly trace.")
    return list(_jobs(rows, _philly_job, path))


def _philly_job(row: Row) -> Job | None:
    """The run time of all attempts, on the GPUs of the largest one."""
    whole = [one for one in row["attempts"] if one.get("start_time") and one.get("end_time") and one.get("detail")]
    if not whole:
        return None
    seconds = math.fsum(_clock(one["end_time"]) - _clock(one["start_time"]) for one in whole)
    gpus = max(sum(len(node["gpus"]) for node in one["detail"]) for one in whole)
    return Job(row["jobid"], row["vc"], gpus, _clock(row["submitted_time"]), seconds)


def _clock(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


READERS: tuple[tuple[set[str], Callable[[Row], Job | None]], ...] = (
    ({"job_id", "vc", "gpu_num", "submit_time", "duration"}, _helios),
    ({"job_name", "organization", "gpu_request", "worker_num", "submit_time", "duration", "job_type"}, _alibaba),
)
