"""Runs members in processes of this machine, or as actors on a Ray cluster, and calls them all together."""

import multiprocessing
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from strata.platform.errors import UserError
from strata.training.bench.fabric.member import Member, Place, lockable_memory

CALL_S = 300.0
GRACE_S = 5.0  # after a failure, for the answers of the other ranks; those of its group will not come
START_S = 1800.0  # pods of a new node pull the image first
LOOPBACK = "127.0.0.1"
NODE = "STRATA_NODE"  # the node's name, which a pod does not know by itself; set by the component fabric-check


class NoAnswerError(Exception):
    """Raised with the ranks that did not answer a call. A hung collective never ends on its own."""

    def __init__(self, ranks: Sequence[int], reason: str) -> None:
        super().__init__(reason)
        self.ranks, self.reason = tuple(ranks), reason


class Team(Protocol):
    """Members by rank, and their places. Ranks of a node are consecutive."""

    places: list[Place]
    host: str  # address of rank 0

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls a method of every member with its own arguments, concurrently."""


class LocalTeam:
    """Processes of this machine over gloo, each in the place of a node."""

    def __init__(self, processes: int, member: type[Member] = Member) -> None:
        context = multiprocessing.get_context("spawn")
        self.places = [Place(str(rank), f"process {rank}", None, lockable_memory()) for rank in range(processes)]
        self.host = LOOPBACK
        self._ends: list[Connection] = []
        self._processes = []
        for _ in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, member), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        for end, words in zip(self._ends, arguments, strict=True):
            with suppress(BrokenPipeError):
                end.send((method, words))
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + CALL_S
        while pending := [rank for rank in range(len(self._ends)) if rank not in answers and rank not in failures]:
            ready = wait([self._ends[rank] for rank in pending], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank in pending if self._ends[rank] in ready]:
                try:
                    failed, answer = self._ends[rank].recv()
                except EOFError:
                    failed, answer = True, f"the process ended during {method}"
                if failed:
                    failures[rank] = answer
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                else:
                    answers[rank] = answer
        return _complete(method, answers, failures, len(self._ends))

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _complete(method: str, answers: dict[int, Any], failures: dict[int, str], ranks: int) -> list[Any]:
    """Answers by rank. Ranks that failed explain those that wait for them, so only they are named."""
    if failures:
        raise NoAnswerError(sorted(failures), next(iter(failures.values())))
    if silent := [rank for rank in range(ranks) if rank not in answers]:
        raise NoAnswerError(silent, f"no answer to {method} within {CALL_S:.0f} s")
    return [answers[rank] for rank in range(ranks)]


def _serve(end: Connection, member: type[Member]) -> None:
    """Answers calls in a process of a local team, until the other end closes."""
    served = member("gloo")
    while True:
        try:
            method, words = end.recv()
        except EOFError:
            return
        try:
            end.send((False, getattr(served, method)(*words)))
        except Exception as error:  # the parent reports it
            end.send((True, f"{type(error).__name__}: {error}"))


class RayTeam:
    """Actors on the connected Ray cluster, on as few nodes as they fit into, like the workers of training."""

    def __init__(self, workers: int, gpus: bool, cpus: int) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = {"CPU": float(cpus)} | ({"GPU": 1.0} if gpus else {})
        self._group = placement_group([bundle] * workers, strategy="PACK")
        if not self._group.wait(START_S):
            raise UserError(
                f"The Ray cluster has had no place for {workers} workers of {bundle} for {START_S / 60:.0f} minutes.",
                "See 'ray status', and set parallel.workers to what the cluster has.",
            )
        actor = ray.remote(_RayMember)
        members = [
            actor.options(
                num_cpus=cpus,
                num_gpus=1 if gpus else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number),
            ).remote("nccl" if gpus else "gloo")
            for number in range(workers)
        ]
        try:
            places: list[Place] = ray.get([member.where.remote() for member in members], timeout=CALL_S)
        except ray.exceptions.GetTimeoutError:
            raise UserError(f"Not all of {workers} workers started within {CALL_S:.0f} s.", "See 'ray list actors'.") from None
        ordered = sorted(zip(places, members, strict=True), key=lambda pair: (pair[0].node, int(pair[0].gpu or 0)))
        self.places, self._members = [place for place, _ in ordered], [member for _, member in ordered]
        self.host: str = ray.get(self._members[0].address.remote(), timeout=CALL_S)
        if gpus:
            seen = {place.node: [str(each.gpu) for each in self.places if each.node == place.node] for place in self.places}
            self.call("see", [(seen[place.node], str(place.gpu)) for place in self.places])

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        import ray

        calls = [getattr(member, method).remote(*words) for member, words in zip(self._members, arguments, strict=True)]
        ranks = {one: rank for rank, one in enumerate(calls)}
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + CALL_S
        pending = calls
        while pending and (left := deadline - time.monotonic()) > 0:
            ready, pending = ray.wait(pending, num_returns=1, timeout=left)
            for one in ready:
                try:
                    answers[ranks[one]] = ray.get(one)
                except ray.exceptions.RayError as error:
                    failures[ranks[one]] = str(error).strip().splitlines()[-1]
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return _complete(method, answers, failures, len(calls))

    def stop(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        for member in self._members:
            ray.kill(member)
        remove_placement_group(self._group)


class _RayMember(Member):
    def where(self) -> Place:
        import ray

        context = ray.get_runtime_context()
        ids = context.get_accelerator_ids().get("GPU", [])
        host = os.environ.get(NODE) or socket.gethostname()
        return Place(context.get_node_id(), host, ids[0] if ids else None, lockable_memory())

    def address(self) -> str:
        import ray

        return str(ray.util.get_node_ip_address())
