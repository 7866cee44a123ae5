"""Names, labels and buckets of all Prometheus metrics. Exporters, dashboards and alerts refer to these constants.

Ray exports its workers' metrics with the prefix `ray_`: `strata_train_loss` is `ray_strata_train_loss` in Prometheus. The
endpoint and the GPU exporter serve their metrics themselves, without a prefix and without Ray's dashboard.
"""

from dataclasses import dataclass
from typing import Literal

RAY_PREFIX = "ray_"


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...]

    @property
    def exported(self) -> str:
        """The name in Prometheus."""
        return RAY_PREFIX + self.name


@dataclass(frozen=True)
class OwnMetric(Metric):
    """A metric that a process of Strata exports itself, without Ray's prefix."""

    @property
    def exported(self) -> str:
        return self.name


@dataclass(frozen=True)
class ServeMetric(OwnMetric):
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram's buckets, in its unit


RUN = ("run",)

TRAIN_STEP = Metric("strata_train_step", "gauge", "Optimizer steps taken", RUN)
TRAIN_STEPS_PLANNED = Metric("strata_train_steps_planned", "gauge", "Optimizer steps in the whole run", RUN)
TRAIN_LOSS = Metric("strata_train_loss", "gauge", "Loss of the last step, in nats per token", RUN)
TRAIN_VALIDATION_LOSS = Metric("strata_train_validation_loss", "gauge", "Loss of the last evaluation, in nats per token", RUN)
TRAIN_GRADIENT_NORM = Metric("strata_train_gradient_norm", "gauge", "Norm of all gradients before clipping", RUN)
TRAIN_LEARNING_RATE = Metric("strata_train_learning_rate", "gauge", "Learning rate of the last step", RUN)
TRAIN_TOKENS = Metric("strata_train_tokens_total", "counter", "Tokens trained on, over all workers", RUN)
TRAIN_TOKENS_PER_SECOND = Metric("strata_train_tokens_per_second", "gauge", "Tokens per second, over all workers", RUN)
TRAIN_MFU = Metric(
    "strata_train_mfu", "gauge", "Model FLOPs utilization: model FLOPs per second over the devices' peak, 0 to 1", RUN
)
TRAIN_STEP_SECONDS = Metric(
    "strata_train_step_seconds",
    "gauge",
    "Time of the last step by phase: data, forward, backward, optimizer, checkpoint",
    ("run", "phase"),
)
# Compared between ranks of one pipeline stage, which do the same work. With ZeRO-3 or tensor parallelism the forward pass waits
# for other ranks, so that a whole group looks slow.
TRAIN_RANK_SECONDS = Metric(
    "strata_train_rank_seconds",
    "gauge",
    "Data and forward time of a rank's last step, before it waits for other ranks' gradients",
    ("run", "rank", "stage"),
)
TRAIN_PEAK_MEMORY = Metric("strata_train_peak_memory_bytes", "gauge", "Peak memory of rank 0 so far", RUN)
TRAIN_CHECKPOINT_STALL = Metric(
    "strata_train_checkpoint_stall_seconds", "gauge", "Time that the last checkpoint blocked training", RUN
)
TRAIN_CHECKPOINT_SAVE = Metric(
    "strata_train_checkpoint_save_seconds", "gauge", "Time from the step until its checkpoint was complete in storage", RUN
)
TRAIN_CHECKPOINT_BYTES = Metric("strata_train_checkpoint_bytes", "gauge", "Size of the newest complete checkpoint", RUN)
TRAIN_CHECKPOINT_STEP = Metric("strata_train_checkpoint_step", "gauge", "Step of the newest complete checkpoint", RUN)
TRAIN_CHECKPOINT_TIME = Metric(
    "strata_train_checkpoint_timestamp_seconds",
    "gauge",
    "Completion time of the newest checkpoint, in Unix seconds; before the first, the start of the workers",
    RUN,
)
TRAIN_CHECKPOINT_FAILURES = Metric(
    "strata_train_checkpoint_failures_total", "counter", "Checkpoints that could not be written", RUN
)
TRAIN_NOT_FINITE = Metric(
    "strata_train_not_finite_total", "counter", "Steps whose loss or gradients were NaN or infinite; each ended the run", RUN
)
TRAIN_RESTARTS = Metric(
    "strata_train_restarts_total", "counter", "Restarts of the workers, after a worker was lost or to resize an elastic run", RUN
)
TRAIN_WORKERS = Metric("strata_train_workers", "gauge", "Workers of the current layout, which changes in an elastic run", RUN)
# Exported by the driver, which sees all ranks.
TRAIN_FAULTS = Metric(
    "strata_train_faults_total",
    "counter",
    "Hangs, deaths, corrupted replicas and spikes that the watchdog has named",
    ("run", "kind"),
)
TRAIN_RANK_SLOWNESS = Metric(
    "strata_train_rank_slowness",
    "gauge",
    "Data and forward time of a rank named as slow, over the median of the other ranks of its pipeline stage",
    ("run", "rank", "host"),
)

TRAINING = (
    TRAIN_STEP,
    TRAIN_STEPS_PLANNED,
    TRAIN_LOSS,
    TRAIN_VALIDATION_LOSS,
    TRAIN_GRADIENT_NORM,
    TRAIN_LEARNING_RATE,
    TRAIN_TOKENS,
    TRAIN_TOKENS_PER_SECOND,
    TRAIN_MFU,
    TRAIN_STEP_SECONDS,
    TRAIN_RANK_SECONDS,
    TRAIN_PEAK_MEMORY,
    TRAIN_CHECKPOINT_STALL,
    TRAIN_CHECKPOINT_SAVE,
    TRAIN_CHECKPOINT_BYTES,
    TRAIN_CHECKPOINT_STEP,
    TRAIN_CHECKPOINT_TIME,
    TRAIN_CHECKPOINT_FAILURES,
    TRAIN_NOT_FINITE,
    TRAIN_RESTARTS,
    TRAIN_FAULTS,
    TRAIN_RANK_SLOWNESS,
    TRAIN_WORKERS,
)

# Every process (role: gateway, decode, prefill or pictures) exports its own series; Prometheus sums them.
REPLICA = ("model", "role", "replica")

# Up to minutes: requests may queue, and answers may be long.
LATENCY_BUCKETS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0),
)
# Dense between 1 and 10 ms, the decode step time of a small model on a large GPU, to separate 2.3 from 3.7 ms.
ITL_BUCKETS = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.012, 0.015, 0.02, 0.025, 0.03, 0.04),
    *(0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0),
)

SERVE_REPLICAS = ServeMetric(
    "strata_serve_replicas", "gauge", "1 for each replica that answers; the sum by role is the number of replicas", REPLICA
)

# Measured in the gateway, from the client's point of view.
SERVE_REQUESTS = ServeMetric(
    "strata_serve_requests_total", "counter", "Requests answered, by HTTP status", (*REPLICA, "route", "status")
)
SERVE_FIRST_TOKEN = ServeMetric(
    "strata_serve_first_token_seconds",
    "histogram",
    "Time to first token (TTFT), measured in the gateway",
    REPLICA,
    LATENCY_BUCKETS,
)
SERVE_INTER_TOKEN = ServeMetric(
    "strata_serve_inter_token_seconds",
    "histogram",
    "Inter-token latency (ITL) of streams, measured in the gateway",
    REPLICA,
    ITL_BUCKETS,
)
SERVE_REQUEST = ServeMetric(
    "strata_serve_request_seconds", "histogram", "End-to-end latency of a request", (*REPLICA, "route"), LATENCY_BUCKETS
)
SERVE_QUEUE = ServeMetric(
    "strata_serve_queue_seconds",
    "histogram",
    "Queue time of admitted requests, until a decode engine had capacity",
    REPLICA,
    LATENCY_BUCKETS,
)
SERVE_PROMPT_TOKENS = ServeMetric(
    "strata_serve_prompt_tokens_total", "counter", "Tokens in the prompts of answered requests", REPLICA
)
SERVE_GENERATED_TOKENS = ServeMetric("strata_serve_generated_tokens_total", "counter", "Tokens sent to clients", REPLICA)
SERVE_IN_FLIGHT = ServeMetric("strata_serve_requests_in_flight", "gauge", "Requests in progress on decode replicas", REPLICA)
SERVE_QUEUED = ServeMetric("strata_serve_requests_queued", "gauge", "Requests queued for capacity on a decode engine", REPLICA)
SERVE_ROUTED = ServeMetric(
    "strata_serve_routed_total",
    "counter",
    "Requests sent to a replica, by the reason of its choice: longest cached prefix, load, no cached prefix, least busy",
    (*REPLICA, "reason"),
)
SERVE_RETRIES = ServeMetric(
    "strata_serve_retries_total", "counter", "Requests retried on another replica before their first token", (*REPLICA, "reason")
)
SERVE_MIGRATIONS = ServeMetric(
    "strata_serve_migrations_total",
    "counter",
    "Streams whose decode replica was lost: continued from their tokens, restarted, or refused (client gets an error)",
    (*REPLICA, "outcome"),
)
SERVE_REJECTIONS = ServeMetric(
    "strata_serve_rejections_total", "counter", "Requests rejected by admission control", (*REPLICA, "reason")
)
SERVE_DISCONNECTS = ServeMetric(
    "strata_serve_client_disconnects_total", "counter", "Clients that disconnected before the end of the response", REPLICA
)

# By tenant, where there are API keys. The label has a bounded number of values: further tenants share one.
SERVE_TENANT_REQUESTS = ServeMetric(
    "strata_serve_tenant_requests_total",
    "counter",
    "Requests answered, by tenant and HTTP status",
    (*REPLICA, "tenant", "status"),
)
SERVE_TENANT_TOKENS = ServeMetric(
    "strata_serve_tenant_tokens_total",
    "counter",
    "Tokens by tenant and direction: input, output",
    (*REPLICA, "tenant", "direction"),
)
SERVE_TENANT_REFUSALS = ServeMetric(
    "strata_serve_tenant_refusals_total", "counter", "Requests refused by a limit of their tenant", (*REPLICA, "tenant", "limit")
)
SERVE_TENANT_RUNNING = ServeMetric(
    "strata_serve_tenant_requests_running", "gauge", "Requests on decode replicas, by tenant", (*REPLICA, "tenant")
)
SERVE_TENANT_QUEUED = ServeMetric(
    "strata_serve_tenant_requests_queued", "gauge", "Requests in the gateway's fair queue, by tenant", (*REPLICA, "tenant")
)
SERVE_TENANT_FIRST_TOKEN = ServeMetric(
    "strata_serve_tenant_first_token_seconds",
    "histogram",
    "Time to first token (TTFT) by tenant, time in the queue included",
    (*REPLICA, "tenant"),
    LATENCY_BUCKETS,
)
SERVE_BATCH_WAITING = ServeMetric(
    "strata_serve_batch_requests_waiting", "gauge", "Requests of the gateway's batches that wait, for all models", REPLICA
)
SERVE_BATCH_RUNNING = ServeMetric(
    "strata_serve_batch_requests_running", "gauge", "Requests of the gateway's batches in progress, for all models", REPLICA
)
SERVE_BATCH_REQUESTS = ServeMetric(
    "strata_serve_batch_requests_total",
    "counter",
    "Requests of batches that ended: completed, failed or expired",
    (*REPLICA, "ending"),
)

# Measured in the engines' replicas.
SERVE_PREFILLS = ServeMetric(
    "strata_serve_prefills_total",
    "counter",
    "Prompts by place of prefill (local or remote) and reason",
    (*REPLICA, "where", "reason"),
)
SERVE_REMOTE_PREFILL = ServeMetric(
    "strata_serve_remote_prefill_seconds",
    "histogram",
    "Time from the request to a prefill replica until its response",
    REPLICA,
    LATENCY_BUCKETS,
)
SERVE_REMOTE_PREFILL_FAILURES = ServeMetric(
    "strata_serve_remote_prefill_failures_total", "counter", "Remote prefills that failed and were repeated elsewhere", REPLICA
)
SERVE_ENGINE_GAP = ServeMetric(
    "strata_serve_engine_gap_seconds",
    "histogram",
    "Inter-token latency by the engine's clock, by concurrent work of the engine or its pool",
    (*REPLICA, "beside"),
    ITL_BUCKETS,
)
SERVE_KV_BYTES = ServeMetric(
    "strata_serve_kv_transfer_bytes_total", "counter", "Bytes of KV cache read from prefill engines", REPLICA
)
SERVE_KV_SECONDS = ServeMetric(
    "strata_serve_kv_transfer_seconds", "histogram", "Time of one KV transfer between engines", REPLICA, LATENCY_BUCKETS
)
SERVE_KV_FAILURES = ServeMetric("strata_serve_kv_transfer_failures_total", "counter", "KV transfers that failed", REPLICA)
SERVE_KV_EXPIRED = ServeMetric(
    "strata_serve_kv_expired_total",
    "counter",
    "Prefilled prompts whose KV blocks no decode engine read in time and were released",
    REPLICA,
)
SERVE_PREFIX_QUERIED = ServeMetric(
    "strata_serve_prefix_cache_queried_tokens_total", "counter", "Prompt tokens looked up in the prefix cache", REPLICA
)
SERVE_PREFIX_HIT = ServeMetric(
    "strata_serve_prefix_cache_hit_tokens_total", "counter", "Prompt tokens found in the prefix cache", REPLICA
)
SERVE_TIER_HIT = ServeMetric(
    "strata_serve_kv_tier_hit_tokens_total",
    "counter",
    "Prompt tokens that the prefix cache lacked and a tier of serve.kv_offload had, by tier",
    (*REPLICA, "tier"),
)
SERVE_KV_USAGE = ServeMetric(
    "strata_serve_kv_cache_usage", "gauge", "Share of KV cache blocks in use by requests, 0 to 1", REPLICA
)
SERVE_RUNNING = ServeMetric("strata_serve_sequences_running", "gauge", "Sequences in the engine's batch", REPLICA)
SERVE_WAITING = ServeMetric(
    "strata_serve_sequences_waiting", "gauge", "Sequences that wait in the engine's queue or were preempted", REPLICA
)
SERVE_DRAFTED = ServeMetric(
    "strata_serve_drafted_tokens_total",
    "counter",
    "Tokens that speculative decoding drafted and the engine verified, by position in the draft",
    (*REPLICA, "position"),
)
SERVE_ACCEPTED = ServeMetric(
    "strata_serve_accepted_tokens_total",
    "counter",
    "Drafted tokens that the model accepted, by position in the draft",
    (*REPLICA, "position"),
)
SERVE_ADAPTERS = ServeMetric("strata_serve_adapters_loaded", "gauge", "LoRA adapters in the engine's memory", REPLICA)
SERVE_ADAPTERS_WAITING = ServeMetric(
    "strata_serve_adapters_waiting", "gauge", "Requests that wait for a slot of the engine for their adapter", REPLICA
)
SERVE_ADAPTER_LOAD = ServeMetric(
    "strata_serve_adapter_load_seconds", "histogram", "Time to load an adapter into the engine", REPLICA, LATENCY_BUCKETS
)
SERVE_ADAPTER_EVICTIONS = ServeMetric(
    "strata_serve_adapter_evictions_total",
    "counter",
    "Adapters freed: memory for others, or removed from the endpoint",
    (*REPLICA, "reason"),
)

# Measured in the replicas of a picture model. Pictures per batch: the rate of pictures over that of batches.
SERVE_PICTURES = ServeMetric(
    "strata_serve_pictures_total", "counter", "Pictures by outcome: completed, cancelled, failed", (*REPLICA, "outcome")
)
SERVE_PICTURES_WAITING = ServeMetric(
    "strata_serve_pictures_waiting", "gauge", "Pictures that wait for a batch of their size and steps", REPLICA
)
SERVE_PICTURES_RUNNING = ServeMetric("strata_serve_pictures_running", "gauge", "Pictures in the running batch", REPLICA)
SERVE_PICTURE_BATCHES = ServeMetric("strata_serve_picture_batches_total", "counter", "Batches begun", REPLICA)
SERVE_PICTURES_BATCHED = ServeMetric("strata_serve_pictures_batched_total", "counter", "Pictures of batches begun", REPLICA)
SERVE_PICTURE_STEPS = ServeMetric(
    "strata_serve_picture_steps_total", "counter", "Sampling steps, each counted once for every picture of its batch", REPLICA
)
SERVE_PICTURE_STEP = ServeMetric(
    "strata_serve_picture_step_seconds", "histogram", "Time of a sampling step of a batch", REPLICA, LATENCY_BUCKETS
)
SERVE_WORKER_RESTARTS = ServeMetric(
    "strata_serve_worker_restarts_total", "counter", "Restarts of a replica's worker group after a worker was lost", REPLICA
)

SERVING_GATEWAY = (
    SERVE_REQUESTS,
    SERVE_FIRST_TOKEN,
    SERVE_INTER_TOKEN,
    SERVE_REQUEST,
    SERVE_QUEUE,
    SERVE_PROMPT_TOKENS,
    SERVE_GENERATED_TOKENS,
    SERVE_IN_FLIGHT,
    SERVE_QUEUED,
    SERVE_ROUTED,
    SERVE_RETRIES,
    SERVE_MIGRATIONS,
    SERVE_REJECTIONS,
    SERVE_DISCONNECTS,
    SERVE_TENANT_REQUESTS,
    SERVE_TENANT_TOKENS,
    SERVE_TENANT_REFUSALS,
    SERVE_TENANT_RUNNING,
    SERVE_TENANT_QUEUED,
    SERVE_TENANT_FIRST_TOKEN,
    SERVE_BATCH_WAITING,
    SERVE_BATCH_RUNNING,
    SERVE_BATCH_REQUESTS,
)
SERVING_ENGINE = (
    SERVE_PREFILLS,
    SERVE_REMOTE_PREFILL,
    SERVE_REMOTE_PREFILL_FAILURES,
    SERVE_ENGINE_GAP,
    SERVE_KV_BYTES,
    SERVE_KV_SECONDS,
    SERVE_KV_FAILURES,
    SERVE_KV_EXPIRED,
    SERVE_PREFIX_QUERIED,
    SERVE_PREFIX_HIT,
    SERVE_TIER_HIT,
    SERVE_KV_USAGE,
    SERVE_RUNNING,
    SERVE_WAITING,
    SERVE_DRAFTED,
    SERVE_ACCEPTED,
    SERVE_ADAPTERS,
    SERVE_ADAPTERS_WAITING,
    SERVE_ADAPTER_LOAD,
    SERVE_ADAPTER_EVICTIONS,
)
SERVING_PICTURES = (
    SERVE_PICTURES,
    SERVE_PICTURES_WAITING,
    SERVE_PICTURES_RUNNING,
    SERVE_PICTURE_BATCHES,
    SERVE_PICTURES_BATCHED,
    SERVE_PICTURE_STEPS,
    SERVE_PICTURE_STEP,
    SERVE_WORKER_RESTARTS,
)
SERVING = (SERVE_REPLICAS, *SERVING_GATEWAY, *SERVING_ENGINE, *SERVING_PICTURES)

# Per GPU of a node, from Strata's exporter where DCGM is absent. Recording rules map both to the same names.
GPU = ("node", "gpu", "name")  # gpu: its index on the node; name: the card's model

GPU_COUNT = OwnMetric("strata_gpu_devices", "gauge", "GPUs that the node's driver shows", ("node",))
GPU_INFO = OwnMetric("strata_gpu_info", "gauge", "1 for each GPU; uuid: its identity in every program", (*GPU, "uuid"))
GPU_UTILIZATION = OwnMetric("strata_gpu_utilization_ratio", "gauge", "Share of the time in which a kernel ran, 0 to 1", GPU)
GPU_MEMORY_USED = OwnMetric("strata_gpu_memory_used_bytes", "gauge", "Memory in use, of every process", GPU)
GPU_MEMORY_TOTAL = OwnMetric("strata_gpu_memory_total_bytes", "gauge", "Memory of the card", GPU)
GPU_POWER = OwnMetric("strata_gpu_power_watts", "gauge", "Power drawn", GPU)
GPU_POWER_LIMIT = OwnMetric("strata_gpu_power_limit_watts", "gauge", "Power the card may draw", GPU)
GPU_TEMPERATURE = OwnMetric("strata_gpu_temperature_celsius", "gauge", "Temperature of the chip", GPU)
GPU_SM_CLOCK = OwnMetric("strata_gpu_sm_clock_hertz", "gauge", "Clock of the multiprocessors", GPU)
GPU_SM_CLOCK_MAX = OwnMetric("strata_gpu_sm_clock_max_hertz", "gauge", "Highest clock of the multiprocessors", GPU)
GPU_THROTTLED = OwnMetric(
    "strata_gpu_throttled", "gauge", "1 while the clock is held down, by reason: power, thermal, hardware", (*GPU, "reason")
)
GPU_XID = OwnMetric("strata_gpu_xid_errors_total", "counter", "Errors the driver reported, by their XID number", (*GPU, "xid"))
GPU_ECC_ERRORS = OwnMetric(
    "strata_gpu_ecc_errors_total", "counter", "Memory errors since the driver was loaded: corrected, uncorrected", (*GPU, "kind")
)
GPU_REMAPPED_ROWS = OwnMetric(
    "strata_gpu_remapped_rows", "gauge", "Memory rows replaced by spare ones after errors: corrected, uncorrected", (*GPU, "kind")
)
GPU_ROW_REMAP = OwnMetric(
    "strata_gpu_row_remap",
    "gauge",
    "1 while a row waits for a reset to be replaced (pending), or if that failed (failed)",
    (*GPU, "state"),
)
GPU_NVLINK_ERRORS = OwnMetric(
    "strata_gpu_nvlink_errors_total",
    "counter",
    "NVLink errors over all links of the card: crc_flit, crc_data, replay, recovery",
    (*GPU, "kind"),
)
GPU_PROCESS_MEMORY = OwnMetric(
    "strata_gpu_process_memory_bytes",
    "gauge",
    "Memory of one process on the card; actor: the Ray actor it belongs to, or the program's name",
    (*GPU, "pid", "actor"),
)
GPU_PROCESS_UTILIZATION = OwnMetric(
    "strata_gpu_process_utilization_ratio", "gauge", "Share of the multiprocessors' time one process had", (*GPU, "pid", "actor")
)

GPUS = (
    GPU_COUNT,
    GPU_INFO,
    GPU_UTILIZATION,
    GPU_MEMORY_USED,
    GPU_MEMORY_TOTAL,
    GPU_POWER,
    GPU_POWER_LIMIT,
    GPU_TEMPERATURE,
    GPU_SM_CLOCK,
    GPU_SM_CLOCK_MAX,
    GPU_THROTTLED,
    GPU_XID,
    GPU_ECC_ERRORS,
    GPU_REMAPPED_ROWS,
    GPU_ROW_REMAP,
    GPU_NVLINK_ERRORS,
    GPU_PROCESS_MEMORY,
    GPU_PROCESS_UTILIZATION,
)

EVERY = (*TRAINING, *SERVING, *GPUS)
