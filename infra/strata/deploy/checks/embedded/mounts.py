"""Files that a container sees: paths below its mounts, and the ConfigMap behind a path."""

from pathlib import PurePosixPath

from strata.deploy.documents import Document


def is_mounted(container: Document, path: str) -> bool:
    return _mount(container, path) is not None


def problem(template: Document, path: str, config_maps: dict[str, Document]) -> str | None:
    """Reason that the first container of a pod cannot read a file; None if it can, or if the file's volume is not a ConfigMap.
    ConfigMaps that are not in `config_maps` are reported as missing references."""
    container = template["spec"]["containers"][0]  # KubeRay runs Ray in it
    mount = _mount(container, path)
    if mount is None:
        return f"no volume is mounted at {path} in the container {container['name']}"
    volumes = {volume["name"]: volume for volume in template["spec"].get("volumes") or []}
    source = (volumes.get(mount["name"]) or {}).get("configMap")
    target = config_maps.get((source or {}).get("name", ""))
    if source is None or target is None:
        return None
    below = PurePosixPath(path).relative_to(mount["mountPath"])
    inside = str(PurePosixPath(mount.get("subPath", "")) / below)
    keys = {item["path"]: item["key"] for item in source.get("items") or []}
    key = keys.get(inside) if keys else inside
    if key not in (target.get("data") or {}):
        return f"ConfigMap {source['name']} has no file {inside}"
    return None


def _mount(container: Document, path: str) -> Document | None:
    """The innermost mount that holds a path."""
    mounts = [each for each in container.get("volumeMounts") or [] if PurePosixPath(path).is_relative_to(each["mountPath"])]
    return max(mounts, key=lambda mount: len(PurePosixPath(mount["mountPath"]).parts), default=None)
