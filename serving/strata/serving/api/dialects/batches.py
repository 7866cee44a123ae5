"""OpenAPI of files and batches."""

from typing import Any

Schema = dict[str, Any]

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
STATUSES = ("validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled", "expired")
_ERRORS = {
    "400": "The request is not valid; 'param' names the parameter.",
    "403": "The tenant has as many files as it may have.",
    "404": "No such file or batch, or it is another tenant's.",
    "405": "The route does not allow this method.",
    "408": "The request took too long to arrive.",
    "409": "The file is in use, or the batch has ended.",
    "413": "The file is too large.",
    "429": "Too many batches that have not ended. Retry-After holds the seconds to wait.",
    "501": "The endpoint has no folder for files.",
    "507": "The storage of the endpoint is full.",
}
_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer"}


def paths() -> Schema:
    upload = {"type": "object", "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}}}
    form = {"multipart/form-data": {"schema": upload | {"required": ["file", "purpose"]}}}
    asked = {"application/json": {"schema": _ref("BatchRequest")}}
    return {
        "/v1/files": {
            "post": _operation("uploadFile", "Upload a JSONL of requests.", "File", form),
            "get": _operation("listFiles", "Files, the newest first.", "FileList"),
        },
        "/v1/files/{id}": {
            "get": _operation("retrieveFile", "A file's size and purpose.", "File"),
            "delete": _operation("deleteFile", "Delete a file.", "FileDeleted"),
            "parameters": [_ID],
        },
        "/v1/files/{id}/content": {
            "get": _operation("downloadFile", "Content of a file.", None),
            "parameters": [_ID],
        },
        "/v1/batches": {
            "post": _operation("createBatch", "Run the requests of a file in idle time.", "Batch", asked),
            "get": _operation("listBatches", "Batches, the newest first.", "BatchList"),
        },
        "/v1/batches/{id}": {"get": _operation("retrieveBatch", "Status of a batch.", "Batch"), "parameters": [_ID]},
        "/v1/batches/{id}/cancel": {
            "post": _operation("cancelBatch", "Stop a batch. Its answers so far stay.", "Batch"),
            "parameters": [_ID],
        },
    }


def schemas() -> Schema:
    listed = {"object": {"const": "list"}, "has_more": {"type": "boolean"}}
    return {
        "BatchRequest": {
            "type": "object",
            "properties": {
                "input_file_id": _TEXT,
                "endpoint": {"enum": list(ENDPOINTS)},
                "completion_window": {"type": "string", "pattern": "^[1-9][0-9]{0,2}h$", "description": "1h to 168h."},
                "metadata": {"type": ["object", "null"], "additionalProperties": _TEXT, "maxProperties": 16},
            },
            "required": ["input_file_id", "endpoint", "completion_window"],
            "additionalProperties": False,
        },
        "Batch": _object(
            {
                "id": _TEXT,
                "object": {"const": "batch"},
                "status": {"enum": list(STATUSES)},
                "request_counts": _object(dict.fromkeys(("total", "completed", "failed"), _COUNT)),
                "output_file_id": {"type": ["string", "null"]},
                "error_file_id": {"type": ["string", "null"]},
                "errors": {"type": ["object", "null"]},
            }
        ),
        "File": _object({"id": _TEXT, "object": {"const": "file"}, "bytes": _COUNT, "filename": _TEXT, "purpose": _TEXT}),
        "FileDeleted": _object({"id": _TEXT, "object": {"const": "file"}, "deleted": {"const": True}}),
        "FileList": _object(listed | {"data": {"type": "array", "items": _ref("File")}}),
        "BatchList": _object(listed | {"data": {"type": "array", "items": _ref("Batch")}}),
    }


def _operation(name: str, summary: str, answer: str | None, content: Schema | None = None) -> Schema:
    media = {"application/json": {"schema": _ref(answer)}} if answer else {"application/octet-stream": {}}
    errors = {
        status: {"description": why, "content": {"application/json": {"schema": _ref("Error")}}}
        for status, why in _ERRORS.items()
    }
    asked = {"requestBody": {"required": True, "content": content}} if content else {}
    responses = {"200": {"description": "The answer.", "content": media}} | errors
    return {"operationId": name, "summary": summary, "responses": responses} | asked


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}
