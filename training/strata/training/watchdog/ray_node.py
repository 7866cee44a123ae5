"""Ray node of a process."""


def here() -> str:
    """Id of this process's Ray node, empty without Ray."""
    import ray

    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""
