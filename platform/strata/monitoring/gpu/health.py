"""Hardware errors of a GPU through NVML: ECC, remapped memory rows and NVLink."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Query = Callable[..., Any]  # calls an NVML function on a card; None if the card does not support it


@dataclass(frozen=True)
class Health:
    """Counts by kind. A kind that the card does not report is missing: not every card has ECC, row remapping or NVLink."""

    ecc_errors: dict[str, int]  # corrected, uncorrected; since the driver was loaded
    remapped_rows: dict[str, int]  # corrected, uncorrected; over the card's life
    row_remap: dict[str, bool]  # pending: a reset is needed; failed: no spare row was left
    nvlink_errors: dict[str, int]  # crc_flit, crc_data, replay, recovery; over all links


def read(nvml: Any, query: Query) -> Health:
    ecc = {
        kind: query(nvml.nvmlDeviceGetTotalEccErrors, type_, nvml.NVML_VOLATILE_ECC)
        for kind, type_ in (
            ("corrected", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ("uncorrected", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        )
    }
    rows = query(nvml.nvmlDeviceGetRemappedRows)
    corrected, uncorrected, pending, failed = rows if rows is not None else (None, None, None, None)
    return Health(
        ecc_errors=_reported(ecc),
        remapped_rows=_reported({"corrected": corrected, "uncorrected": uncorrected}),
        row_remap={name: bool(value) for name, value in _reported({"pending": pending, "failed": failed}).items()},
        nvlink_errors=_nvlink(nvml, query),
    )


def _reported(values: dict[str, int | None]) -> dict[str, int]:
    return {name: int(value) for name, value in values.items() if value is not None}


def _nvlink(nvml: Any, query: Query) -> dict[str, int]:
    fields = {
        "crc_flit": nvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
        "crc_data": nvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
        "replay": nvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
        "recovery": nvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
    }
    answers = query(nvml.nvmlDeviceGetFieldValues, list(fields.values()))
    if answers is None:
        return {}
    # Each value has a return code of its own: a card without NVLink answers the call and reports none of them.
    return {
        kind: int(answer.value.ullVal)
        for kind, answer in zip(fields, answers, strict=True)
        if answer.nvmlReturn == nvml.NVML_SUCCESS
    }
